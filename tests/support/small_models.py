"""Small models, trained by the engine and by plain PyTorch, for tests of ordinary code in models and losses."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from ferryman.engine import Engine

WIDTH = 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """A stack of blocks; tests derive their own from it."""

    block = Block

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)
        self.prepare()

    def prepare(self):
        pass

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(steps, samples=24):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (
            torch.randn(samples, WIDTH, generator=generator),
            torch.randint(0, 5, (samples,), generator=generator),
        )


def made(make, prepare):
    torch.manual_seed(0)
    model = make().train()
    if prepare is not None:
        prepare(model)
    return model


def train_plainly(model, function, device, micro_batches, steps=3):
    """Seeds each micro-batch as the engine does."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in batches(steps):
        seed, total = int(torch.randint(0, 2**62, ())), 0.0
        states = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            for number, part in enumerate(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)):
                torch.manual_seed(seed + number)
                random.seed(seed + number)
                np.random.seed((seed + number) % 2**32)
                value = function(model, tuple(t.to(device) for t in part)) / micro_batches
                value.backward()
                total += value.item()
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train(model, function, device, micro_batches, steps=3, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Engine(model, optimizer, device=device, loss=function, max_grad_norm=1.0, **options) as engine:
        return [engine.step(batch, micro_batches).item() for batch in batches(steps)]


def assert_equal_to_plain(make, function, prepare, micro_batches, device):
    """Compares losses, weights, buffers, and the values that attributes have in the end."""
    model, plain = made(make, prepare), made(make, prepare)
    stash = {} if device.type == "cpu" else {"stash": "host", "slots": 2, "held": False}
    torch.manual_seed(2)
    expected = train_plainly(plain, function, device, micro_batches)
    torch.manual_seed(2)
    losses = train(model, function, device, micro_batches, **stash)
    assert losses == pytest.approx(expected, rel=1e-5)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value.cpu(), atol=1e-5, rtol=1e-4, msg=key)
    for mine, theirs in zip(model.modules(), plain.modules(), strict=True):
        for attribute in ("residual", "auxiliary", "log"):
            if attribute in vars(theirs):
                torch.testing.assert_close(vars(mine)[attribute], vars(theirs)[attribute], atol=1e-5, rtol=1e-4)
        assert getattr(mine, "calls", 0) == getattr(theirs, "calls", 0)
