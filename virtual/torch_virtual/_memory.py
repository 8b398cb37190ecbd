"""The device's memory, and host memory made fit for asynchronous copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


def memory_reserved(device: Device = None) -> int:
    """Bytes that the process has taken from the device; with caching, more than its tensors use."""
    return torch.accelerator.memory_reserved(index_of(device))


def max_memory_reserved(device: Device = None) -> int:
    return torch.accelerator.max_memory_reserved(index_of(device))


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Allows this process to reserve at most this share of the capacity, as `torch.cuda`'s function does."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"a fraction of the device's memory is required, from 0 to 1: {fraction!r}")
    _C.set_fraction(index_of(device), fraction)


def get_per_process_memory_fraction(device: Device = None) -> float:
    """The share of the capacity that this process may reserve."""
    return _C.fraction(index_of(device))


def empty_cache() -> None:
    """Gives segments that hold no tensor back to the device, and unused pages back to the host."""
    torch.accelerator.empty_cache()


@dataclass(frozen=True)
class Caching:
    """How the allocator keeps freed memory for later, in bytes; by default it keeps none.

    With caching it works as CUDA's does: sizes are rounded up, memory comes from the device in segments, which are cut
    into blocks, and a freed block is for the stream that it was allocated for. `CUDA` has that allocator's sizes;
    smaller ones suit small models.
    """

    rounding: int = 1  # allocations take multiples of it
    small_segment: int = 0  # for allocations of at most half of it
    large_segment: int = 0  # for others of less than half of it; larger ones take multiples of a small segment

    def __post_init__(self) -> None:
        if (self.small_segment, self.large_segment) == (0, 0):
            if self.rounding != 1:
                raise ValueError(f"rounding={self.rounding} requires segments: without caching, sizes are exact")
            return
        if not (self.rounding >= 64 and self.rounding % 64 == 0):
            raise ValueError(f"rounding must be a multiple of 64 bytes, the alignment of tensors, not {self.rounding}")
        if self.small_segment % self.rounding or self.small_segment < 2 * self.rounding:
            raise ValueError(f"small_segment must be a multiple of rounding, at least twice it: {self.small_segment}")
        if self.large_segment % self.small_segment or self.large_segment < 2 * self.small_segment:
            raise ValueError(
                f"large_segment must be a multiple of small_segment, at least twice it: {self.large_segment}"
            )


EXACT = Caching()
CUDA = Caching(rounding=512, small_segment=2 << 20, large_segment=20 << 20)


def set_caching(caching: Caching, device: Device = None) -> Caching:
    """Segments taken from now on follow this; returns what was set before."""
    index = index_of(device)
    before = Caching(*_C.caching(index))
    _C.set_caching(index, caching.rounding, caching.small_segment, caching.large_segment)
    return before


@contextmanager
def caching(caching: Caching, device: Device = None) -> Iterator[None]:
    """`set_caching` for a block of code."""
    index = index_of(device)
    before = set_caching(caching, index)
    try:
        yield
    finally:
        set_caching(before, index)


def register_host(tensor: torch.Tensor) -> None:
    """Pins a tensor's memory where it is, as cudaHostRegister does."""
    _C.register_host(tensor)


def unregister_host(tensor: torch.Tensor) -> None:
    """Undoes `register_host`; a copy that still needs the memory is a race."""
    _C.unregister_host(tensor)
