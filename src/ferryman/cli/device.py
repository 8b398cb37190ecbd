"""The --device that commands take."""

from __future__ import annotations

import contextlib
import importlib

import torch

from ferryman import checks


def find_device(name: str | None) -> torch.device:
    """A device that works here; without a name the accelerator that PyTorch reports, else the CPU."""
    if name is not None and name.partition(":")[0] == "virtual":
        with contextlib.suppress(ImportError):  # then the check says what there is
            importlib.import_module("torch_virtual")
    return checks.real_device(name)
