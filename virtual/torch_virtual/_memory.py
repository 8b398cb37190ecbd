"""The device's memory, and host memory made fit for asynchronous copies."""

from __future__ import annotations

from typing import Any

import torch

from torch_virtual import _C
from torch_virtual._device import Device, index_of


def capacity(device: Device = None) -> int:
    """Bytes. The host's memory, unless it was set."""
    return _C.capacity(index_of(device))


def set_capacity(nbytes: int, device: Device = None) -> None:
    """From now on an allocation that would take the use beyond `nbytes` raises torch.OutOfMemoryError."""
    if isinstance(nbytes, str) or int(nbytes) != nbytes or nbytes < 0:
        raise ValueError(
            f"a device's capacity is a whole number of bytes, 0 or more (it cannot be negative): {nbytes!r}"
        )
    _C.set_capacity(index_of(device), int(nbytes))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes."""
    return torch.accelerator.get_memory_info(index_of(device))


def memory_allocated(device: Device = None) -> int:
    return torch.accelerator.memory_allocated(index_of(device))


def max_memory_allocated(device: Device = None) -> int:
    return torch.accelerator.max_memory_allocated(index_of(device))


def reset_peak_memory_stats(device: Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(index_of(device))


def memory_stats(device: Device = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(index_of(device))


def empty_cache() -> None:
    """Gives unused pages back to the host. Never needed for capacity: free memory is free."""
    torch.accelerator.empty_cache()


def register_host(tensor: torch.Tensor) -> None:
    """Pins a tensor's memory where it is, to the byte, as cudaHostRegister does."""
    _C.register_host(tensor)


def unregister_host(tensor: torch.Tensor) -> None:
    """Undoes `register_host`; a copy that still needs the memory is a race."""
    _C.unregister_host(tensor)
