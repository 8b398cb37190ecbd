"""Slots take what their units take: a budget in which slots of the largest unit's size do not fit is enough."""

import gc

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from ferryman.plan import slot_sizes
from ferryman.plan.slot_sizes import SlotSizes, gradient_slot_bytes
from support.devices import torch_virtual
from support.models import WIDTH, Toy

DEVICE = "virtual:0"
NAMED = ["embed", "blocks.*", "head"]


class Head(Toy):
    """Its embedding and its head are much larger than its blocks."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(2048, WIDTH), nn.Linear(WIDTH, 2048, bias=False)


def batch():
    ids = torch.arange(8).reshape(4, 2)
    return {"input_ids": ids, "labels": ids}


def engine_with(budget):
    torch.manual_seed(0)
    return Engine(Head(), device=DEVICE, memory=budget, units=NAMED, slots=2, held=False, stash="host")


def alike(units, count, size):
    """As large as the largest unit, each."""
    largest = max(map(size, units))
    return SlotSizes(min(count, 2) * largest, (largest,) * (count - 2), is_single=count == 1)


@pytest.mark.exact
def test_a_head_fits_where_two_of_its_size_do_not(virtual, monkeypatch):
    gc.collect()  # what other tests have left on the device must not go meanwhile
    with engine_with("4MiB") as engine:
        units = {unit.name: unit for unit in engine.units}
        head, block = units["head"], units["blocks.2"]
        weights, gradients = (
            head.nbytes + block.nbytes,
            sum(gradient_slot_bytes(u, updates=False) for u in (head, block)),
        )
        plan = engine.plan
        assert plan.account["weight slots"] == weights
        assert plan.account["gradient slots"] == gradients
        before = plan.fixed - weights - gradients + 2 * head.nbytes + 2 * gradient_slot_bytes(head, updates=False)
    budget = before  # without any room for micro-batches, if slots were alike
    torch_virtual.synchronize()
    others = torch.accelerator.memory_allocated(DEVICE)
    with engine_with(budget) as engine:
        assert (engine.plan.weight_slots, engine.plan.gradient_slots) == (2, 2)
        engine.forward_backward(batch())
        torch_virtual.synchronize()
        with torch_virtual.watch(DEVICE) as seen:
            engine.forward_backward(batch())
        assert engine.plan.fixed < seen.counters.peak_memory - others <= budget
    monkeypatch.setattr(slot_sizes, "slot_sizes", alike)
    with pytest.raises(ValueError, match="too small for this model"):
        engine_with(budget).forward_backward(batch())
