"""The contexts in which lanes' work runs. They are classes, since each visit enters several, and a generator takes
several times as long.

Note [Profiler ranges]
While a profiler is active, work runs inside a `torch.profiler.record_function` range that has the work's label, so that
PyTorch's profiler and Nsight show the same names as our trace. A range is recorded on the thread that runs or issues
the work. By default PyTorch's profiler records only the thread that started it:
`experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)` adds the lanes' threads.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch.autograd import profiler

from ferryman.runtime.marks import Mark, new_event

if TYPE_CHECKING:
    from ferryman.runtime.lanes import DeviceLane, Lane


class Run:
    """Context in which a lane's work runs: records its start and end in the mark and in the trace."""

    def __init__(self, lane: Lane, mark: Mark, nbytes: int) -> None:
        self._lane, self._mark, self._nbytes = lane, mark, nbytes
        self._range: profiler.record_function | None = None

    def __enter__(self) -> None:
        if profiler._is_profiler_enabled:
            self._range = profiler.record_function(self._mark.label)
            self._range.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._range is not None:
            self._range.__exit__(kind, error, traceback)


class HostRun(Run):
    _start = 0.0

    def __enter__(self) -> None:
        super().__enter__()
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            mark, trace = self._mark, self._lane._group.trace
            mark._span = span = self._start, time.perf_counter()
            if trace is not None:
                trace.add_host_span(self._lane.name, mark.label, *span, self._nbytes)
        super().__exit__(kind, error, traceback)


class DeviceRun(Run):
    """The work is launched on the lane's stream."""

    def __init__(self, lane: DeviceLane, mark: Mark, nbytes: int) -> None:
        super().__init__(lane, mark, nbytes)
        timed, device = mark._timed or lane._group.trace is not None, lane.stream.device
        self._stream = lane.stream
        self._current = OnStream(lane.stream)
        self._begin = new_event(device, timed=True) if timed else None
        self._end = new_event(device, timed=timed)

    def __enter__(self) -> None:
        super().__enter__()
        if self._begin is not None:
            self._begin.record(self._stream)
        self._current.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        mark, begin, end, trace = self._mark, self._begin, self._end, self._lane._group.trace
        try:
            end.record(self._stream)
            mark._event = end  # also set if the work failed: kernels that it launched must be waited for
        finally:
            self._current.__exit__(kind, error, traceback)
            super().__exit__(kind, error, traceback)
        if error is None and begin is not None:
            mark._span = begin, end
            if trace is not None:
                trace.add_device_span(self._lane.name, mark.label, begin, end, self._nbytes)


class OnStream:
    """Context in which the calling thread launches its work on a stream.

    Not `with stream:`, which saves the previous stream on the stream object: if two threads enter the same object, each
    restores the previous stream of the other.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._before: tuple[torch.Stream, int] | None = None  # the thread's stream and device, if they had to change

    def __enter__(self) -> None:
        device = torch.accelerator.current_device_index()
        stream = torch.accelerator.current_stream(self._stream.device_index)
        if stream != self._stream or device != self._stream.device_index:
            self._before = stream, device
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            stream, device = self._before
            torch.accelerator.set_stream(stream)  # and its device
            if device != stream.device_index:
                torch.accelerator.set_device_index(device)
