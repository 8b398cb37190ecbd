"""What users can get wrong about updates: refused with what is required, what was found and how to mend it."""

import math

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import ferryman
from ferryman.engine import Engine
from ferryman.runtime import host_memory as memory
from support.models import CASES, Toy, build, text
from support.slow import covering
from support.small_models import Model, batches, loss, made


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_unchanged(model, before):
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2]), r"does not have '.*' and \d+ more"),
        (lambda m: torch.optim.AdamW(m.parameters(), capturable=True), "capturable=True. is not supported"),
        (lambda m: "AdamW", "must be a torch.optim.Optimizer, or a list of several; this is a str"),
        (lambda m: adamw(Toy()), r"the optimizer does not have 'embed.weight' and \d+ more"),
        (lambda m: torch.optim.SGD(list(m.parameters())[1:], lr=1), "does not have 'embed.weight', which trains"),
        (
            lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.zeros(3, 5))], lr=1),
            r"a parameter of shape \(3, 5\), in group 0, that is not in the model",
        ),
    ],
)
def test_optimizers(make, words):
    model = Toy()
    before = weights(model)
    with pytest.raises(ValueError, match=words):
        Engine(model, make(model), device="cpu")
    assert_unchanged(model, before)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_twice():
    model = Toy()
    optimizer = torch.optim.SGD([*model.parameters(), model.head.weight], lr=1)
    with pytest.raises(ValueError, match=r"a parameter twice, of shape \(64, 16\), in its groups 0 and 0"):
        Engine(model, optimizer, device="cpu")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp8"}, "precision='fp8': choose 'fp32', 'bf16' or 'fp16'"),
        ({"precision": torch.bfloat16}, "precision=torch.bfloat16: choose"),
        ({"max_grad_norm": 0}, "max_grad_norm=0: it must be a number above 0"),
        ({"max_grad_norm": "1"}, "max_grad_norm='1': it must be a number above 0"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore': choose 'raise' or 'skip'"),
        ({"host_threads": 0}, "host_threads=0: it must be an integer"),
    ],
)
def test_arguments(options, words):
    model = Toy()
    with pytest.raises(ValueError, match=words):
        Engine(model, adamw(model), device="cpu", **options)


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"max_grad_norm": 1.0}, {"deferred": True}])
def test_what_needs_an_optimizer(options):
    with pytest.raises(
        ValueError, match=rf"{next(iter(options))}= is about updates, so the engine needs the optimizer"
    ):
        Engine(Toy(), device="cpu", **options)


@pytest.mark.parametrize("call", [lambda e: e.step(text(4), 2), lambda e: e.update()])
def test_a_step_needs_an_optimizer(call):
    with Engine(Toy(), device="cpu") as engine, pytest.raises(ValueError, match="the engine has no optimizer"):
        call(engine)


def moved(optimizer):
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


def dropped(optimizer):
    optimizer.param_groups[0]["params"] += optimizer.param_groups.pop()["params"]


def with_momentum(optimizer):
    optimizer.param_groups[1]["momentum"] = 0.9


def forgotten(optimizer):
    optimizer.param_groups[0]["params"].pop()


@covering
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (moved, "has moved to another group of the optimizer"),
        (dropped, "had 2 parameter groups and has 1 now"),
        (with_momentum, "group 1 of the optimizer has other options now"),
        (forgotten, "the optimizer does not have 'head.weight'"),
    ],
)
def test_groups_that_change_in_mid_run(change, words, device):
    model = Toy()
    wide, rest = ([p for p in model.parameters() if (p.dim() > 1) == is_wide] for is_wide in (True, False))
    optimizer = torch.optim.SGD([{"params": wide}, {"params": rest}], lr=1e-2)
    with Engine(model, optimizer, device=device) as engine:
        engine.step(text(4), 2)
        optimizer.param_groups[0]["lr"] = 1e-3  # values may change
        engine.step(text(4), 2)
        before = weights(model)
        change(optimizer)
        with pytest.raises(ValueError, match=words):
            engine.step(text(4), 2)
        assert_unchanged(model, before)


@covering
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"deferred": True}, {"max_grad_norm": 1.0}], ids=str)
def test_a_loss_that_is_not_finite_changes_nothing(value, options, device):
    model = build(CASES["toy"])
    factor = torch.ones(4)

    def loss(model, part):
        return model(part["input_ids"], part["labels"]).loss * part["factor"][0]

    with Engine(model, adamw(model), device=device, loss=loss, **options) as engine:
        engine.step({**text(4), "factor": factor}, 2)
        before = weights(model)
        for _ in range(2):
            with pytest.raises(
                ferryman.NonFiniteError, match=r"the loss of micro-batch 0 is (nan|inf)\. No weight was"
            ):
                engine.step({**text(4), "factor": factor * value}, 2)
            assert_unchanged(model, before)
        engine.step({**text(4), "factor": factor}, 2)  # ready for the next
        assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])


@pytest.mark.parametrize("options", [{"deferred": True}, {"max_grad_norm": 1.0}], ids=str)
def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(options, device):
    model = build(CASES["toy"])
    with Engine(model, adamw(model), device=device, **options) as engine:
        engine.forward_backward(text(4), 2)
        engine.gradient("blocks.1.up.weight")[0, 0] = math.nan
        before = weights(model)
        with pytest.raises(
            ferryman.NonFiniteError, match=r"'blocks.1.up.weight' is not finite .*No weight was changed"
        ):
            engine.update()
        assert_unchanged(model, before)
        engine.step(text(4), 2)


def test_looking_before_an_update_names_it_too_when_updates_are_eager(device):
    model = build(CASES["toy"])
    with Engine(model, adamw(model), device=device) as engine:
        engine.forward_backward(text(4), 2)
        model.blocks[1].up.weight.grad[0, 0] = math.inf
        before = weights(model)
        with pytest.raises(
            ferryman.NonFiniteError, match=r"'blocks.1.up.weight' is not finite .*No weight was changed"
        ):
            engine.update()
        assert_unchanged(model, before)


def test_steps_that_are_not_finite_can_be_skipped(device):
    model = build(CASES["toy"])
    factor = torch.ones(4)

    def loss(model, part):
        return model(part["input_ids"], part["labels"]).loss * part["factor"][0]

    with Engine(model, adamw(model), device=device, loss=loss, on_nonfinite="skip") as engine:
        engine.step({**text(4), "factor": factor}, 2)
        before = weights(model)
        engine.step({**text(4), "factor": factor * math.nan}, 2)
        assert_unchanged(model, before)
        assert not math.isfinite(engine.grad_norm)
        engine.step({**text(4), "factor": factor}, 2)
        assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])


def test_a_model_that_the_host_cannot_hold_is_refused_before_anything_is_taken():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(32768, 32768, bias=False) for _ in range(200)))  # 215 G parameters
    with pytest.raises(
        ValueError, match=r"the host cannot hold this: .*GiB are needed \(.*optimizer state\), and .* free"
    ):
        Engine(model, torch.optim.AdamW(model.parameters()), device="cpu", precision="bf16")
    assert next(model.parameters()).is_meta


def test_free_memory_of_the_host_is_known_here():
    free = memory.available()
    assert free is None or 1 << 20 < free < 1 << 50


@pytest.mark.parametrize("way", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_optimizer_steps(way, device):
    model = made(Model, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = getattr(optimizer, way)(lambda *_: None)
    with pytest.raises(ValueError, match=rf"a step hook \({way}\)"):
        Engine(model, optimizer, device=device, loss=loss)
    handle.remove()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Engine(model, optimizer, device=device, loss=loss) as engine:
        handle = getattr(optimizer, way)(lambda *_: None)
        with pytest.raises(ValueError, match=rf"a step hook \({way}\)"):
            engine.step(next(batches(1)))
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        handle.remove()
        engine.step(next(batches(1)))


@pytest.mark.parametrize("way", ["register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"])
def test_hooks_of_all_optimizers_steps(way):
    model = made(Model, None)
    handle = getattr(torch_optimizer, way)(lambda *_: None)
    try:
        with pytest.raises(ValueError, match=rf"a step hook \({way}\)"):
            Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", loss=loss)
    finally:
        handle.remove()
