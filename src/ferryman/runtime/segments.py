"""Segments: what an allocator takes from the device for the allocations that are asked of it.

An allocator that caches takes memory from the device in segments, and cuts them into blocks. What it has taken is
*reserved*; what tensors use is *allocated*. A budget bounds what is reserved, since no other process can use that.
PyTorch's allocators differ in sizes only, so these are found out by asking for two small tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

_STREAMS = 4  # to try: a stream may be one that was used before, and its segments may have room


@dataclass(frozen=True)
class Segments:
    """Sizes in bytes. By default, as much is reserved as is asked for."""

    rounding: int = 1  # allocations take multiples of it
    small: int = 0  # the segment for allocations of at most half of it
    large: int = 0  # the segment for others of less than half of it; larger ones take multiples of a small segment

    @property
    def is_exact(self) -> bool:
        return self.small == 0

    def reserved(self, sizes: Iterable[int]) -> int:
        """Bytes that are reserved for allocations of these sizes, one after the other, on one stream."""
        if self.is_exact:
            return sum(sizes)
        total, rests = 0, dict[bool, list[int]]({True: [], False: []})
        for size in filter(None, sizes):
            block = _round_up(size, self.rounding)
            is_small = block <= self.small // 2
            fitting = [rest for rest in rests[is_small] if rest >= block]
            if fitting:
                found = min(fitting)
                rests[is_small].remove(found)
            else:
                found = self._segment(block, is_small=is_small)
                total += found
            if found > block:
                rests[is_small].append(found - block)
        return total

    def _segment(self, block: int, *, is_small: bool) -> int:
        if is_small:
            return self.small
        return self.large if block < self.large // 2 else _round_up(block, self.small)


def find_segments(device: torch.device) -> Segments:
    """The sizes of the device's allocator. If they cannot be found out, as much is reserved as is asked for."""
    if device.type == "cpu":
        return Segments()
    for _ in range(_STREAMS):
        stream = torch.Stream(device)
        try:
            rounding, small, first = _grown(device, stream, 1)
            if small <= 1:
                return Segments()
            _, large, second = _grown(device, stream, small // 2 + 1)
        except torch.OutOfMemoryError:
            return Segments()
        del first, second
        if large > small > rounding:
            return Segments(rounding, small, large)
    return Segments()


def _grown(device: torch.device, stream: torch.Stream, nbytes: int) -> tuple[int, int, torch.Tensor]:
    """A new tensor on this stream, and how much more is allocated and reserved because of it."""
    before = _in_use(device)
    outer = torch.accelerator.current_stream(device)
    index = torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)
    try:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    finally:
        torch.accelerator.set_stream(outer)
        torch.accelerator.set_device_index(index)
    allocated, reserved = (now - then for now, then in zip(_in_use(device), before, strict=True))
    return allocated, reserved, tensor


def _in_use(device: torch.device) -> tuple[int, int]:
    return torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device)


def _round_up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
