"""How fast the link to a device is, measured once before anything is planned."""

from __future__ import annotations

import math

import torch

from ferryman.runtime.lanes import Lanes
from ferryman.runtime.marks import busy_seconds
from ferryman.runtime.pinned import PinnedMemory

_SIZES = (1 << 20, 1 << 25)  # bytes of copies; the later ones only if the link is fast
_SLOW = 1e9  # bytes per second; a longer measurement would show nothing that matters
_COPIES = 3  # the first one also warms up; the fastest counts
_CLASS = 6.25e9  # bytes per second: PCIe 3.0 with eight lanes, nearly; each doubling of lanes or generation is a class


def link_rate(device: torch.device, most: int) -> float:
    """Bytes per second from the host to the device, rounded to a class of links. Takes `most` bytes of it at most.

    Plans depend on it, and which weights the device updates depends on the plan. So two runs on one machine must find
    the same rate, although two measurements never do. Classes are powers of two, with common links in their middle.
    """
    rate = 0.0
    with Lanes(device) as lanes:
        lane = lanes.device("h2d")
        for size in _SIZES:
            nbytes = min(size, most)
            there, host = torch.empty(nbytes, dtype=torch.uint8, device=device), PinnedMemory(nbytes, device)
            marks = [lane.copy([(there, host.bytes)], label="measure the link") for _ in range(_COPIES)]
            lane.wait()
            host.close()
            rate = nbytes / min(busy_seconds([mark]) for mark in marks)
            if rate < _SLOW or nbytes == most:
                break
    return class_of(rate)


def class_of(rate: float) -> float:
    """The rate of the class of links to which a measured rate belongs."""
    return float(_CLASS * 2.0 ** round(math.log2(rate / _CLASS)))
