"""Saving and going on: to the last bit on the same device, and on others, with other settings."""

import random

import numpy as np
import pytest
import torch
import transformers as hf
from torch.optim import lr_scheduler as schedules

import ferryman
from ferryman.engine import Engine
from ferryman.server import kernels
from support.checkpoints import Run, assert_equal, assert_resumes, everything, one_group, two_groups
from support.models import CASES, Block, Toy, build, text
from support.own_steps import OWN_STEPS
from support.slow import covering, slow

# To the last bit.


@covering
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("way", [{}, {"max_grad_norm": 0.3}])
def test_resumes(tmp_path, device, precision, way):
    """The model has dropout, so the generators count too."""
    assert_resumes(tmp_path, Run(options={"device": device, "precision": precision, **way}))


@covering
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_model_resumes_with_its_float32_master(tmp_path, device, dtype):
    assert_resumes(tmp_path, Run(dtype=dtype, options={"device": device}))


@covering
@pytest.mark.parametrize("name", ["gpt2", "t5", "frozen top", *slow("bert", "frozen")])
def test_models_resume(tmp_path, device, name):
    assert_resumes(tmp_path, Run(name, options={"device": device}))


@covering
@pytest.mark.parametrize("updates", ["host", "stride:2", "static:0.5", "auto"])
@pytest.mark.parametrize("way", [{"held": True}, {"max_grad_norm": 0.3}])
def test_every_policy_resumes(tmp_path, accelerator, updates, way):
    """Part of the state is on the device when it is saved."""
    options = {"device": accelerator, "updates": updates, "subgroup": 256, "precision": "bf16", **way}
    if updates == "auto":  # who updates what depends on the time it takes: not the same in two runs
        options["held"] = True
        with Run(options=options) as run:
            run.step()
            saved = everything(run.engine)
            run.engine.save(tmp_path / "saved")
            run.step(2, 3)
            run.engine.load(tmp_path / "saved")
            assert_equal(everything(run.engine), saved)
    else:
        assert_resumes(tmp_path, Run(options=options))


@pytest.mark.parametrize(
    "name",
    [
        "SGD",
        "SGD, momentum",
        "Lion",
        "Adagrad",
        "RMSprop",
        "NAdam",
        "AdamW, amsgrad",
        "AdamW, a tensor's rate",
        "Rprop",
    ],
)
def test_optimizers_resume(tmp_path, name):
    assert_resumes(tmp_path, Run(optimizer=one_group(name), options={"precision": "bf16"}))


@pytest.mark.parametrize("name", OWN_STEPS)
@pytest.mark.parametrize("first", [1, 3])
def test_own_steps_resume(tmp_path, name, first):
    """With all that they keep in their state and in their groups; in early steps some keep it in another form."""
    options = {"precision": "bf16", "max_grad_norm": 0.3}
    assert_resumes(tmp_path, Run(optimizer=OWN_STEPS[name], options=options), first=first, last=first + 2)


SCHEDULERS = {
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.01, total_steps=10),
    "steps": lambda o: schedules.MultiStepLR(o, [1, 3], gamma=0.5),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=2), schedules.ExponentialLR(o, 0.9)], [2]
    ),
    "lambda": lambda o: schedules.LambdaLR(o, [lambda step: 1 / (step + 1), lambda step: 0.5**step]),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "transformers": lambda o: hf.get_cosine_schedule_with_warmup(o, 2, 10),
}


KINDS = ("one cycle", "sequence", "lambda", "plateau")  # what they keep: nothing, others, functions, the best so far


@pytest.mark.parametrize("name", [*KINDS, *slow(*sorted(SCHEDULERS.keys() - {*KINDS}))])
def test_schedulers_resume(tmp_path, name):
    assert_resumes(tmp_path, Run(scheduler=SCHEDULERS[name]))


@pytest.mark.exact
@pytest.mark.parametrize(
    ("dtype", "precision", "edited"),
    [(None, "fp16", True), *slow((torch.bfloat16, None, False), (None, "fp16", False))],
)
def test_a_budget_that_changes_the_plan_resumes(tmp_path, virtual, dtype, precision, edited):
    """The first batch of the engine that loads has it build itself anew, with what it has loaded."""

    def run(**options):
        return Run("gpt2", dtype=dtype, options={"device": virtual, "precision": precision, **options})

    with run() as first:
        first.engine._parts.server.scale.value /= 2
        first.step()
        saved = everything(first.engine)
        first.engine.save(tmp_path / "saved")
    with run(memory="48KiB", stash="host") as tight:
        tight.engine.load(tmp_path / "saved")
        server = tight.engine._parts.server
        tight.engine._optimizer_view.optimizers[0].param_groups[0]["lr"] = (
            0.123  # the user's, and not the checkpoint's any more
        )
        if edited:
            torch.nn.init.zeros_(tight.model.transformer.wpe.weight)
        tight.engine.forward_backward(CASES["gpt2"].batch(4), 4)
        assert tight.engine._parts.server is not server, "it was to be built anew"
        assert tight.engine._optimizer_view.optimizers[0].param_groups[0]["lr"] == 0.123
        saved["group 0"]["lr"] = 0.123
        tight.engine.zero_grad()
        found = everything(tight.engine)
        if edited:
            assert not found["transformer.wpe.weight"].any()
            assert (found["steps"], found["scale"]) == (saved["steps"], saved["scale"])
        else:
            assert_equal(found, saved)
        tight.step(2, 4, micro_batches=4)
        assert tight.engine.steps == 4


# What is beside the model.


class Position:
    """Of somebody who reads data."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_objects_come_back_as_they_were(tmp_path):
    state = {
        "plain": [1, -2.5, "text", None, True, 2**70],
        "floats": (float("inf"), -float("inf"), 1e-300, 0.1),
        "nested": {"a": ({"b": [(), {}, []]},)},
        3: "a number",
        "3": "its name",
        (1, "a"): "a tuple",
        "tensors": [torch.arange(6).view(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 4)],
        "not contiguous": torch.arange(6.0).view(2, 3).T,
        "permuted": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        "expanded": torch.arange(3.0).expand(2, 3),
        "arrays": np.arange(4, dtype=np.uint32)[::-1],
        "numpy's": np.float32(0.25),
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        1: torch.tensor(3),
        "1": torch.tensor(4),
    }
    with Run() as run:
        run.engine.save(tmp_path / "saved", objects={"data": Position(state)})
        found = Position(None)
        run.engine.load(tmp_path / "saved", objects={"data": found})
    back = found.state
    tensors = torch.utils._pytree.tree_leaves(back["tensors"])
    assert back.keys() == state.keys()
    for key in ("plain", "floats", "nested", 3, "3", (1, "a")):
        assert back[key] == state[key]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, state["tensors"], strict=True))
    for key in ("not contiguous", "permuted", "expanded"):
        assert torch.equal(back[key], state[key])
        if key != "expanded":  # products depend on the order in memory, in their last bits
            assert back[key].stride() == state[key].stride()
    assert back["arrays"].dtype == np.uint32
    assert back["arrays"].tolist() == [3, 2, 1, 0]
    assert back["numpy's"] == 0.25
    assert [int(t) for t in (back["a.b"], back["a"]["b"], back[1], back["1"])] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"a": {1, 2}}, r"objects\.data\.a is a set, which cannot be saved"),
        ({"a": [print]}, r"objects\.data\.a\[0\] is a builtin_function"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "complex128"),
        ({"a": torch.zeros(2).to_sparse()}, r"objects\.data\.a is a Tensor"),
        ({"a": np.array(["text"])}, r"objects\.data\.a is a ndarray"),
        ({torch.tensor(1): 2}, "key of objects.data is a tensor"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, state, told):
    with Run() as run:
        with pytest.raises(ValueError, match=told):
            run.engine.save(tmp_path / "saved", objects={"data": Position(state)})
        assert not list(tmp_path.iterdir())
        with pytest.raises(ValueError, match=r"'data'.*is a int; objects to save must have state_dict"):
            run.engine.save(tmp_path / "saved", objects={"data": 1})


def test_generators_come_back(tmp_path):
    with Run() as run:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        random.gauss(0, 1)  # leaves a second number behind
        run.engine.save(tmp_path / "saved")
        expected = random.gauss(0, 1), random.random(), np.random.rand(), torch.rand(1).item()
        run.engine.load(tmp_path / "saved")
        assert (random.gauss(0, 1), random.random(), np.random.rand(), torch.rand(1).item()) == expected


# Elsewhere.


ACCELERATOR = "the accelerator"
ON_DEVICE = {"device": ACCELERATOR, "subgroup": 256}


@pytest.mark.parametrize(
    ("optimizer", "one", "other"),
    [
        ("AdamW", {"device": "cpu"}, {**ON_DEVICE, "held": True, "updates": "static:0.5"}),
        ("AdamW", {**ON_DEVICE, "updates": "static:1.0"}, {"device": ACCELERATOR, "updates": "host"}),
        ("AdamW", {"device": ACCELERATOR}, {"device": ACCELERATOR, "memory": "1MiB", "max_grad_norm": 0.5}),
        ("AdamW", {"precision": "fp16"}, {"precision": "bf16"}),
        ("RMSprop", {"precision": "bf16", "device": ACCELERATOR}, {"precision": "fp16", "device": "cpu"}),
        *slow(
            ("AdamW", {"device": ACCELERATOR}, {"device": "cpu"}),
            ("AdamW", {"precision": "bf16"}, {}),
            ("RMSprop", {}, {"precision": "bf16"}),
        ),
    ],
    ids=str,
)
def test_it_goes_on_elsewhere(tmp_path, accelerator, optimizer, one, other):
    """With all of the master and the optimizer's state, to the last bit; and trains."""
    places = {ACCELERATOR: accelerator}
    one, other = ({**options, "device": places.get(options.get("device"), "cpu")} for options in (one, other))
    with Run(optimizer=one_group(optimizer), options=one) as run:
        run.step()
        saved = everything(run.engine)
        run.engine.save(tmp_path / "saved")
    with Run(optimizer=one_group(optimizer), seed=5, options=other) as run:
        run.engine.load(tmp_path / "saved")
        found = everything(run.engine)
        assert_equal({**found, "scale": None}, {**saved, "scale": None})
        run.step(2, 3)
        run.engine.save(tmp_path / "back")
        saved = everything(run.engine)
    with Run(optimizer=one_group(optimizer), seed=6, options=one) as run:
        run.engine.load(tmp_path / "back")
        assert_equal({**everything(run.engine), "scale": None}, {**saved, "scale": None})
        run.step(3, 4)


def test_the_loss_scale_comes_back(tmp_path):
    with Run(options={"precision": "fp16"}) as run:
        run.engine._parts.server.scale.value = 8.0
        run.step()
        run.engine.save(tmp_path / "saved")
    with Run(options={"precision": "fp16"}) as run:
        run.engine.load(tmp_path / "saved")
        assert run.engine.loss_scale == 8.0
        assert run.engine._parts.server.scale._good_steps == 2
    with Run(options={"precision": "bf16"}) as run:
        run.engine.load(tmp_path / "saved")
        assert run.engine.loss_scale == 1.0


# When, and how often.


def test_an_engine_goes_back(tmp_path, device):
    """To a checkpoint of its own, as often as asked, whatever is under way."""
    with Run(scheduler=SCHEDULERS["cosine"], options={"device": device, "max_grad_norm": 0.3}) as run:
        run.step()
        run.engine.save(tmp_path / "saved", objects=run.objects)
        run.engine.save(tmp_path / "saved", objects=run.objects)
        expected = run.step(2, 4)
        for _ in range(2):
            run.engine.load(tmp_path / "saved", objects=run.objects)
            assert run.step(2, 4) == expected
        run.engine.forward_backward(text(4))
        run.engine.load(tmp_path / "saved", objects=run.objects)
        assert all(parameter.grad is None for parameter in run.model.parameters())
        assert run.step(2, 4) == expected


def test_a_failed_update_is_left_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no")

    with Run(options={"max_grad_norm": 0.3}) as run:
        run.step()
        run.engine.save(tmp_path / "saved")
        saved, expected = everything(run.engine), run.step(2, 4)
        with monkeypatch.context() as broken:
            broken.setattr(kernels, "update", fail)
            with pytest.raises(RuntimeError, match="no"):
                run.step(4, 6)
        run.engine.load(tmp_path / "saved")
        assert_equal(everything(run.engine), saved)
        assert run.step(2, 4) == expected


def test_gradients_are_not_part_of_it(tmp_path, device):
    with Run(options={"device": device}) as run:
        run.engine.forward_backward(text(4))
        with pytest.raises(ValueError, match=r"gradients from forward_backward.*engine\.update\(\)"):
            run.engine.save(tmp_path / "saved")
        assert not list(tmp_path.iterdir())
        run.engine.update()
        run.engine.save(tmp_path / "saved")


def test_weights_without_values_are_not_saved(tmp_path):
    with torch.device("meta"):
        model = CASES["toy"].make()
    with Engine(model, device="cpu") as engine, pytest.raises(ValueError, match=r"'embed\.weight' was on the meta"):
        engine.save(tmp_path / "saved")


def test_weights_that_were_replaced_are_not_saved(tmp_path):
    with Run() as run:
        run.model.head.weight.data = run.model.head.weight.data.clone()
        with pytest.raises(ValueError, match=r"the memory of 'head\.weight' was replaced"):
            run.engine.save(tmp_path / "saved")
        run.model.head.weight.data = run.engine._parts.store.weights(run.engine.units[-1]).view(torch.float32)[:1]


def test_edits_are_saved(tmp_path):
    with Run(options={"precision": "bf16"}) as run:
        run.step()
        with torch.no_grad():
            run.model.head.weight.fill_(0.5)
        run.engine.save(tmp_path / "saved")
    with Run(seed=5) as run:
        run.engine.load(tmp_path / "saved")
        assert (run.model.head.weight == 0.5).all()


def test_without_an_optimizer(tmp_path, device):
    with Run(options={"device": device, "precision": "bf16"}) as run:
        run.step()
        wide = everything(run.engine)
        run.engine.save(tmp_path / "trained")
    with Engine(build(CASES["toy"], 5), device=device) as engine:
        engine.load(tmp_path / "trained")
        for name, value in everything(engine).items():
            assert name in ("steps", "scale") or torch.equal(value.view(-1), wide[name].view(-1)), name
        engine.save(tmp_path / "weights")
    with Engine(build(CASES["toy"], 6), device=device) as engine:
        engine.load(tmp_path / "weights")
        assert torch.equal(engine._model.head.weight.view(-1), wide["head.weight"].view(-1))
    with Run() as run:
        with pytest.raises(ValueError, match=r"saved by an engine without an optimizer.*load_weights"):
            run.engine.load(tmp_path / "weights")
        run.engine.load_weights(tmp_path / "weights")
        assert torch.equal(run.model.head.weight.view(-1), wide["head.weight"].view(-1))
        run.step()


def test_blocks_that_were_inserted_are_saved(tmp_path, device):
    with Run(options={"device": device}) as run:
        block = Block()
        run.engine._optimizer_view.optimizers[0].add_param_group({"params": list(block.parameters())})
        run.engine.insert(1, block)
        run.step()
        run.engine.save(tmp_path / "saved")
        saved, expected = everything(run.engine), run.step(2, 3)

    def optimizer(model):  # in the same groups
        block = list(model.blocks[1].parameters())
        rest = [p for p in model.parameters() if all(p is not q for q in block)]
        found = two_groups(type("Part", (), {"parameters": lambda self: iter(rest)})())
        found.add_param_group({"params": block})
        return found

    told = r"belongs to another model.*'blocks\.3\.\S+' and 5 more not in the model"
    with Run(options={"device": device}) as run, pytest.raises(ValueError, match=told):
        run.engine.load(tmp_path / "saved")
    model = Toy(4).train()
    with Engine(model, optimizer(model), device=device) as engine:
        engine.load(tmp_path / "saved")
        assert_equal(everything(engine), saved)
        assert engine.step(CASES["toy"].batch(4, 3), 2).item() == expected[0]


# Of something else.


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (Run("two losses"), r"\(a Toy, and this is a TwoLosses\): 'blocks\.3\.\S+' and 7 more missing in the files"),
        (Run("gpt2"), r"belongs to another model \(a Toy, and this is a GPT2LMHeadModel\)"),
        (Run(optimizer=one_group("SGD")), "has the state of AdamW, but the engine's optimizer is SGD"),
        (Run(optimizer=one_group("AdamW")), "has 2 parameter groups, but the optimizer has 1"),
        (Run(optimizer=lambda model: _swapped(model)), "parameter group 0 differs from that of"),
        (
            Run(optimizer=lambda model: torch.optim.AdamW(_groups(model), amsgrad=True)),
            "the optimizer keeps .*other options",
        ),
    ],
    ids=["depth", "model", "optimizer", "groups", "members", "options"],
)
def test_what_differs_is_said_and_nothing_is_changed(tmp_path, run, told):
    with Run() as of_another:
        of_another.step()
        of_another.engine.save(tmp_path / "saved")
    with run:
        before = everything(run.engine)
        with pytest.raises(ValueError, match=told):
            run.engine.load(tmp_path / "saved")
        assert_equal(everything(run.engine), before)
        run.step()


def _groups(model):
    return [{"params": group["params"]} for group in two_groups(model).param_groups]


def _swapped(model):
    return torch.optim.AdamW(_groups(model)[::-1])


def test_shapes_that_differ_are_said(tmp_path):
    with Run() as run:
        run.engine.save(tmp_path / "saved")
    model = build(CASES["toy"])
    model.head = torch.nn.Linear(16, 32)
    told = r"'head\.bias' has shape \(32,\) in the model and \(64,\) in the files"
    with Engine(model, device="cpu") as engine, pytest.raises(ValueError, match=told):
        engine.load(tmp_path / "saved")


def test_the_state_is_plain(tmp_path):
    """No pickle in any file, and the manifest is JSON."""
    with Run(optimizer=one_group("NAdam")) as run:
        run.step()
        run.engine.save(tmp_path / "saved")
    kinds = {path.suffix for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors"}
    assert ferryman.__version__ in (tmp_path / "saved" / "ferryman" / "checkpoint.json").read_text()
