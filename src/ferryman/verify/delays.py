"""Lanes that are late, so that whoever does not wait for them is wrong; and waits that are left out, to prove it."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Collection, Iterator

import torch

from ferryman.engine import Engine
from ferryman.runtime.lanes import DeviceLane, Lane
from ferryman.verify.accelerator import Accelerator

# Longer than a visit of these models takes: shorter delays hide missing waits.
_SECONDS = 0.01


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Within, this one object has another method."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


class Delays:
    """Holds lanes up. How a stream is held up is all that differs between devices, and is in `_hold_up` alone."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._kernels = 0
        if not accelerator.is_host and not accelerator.is_simulated:
            # A few threads that go through many rows one by one: long, and with room beside them for other kernels.
            self._rows = torch.ones(2**16, 32, device=accelerator.device)
            self._sums = torch.empty_like(self._rows)
            self._kernels = self._calibrate()

    @contextlib.contextmanager
    def late(self, engine: Engine, names: Collection[str], *, times: int = 1) -> Iterator[None]:
        """Within, whatever the engine's lanes of these names do begins late, by so many times the usual delay."""
        lanes = [lane for lane in engine._parts.lanes if lane.name in names]
        assert len(lanes) == len(names), f"an engine has lanes {[lane.name for lane in engine._parts.lanes]}"
        with contextlib.ExitStack() as stack:
            if self._accelerator.is_simulated and any(isinstance(lane, DeviceLane) for lane in lanes):
                stack.enter_context(self._accelerator.link(delay=times * _SECONDS))
            for lane in lanes:
                stack.callback(setattr, lane, "prelude", lane.prelude)
                lane.prelude = functools.partial(self._hold_up, lane, times)
            yield

    def _hold_up(self, lane: Lane, times: int) -> None:
        if not isinstance(lane, DeviceLane):
            time.sleep(times * _SECONDS)
        for _ in range(times * self._kernels):  # none for a simulated device, whose link is late itself
            torch.cumsum(self._rows, 0, out=self._sums)

    def _calibrate(self) -> int:
        """How many make up the delay."""
        begin, end = (torch.Event(self._accelerator.device, enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first compiles, or loads
            begin.record()
            torch.cumsum(self._rows, 0, out=self._sums)
            end.record()
            end.synchronize()
        return max(1, math.ceil(_SECONDS * 1e3 / max(begin.elapsed_time(end), 1e-2)))
