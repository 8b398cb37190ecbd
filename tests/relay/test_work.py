"""The work that a step does in Python, in calls of functions: how it grows with the parts of a model."""

import sys

import torch
from torch import nn

from ferryman.engine import Engine
from ferryman.runtime.lanes import Lane

WIDTH = 4
UNITS = 3  # more than gradient slots, so that micro-batches take turns on the CPU, too


class Scales(nn.Module):
    """A block of many small tensors."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH, dtype=dtype) for _ in range(count))

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return x


def calls_in_a_step(count, device, dtype=torch.bfloat16, micro_batches=2):
    """Functions that the caller's thread, which computes the units, calls in a step with units of so many tensors."""
    model = nn.Sequential(*(Scales(count, dtype) for _ in range(UNITS)))
    batch = torch.ones(micro_batches, WIDTH, dtype=dtype)
    found = 0

    def see(_frame, event, _argument):
        nonlocal found
        found += event in ("call", "c_call")

    optimizer = torch.optim.AdamW(model.parameters())
    with Engine(model, optimizer, device=device, loss=lambda model, x: model(x).float().mean()) as engine:
        for _ in range(2):
            engine.step(batch, micro_batches=micro_batches)
        engine.wait()
        sys.setprofile(see)
        try:
            engine.step(batch, micro_batches=micro_batches)
        finally:
            sys.setprofile(None)
    return found


def test_gradients_of_a_unit_are_collected_in_linear_time(accelerator):
    few, some, many = (calls_in_a_step(count, accelerator) for count in (16, 48, 112))
    assert many - some < 2.2 * (some - few), "64 more tensors take twice the work of 32 more, not the square"


def test_gradients_of_later_micro_batches_are_added_by_autograd():
    def of_a_tensor(micro_batches):
        few, many = (calls_in_a_step(count, "cpu", torch.float32, micro_batches) for count in (16, 48))
        return (many - few) / (32 * UNITS)

    further = (of_a_tensor(6) - of_a_tensor(2)) / 4
    assert further < 33, "functions for each further micro-batch, both forwards included; 28 when this was written"


def work_of_an_update(blocks, monkeypatch):
    """Functions that the caller's thread calls in an update of so many small units, and labels of what lanes get."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)))
    labels, found, submit = [], 0, Lane.submit

    def see(_frame, event, _argument):
        nonlocal found
        found += event in ("call", "c_call")

    def submitted(lane, work, **options):
        labels.append(options["label"].partition(" ")[0])
        return submit(lane, work, **options)

    optimizer = torch.optim.AdamW(model.parameters())
    with Engine(model, optimizer, device="cpu", loss=lambda model, x: model(x).mean()) as engine:
        for last in (False, False, True):
            engine.forward_backward(torch.ones(2, WIDTH), micro_batches=2)
            engine.wait()
            if last:
                monkeypatch.setattr(Lane, "submit", submitted)
                sys.setprofile(see)
            try:
                engine.update()
            finally:
                sys.setprofile(None)
        engine.wait()
        monkeypatch.undo()
    return found, labels


def test_small_units_are_updated_together(monkeypatch):
    few, labels_of_few = work_of_an_update(8, monkeypatch)
    many, labels_of_many = work_of_an_update(24, monkeypatch)
    assert labels_of_few == labels_of_many == ["check", "update"]
    assert (many - few) / 16 < 140, "functions per unit of two tensors on the calling thread; 132 when this was written"
