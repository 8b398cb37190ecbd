"""Host memory where gradients land: a few small pinned buffers that are used in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ferryman.runtime.marks import Mark
from ferryman.runtime.pinned import PinnedMemory

_BUFFERS = 4  # in a ring: some are being filled while others are being used


@dataclass
class Buffer:
    """Pinned memory, and the mark after which it may be overwritten."""

    memory: PinnedMemory
    free: Mark | None = None  # the end of its last use; None: nothing uses it


class Landing(NamedTuple):
    """Where the gradient of one subgroup lands on the host."""

    gradient: torch.Tensor  # flat
    after: list[Mark]  # the memory may be written after these
    buffer: Buffer | None = None  # the ring's buffer that it is part of; None: memory that belongs to the unit


class LandingBuffers:
    """A ring of buffers that grow to the largest size that was asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = [Buffer(PinnedMemory(0, device)) for _ in range(_BUFFERS)]
        self._turn = 0

    def next(self, nbytes: int) -> Buffer:
        """The buffer whose last use is longest ago, with room for `nbytes`."""
        self._turn = (self._turn + 1) % _BUFFERS
        buffer = self._ring[self._turn]
        if buffer.memory.bytes.nbytes < nbytes:
            if buffer.free is not None:
                buffer.free.wait()
            buffer.memory.close()
            buffer.memory = PinnedMemory(nbytes, self._device)
        return buffer

    def landing(self, count: int, dtype: torch.dtype) -> Landing:
        """Room for `count` elements in the next buffer."""
        nbytes = count * dtype.itemsize
        buffer = self.next(nbytes)
        after = [] if buffer.free is None else [buffer.free]
        return Landing(buffer.memory.bytes[:nbytes].view(dtype), after, buffer)

    def recover(self) -> None:
        """After a failure, when no lane has work any more: no buffer is in use."""
        for buffer in self._ring:
            buffer.free = None

    def close(self) -> None:
        for buffer in self._ring:
            buffer.memory.close()
