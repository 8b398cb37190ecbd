"""Gradients of later micro-batches, which autograd adds to their sums during a visit."""

import copy

import pytest
import torch
from torch import nn

from ferryman.engine import Engine

WIDTH, MICRO_BATCHES = 4, 3


class Meddling(nn.Module):
    """A linear layer that calls a function with the layer and the input before each forward."""

    def __init__(self, meddle):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.meddle = meddle

    def forward(self, x):
        self.meddle(self.linear, x)
        return self.linear(x)


def run(device, meddle):
    torch.manual_seed(0)
    model = nn.Sequential(Meddling(lambda *_: None), Meddling(meddle))
    batch = torch.randn(2 * MICRO_BATCHES, WIDTH)
    with Engine(model, device=device, loss=lambda model, x: model(x).square().mean()) as engine:
        engine.forward_backward(batch, micro_batches=MICRO_BATCHES)


def test_clearing_a_sum_in_a_unit_is_refused(device):
    def clear(linear, x):
        if linear.weight.grad is not None:  # at the turn, after the backward of the first micro-batch
            linear.weight.grad = None

    with pytest.raises(ValueError, match=r"the gradient of '1\.linear\.weight' is read or cleared"):
        run(device, clear)


def test_a_hook_that_is_registered_after_the_first_gradient_is_called(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plain, batch = copy.deepcopy(model), torch.randn(2 * MICRO_BATCHES, WIDTH)
    marked = batch.clone()
    marked[2, 0] = 7.0  # in the second micro-batch

    def loss_with(weight):
        def loss(model, x):
            value = model(x).square().mean()
            if (x[:, 0] == 7).any():
                weight.register_hook(lambda gradient: gradient * 2)
            return value

        return loss

    expected = loss_with(plain[1].weight)
    for part in (*batch.chunk(MICRO_BATCHES), *marked.chunk(MICRO_BATCHES)):
        (expected(plain, part) / MICRO_BATCHES).backward()
    with Engine(model, device=device, loss=loss_with(model[1].weight)) as engine:
        for whole in (batch, marked):
            engine.forward_backward(whole, micro_batches=MICRO_BATCHES)
        torch.testing.assert_close(engine.gradient("1.weight").cpu(), plain[1].weight.grad)
