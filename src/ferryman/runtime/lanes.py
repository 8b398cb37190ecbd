"""Lanes and marks: work that overlaps, and the points where it meets.

A lane is an in-order queue of work; lanes run beside one another. A mark is the end of one piece of work, for other
lanes to wait for. On an accelerator a lane is a torch stream and a mark an event; on the host and the disk a lane is a
thread. Either kind of lane waits for either kind of mark, and the thread that submits never does.

Note [Who issues]
An accelerator cannot wait for a thread. So work for a stream is issued at once, by the thread that submits it, if
everything that it comes after is done or already issued to a stream. Otherwise a thread of the lane's own issues it,
after it has waited for the host's marks. Either way the stream waits for other streams by events.

Note [Failures]
Work that raises fails its lane. Work that comes after it, by the lane's order or by a mark, is not run: its marks are
cancelled, so nothing waits forever. The next `wait` on any mark or lane of the group raises the exception, once, with
its traceback and a note that says which work failed. This begins a new *epoch* of the group. A failure cancels work in
its lane that was submitted in an earlier epoch than the one that began when it was raised; work submitted later runs.
Only waiting for a mark that was cancelled still raises, a LaneError, since its work was never done.

Note [Witness]
A device may have a race detector that follows what the host waits for (`torch_virtual` has one). Its module then offers
`own_clock`, `now`, `learn`, `host_reads` and `host_writes`, and lanes report to it what their marks order. Without a
detector, these calls do nothing.

Note [Profiler ranges]
While a profiler is active, work runs inside a `torch.profiler.record_function` range that has the work's label, so that
PyTorch's profiler and Nsight show the same names as our trace. A range is recorded on the thread that runs or issues
the work. By default PyTorch's profiler records only the thread that started it:
`experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)` adds the lanes' threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler

from ferryman.runtime import shutdown
from ferryman.runtime.caller import Origin
from ferryman.runtime.marks import Failure, LaneError, Mark, new_event

if TYPE_CHECKING:
    from ferryman.observe.trace import Trace

Work = Callable[[], object]


class _NoWitness:
    """Stands in where the device has no race detector."""

    def own_clock(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def now(self) -> None:
        return None

    def learn(self, instant: Any) -> None:
        pass

    def host_reads(self, tensor: torch.Tensor, what: str) -> None:
        pass

    def host_writes(self, tensor: torch.Tensor, what: str) -> None:
        pass


def _witness_of(device: torch.device) -> Any:
    if device.type == "cpu":
        return _NoWitness()
    module = torch.get_device_module(device)
    return module if hasattr(module, "own_clock") else _NoWitness()


@dataclass(slots=True)
class _Job:
    work: Work
    after: Sequence[Mark]
    mark: Mark
    nbytes: int
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    epoch: int  # of the group, when it was submitted
    instant: Any  # of the race detector, when it was submitted


def _nothing() -> None:
    pass


def _profiler_range(label: str) -> contextlib.AbstractContextManager[Any]:
    """See Note [Profiler ranges]. Without a profiler nothing is recorded, which costs less than a microsecond."""
    return profiler.record_function(label) if profiler._is_profiler_enabled else contextlib.nullcontext()


class Lane:
    """An in-order queue of work. Made by `Lanes.host` and `Lanes.device`."""

    def __init__(self, group: Lanes, name: str) -> None:
        self.name = name
        self._group = group
        self._condition = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._busy = False  # a job is being run or issued
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failures: list[Failure] = []  # of this lane's work, and of work that it came after
        self._last: Mark | None = None
        self.prelude: Work = (
            _nothing  # runs first in each piece of work, as a part of it; `verify` delays lanes with it
        )

    def submit(
        self,
        work: Work,
        *,
        after: Iterable[Mark] = (),
        label: str | None = None,
        nbytes: int = 0,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        timed: bool = False,
    ) -> Mark:
        """Queues `work` behind everything that was submitted to this lane before, and behind the marks in `after`.

        Returns at once. `label` and `nbytes` are for the trace. `reads` and `writes` are the pinned tensors that work
        on the host uses, for the race detector. `timed`: `busy_seconds` can measure the work on a device.
        """
        self._group.origin.check()
        marks = tuple(after)
        if not all(isinstance(mark, Mark) for mark in marks):
            raise ValueError(f"after=: a list of marks is required, found {list(marks)!r}")
        if label is None:
            label = getattr(work, "__name__", "work")
        mark = Mark(self._group, self.name, label, timed=timed)
        with self._condition:
            if self._closed:
                raise LaneError(f"lane {self.name!r} is closed, it takes no more work ({label!r})")
            group = self._group
            job = _Job(work, marks, mark, nbytes, reads, writes, group._epoch, group._witness.now())
            inline = not self._busy and not self._queue and self._can_issue_now(job)
            if inline:
                self._busy = True
            else:
                self._queue.append(job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=f"ferryman-{self.name}", daemon=True)
                    self._thread.start()
                self._condition.notify_all()
            self._last = mark  # at the end: if anything above raises, there is nothing to wait for
        if inline:
            with group._witness.own_clock(f"the issuing thread of lane {self.name!r}"):
                self._perform(job)
        return mark

    def copy(
        self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], *, after: Iterable[Mark] = (), label: str
    ) -> Mark:
        """Queues copies, each given as target and source; timed."""

        def work() -> None:
            for target, source in copies:
                target.copy_(source, non_blocking=True)

        nbytes = sum(target.nbytes for target, _ in copies)
        return self.submit(work, after=after, label=label, nbytes=nbytes, timed=True)

    def wait(self) -> None:
        """Blocks until everything submitted so far is over; raises a failure that was not raised yet."""
        self._group._raise_failure()
        if self._last is not None:
            self._last._block()
        self._group._raise_failure()

    @contextlib.contextmanager
    def occupy(self, label: str, *, after: Iterable[Mark] = ()) -> Iterator[Mark]:
        """Within, the caller itself does the lane's work; yields the mark of its end.

        For work that cannot be submitted as a function, such as a model's own code: it runs on the thread that entered,
        or on one that the thread waits for. On a device the lane's stream must be current there. Raises if a mark in
        `after` was cancelled.
        """
        self._group.origin.check()
        mark = Mark(self._group, self.name, label)
        with self._condition:
            self._condition.wait_for(lambda: not self._busy and not self._queue)
            self._busy = True
            self._last = mark
        try:
            self.follow(*after)
            with _profiler_range(label), self._recorded(mark, 0):
                self.prelude()
                yield mark
        except BaseException as error:
            mark._failure = Failure(error, self.name, label)
            mark._failure.take_error(self._group._epoch)  # the caller gets it here, not from a later wait
            raise
        finally:
            mark._instant = self._group._witness.now()
            mark._settled.set()
            with self._condition:
                self._busy = False
                self._condition.notify_all()

    def here(self) -> Mark:
        """A mark after everything that the caller has done on the lane so far."""
        return Mark(self._group, self.name, "this point")._resolve_at(None)

    def follow(self, *marks: Mark) -> None:
        """Has the lane, while the caller occupies it, wait for `marks`."""
        self._group.origin.check()
        for mark in marks:
            mark._settled.wait()
            if mark._failure is not None:
                mark.wait()
            self._come_after(mark)

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Within, the calling thread launches its work on this lane's stream."""
        return contextlib.nullcontext()

    def _can_issue_now(self, job: _Job) -> bool:
        raise NotImplementedError

    def _come_after(self, mark: Mark) -> None:
        """Has the lane wait for a settled mark."""
        raise NotImplementedError

    def _recorded(self, mark: Mark, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """Within, the lane's work runs: notes its begin and end in the mark and in the trace."""
        raise NotImplementedError

    def _run(self, job: _Job) -> None:
        for mark in job.after:
            self._come_after(mark)
        witness, label = self._group._witness, job.mark.label
        for tensor in job.reads:
            witness.host_reads(tensor, label)
        for tensor in job.writes:
            witness.host_writes(tensor, label)
        with _profiler_range(label), self._recorded(job.mark, job.nbytes):
            self.prelude()
            job.work()

    def _serve(self) -> None:
        with self._group._witness.own_clock(f"lane {self.name!r}"):
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: not self._busy and (self._queue or self._closed))
                    if not self._queue:
                        return
                    job = self._queue.popleft()
                    self._busy = True
                self._perform(job)

    def _perform(self, job: _Job) -> None:
        mark = job.mark
        try:
            self._group._witness.learn(job.instant)
            mark._failure = next((failure for failure in self._failures if job.epoch < failure.epoch), None)
            for before in job.after:
                before._settled.wait()
                mark._failure = mark._failure or before._failure
            if mark._failure is None:
                self._run(job)
        except BaseException as error:  # of any kind: a wait raises it
            mark._failure = Failure(error, self.name, mark.label)
            self._group._add_failure(mark._failure)
        finally:
            if mark._failure is not None and mark._failure not in self._failures:
                self._failures.append(mark._failure)
            # Before the mark is set: memory that the work used is freed by whoever waits for the mark, not here.
            job.work, job.reads, job.writes = _nothing, (), ()
            mark._instant = self._group._witness.now()
            mark._settled.set()
            with self._condition:
                self._busy = False
                self._condition.notify_all()

    def _close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._last is not None:
            self._last._block()


class HostLane(Lane):
    """A lane for work on the host or the disk: a thread."""

    def _can_issue_now(self, job: _Job) -> bool:
        return False  # the lane's thread runs the work, never the submitting one

    def _come_after(self, mark: Mark) -> None:
        mark._block()

    @contextlib.contextmanager
    def _recorded(self, mark: Mark, nbytes: int) -> Iterator[None]:
        trace, start = self._group.trace, time.perf_counter()
        yield
        mark._span = start, time.perf_counter()
        if trace is not None:
            trace.add_host_span(self.name, mark.label, *mark._span, nbytes)


class DeviceLane(Lane):
    """A lane for copies in one direction, or for kernels: a torch stream. A piece of work launches them.

    `apart`: work is always launched by the lane's own thread, since launching it takes long.
    """

    def __init__(self, group: Lanes, name: str, *, apart: bool = False) -> None:
        super().__init__(group, name)
        self.stream = torch.Stream(group.torch_device)
        self._apart = apart

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        # Not `with self.stream:`, which keeps what it has to restore on the stream object: if two threads enter the
        # same object, each restores what the other one had.
        device = torch.accelerator.current_device_index()
        stream = torch.accelerator.current_stream(self.stream.device)
        torch.accelerator.set_stream(self.stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(stream)
            torch.accelerator.set_device_index(device)

    def _can_issue_now(self, job: _Job) -> bool:
        return not self._apart and all(mark._settled.is_set() for mark in job.after)

    def here(self) -> Mark:
        return Mark(self._group, self.name, "this point")._resolve_at(self.stream)

    def _come_after(self, mark: Mark) -> None:
        if mark._event is None:
            self._group._witness.learn(mark._instant)
        else:
            mark._event.wait(self.stream)

    @contextlib.contextmanager
    def _recorded(self, mark: Mark, nbytes: int) -> Iterator[None]:
        trace = self._group.trace
        timed = mark._timed or trace is not None
        begin = new_event(self.stream.device, timed=True) if timed else None
        end = new_event(self.stream.device, timed=timed)
        with self.current():
            if begin is not None:
                begin.record(self.stream)
            try:
                yield
            finally:
                end.record(self.stream)
                mark._event = end  # also of work that failed halfway: what it launched must be waited for
        mark._span = None if begin is None else (begin, end)
        if trace is not None and begin is not None:
            trace.add_device_span(self.name, mark.label, begin, end, nbytes)


class Lanes:
    """A group of lanes that share their failures and a trace.

    Closing it, or leaving a `with`, waits for all work. `trace` can be set or removed when no lane has work.
    """

    def __init__(self, device: torch.device | str, *, trace: Trace | None = None) -> None:
        self.torch_device = torch.device(device)
        self._witness = _witness_of(self.torch_device)
        self.origin = Origin()
        self._lock = threading.RLock()  # reentrant: a garbage collection may close the group anywhere
        self._failures: deque[Failure] = deque()  # not raised yet
        self._epoch = 0  # the number of failures raised so far; see Note [Failures]
        self._lanes: list[Lane] = []
        self._trace = trace
        shutdown.open_lanes.add(self)

    @property
    def trace(self) -> Trace | None:
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._trace = trace
        for lane in self._lanes:
            self._give_row(lane)

    def host(self, name: str) -> Lane:
        """A lane on the host: a thread."""
        return self._add(HostLane(self, name))

    def device(self, name: str, *, apart: bool = False) -> Lane:
        """A lane on the device: a stream, or a thread where the device is the host itself."""
        on_host = self.torch_device.type == "cpu"
        return self._add(HostLane(self, name) if on_host else DeviceLane(self, name, apart=apart))

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def here(self) -> Mark:
        """A mark after everything that the calling thread has launched so far, on its current stream of the device."""
        on_host = self.torch_device.type == "cpu"
        stream = None if on_host else torch.accelerator.current_stream(self.torch_device)
        return Mark(self, "the caller's", "this point")._resolve_at(stream)

    def wait(self) -> None:
        """Blocks until everything submitted so far to any lane is over; raises as `Lane.wait` does."""
        for lane in self._lanes:
            lane.wait()

    def drain(self) -> None:
        """Blocks until everything submitted so far is over or cancelled, and forgets failures that were not raised yet.

        For callers that are handling an exception already.
        """
        for lane in self._lanes:
            if lane._last is not None:
                lane._last._block()
            if isinstance(lane, DeviceLane):
                lane.here()._block()  # if the last work was cancelled, earlier work may still run
        with self._lock:
            while self._failures:
                self._epoch += 1
                self._failures.popleft().take_error(self._epoch)

    def close(self) -> None:
        """Finishes all work, ends the threads, and raises a failure that was not raised yet."""
        shutdown.open_lanes.discard(self)
        for lane in self._lanes:
            lane._close()
        self._raise_failure()

    def __enter__(self) -> Lanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # A failure of the lanes must not hide the exception that is being raised.
        with contextlib.suppress(BaseException):
            self.close()

    def _add(self, lane: Lane) -> Lane:
        if any(lane.name == other.name for other in self._lanes):
            raise ValueError(f"there is a lane {lane.name!r} already")
        self._lanes.append(lane)
        self._give_row(lane)
        return lane

    def _give_row(self, lane: Lane) -> None:
        if self._trace is not None:
            self._trace.add_lane(lane.name, lane.stream if isinstance(lane, DeviceLane) else None)

    def _add_failure(self, failure: Failure) -> None:
        with self._lock:
            self._failures.append(failure)

    def run_here(self) -> bool:
        """Whether the thread that calls is a lane's."""
        return any(lane._thread is threading.current_thread() for lane in self._lanes)

    def _raise_failure(self) -> None:
        self.origin.check()
        with self._lock:
            if not self._failures:
                return
            self._epoch += 1
            # Not through a variable: this frame and the error would keep each other alive.
            raise self._failures.popleft().take_error(self._epoch)
