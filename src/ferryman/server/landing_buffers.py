"""Host memory where gradients land: a few small pinned buffers that are used in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ferryman.runtime.arena import Allocation, Arena
from ferryman.runtime.marks import Mark

_BUFFERS = 4  # in a ring: some are being filled while others are being used


@dataclass(eq=False)
class Buffer:
    """Pinned memory, and the mark after which it may be overwritten."""

    memory: Allocation
    free: Mark | None = None  # the end of its last use; None: no use yet

    @property
    def after(self) -> list[Mark]:
        """The marks after which it may be overwritten."""
        return self.memory.after if self.free is None else [self.free]


class Landing(NamedTuple):
    """Where the gradient of one subgroup lands on the host."""

    gradient: torch.Tensor  # flat
    after: list[Mark]  # the memory may be written after these
    buffer: Buffer | None = None  # the ring's buffer that it is part of; None: memory that belongs to the unit


class LandingBuffers:
    """A ring of buffers that grow to the largest size that was asked for."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._ring: list[Buffer | None] = [None] * _BUFFERS
        self._latest = 0

    def next(self, nbytes: int) -> Buffer:
        """The buffer whose last use is longest ago, with room for `nbytes`."""
        self._latest = (self._latest + 1) % _BUFFERS
        buffer = self._ring[self._latest]
        if buffer is None or buffer.memory.bytes.nbytes < nbytes:
            if buffer is not None:
                self._arena.give(buffer.memory, buffer.after)
            buffer = self._ring[self._latest] = self.one_more(nbytes)
        return buffer

    def one_more(self, nbytes: int) -> Buffer:
        """An additional buffer, for one use."""
        return Buffer(self._arena.take(nbytes))

    def used(self, buffer: Buffer, until: Mark) -> None:
        """Records that the buffer is in use until the mark."""
        buffer.free = until
        if buffer not in self._ring:
            self._arena.give(buffer.memory, [until])

    def landing(self, count: int, dtype: torch.dtype) -> Landing:
        """Room for `count` elements in the next buffer."""
        nbytes = count * dtype.itemsize
        buffer = self.next(nbytes)
        return Landing(buffer.memory.bytes[:nbytes].view(dtype), buffer.after, buffer)

    def recover(self) -> None:
        """Called after a failure, when no lane has work: no buffer is in use."""
        for buffer in filter(None, self._ring):
            buffer.free = None
            buffer.memory.after.clear()

    def close(self) -> None:
        """Gives the memory back. No lane may have work."""
        for buffer in filter(None, self._ring):
            self._arena.give(buffer.memory)
        self._ring = [None] * _BUFFERS
