"""Delays for lanes, so that a missing wait changes the result; and methods replaced to leave a wait out."""

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

_DELAY_SECONDS = 0.01  # longer than a visit of the small models: shorter delays hide missing waits


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Context in which `owner` has `value` as its attribute `name`."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


class Delays:
    """Delays the work of lanes. Only `_delay` differs between kinds of devices."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._kernels = 0
        if not accelerator.is_host and not accelerator.is_simulated:
            # A slow kernel that occupies few threads, so that other kernels can run beside it.
            self._rows = torch.ones(2**16, 32, device=accelerator.device, dtype=torch.float32)
            self._sums = torch.empty_like(self._rows)
            self._kernels = self._calibrate()

    @contextlib.contextmanager
    def late(self, engine: Engine, names: Collection[str], *, times: int = 1) -> Iterator[None]:
        """Context in which all work of the named lanes starts late, by `times` the usual delay."""
        lanes = [lane for lane in engine._parts.lanes if lane.name in names]
        assert len(lanes) == len(names), f"an engine has lanes {[lane.name for lane in engine._parts.lanes]}"
        with contextlib.ExitStack() as stack:
            if self._accelerator.is_simulated and any(isinstance(lane, DeviceLane) for lane in lanes):
                stack.enter_context(self._accelerator.link(delay=times * _DELAY_SECONDS))
            for lane in lanes:
                stack.callback(setattr, lane, "prelude", lane.prelude)
                lane.prelude = functools.partial(self._delay, lane, times)
            yield

    def _delay(self, lane: Lane, times: int) -> None:
        if not isinstance(lane, DeviceLane):
            time.sleep(times * _DELAY_SECONDS)
        for _ in range(times * self._kernels):  # none on a simulated device, whose link has the delay
            torch.cumsum(self._rows, 0, out=self._sums)

    def _calibrate(self) -> int:
        """The number of kernels that take as long as the delay."""
        begin, end = (torch.Event(self._accelerator.device, enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first compiles, or loads
            begin.record()
            torch.cumsum(self._rows, 0, out=self._sums)
            end.record()
            end.synchronize()
        return max(1, math.ceil(_DELAY_SECONDS * 1e3 / max(begin.elapsed_time(end), 1e-2)))
