"""Helpers for tests of updates: ways to update, optimizers, comparison of weights, and slow host kernels."""

import time

import torch

import ferryman
from ferryman.server import kernels
from support.slow import slow

WAYS = {"eager": {}, "deferred": {"deferred": True}, "clipped": {"max_grad_norm": 0.3}}


def adamw(model):
    """AdamW with weight-decay groups, a group with its own learning rate, and a warm-up; with its scheduler."""
    wide = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))


def assert_near(model, plain, limit=2e-6):
    ours, theirs = model.state_dict(), plain.state_dict()
    for name, value in theirs.items():
        off = float((ours[name].float() - value.cpu().float()).abs().max())
        assert off <= limit, f"{name} is off by {off}"


def slow_kernels(monkeypatch, seconds=0.02):
    """Delays each host update by `seconds`."""
    real = kernels.update

    def late(*args, **kwargs):
        time.sleep(seconds)
        real(*args, **kwargs)

    monkeypatch.setattr(kernels, "update", late)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "Adam with decay": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "AdamW, maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, maximize=True),
    "AdamW, a tensor's rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.01, initial_accumulator_value=0.1),
    "Lion": lambda p: ferryman.Lion(p, lr=1e-4, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}
# One of each form: with kernels of ours, with options that have none, and by their own step. The others take longer.
_MAIN = ("AdamW", "AdamW, amsgrad", "SGD, momentum", "Adagrad", "Lion", "RMSprop", "NAdam")
MAIN_AND_SLOW = [*_MAIN, *slow(*(name for name in OPTIMIZERS if name not in _MAIN))]
