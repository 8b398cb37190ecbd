"""The work that a step does in Python, in calls of functions: how it grows with the parts of a model."""

import sys

import torch
from torch import nn

from ferryman.engine import Engine

WIDTH = 4


class Scales(nn.Module):
    """A block of many small tensors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH, dtype=torch.bfloat16) for _ in range(count))

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return x


def calls_in_a_step(count, device):
    """Functions that the caller's thread, which computes the units, calls in a step with units of so many tensors."""
    model = nn.Sequential(*(Scales(count) for _ in range(2)))
    batch = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    found = 0

    def see(_frame, event, _argument):
        nonlocal found
        found += event in ("call", "c_call")

    optimizer = torch.optim.AdamW(model.parameters())
    with Engine(model, optimizer, device=device, loss=lambda model, x: model(x).float().mean()) as engine:
        for _ in range(2):
            engine.step(batch, micro_batches=2)
        engine.wait()
        sys.setprofile(see)
        try:
            engine.step(batch, micro_batches=2)
        finally:
            sys.setprofile(None)
    return found


def test_gradients_of_a_unit_are_collected_in_linear_time(accelerator):
    few, some, many = (calls_in_a_step(count, accelerator) for count in (16, 48, 112))
    assert many - some < 2.2 * (some - few), "64 more tensors take twice the work of 32 more, not the square"
