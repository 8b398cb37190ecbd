"""Batches that the user's own function cuts: `Engine(split=...)`."""

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from ferryman.runtime.sizes import parse_bytes
from support.models import Block, Result, assert_same, gradients, on
from support.slow import covering

WIDTH, STEPS, SAMPLES = 32, 16, 8


class TimeMajor(nn.Module):
    """Its first dimension is time, its second that of samples."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, dropout=0.0) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        states = []
        for now in x:
            states.append(now + 0.5 * states[-1] if states else now)
        x = torch.stack(states)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def columns(batch, count):
    """Along dimension 1."""
    pieces = [value.tensor_split(count, dim=1) for value in batch.values()]
    return [dict(zip(batch, row, strict=True)) for row in zip(*pieces, strict=True) if row[0].shape[1]]


def weighed(batch, count):
    return [(part["x"].shape[1], part) for part in columns(batch, count)]


def sequences(samples=SAMPLES, steps=STEPS):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(steps, samples, WIDTH, generator=generator)
    return {"x": x, "y": torch.randn(steps, samples, 1, generator=generator)}


def net():
    torch.manual_seed(0)
    return TimeMajor()


def accumulated(device, parts, weights):
    plain = on(device, net())
    total = torch.zeros((), device=device)
    for part, weight in zip(parts, weights, strict=True):
        one = loss(plain, {name: value.to(device) for name, value in part.items()}) * weight
        one.backward()
        total += one.detach()
    return Result(total.cpu(), gradients(plain))


def assert_whole(result, device, batch):
    """That it is what the batch gives when it is not cut, but for rounding."""
    whole = accumulated(device, [batch], [1.0])
    torch.testing.assert_close(result.loss, whole.loss)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(result.gradients[name], gradient, rtol=1e-4, atol=1e-6)


@covering
@pytest.mark.parametrize("count", [1, 4])
def test_micro_batches_are_what_the_function_returns(device, count):
    model, batch = net(), sequences()
    with Engine(model, device=device, loss=loss, split=columns) as engine:
        result = Result(engine.forward_backward(batch, count).cpu(), gradients(model))
        assert engine.choice.micro_batches == count
    assert_same(result, accumulated(device, columns(batch, count), [1 / count] * count))
    assert_whole(result, device, batch)


def test_weights_make_ragged_parts_exact(device):
    model, batch = net(), sequences(samples=7)
    with Engine(model, device=device, loss=loss, split=weighed) as engine:
        result = Result(engine.forward_backward(batch, 3).cpu(), gradients(model))
    parts = columns(batch, 3)
    assert [part["x"].shape[1] for part in parts] == [3, 2, 2]
    assert_same(result, accumulated(device, parts, [3 / 7, 2 / 7, 2 / 7]))
    assert_whole(result, device, batch)


def test_in_a_sum_weights_do_not_count(device):
    model, batch = net(), sequences(samples=7)

    def sum_loss(model, part):
        return (model(part["x"]) - part["y"]).square().sum() / batch["y"].numel()

    with Engine(model, device=device, loss=sum_loss, split=weighed, reduction="sum") as engine:
        result = Result(engine.forward_backward(batch, 3).cpu(), gradients(model))
    assert_whole(result, device, batch)


def test_fewer_than_asked_for_will_do_and_lists_are_left_alone(device):
    model, batch = net(), sequences(samples=3)
    with Engine(model, device=device, loss=loss, split=weighed) as engine:
        engine.forward_backward(batch, 8)
        assert engine.choice.micro_batches == 3
        engine.zero_grad()
        engine.forward_backward(columns(batch, 2))
        assert engine.choice.micro_batches == 2


def test_batches_of_any_type_can_be_cut():
    batch = sequences()
    with Engine(net(), device="cpu", loss=loss, split=lambda whole, count: columns(batch, count)) as engine:
        engine.forward_backward(object(), 4)
        assert engine.choice.micro_batches == 4


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda batch, count: tuple(columns(batch, count)), "split= must return a list of micro-batches.*a tuple"),
        (lambda batch, count: [], "split= was asked for 4 micro-batches and returned 0"),
        (lambda batch, count: columns(batch, 8), "split= was asked for 4 micro-batches and returned 8"),
        (lambda batch, count: [*weighed(batch, 2), batch], "micro-batch 2 has no weight"),
        (lambda batch, count: [(0, batch)], "split= returned the weight 0 for micro-batch 0"),
        (lambda batch, count: [(float("nan"), batch)], "split= returned the weight nan"),
    ],
)
def test_what_the_function_must_not_return(function, words):
    with Engine(net(), device="cpu", loss=loss, split=function) as engine, pytest.raises(ValueError, match=words):
        engine.forward_backward(sequences(), 4)


def test_it_must_be_a_function():
    with pytest.raises(ValueError, match=r"split= must be a function of a batch and a count.*this is a int"):
        Engine(net(), device="cpu", split=4)


# With a budget.


@pytest.mark.exact  # counts for budgets in bytes of tensors
@pytest.mark.parametrize(("budget", "count"), [("256KiB", 4), ("400KiB", 2), ("16MiB", 1)])
def test_a_budget_finds_the_count(budget, count, virtual):
    model, batch = net(), sequences(steps=32)
    with Engine(model, device=virtual, loss=loss, split=weighed, memory=budget, held=False) as engine:
        result = Result(engine.forward_backward(batch).cpu(), gradients(model))
        found = engine.choice.micro_batches
        assert found == count
        others = torch.accelerator.memory_allocated(virtual) - engine.plan.fixed
        torch.accelerator.reset_peak_memory_stats(virtual)
        before = engine.fetches
        engine.forward_backward(batch)
        assert torch.accelerator.max_memory_allocated(virtual) - others <= parse_bytes(budget, "memory")
        assert engine.fetches - before < before / 2, "nothing is tried again"
        engine.forward_backward(batch, 8)  # as it is asked for
        assert engine.choice.micro_batches == 8
    parts = columns(batch, found)
    assert_same(result, accumulated(virtual, parts, [1 / found] * found))
    assert_whole(result, virtual, batch)


def test_what_does_not_fit_however_it_is_cut_is_refused(virtual):
    def function(batch, count):
        if count > 2:
            raise ValueError("no more than two")
        return columns(batch, count)

    with Engine(net(), device=virtual, loss=loss, split=function, memory="256KiB") as engine:
        with pytest.raises(ValueError, match=r"micro-batches of .* need .* memory=256\.00KiB; pass smaller"):
            engine.forward_backward(sequences(steps=64))
        with pytest.raises(ValueError, match=r"micro-batches of .* need .* memory=256\.00KiB; pass smaller"):
            engine.forward_backward(sequences(steps=64), micro_batches=1)
