"""The optimizer of a run, and its learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ferryman.cli.train_options import TrainOptions
from ferryman.server.rules import Lion

RULES: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lion": Lion,
    "adagrad": torch.optim.Adagrad,
}

_LEAST = 0.1  # of the learning rate, at the end of a cosine


def make_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """Weight decay is for matrices; biases and norms are left alone."""
    settings: dict[str, Any] = {"lr": options.lr}
    if options.weight_decay is not None:
        settings["weight_decay"] = options.weight_decay
    if options.betas is not None:
        if options.optimizer not in ("adamw", "adam", "lion"):
            raise ValueError(f"--betas: --optimizer {options.optimizer} has none; adamw, adam and lion do")
        settings["betas"] = options.betas
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2]},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    rule: torch.optim.Optimizer = RULES[options.optimizer]([group for group in groups if group["params"]], **settings)
    return rule


def set_rate(optimizer: torch.optim.Optimizer, options: TrainOptions, step: int, steps: int) -> float:
    """For the step that comes after `step` of them, of `steps` in all. It follows from these alone."""
    rate = options.lr * share(options.schedule, step, steps, options.warmup)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def share(schedule: str, step: int, steps: int, warmup: int) -> float:
    """Of the highest learning rate."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    gone = min(1.0, (step - warmup) / max(1, steps - warmup))
    if schedule == "linear":
        return 1 - gone
    if schedule == "cosine":
        return _LEAST + (1 - _LEAST) * (1 + math.cos(math.pi * gone)) / 2
    return 1.0
