"""Where gradients land that are used at once: a few small buffers on the host, in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ferryman.runtime.marks import Mark
from ferryman.runtime.pinned import PinnedMemory

_BUFFERS = 4


@dataclass
class Buffer:
    memory: PinnedMemory
    free: Mark | None = None  # the end of the update that used it last


class LandingBuffers:
    """Buffers that grow to the largest subgroup that was seen."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = [Buffer(PinnedMemory(0, device)) for _ in range(_BUFFERS)]
        self._turn = 0

    def next(self, nbytes: int) -> Buffer:
        """The one whose last use is longest ago, with room for so many bytes."""
        self._turn = (self._turn + 1) % _BUFFERS
        buffer = self.latest
        if buffer.memory.bytes.nbytes < nbytes:
            if buffer.free is not None:
                buffer.free.wait()
            buffer.memory.close()
            buffer.memory = PinnedMemory(nbytes, self._device)
        return buffer

    @property
    def latest(self) -> Buffer:
        """That `next` gave last."""
        return self._ring[self._turn]

    def recover(self) -> None:
        """After a failure, when no lane has work any more: there is nothing to wait for."""
        for buffer in self._ring:
            buffer.free = None

    def close(self) -> None:
        for buffer in self._ring:
            buffer.memory.close()
