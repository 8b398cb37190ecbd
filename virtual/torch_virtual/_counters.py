"""What a device has done: copies and bytes each way, peak memory, races."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import torch

from torch_virtual import _C
from torch_virtual._device import Device, index_of


@dataclass(frozen=True)
class Counters:
    h2d_bytes: int
    d2h_bytes: int
    h2d_copies: int
    d2h_copies: int
    blocking_copies: int  # of those, that the host waited for
    memory: int  # bytes in use
    peak_memory: int  # bytes; since the last reset, or within a watched block
    races: int  # of the process: a race may be between two devices
    spinning_waits: int  # of the process: waits for the device that keep a core busy


def counters(device: Device = None) -> Counters:
    index = index_of(device)
    return Counters(
        *_C.traffic(index),
        memory=torch.accelerator.memory_allocated(index),
        peak_memory=torch.accelerator.max_memory_allocated(index),
        races=_C.race_count(),
        spinning_waits=_C.spinning_waits(),
    )


class Watch:
    """Counts for a block of code; read its counters inside the block, for so far, or after it."""

    def __init__(self, device: Device = None) -> None:
        self._index = index_of(device)
        self._after: Counters | None = None

    def __enter__(self) -> Watch:
        torch.accelerator.reset_peak_memory_stats(self._index)
        self._before = counters(self._index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._after = counters(self._index)

    @property
    def counters(self) -> Counters:
        before, after = self._before, self._after or counters(self._index)
        return Counters(
            after.h2d_bytes - before.h2d_bytes,
            after.d2h_bytes - before.d2h_bytes,
            after.h2d_copies - before.h2d_copies,
            after.d2h_copies - before.d2h_copies,
            after.blocking_copies - before.blocking_copies,
            after.memory,
            after.peak_memory,
            after.races - before.races,
            after.spinning_waits - before.spinning_waits,
        )


def watch(device: Device = None) -> Watch:
    """`with watch() as seen: ...`, then `seen.counters`. The device's peak memory starts anew."""
    return Watch(device)
