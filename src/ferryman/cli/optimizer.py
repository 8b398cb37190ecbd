"""The optimizer of a training run and its learning rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ferryman.cli.train_options import TrainOptions
from ferryman.server.rules import Lion

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lion": Lion,
    "adagrad": torch.optim.Adagrad,
}

_FINAL_COSINE_FACTOR = 0.1  # of the peak learning rate, at the end of a cosine schedule


def make_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """Applies weight decay to matrices only, not to biases and normalization weights."""
    settings: dict[str, Any] = {"lr": options.lr}
    if options.weight_decay is not None:
        settings["weight_decay"] = options.weight_decay
    if options.betas is not None:
        if options.optimizer not in ("adamw", "adam", "lion"):
            raise ValueError(f"--betas: --optimizer {options.optimizer} has no betas; adamw, adam and lion do")
        settings["betas"] = options.betas
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2]},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    rule: torch.optim.Optimizer = OPTIMIZERS[options.optimizer](
        [group for group in groups if group["params"]], **settings
    )
    return rule


def set_learning_rate(optimizer: torch.optim.Optimizer, options: TrainOptions, step: int, steps: int) -> float:
    """Sets and returns the learning rate of the next step, after `step` of `steps` steps have been made."""
    rate = options.lr * learning_rate_factor(options.schedule, step, steps, options.warmup)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def learning_rate_factor(schedule: str, step: int, steps: int, warmup: int) -> float:
    """The learning rate as a fraction of its peak, as a pure function of the step."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    gone = min(1.0, (step - warmup) / max(1, steps - warmup))
    if schedule == "linear":
        return 1 - gone
    if schedule == "cosine":
        return _FINAL_COSINE_FACTOR + (1 - _FINAL_COSINE_FACTOR) * (1 + math.cos(math.pi * gone)) / 2
    return 1.0
