"""What a device is called."""

from __future__ import annotations

import torch


def device_name(device: torch.device) -> str:
    """With the product's name, where its module tells."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else f"{device} ({name(device)})"
