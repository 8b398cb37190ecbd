"""Defaults that depend on the model and the machine, for `ferryman train` and `ferryman plan`.

All other defaults are declared in `TrainOptions`.
"""

from __future__ import annotations

import torch
from torch import nn

from ferryman.cli.model_argument import ModelSpec
from ferryman.model.chunked_loss import find_head
from ferryman.runtime.device_memory import usual_budget
from ferryman.runtime.sizes import parse_bytes
from ferryman.training import checks

MAX_SEQUENCE = 1024  # tokens, by default

# The defaults of engine settings in these commands, where they differ from those of the engine.
DEFAULT_TEXTS = {
    "memory": "90% of the free device memory",
    "chunked_loss": "yes, if the model's head is a linear layer",
}


def window(sequence: int | None, model: ModelSpec) -> int:
    """Tokens per window: as given, or the model's context, up to a limit."""
    if sequence is None:
        return min(model.context or MAX_SEQUENCE, MAX_SEQUENCE)
    if sequence < 2:
        raise ValueError(f"--sequence {sequence}: must be at least 2 tokens, since each token predicts the next")
    if model.context is not None and sequence > model.context:
        raise ValueError(f"--sequence {sequence} is longer than the context of {model.name!r}: {model.context} tokens")
    return sequence


def budget(device: torch.device, memory: int | str | None) -> int | None:
    """The budget of device memory in bytes. None: no limit, or the device is the CPU."""
    if memory is not None:
        given = parse_bytes(memory, "memory")
        checks.budget(given, device)
        return given
    return usual_budget(device)


def chunked_loss(given: bool | None, model: nn.Module) -> bool:
    """Whether the loss is computed in chunks of the vocabulary: wherever that is possible."""
    return find_head(model) is not None if given is None else given
