"""Stacks of equal blocks that take tensors of numbers, whose device memory is easy to calculate."""

import torch
from torch import nn

from support.models import Block

WIDTH, LENGTH = 64, 256


class Stack(nn.Module):
    def __init__(self, layers, width=WIDTH):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Perceptron(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def perceptrons(layers, width):
    torch.manual_seed(0)
    return nn.Sequential(*(Perceptron(width) for _ in range(layers)))


def square_loss(model, part):
    return model(part["x"]).square().mean()


def numbers(samples, length=LENGTH, width=WIDTH):
    return {"x": torch.randn(samples, length, width, generator=torch.Generator().manual_seed(length))}
