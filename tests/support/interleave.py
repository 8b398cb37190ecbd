"""Helpers for tests of updates that host and device share: policies, models, and two runs side by side."""

import random

import torch
from torch import nn

from ferryman.engine import Engine
from ferryman.server import balancer as split
from support.models import VOCABULARY, Block, Case, Toy, build, cut, plain_step
from support.updates import OPTIMIZERS, adamw, assert_near

ON_DEVICE = ("static:0.5", "static:1", "stride:2", "stride:3")

# A few of all: policies, ways to update, and whether weights are held on the device.
MIX = [
    ("static:0.5", "eager", False),
    ("static:0.5", "clipped", True),
    ("stride:2", "deferred", True),
    ("stride:2", "clipped", False),
]

SUBGROUPS = {1: 1024, 2: 400, 3: 272, 7: 112}  # how many a block of Odd has, and of how many parameters


class Odd(Toy):
    """A model whose tensors end within a vector register, and whose subgroups end within tensors."""

    def __init__(self, layers=3, width=13):
        super().__init__(0)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)


class Broad(Odd):
    """A model whose blocks are large enough for `auto` to consider the device."""

    def __init__(self):
        super().__init__(4, 64)


ODD, BROAD = Case(Odd), Case(Broad)


def plain_optimizer(name):
    """An optimizer of `support.updates` by name, with a scheduler that does not change the learning rate."""

    def make(model):
        optimizer = OPTIMIZERS[name](model.parameters())
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    return make


class Pair:
    """A model in an engine, and the same model in plain PyTorch, stepped side by side."""

    def __init__(self, device, case=ODD, make=adamw, **options):
        self.model, self.plain = build(case), build(case)
        (self.optimizer, self.scheduler), (self.theirs, self.their_scheduler) = make(self.model), make(self.plain)
        self.limit = options.get("max_grad_norm")
        self.batch = case.batch
        self.engine = Engine(self.model, self.optimizer, device=device, **options)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.engine.__exit__(kind, error, traceback)

    def step(self, seed):
        self.ours(seed)
        self.plainly(seed)

    def ours(self, seed):
        torch.manual_seed(seed)
        loss = self.engine.step(self.batch(4, seed=seed), 2)
        self.scheduler.step()
        return loss

    def plainly(self, seed):
        self.plain_backward(seed)
        self.plain_update()

    def backward(self, seed):
        torch.manual_seed(seed)
        self.engine.forward_backward(self.batch(4, seed=seed), 2)
        self.plain_backward(seed)

    def plain_backward(self, seed):
        torch.manual_seed(seed)
        plain_step(self.plain, cut(self.batch(4, seed=seed), 2))

    def update(self):
        self.engine.update()
        self.scheduler.step()
        self.plain_update()

    def plain_update(self):
        if self.limit is not None:
            torch.nn.utils.clip_grad_norm_(self.plain.parameters(), self.limit)
        self.theirs.step()
        self.theirs.zero_grad()
        self.their_scheduler.step()

    @property
    def models(self):
        return self.model, self.plain

    def check(self, limit=2e-6):
        assert_near(self.model, self.plain, limit)

    def check_state(self):
        """Asserts that `optimizer.state` is close to that of plain PyTorch's optimizer."""
        ours, theirs = self.optimizer.state_dict()["state"], self.theirs.state_dict()["state"]
        for key, values in theirs.items():
            for name, value in values.items():
                if value is not None:  # as torch notes that there is no momentum
                    torch.testing.assert_close(ours[key][name], value, atol=1e-6, rtol=1e-5)


def subgroups_of(engine):
    """All subgroups in forward order, and those that stay on the device."""
    plan = engine.plan
    return plan.staging.subgroups(plan.in_forward_order), plan.staging.owned(plan.in_forward_order)


def let_auto_guess(monkeypatch, seed=0):
    """Makes `auto` choose at random in every step: any choice must give the same weights."""
    chance = random.Random(seed)
    monkeypatch.setattr(split, "MIN_DEVICE_SUBGROUP", 16)
    monkeypatch.setattr("ferryman.training.planner.MIN_DEVICE_SUBGROUP", 16)
    monkeypatch.setattr(split, "_have_changed", lambda old, new: old is not new)  # once a step
    monkeypatch.setattr(split, "choose", lambda *args: chance.random() < 0.5)
    monkeypatch.setattr(split, "assign", lambda sizes, *args: [chance.random() < 0.5 for _ in sizes])
