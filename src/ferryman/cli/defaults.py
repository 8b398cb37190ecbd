"""What is taken where nothing is given, by `ferryman train` and by `ferryman plan`, which tells what it would do.

All other defaults that both have are those of `TrainOptions`.
"""

from __future__ import annotations

import torch
from torch import nn

from ferryman.cli.model_argument import ModelSpec
from ferryman.model.chunked_loss import find_head
from ferryman.runtime.sizes import parse_bytes
from ferryman.training import checks

LONGEST = 1024  # tokens in a window

# What settings of the engine do by default in these commands, where that is not what the engine does.
DEFAULT_TEXTS = {"memory": "nine tenths of what is free", "chunked_loss": "yes, if the model's head is a linear layer"}

_SHARE = 0.9  # of the free device memory: an allocator's gaps, and what libraries take for themselves, need some


def window(sequence: int | None, model: ModelSpec) -> int:
    """Tokens in a window: the model's context, if it is not too long."""
    if sequence is None:
        return min(model.context or LONGEST, LONGEST)
    if sequence < 2:
        raise ValueError(f"--sequence {sequence}: a sample has at least 2 tokens, of which each predicts the next")
    if model.context is not None and sequence > model.context:
        raise ValueError(f"--sequence {sequence} is longer than {model.name!r} takes: {model.context} tokens")
    return sequence


def budget(device: torch.device, memory: int | str | None) -> int | None:
    """Bytes of the device that may be used; None for the CPU, which has no memory of its own."""
    if memory is not None:
        given = parse_bytes(memory, "memory")
        checks.budget(given, device)
        return given
    if device.type == "cpu":
        return None
    try:
        return int(_SHARE * torch.accelerator.get_memory_info(device)[0])
    except (NotImplementedError, RuntimeError):  # not every device tells
        return None


def chunked_loss(given: bool | None, model: nn.Module) -> bool:
    """Whether the loss is computed in chunks of the vocabulary: wherever that is possible."""
    return find_head(model) is not None if given is None else given
