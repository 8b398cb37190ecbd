"""Units of very different sizes share slots: the same results, no races, no more fetches, and less memory."""

import contextlib

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from ferryman.relay.gradient_slots import GradientSlots
from ferryman.relay.weight_slots import WeightSlots
from support.block_changes import Wide
from support.devices import delay_copies, torch_virtual
from support.models import CASES, WIDTH, Toy, assert_same, build, cut, on, plain_step, step, text
from support.slow import covering

MANY = 512  # rows of an embedding that is larger than four blocks


class Head(Toy):
    """Its embedding and its head are large."""

    def __init__(self, layers=4):
        super().__init__(layers)
        self.embed, self.head = nn.Embedding(MANY, WIDTH), nn.Linear(WIDTH, MANY, bias=False)


class Tied(Head):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class Twice(Head):
    """Calls its blocks again, out of order."""

    def hidden(self, ids):
        x = self.embed(ids)
        for number in (0, 1, 2, 0, 3, 1, 2):
            x = self.blocks[number](x)
        return x


class Neighbors(Toy):
    """Calls two large blocks one after the other that are not neighbors in the model, so that they overlap."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Wide(inner) for inner in (30, 50, 50, 30, 70))

    def hidden(self, ids):
        x = self.embed(ids)
        for number in (0, 1, 2, 4, 3):
            x = self.blocks[number](x)
        return x


MODELS = {"head": Head, "tied": Tied, "twice": Twice, "neighbors": Neighbors}
OTHERS = ["t5", "mixtral"]
LOOSE = {"tied": ("embed.weight",), "twice": ("blocks.*",)}  # where gradients are added up in another order


def made(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name]() if name in MODELS else build(CASES[name])


def batch_of(name):
    return text(8) if name in MODELS else CASES[name].batch(8)


def compare(name, device, slots, recompute="always"):
    """Two rounds of gradients against plain PyTorch; returns the fetches of the second one."""
    model, plain = made(name), on(device, made(name))
    batch, loose = batch_of(name), LOOSE[name] if name in LOOSE else CASES[name].loose if name in CASES else ()
    with Engine(model, device=device, slots=slots, held=False, recompute=recompute) as engine:
        for seed in range(2):
            plain.zero_grad()
            engine.zero_grad()
            torch.manual_seed(seed)
            expected = plain_step(plain, cut(batch, 4))
            torch.manual_seed(seed)
            before = engine.fetches
            assert_same(step(engine, model, batch), expected, loose)
        return engine.fetches - before, len(engine.units), engine.plan


@covering
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
@pytest.mark.parametrize("slots", [2, 3, 1])
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_gradients_are_those_of_plain_pytorch(name, slots, recompute, virtual):
    delay_copies(virtual)
    compare(name, virtual, slots, recompute)


def test_a_head_costs_no_fetch_and_less_than_two_of_its_size(virtual):
    fetches, units, plan = compare("head", virtual, 2)
    assert fetches == 2 * units - 2
    assert plan.account["weight slots"] < 1.4 * max(unit.nbytes for unit in plan.units)


# The control: units overlap where the model calls them in another order than expected.

WAITS = {"weights": WeightSlots, "gradients": GradientSlots}


@pytest.mark.parametrize("slots", WAITS)
def test_a_missing_wait_for_the_other_end_is_found(slots, virtual, monkeypatch):
    delay_copies(virtual)
    monkeypatch.setattr(WAITS[slots], "_other_end", lambda self, slot: None)
    with pytest.raises((RuntimeError, AssertionError, ValueError)):
        compare("neighbors", virtual, 2)
    monkeypatch.undo()
    with contextlib.suppress(RuntimeError):
        torch_virtual.synchronize()
    torch_virtual.clear_races()
