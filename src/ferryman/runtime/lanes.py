"""Lanes and marks: work that overlaps, and the points where it meets.

A lane is an in-order queue of work; lanes run beside one another. A mark is the end of one piece of work, for other
lanes to wait for. On an accelerator a lane is a torch stream and a mark an event; on the host and the disk a lane is a
thread. Either kind of lane waits for either kind of mark, and the thread that submits never does.

Note [Who issues]
An accelerator cannot wait for a thread. So work for a stream is issued at once, by the thread that submits it, if
all that it comes after is done or already issued to a stream; else by a thread of the lane's own, which waits for the
host's marks first. Either way the stream itself waits for other streams, by events.

Note [Failures]
Work that raises fails its lane. What comes after it, by the lane's order or by a mark, is not run: its marks are
cancelled, so nothing waits for ever. The exception itself comes out of the next `wait` on any mark or lane of the
group, once, as what it is, with its traceback and a note that says what was being done. From then on the lanes take
new work; only waiting for a mark that was cancelled still raises, a LaneError, since what it stands for never happened.

Note [Witness]
A device may have a race detector that follows what the host waits for (`torch_virtual` has). Its module then offers
`own_clock`, `now`, `learn`, `host_reads` and `host_writes`, and lanes tell it what their marks order. Where there is
none, nothing is told.

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

from ferryman.runtime import shutdown as ending
from ferryman.runtime.marks import Failure, LaneError, Mark

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
    failures_seen: int  # by the group's waits, when it was submitted
    instant: Any  # what the witness knew when it was submitted


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
        self._failures: list[Failure] = []  # of this lane's work, or of work that it came after
        self._last: Mark | None = None
        self.prelude: Work = _nothing  # done first in each piece of work, as a part of it; `verify` makes lanes late so

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
        """Queues `work` behind all that was submitted to this lane before and behind the marks in `after`.

        Returns at once. `label` and `nbytes` are for the trace. `reads` and `writes` are the pinned tensors that work
        on the host uses, for the race detector. Of `timed` work `busy_seconds` can tell how long it took.
        """
        marks = tuple(after)
        if not all(isinstance(mark, Mark) for mark in marks):
            raise ValueError(f"after=: a list of marks is required, this is {list(marks)!r}")
        if label is None:
            label = getattr(work, "__name__", "work")
        mark = Mark(self._group, self.name, label, timed=timed)
        with self._condition:
            if self._closed:
                raise LaneError(f"lane {self.name!r} is closed, it takes no more work ({label!r})")
            group = self._group
            job = _Job(work, marks, mark, nbytes, reads, writes, group._failures_seen, group._witness.now())
            inline = not self._busy and not self._queue and self._can_issue_now(job)
            if inline:
                self._busy = True
            else:
                self._queue.append(job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=f"ferryman-{self.name}", daemon=True)
                    self._thread.start()
                self._condition.notify_all()
            self._last = mark  # at the end: what raises before this leaves nothing behind to wait for
        if inline:
            with group._witness.own_clock(f"the issuing thread of lane {self.name!r}"):
                self._perform(job)
        return mark

    def copy(
        self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], *, after: Iterable[Mark] = (), label: str
    ) -> Mark:
        """Queues copies, each given as what is written and what is read; timed."""

        def work() -> None:
            for target, source in copies:
                target.copy_(source, non_blocking=True)

        nbytes = sum(target.nbytes for target, _ in copies)
        return self.submit(work, after=after, label=label, nbytes=nbytes, timed=True)

    def wait(self) -> None:
        """Blocks until all that was submitted so far is over; raises a failure that nobody has seen yet."""
        self._group._raise_failure()
        if self._last is not None:
            self._last._block()
        self._group._raise_failure()

    @contextlib.contextmanager
    def occupy(self, label: str, *, after: Iterable[Mark] = ()) -> Iterator[Mark]:
        """The caller does the work itself, here and now; yields the mark of its end.

        For work that is not a function to be submitted, such as a model's own code: it runs on the thread that entered,
        or on one that waits for it. On a device the lane's stream must be current there. Raises what `after` raises.
        """
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
            mark._failure.let_out(self._group._failures_seen)  # it is on its way to the caller
            raise
        finally:
            mark._instant = self._group._witness.now()
            mark._settled.set()
            with self._condition:
                self._busy = False
                self._condition.notify_all()

    def here(self) -> Mark:
        """A mark at this point of what the caller is doing on the lane."""
        return Mark(self._group, self.name, "this point")._settle_at(None)

    def follow(self, *marks: Mark) -> None:
        """Has what is done on this lane from now on, by whoever occupies it, come after `marks`."""
        for mark in marks:
            mark._settled.wait()
            if mark._failure is not None:
                mark.wait()
            self._come_after(mark)

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Within, what the calling thread launches goes to this lane."""
        return contextlib.nullcontext()

    def _can_issue_now(self, job: _Job) -> bool:
        raise NotImplementedError

    def _come_after(self, mark: Mark) -> None:
        """Has the lane wait for a mark that is settled."""
        raise NotImplementedError

    def _recorded(self, mark: Mark, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """Within, work is done; prepares the mark and traces it."""
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
            mark._failure = next((failure for failure in self._failures if failure.dooms(job.failures_seen)), None)
            for before in job.after:
                before._settled.wait()
                mark._failure = mark._failure or before._failure
            if mark._failure is None:
                self._run(job)
        except BaseException as error:  # whatever it is, the driver must hear of it
            mark._failure = Failure(error, self.name, mark.label)
            self._group._add_failure(mark._failure)
        finally:
            if mark._failure is not None and mark._failure not in self._failures:
                self._failures.append(mark._failure)
            # Whoever waits for the mark may then let go of what the work has used, and be the last to do so.
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
    """A thread: work on the host or the disk."""

    def _can_issue_now(self, job: _Job) -> bool:
        return False  # the submitting thread never does the work

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
    """A torch stream: copies over the link one way, or kernels. The work is what launches them.

    `apart`: always from the lane's own thread, for work whose launches alone would keep the submitting thread.
    """

    def __init__(self, group: Lanes, name: str, *, apart: bool = False) -> None:
        super().__init__(group, name)
        self.stream = torch.Stream(group._torch_device)
        self._apart = apart

    def current(self) -> contextlib.AbstractContextManager[Any]:
        return self.stream

    def _can_issue_now(self, job: _Job) -> bool:
        return not self._apart and all(mark._settled.is_set() for mark in job.after)

    def here(self) -> Mark:
        return Mark(self._group, self.name, "this point")._settle_at(self.stream)

    def _come_after(self, mark: Mark) -> None:
        if mark._event is None:
            self._group._witness.learn(mark._instant)
        else:
            self.stream.wait_event(mark._event)

    @contextlib.contextmanager
    def _recorded(self, mark: Mark, nbytes: int) -> Iterator[None]:
        trace = self._group.trace
        timed = mark._timed or trace is not None
        begin = torch.Event(self.stream.device, enable_timing=True) if timed else None
        end = torch.Event(self.stream.device, enable_timing=timed, blocking=True)
        with self.stream:
            if begin is not None:
                begin.record(self.stream)
            try:
                yield
            finally:
                end.record(self.stream)
                mark._event = end  # also of work that failed half-way: what it launched must be waited for
        mark._span = None if begin is None else (begin, end)
        if trace is not None and begin is not None:
            trace.add_device_span(self.name, mark.label, begin, end, nbytes)


class Lanes:
    """A group of lanes that belong together: they share their failures and a trace.

    Closing it, or leaving a `with`, waits for all work. `trace` can be set or taken away whenever no work is under way.
    """

    def __init__(self, device: torch.device | str, *, trace: Trace | None = None) -> None:
        self._torch_device = torch.device(device)
        self._witness = _witness_of(self._torch_device)
        self._lock = threading.Lock()
        self._failures: deque[Failure] = deque()  # that no wait has let out yet
        self._failures_seen = 0
        self._lanes: list[Lane] = []
        self._trace = trace
        ending.open_lanes.add(self)

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
        on_host = self._torch_device.type == "cpu"
        return self._add(HostLane(self, name) if on_host else DeviceLane(self, name, apart=apart))

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def here(self) -> Mark:
        """A mark at this point of what the calling thread does, on its own stream of the device."""
        on_host = self._torch_device.type == "cpu"
        stream = None if on_host else torch.accelerator.current_stream(self._torch_device)
        return Mark(self, "the caller's", "this point")._settle_at(stream)

    def wait(self) -> None:
        """Blocks until all that was submitted so far to any lane is over; raises as `Lane.wait` does."""
        for lane in self._lanes:
            lane.wait()

    def drain(self) -> None:
        """Blocks until all that was submitted so far is over, or was cancelled. An exception is on its way already, so
        none is raised, and failures that nobody has seen are forgotten."""
        for lane in self._lanes:
            if lane._last is not None:
                lane._last._block()
            if isinstance(lane, DeviceLane):
                lane.stream.synchronize()  # if the last was cancelled, what came before may still be under way
        with self._lock:
            while self._failures:
                self._failures_seen += 1
                self._failures.popleft().let_out(self._failures_seen)

    def close(self) -> None:
        """Finishes what was submitted, ends the threads, raises a failure that nobody has seen yet."""
        ending.open_lanes.discard(self)
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
        # A failure of the lanes must not hide the exception that is on its way.
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

    def _raise_failure(self) -> None:
        with self._lock:
            if not self._failures:
                return
            self._failures_seen += 1
            # Not by way of a variable: this frame and the error would keep each other alive.
            raise self._failures.popleft().let_out(self._failures_seen)
