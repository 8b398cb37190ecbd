"""The --device that commands take."""

from __future__ import annotations

import importlib

import torch

from ferryman.training import checks


def find_device(device: torch.device | str | None, place: int | None = None) -> torch.device:
    """A device that works here; without a name the accelerator that PyTorch reports, else the CPU. `place`: which of a
    node's ranks asks, of several that have one each."""
    if device is not None and str(device).partition(":")[0] == "virtual":  # it is there once its module is imported
        try:
            importlib.import_module("torch_virtual")
        except ImportError as error:
            raise ValueError(
                f"--device {device} needs torch_virtual, which is in the folder virtual/ of Ferryman's repository: "
                f"pip install --no-build-isolation ./virtual ({error})"
            ) from error
    return checks.real_device(device, place)
