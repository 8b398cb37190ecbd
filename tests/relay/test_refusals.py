"""What cannot work is refused, in words that help, and the next step is as if nothing had been."""

import contextlib
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from ferryman.engine import Engine
from support.models import CASES, Block, Toy, assert_same, build, cut, on, plain_step, step, text
from support.slow import covering, slow
from support.updates import assert_near


class Switchable(Toy):
    """Does something wrong in its middle, if told to."""

    def __init__(self):
        super().__init__(4)
        self.wrong = None
        self.blocks[2] = SwitchableBlock(self)

    def hidden(self, ids):
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            given = x
            x = block(x)
            if number == 2 and self.wrong in ("weight", "stash", "model"):
                x = getattr(self, self.wrong)(given, x)
        return x

    def weight(self, given, x):
        return x + self.blocks[0].down.bias

    def stash(self, given, x):
        given += 1
        return x

    def model(self, given, x):
        raise KeyError("the model's own")


class SwitchableBlock(Block):
    def __init__(self, model):
        super().__init__()
        self._model = (model,)  # not as a child

    def forward(self, x):
        wrong = self._model[0].wrong
        if wrong == "block" or (wrong == "block's second run" and torch.is_grad_enabled()):
            raise KeyError("the block's own")
        if wrong == "input":
            x.mul_(2)
        return super().forward(x)


@contextlib.contextmanager
def ready_afterwards(device, **options):
    """A model in an engine, once new and once after a good step; what is done with it must raise and leave no trace."""
    torch.manual_seed(0)
    model = Switchable()
    plain, batch = on(device, model), text(8)

    def compare(engine):
        plain.zero_grad()
        engine.zero_grad()
        torch.manual_seed(1)
        expected = plain_step(plain, cut(batch, 4))
        torch.manual_seed(1)
        assert_same(step(engine, model, batch), expected)

    with Engine(model, device=device, **options) as engine:
        yield model, engine, compare
        model.wrong = None
        compare(engine)
        compare(engine)


def fails(model, engine, compare, wrong, error, match):
    """As the very first step, and once the engine knows the model."""
    for _ in range(2):
        model.wrong = wrong
        with pytest.raises(error, match=match) as caught:
            engine.forward_backward(text(8), 4)
        model.wrong = None
        compare(engine)
    return caught


@covering
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("stash", r"an input of the unit 'blocks\.2' was edited in place.*x = x \+ y"),
        ("input", r"the unit 'blocks\.2' edits one of its inputs in place.*x\.clone\(\)"),
    ],
)
def test_models_that_cannot_be_relayed(wrong, words, device):
    with ready_afterwards(device) as (model, engine, compare):
        fails(model, engine, compare, wrong, ValueError, words)


def test_a_parameter_that_is_used_outside_its_unit_after_the_first_step(device):
    """Before the first step, it would be kept on the device."""
    model = Switchable()
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device) as engine:
        engine.step(text(8), 4)
        model.wrong = "weight"
        before = model.head.weight.detach().clone()
        with pytest.raises(ValueError, match=r"'blocks\.0\.down\.bias' is used outside .* 'blocks\.0'.*resident=\["):
            engine.step(text(8), 4)
        assert torch.equal(model.head.weight, before)


def test_the_virtual_device_has_to_be_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch_virtual", raising=False)
    with pytest.raises(ValueError, match=r"device='virtual:99' .*: import torch_virtual first"):
        Engine(Toy(), device="virtual:99")


def test_a_parameter_tied_to_a_module_outside_its_unit(device):
    model = build(CASES["gpt2"])
    plain, batch = on(device, model), text(8)
    with Engine(model, device=device, units=["transformer.wte", "transformer.h.*"]) as engine:
        torch.manual_seed(1)
        with pytest.warns(UserWarning, match=r"used outside its unit .*, so it stays on the device") as caught:
            found = step(engine, model, batch, 4)
        assert caught[0].filename == step.__code__.co_filename, "the line that called the engine"
        assert "transformer.wte.weight" not in {item.name for unit in engine.units for item in unit.items}
    torch.manual_seed(1)
    assert_same(found, plain_step(plain, cut(batch, 4)), loose=("*",))


def test_results_that_hide_their_tensors(device):
    """Gradients pass through whatever objects hold the tensors."""

    class Hiding(Block):
        def forward(self, x):
            return SimpleNamespace(x=super().forward(x))

    class Model(Toy):
        def hidden(self, ids):
            return self.blocks[0](self.blocks[1](self.embed(ids)).x).x

    torch.manual_seed(0)
    model = Model()
    model.blocks = nn.ModuleList(Hiding() for _ in range(2))
    plain = on(device, model)
    with Engine(model, device=device) as engine:
        torch.manual_seed(1)
        expected = plain_step(plain, cut(text(8), 4))
        torch.manual_seed(1)
        assert_same(step(engine, model, text(8)), expected)


@covering
@pytest.mark.parametrize("wrong", ["model", "block", "block's second run"])
def test_exceptions_of_the_model_come_out_as_themselves(wrong, device):
    with ready_afterwards(device) as (model, engine, compare):
        caught = fails(model, engine, compare, wrong, KeyError, "own")
    frames = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert frames[-1] == ("model" if wrong == "model" else "forward")
    assert caught.traceback[-1].path == Path(__file__)


@covering
@pytest.mark.parametrize("at", [2, *slow(0, 3)])
@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_exceptions_of_the_loss_come_out_as_themselves(at, kind, device):
    error, armed = kind("loss"), []  # made here: one that outlived the test would keep its frames, and their tensors

    def loss(model, part):
        value = model(**part).loss
        if armed and armed.pop(0) == at:
            raise error
        return value

    with ready_afterwards(device, loss=loss) as (_, engine, compare):
        for _ in range(2):
            armed[:] = range(4)
            with pytest.raises(kind) as caught:
                engine.forward_backward(text(8), 4)
            assert caught.value is error
            assert traceback.extract_tb(caught.tb)[-1].name == "loss"
            armed.clear()
            compare(engine)


def test_exceptions_in_a_backward_come_out_as_themselves(device):
    armed = []

    def loss(model, part):
        value = model(**part).loss
        if armed:
            value.register_hook(fail)
        return value

    def fail(gradient):
        raise KeyError("hook")

    with ready_afterwards(device, loss=loss) as (_, engine, compare):
        for _ in range(2):
            armed.append(True)
            with pytest.raises(KeyError, match="hook") as caught:
                engine.forward_backward(text(8), 4)
            assert traceback.extract_tb(caught.tb)[-1].name == "fail"
            armed.clear()
            compare(engine)


def test_exceptions_of_batches_that_load_themselves(device):
    """A collating dict, whose values are made when they are asked for."""

    class Lazy(dict):
        def __getitem__(self, key):
            raise KeyError("collate")

    def loss(model, part):
        return model(input_ids=part["input_ids"], labels=part["labels"]).loss

    with ready_afterwards(device, loss=loss) as (_, engine, _):
        parts = cut(text(8), 4)
        parts[2] = Lazy(parts[2])
        with pytest.raises(KeyError):
            engine.forward_backward(parts)


@covering
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda loss: loss.expand(2), r"must be a scalar tensor; this is a tensor of shape \(2,\)"),
        (lambda loss: loss.item(), "must be a scalar tensor; this is a float"),
        (lambda loss: None, "must be a scalar tensor; this is a NoneType"),
        (lambda loss: loss.detach(), "does not require a gradient"),
    ],
    ids=["vector", "number", "none", "detached"],
)
def test_losses_that_are_none(make, words, device):
    armed = []
    with ready_afterwards(
        device, loss=lambda model, part: make(model(**part).loss) if armed else model(**part).loss
    ) as (_, engine, compare):
        for _ in range(2):
            armed.append(True)
            with pytest.raises(ValueError, match=words):
                engine.forward_backward(text(8), 4)
            armed.clear()
            compare(engine)


@pytest.mark.parametrize(
    ("batch", "micro_batches", "words"),
    [
        (text(8), 9, r"micro_batches=9: a batch of 8 samples can be cut into 1 to 8"),
        (text(8), 0, r"micro_batches=0"),
        (text(8), -1, r"micro_batches=-1"),
        (text(8), 1.5, r"micro_batches=1\.5: it must be an integer"),
        (text(8), "2", r"micro_batches='2': it must be an integer"),
        (text(8), True, r"micro_batches=True: it must be an integer"),
        (cut(text(8), 2), 2.0, r"micro_batches=2\.0: it must be an integer"),
        (text(6), 4, r"6 samples in parts of 2 make 3 micro-batches; choose micro_batches=3"),
        ({"input_ids": torch.zeros(8, 4), "labels": torch.zeros(6, 4)}, 2, "8 and 6 samples"),
        ({}, 2, "no tensor with a dimension along which"),
        ({"scale": torch.tensor(1.0)}, 2, "no tensor with a dimension along which"),
        ([], None, "no micro-batches"),
        (cut(text(8), 4), 3, r"micro_batches=3, but the batch is a list of 4"),
        (torch.zeros(()), 2, "no tensor with a dimension along which"),
        (torch.zeros(0, 4), 1, "has no samples"),
        ({torch.zeros(8, 4)}, 2, "a dict or tuple of tensors.*this is a set"),
        ("text", 2, "a dict or tuple of tensors.*this is a str"),
        (text(0), 1, "has no samples"),
        ([text(2), text(0)], None, "micro-batch 1 has no samples"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_batches_that_cannot_be_cut(batch, micro_batches, words):
    with (
        ready_afterwards(torch.device("cpu")) as (_, engine, _),
        pytest.raises(ValueError, match=words),
    ):
        engine.forward_backward(batch, micro_batches)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slots": 2.0}, r"slots=2\.0: it must be an integer"),
        ({"slots": 0}, r"slots=0: .* at least 1"),
        ({"slots": -1}, r"slots=-1: .* at least 1"),
        ({"slots": True}, r"slots=True: it must be an integer"),
        ({"slots": "2"}, r"slots='2': it must be an integer"),
        ({"units": "blocks.*"}, r"units='blocks\.\*' is a string; .* units=\['blocks\.\*'\]"),
        ({"resident": "norm.*"}, r"resident='norm\.\*' is a string; .* resident=\['norm\.\*'\]"),
        ({"device": "meta"}, r"device='meta' cannot be used.*the device must be real"),
        ({"stash": "disk"}, r"stash='disk': choose 'auto', 'device' or 'host'"),
        ({"stash": None}, r"stash=None"),
        ({"model": None}, r"must be a torch\.nn\.Module; this is a NoneType"),
        ({"model": Toy}, r"must be a torch\.nn\.Module; this is a type"),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_kind(options, words):
    model = build(CASES["toy"])
    with pytest.raises(ValueError, match=words):
        Engine(**{"model": model, "device": "cpu", **options})
    assert all("forward" not in module.__dict__ for module in model.modules())


@covering
@pytest.mark.parametrize("returns", ["logits", "a dict", "an output without labels"])
def test_models_that_return_no_loss(returns, device):
    """Labels, if it is a model that has a loss; else a loss of the user's."""

    class Model(Toy):
        def forward(self, input_ids, labels=None):
            output = super().forward(input_ids)
            return {"logits": output.logits, "a dict": dict(output)}.get(returns, output)

    kind = {"logits": "Tensor", "a dict": "dict"}.get(returns, "CausalLMOutput")
    batch = text(8)
    if returns == "an output without labels":
        del batch["labels"]
    with Engine(Model(), device=device) as engine:
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"returned a {kind} without a loss.*labels.*pass loss="):
                engine.forward_backward(batch, 4)


def test_steps_without_gradients_are_refused(device):
    with ready_afterwards(device) as (_, engine, _):
        for without in (torch.no_grad, torch.inference_mode):
            with without(), pytest.raises(ValueError, match="a step needs gradients"):
                engine.forward_backward(text(8), 4)


@covering
@pytest.mark.parametrize("place", ["in a block", "outside"])
def test_batch_norm_in_training_is_refused_by_name(place, device):
    model = Toy()
    where = model.blocks[1] if place == "in a block" else model
    where.norm = nn.BatchNorm1d(8)
    name = "blocks.1.norm" if place == "in a block" else "norm"
    with Engine(model, device=device) as engine:
        with pytest.raises(ValueError, match=rf"module '{name}' is a BatchNorm1d in training.*\.eval\(\)"):
            engine.forward_backward(text(8), 4)
        where.norm.eval()
        engine.forward_backward(text(8), 4)


def test_a_cache_is_refused_by_name(device):
    model = build(CASES["llama"])

    def loss(model, part):
        return model(**part, past_key_values=DynamicCache(config=model.config) if armed else None).loss

    armed = [True]
    plain = on(device, model)
    with Engine(model, device=device, loss=loss) as engine:
        with pytest.raises(ValueError, match=r"'model\.layers\.0'.*DynamicCache as 'past_key_values'.*use_cache=False"):
            engine.forward_backward(text(8), 4)
        armed.clear()
        torch.manual_seed(1)
        expected = plain_step(plain, cut(text(8), 4), loss)
        torch.manual_seed(1)
        assert_same(step(engine, model, text(8)), expected)


@pytest.mark.parametrize("how", ["data", "assign", "to"])
def test_memory_that_was_replaced_is_noticed(how, device):
    model = build(CASES["toy"])
    with Engine(model, device=device) as engine:
        if how == "data":
            model.embed.weight.data = torch.zeros_like(model.embed.weight)
        elif how == "assign":
            model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
        else:
            model.bfloat16()
        with pytest.raises(ValueError, match="was replaced while the engine used the model"):
            engine.forward_backward(text(8), 4)


def test_gradients_that_the_user_has_cleared_start_anew(device):
    model = build(CASES["toy"])
    with Engine(model, device=device) as engine:
        torch.manual_seed(1)
        engine.forward_backward(text(8), 4)
        once = {name: p.grad.clone() for name, p in model.named_parameters()}
        torch.optim.SGD(model.parameters()).zero_grad()
        torch.manual_seed(1)
        engine.forward_backward(text(8), 4)
        assert all(torch.equal(p.grad, once[name]) for name, p in model.named_parameters())


def test_modules_that_cannot_be_taken_apart_are_refused():
    with pytest.raises(ValueError, match=r"the module '0' has sparse gradients.*sparse=False"):
        Engine(nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)), device="cpu")


def test_hooks_that_plain_pytorch_would_call_in_the_backward_are_refused(device):
    model = build(CASES["toy"])
    hook = model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p: None)
    words = r"'blocks.1.up.weight' has a hook .*engine.gradient\('blocks.1.up.weight'\)"
    with pytest.raises(ValueError, match=words):
        Engine(model, device=device)
    hook.remove()
    model.embed.weight.register_post_accumulate_grad_hook(lambda p: None)
    model.embed.weight.requires_grad_(False)  # so that it is never called
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device) as engine:
        engine.step(text(4), 2)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        hook = model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p: None)
        for refused in (engine.step, engine.forward_backward):
            with pytest.raises(ValueError, match=words):
                refused(text(4), 2)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        block = Block()
        block.up.weight.register_post_accumulate_grad_hook(lambda p: None)
        with pytest.raises(ValueError, match=r"'block.up.weight' has a hook"):
            engine.insert("blocks.1", block)
        hook.remove()
        engine.step(text(4), 2)


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
def test_parameters_in_a_dtype_that_does_not_train(optimizer, device):
    for dtype, words in ((torch.float64, r"use model.float\(\)"), (torch.complex64, "view_as_complex")):
        model = build(CASES["toy"])
        model.norm.weight = nn.Parameter(model.norm.weight.detach().to(dtype))
        with pytest.raises(ValueError, match=rf"'norm.weight' trains in {dtype}, .*{words}"):
            Engine(model, optimizer and optimizer(model.parameters()), device=device)
        block = Block()
        block.norm.bias = nn.Parameter(block.norm.bias.detach().to(dtype))
        with Engine(build(CASES["toy"]), device=device) as engine:
            with pytest.raises(ValueError, match=rf"'block.norm.bias' trains in {dtype}"):
                engine.insert("blocks.1", block)
            engine.forward_backward(text(4), 2)


def test_double_precision_that_is_converted_while_the_engine_has_the_model(device):
    model, plain = build(CASES["toy"]).double(), build(CASES["toy"])
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Engine(model, optimizer, device=device, precision="fp32") as engine:
        for seed in range(2):
            torch.manual_seed(seed)
            engine.step(text(4, seed), 2)
            torch.manual_seed(seed)
            plain_step(plain, cut(text(4, seed), 2))
            theirs.step()
            theirs.zero_grad()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert_near(model, plain)
