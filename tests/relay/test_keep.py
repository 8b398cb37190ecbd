"""Calls whose graph is kept from the forward to the backward: nothing runs twice, and results are the same."""

import queue

import pytest
import torch
from torch import nn
from torch.nn import functional

from ferryman.engine import Engine
from ferryman.observe.trace import Trace
from ferryman.relay.kept_graph import SavedTensors
from ferryman.relay.unit_tensors import UnitTensors
from ferryman.runtime import host_memory
from support.devices import delay_copies
from support.models import CASES, Toy, assert_same, build, compare_steps, on, step, text
from support.slow import covering


def calls_of(engine):
    return engine._parts.relay.calls


def assert_parity(device, model, batch, loose=(), counts=(4, 2, 4), **options):
    """Some steps with different numbers of micro-batches, plain and by an engine. Returns the engine's calls."""
    plain = on(device, model)
    with Engine(model, device=device, **{"recompute": "never", **options}) as engine:
        return [calls_of(engine) for _ in compare_steps(engine, model, plain, batch, counts, loose)]


def relayed(device, slots=1):
    """Settings with which weights are overwritten between a call's forward and its backward."""
    return {} if device.type == "cpu" else {"slots": slots, "held": False}


@covering
@pytest.mark.parametrize(
    "name", ["toy", "gpt2", "t5", "mixtral", "reused", "skips", "skipping", "frozen", "two losses"]
)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_gradients_are_those_of_plain_pytorch(name, slots, device):
    case = CASES[name]
    delay_copies(device)
    calls = assert_parity(device, build(case), case.batch(8), case.loose, **relayed(device, slots))
    assert all(one.kept > 0 and one.recomputed == 0 for one in calls)


@covering
@pytest.mark.parametrize("name", ["t5", "reused", "gpt2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_gradients_are_bitwise_those_of_recomputation(name, precision, stash, accelerator):
    """Also where plain PyTorch adds in another order."""
    case, found = CASES[name], []
    for recompute in ("always", "never"):
        model = build(case)
        optimizer = torch.optim.SGD(model.parameters())
        options = {"precision": precision, "stash": stash, "recompute": recompute, **relayed(accelerator, 2)}
        with Engine(model, optimizer, device=accelerator, **options) as engine:
            torch.manual_seed(3)
            found.append(step(engine, model, case.batch(8)))
            assert (calls_of(engine).recomputed == 0) == (recompute == "never")
    assert_same(*found)


class LowRank(nn.Module):
    """A frozen layer with a trained correction."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a, self.b = nn.Linear(inner.in_features, 2, bias=False), nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x):
        return self.inner(x) + self.b(self.a(x))


def test_low_rank_corrections(device):
    model = Toy().requires_grad_(False)
    for block in model.blocks:
        block.up = LowRank(block.up)
    assert all(one.recomputed == 0 for one in assert_parity(device, model, text(8), **relayed(device)))


def test_dropout_draws_once(device):
    class Masked(nn.Module):
        def forward(self, x):
            mask = torch.rand_like(x)
            self.masks.put(float(mask.sum()))
            return x * mask

    model = Toy().eval()
    for block in model.blocks:
        block.dropout = Masked()
    with Engine(model, device=device, recompute="never", **relayed(device)) as engine:
        for number in range(2):
            for block in model.blocks:
                block.dropout.masks = queue.SimpleQueue()  # the engine cannot see into it
            engine.forward_backward(text(8), 4)
            drawn = [block.dropout.masks.qsize() for block in model.blocks]
            assert number == 0 or drawn == [4] * len(model.blocks)  # the first step has a trial as well


class _Scaled(torch.autograd.Function):
    """Keeps a weight in a way that autograd does not know."""

    @staticmethod
    def forward(ctx, x, weight, keep):
        ctx.kept = keep(weight)
        ctx.x = x.detach()
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        weight = ctx.kept() if callable(ctx.kept) else ctx.kept
        return gradient * weight, (gradient * ctx.x).flatten(0, -2).sum(0), None


class Keeping(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(CASES["toy"].make().norm.weight.shape))
        self.keep = keep

    def forward(self, x):
        return _Scaled.apply(x, self.weight, self.keep)


KEEPS = {"the parameter": lambda weight: weight, "a view": lambda weight: weight.view(-1)}


class Winding(Toy):
    """In the backward, its units are not in the slots in which they were in the forward."""

    def hidden(self, ids):
        x = self.embed(ids)
        for number in (0, 1, 2, 0, 3, 1, 2):
            x = self.blocks[number](x)
        return x


def with_blocks(make, kind=Winding):
    torch.manual_seed(0)
    model = kind(4).eval()
    model.blocks = nn.ModuleList(nn.Sequential(block, make()) for block in model.blocks)
    return model


@pytest.mark.parametrize("kept", KEEPS)
def test_weights_that_a_function_keeps_by_itself(kept, device):
    calls = assert_parity(device, with_blocks(lambda: Keeping(KEEPS[kept])), text(8), ("*",), **relayed(device, 2))
    # A view of a slot's memory is noticed, and such calls run again. The parameter moves with its unit.
    assert (calls[-1].recomputed > 0) == (kept == "a view" and device.type != "cpu")


@pytest.mark.parametrize("kept", ["what autograd saves", "a view"])
def test_without_these_gradients_would_be_wrong(kept, accelerator, monkeypatch):
    """Weights that a graph refers to by their memory are overwritten. The check of the first step notices."""
    monkeypatch.setattr(UnitTensors, "has_aliases", lambda self: False)
    if kept == "what autograd saves":
        monkeypatch.setattr(SavedTensors, "_pack", lambda self, tensor: _Plain(tensor.detach()))
    make = nn.Identity if kept == "what autograd saves" else lambda: Keeping(KEEPS["a view"])
    with pytest.raises(UserWarning, match="give other results when they take turns"):
        assert_parity(accelerator, with_blocks(make), text(8), ("*",), **relayed(accelerator, 2))


class _Plain:
    def __init__(self, tensor):
        self.tensor = tensor

    def unpack(self):
        return self.tensor


class Transformed(nn.Module):
    """torch.func does not allow hooks on saved tensors."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.scale * torch.func.grad(lambda y: y.sin().sum())(x)


class Averaging(nn.Module):
    """Edits a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean())
        return x * self.scale + self.mean


class Hooked(nn.Module):
    """Has a hook inside, which reads a weight in the backward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 2.0))

    def forward(self, x):
        x = x * self.scale
        if x.requires_grad:
            scale = self.scale
            x.register_hook(lambda gradient: gradient * scale.detach())
        return x * 1.5


@pytest.mark.parametrize(
    ("make", "again"), [(Transformed, "relayed"), (Averaging, "always"), (Hooked, "never")], ids=lambda x: str(x)
)
def test_calls_that_cannot_keep_their_graph_run_again(make, again, device):
    calls = assert_parity(device, with_blocks(make, Toy), text(8), ("*",), **relayed(device, 2))
    assert (calls[-1].recomputed > 0) == (again == "always" or (again == "relayed" and device.type != "cpu"))


def test_an_edit_of_what_a_graph_has_saved_is_refused_as_in_plain_pytorch(device):
    class Edits(Toy):
        def hidden(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = torch.tanh(block(x))
                x = self.last(x)
                x += 1
            return x

    model = Edits()
    model.last = nn.Sequential(nn.Linear(model.norm.weight.numel(), model.norm.weight.numel()), nn.Tanh())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(**text(2)).loss.backward()
    options = {"units": ["embed", "blocks.*", "last", "head"], **relayed(device)}
    with (
        Engine(model, device=device, recompute="never", **options) as engine,
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        engine.forward_backward(text(4), 2)


def test_what_is_kept_does_not_move(accelerator):
    """With the stash on the host, only what no kept graph needs is moved."""
    moved = {}
    for recompute in ("always", "never"):
        trace, model = Trace(), Toy(4).eval()
        options = {"stash": "host", "recompute": recompute, "trace": trace, **relayed(accelerator, 2)}
        with Engine(model, device=accelerator, **options) as engine:
            engine.forward_backward(text(8), 4)
            engine.wait()
            moved[recompute] = sum(span.nbytes for span in trace.spans() if span.label == "restore stash")
    assert moved["never"] < moved["always"]


def test_a_host_that_is_short_of_memory_recomputes(monkeypatch):
    model = Toy()
    with Engine(model, device="cpu", recompute="auto") as engine:
        engine.forward_backward(text(8), 4)
        assert calls_of(engine).recomputed == 0
        monkeypatch.setattr(host_memory, "available", lambda: host_memory.total() // 10)
        engine.forward_backward(text(8), 4)
        assert calls_of(engine).recomputed > 0
    with Engine(model, device="cpu", recompute="never") as engine:
        engine.forward_backward(text(8), 4)
        assert calls_of(engine).recomputed == 0


def test_statistics_say_what_was_kept(device):
    for recompute in ("always", "never"):
        model = Toy()
        optimizer = torch.optim.SGD(model.parameters())
        with Engine(model, optimizer, device=device, recompute=recompute) as engine:
            for _ in range(2):
                engine.step(text(8), 4)
            calls = engine.stats().calls
            assert (calls.recomputed == 0) == (recompute == "never")
            # All blocks, the embedding and the head; the turn keeps its graph in any case.
            assert calls.kept + calls.recomputed == 4 * len(engine.units)
            assert f"{calls.kept} calls kept" in str(engine.stats())


def test_a_graph_whose_backward_does_not_come_is_dropped(accelerator):
    """Of a call that the loss does not use; and after an exception in the loss."""

    class Model(Toy):
        fails = False

        def forward(self, input_ids, labels=None):
            x = self.embed(input_ids)
            for block in self.blocks:
                block(x)
            if self.fails:
                raise ValueError("in the loss")
            loss = functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
            return type("Output", (), {"loss": loss})()

    model = Model()
    with Engine(model, device=accelerator, recompute="never", **relayed(accelerator)) as engine:
        engine.forward_backward(text(8), 4)
        before = torch.accelerator.memory_allocated(accelerator)
        engine.forward_backward(text(8), 4)
        assert torch.accelerator.memory_allocated(accelerator) <= before
        model.fails = True
        with pytest.raises(ValueError, match="in the loss"):
            engine.forward_backward(text(8), 4)
        model.fails = False
        engine.zero_grad()
        engine.forward_backward(text(8), 4)
        assert torch.accelerator.memory_allocated(accelerator) <= before
