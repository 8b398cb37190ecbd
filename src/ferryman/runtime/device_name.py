"""The name of a device."""

from __future__ import annotations

import torch


def device_name(device: torch.device) -> str:
    """The device and, if its module knows it, its product name."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else f"{device} ({name(device)})"
