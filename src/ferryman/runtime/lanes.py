"""Lanes and marks: work that overlaps, and the points at which it is synchronized.

A lane is an in-order queue of work; lanes run in parallel. A mark is the end of one piece of work, and other lanes can
wait for it. On an accelerator a lane is a torch stream and a mark is an event; on the host and the disk a lane is a
thread. Either kind of lane can wait for either kind of mark. Submitting work never waits.

Note [Who issues]
An accelerator cannot wait for a thread. So the submitting thread issues work to a stream at once if all marks that the
work must wait for have passed or are already issued to a stream. Otherwise the lane's own thread issues it, after it
has waited for the host's marks. In both cases the stream waits for other streams by events. A lane on the host runs its
work in its own thread, except for small copies that need not wait: to wake that thread would take longer.

Note [Failures]
Work that raises an exception fails its lane. Work that depends on it, by the lane's order or by a mark, does not run:
its marks are cancelled, so nothing waits forever. The next `wait` on any mark or lane of the group raises the
exception, once, with its traceback and a note that says which work failed. This begins a new *epoch* of the group. A
failure cancels work of its lane that was submitted before that epoch; work submitted later runs. Waiting for a
cancelled mark still raises a LaneError, because its work was never done.

Note [Witness]
A device may have a race detector that tracks for which work the host waits (`torch_virtual` has one). Its module then
has the functions `own_clock`, `now`, `learn`, `host_reads` and `host_writes`, and lanes report the order that marks
establish. Without a detector, these calls do nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ferryman.runtime import shutdown
from ferryman.runtime.caller import Origin
from ferryman.runtime.marks import Failure, LaneError, Mark
from ferryman.runtime.running import DeviceRun, HostRun, OnStream, Run

if TYPE_CHECKING:
    from ferryman.observe.trace import Trace

Work = Callable[[], object]

_URGENT = -1  # a stream's priority: the lower the number, the more urgent
_QUICK = 1 << 16  # bytes; to copy as many takes about 10 us, and to wake a thread takes longer


class _NoWitness:
    """Replaces the race detector for devices that have none."""

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
    epoch: int  # the group's epoch when the work was submitted
    instant: Any  # the race detector's clock when the work was submitted
    quick: bool


def _nothing() -> None:
    pass


class Lane:
    """An in-order queue of work. Made by `Lanes.host` and `Lanes.device`."""

    def __init__(self, group: Lanes, name: str) -> None:
        self.name = name
        self._group = group
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._queue: deque[_Job] = deque()
        self._busy = False  # a job is being run or issued
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failures: list[Failure] = []  # failures of this lane's work, and of work that it depended on
        self._last: Mark | None = None
        self.prelude: Work = _nothing  # runs at the start of each piece of work; `verify` uses it for delays

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
        quick: bool = False,
    ) -> Mark:
        """Queues `work` behind everything that was submitted to this lane before, and behind the marks in `after`.

        Returns at once. `label` and `nbytes` are for the trace. `reads` and `writes` are the pinned tensors that work
        on the host uses, for the race detector. `timed`: `busy_seconds` can measure the work on a device.
        `quick`: a lane on the host may run the work at once, on the calling thread.
        """
        self._group.origin.check()
        marks = tuple(after)
        for each in marks:
            if not isinstance(each, Mark):
                raise ValueError(f"after=: a list of marks is required, found {list(marks)!r}")
        if label is None:
            label = getattr(work, "__name__", "work")
        mark = Mark(self._group, self.name, label, timed=timed)
        with self._lock:
            if self._closed:
                raise LaneError(f"lane {self.name!r} is closed, it takes no more work ({label!r})")
            group = self._group
            job = _Job(work, marks, mark, nbytes, reads, writes, group._epoch, group._witness.now(), quick)
            inline = not self._busy and not self._queue and self._can_issue_now(job)
            if inline:
                self._busy = True
            else:
                self._queue.append(job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=f"ferryman-{self.name}", daemon=True)
                    self._thread.start()
                self._condition.notify_all()
            self._last = mark  # set last: if the code above raises, there is nothing to wait for
        if inline:
            with group._witness.own_clock(f"the issuing thread of lane {self.name!r}"):
                self._perform(job)
        return mark

    def copy(
        self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], *, after: Iterable[Mark] = (), label: str
    ) -> Mark:
        """Queues copies, each given as a pair of target and source. Their time is measured."""

        def work() -> None:
            for target, source in copies:
                target.copy_(source, non_blocking=True)

        nbytes = sum(target.nbytes for target, _ in copies)
        return self.submit(work, after=after, label=label, nbytes=nbytes, timed=True, quick=nbytes <= _QUICK)

    def wait(self) -> None:
        """Blocks until all work submitted so far is over. Raises a failure that has not been raised yet."""
        self._group._raise_failure()
        if self._last is not None:
            self._last._block()
        self._group._raise_failure()

    def occupy(self, label: str, *, after: Iterable[Mark] = ()) -> contextlib.AbstractContextManager[Mark]:
        """Context in which the caller itself does the lane's work. Yields the mark of its end.

        For work that cannot be submitted as a function, such as a model's own code. It runs on the calling thread, or
        on one that the calling thread waits for. On a device, the lane's stream must be current there. Raises if a mark
        in `after` was cancelled.
        """
        return _Occupation(self, Mark(self._group, self.name, label), after)

    def here(self) -> Mark:
        """A mark after all work that the caller has done on the lane so far."""
        return Mark(self._group, self.name, "this point")._resolve_at(None)

    def follow(self, *marks: Mark) -> None:
        """Makes the lane wait for `marks`. Called while the caller occupies the lane."""
        self._group.origin.check()
        for mark in marks:
            mark._settled.wait()
            if mark._failure is not None:
                mark.wait()
            self._come_after(mark)

    def outlast(self, mark: Mark) -> None:
        """Makes the lane wait for the end of work, whether or not it failed. Never raises: memory that the work has
        used belongs to the lane and is about to be freed."""
        mark._settled.wait()
        self._come_after(mark)

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the calling thread launches its work on this lane's stream."""
        return contextlib.nullcontext()

    def _can_issue_now(self, job: _Job) -> bool:
        raise NotImplementedError

    def _come_after(self, mark: Mark) -> None:
        """Makes the lane wait for a settled mark."""
        raise NotImplementedError

    def _running(self, mark: Mark, nbytes: int) -> Run:
        """Context in which the lane's work runs."""
        raise NotImplementedError

    def _run(self, job: _Job) -> None:
        for mark in job.after:
            self._come_after(mark)
        witness, label = self._group._witness, job.mark.label
        for tensor in job.reads:
            witness.host_reads(tensor, label)
        for tensor in job.writes:
            witness.host_writes(tensor, label)
        with self._running(job.mark, job.nbytes):
            self.prelude()
            job.work()

    def _serve(self) -> None:
        with self._group._witness.own_clock(f"lane {self.name!r}"):
            while True:
                with self._lock:
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
        except BaseException as error:  # a wait raises it
            mark._failure = Failure(error, self.name, mark.label)
            self._group._add_failure(mark._failure)
        finally:
            if mark._failure is not None and mark._failure not in self._failures:
                self._failures.append(mark._failure)
            # Drop references before the mark is set, so that no memory is freed here after a waiter has continued.
            job.work, job.reads, job.writes = _nothing, (), ()
            mark._instant = self._group._witness.now()
            mark._settled.set()
            with self._lock:
                self._busy = False
                self._condition.notify_all()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._last is not None:
            self._last._block()


class _Occupation:
    """See `Lane.occupy`. A class, since a generator takes several times as long."""

    def __init__(self, lane: Lane, mark: Mark, after: Iterable[Mark]) -> None:
        self._lane, self._mark, self._after = lane, mark, after
        self._run: Run | None = None  # while the caller's work runs

    def __enter__(self) -> Mark:
        lane, mark = self._lane, self._mark
        lane._group.origin.check()
        with lane._lock:
            lane._condition.wait_for(lambda: not lane._busy and not lane._queue)
            lane._busy = True
            lane._last = mark
        try:
            lane.follow(*self._after)
            run = lane._running(mark, 0)
            run.__enter__()
            self._run = run
            lane.prelude()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return mark

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lane, mark = self._lane, self._mark
        run, self._run = self._run, None
        try:
            if run is not None:
                run.__exit__(kind, error, traceback)
        finally:
            if error is not None:
                mark._failure = Failure(error, lane.name, mark.label)
                mark._failure.take_error(lane._group._epoch)  # raised here, not by a later wait
            mark._instant = lane._group._witness.now()
            mark._settled.set()
            with lane._lock:
                lane._busy = False
                lane._condition.notify_all()


class HostLane(Lane):
    """A lane for work on the host or the disk: a thread. See also Note [Who issues]."""

    def _can_issue_now(self, job: _Job) -> bool:
        """Whether the calling thread runs the work. With a prelude, which may take long, the lane's thread does."""
        return job.quick and self.prelude is _nothing and all(mark.passed() for mark in job.after)

    def _come_after(self, mark: Mark) -> None:
        mark._block()

    def _running(self, mark: Mark, nbytes: int) -> Run:
        return HostRun(self, mark, nbytes)


class DeviceLane(Lane):
    """A lane for copies in one direction, or for kernels: a torch stream. A piece of work launches copies or kernels.

    `apart`: the lane's own thread always launches the work, because launching takes long. `beside`: another lane, whose
    stream this one uses. Their work then runs in the order in which it is launched. `urgent`: where the device has
    priorities, kernels of this lane run before those of other lanes.
    """

    def __init__(
        self, group: Lanes, name: str, *, apart: bool = False, beside: Lane | None = None, urgent: bool = False
    ) -> None:
        super().__init__(group, name)
        if beside is None:
            self.stream = group.streams.get(name) or torch.Stream(group.torch_device, priority=_URGENT if urgent else 0)
        else:
            assert isinstance(beside, DeviceLane)
            self.stream = beside.stream
        group.streams[name] = self.stream
        self._apart = apart

    def current(self) -> contextlib.AbstractContextManager[None]:
        return OnStream(self.stream)

    def _can_issue_now(self, job: _Job) -> bool:
        return not self._apart and all(mark._settled.is_set() for mark in job.after)

    def here(self) -> Mark:
        return Mark(self._group, self.name, "this point")._resolve_at(self.stream)

    def _come_after(self, mark: Mark) -> None:
        if mark._event is None:
            self._group._witness.learn(mark._instant)
        else:
            mark._event.wait(self.stream)

    def _running(self, mark: Mark, nbytes: int) -> Run:
        return DeviceRun(self, mark, nbytes)


class Lanes:
    """A group of lanes that share failures and a trace.

    Closing the group, or leaving its `with` block, waits for all work. `trace` can be set or removed while lanes are
    idle. `streams`: those of a closed group, by lane. Libraries keep a workspace for each stream, so they serve again.
    """

    def __init__(
        self, device: torch.device | str, *, trace: Trace | None = None, streams: dict[str, torch.Stream] | None = None
    ) -> None:
        self.torch_device, self.streams = torch.device(device), {} if streams is None else streams
        self._witness = _witness_of(self.torch_device)
        self.origin = Origin()
        self._lock = threading.RLock()  # reentrant: garbage collection may close the group at any point
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

    def device(self, name: str, *, apart: bool = False, beside: Lane | None = None, urgent: bool = False) -> Lane:
        """A lane on the device: a stream, or a thread if the device is the CPU. For the options see `DeviceLane`."""
        if self.torch_device.type == "cpu":
            return self._add(HostLane(self, name))
        return self._add(DeviceLane(self, name, apart=apart, beside=beside, urgent=urgent))

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def here(self) -> Mark:
        """A mark after all work that the calling thread has launched so far on its current stream of the device."""
        on_host = self.torch_device.type == "cpu"
        stream = None if on_host else torch.accelerator.current_stream(self.torch_device)
        return Mark(self, "the caller's", "this point")._resolve_at(stream)

    def wait(self) -> None:
        """Blocks until all work submitted so far to any lane is over. Raises failures as `Lane.wait` does."""
        for lane in self._lanes:
            lane.wait()

    def drain(self) -> None:
        """Blocks until all work submitted so far is over or cancelled, and drops failures that were not raised yet.

        For callers that are already handling an exception.
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
        """Finishes all work, ends the threads, and raises a failure that has not been raised yet."""
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
        """Whether the calling thread belongs to a lane."""
        return any(lane._thread is threading.current_thread() for lane in self._lanes)

    def _raise_failure(self) -> None:
        self.origin.check()
        with self._lock:
            if not self._failures:
                return
            self._epoch += 1
            # No local variable: this frame and the error would keep each other alive.
            raise self._failures.popleft().take_error(self._epoch)
