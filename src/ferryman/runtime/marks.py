"""Marks: the ends of pieces of work, which other lanes and threads can wait for."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from ferryman.runtime.lanes import Lanes


class Event(Protocol):
    """The common interface of `torch.Event` and the event classes of devices' modules."""

    def record(self, stream: torch.Stream) -> None: ...
    def wait(self, stream: torch.Stream) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any) -> float: ...


def new_event(device: torch.device, *, timed: bool = False) -> Event:
    """An event. If the device supports it, `synchronize` sleeps instead of polling.

    `torch.Event` accepts `blocking=True` but ignores it: `synchronize` keeps a core busy. Only the event classes of
    some devices' modules (such as CUDA's) use it.
    """
    return _event_class(device.type)(device, timed)


@functools.cache
def _event_class(device_type: str) -> Callable[[torch.device, bool], Event]:
    kind = getattr(torch.get_device_module(device_type), "Event", None)
    if kind is not None and "blocking" in inspect.signature(kind).parameters:
        return lambda _, timed: kind(enable_timing=timed, blocking=True)  # it gets its device when it is recorded
    return lambda device, timed: torch.Event(device, enable_timing=timed)


_numbers = itertools.count()


class LaneError(RuntimeError):
    """Work was not done, because earlier work had failed or its lane was closed."""


class Failure:
    """The exception of one piece of work, kept until a wait raises it.

    `epoch`: the epoch of its lanes that began when it was raised; see Note [Failures] in `lanes.py`.
    """

    def __init__(self, error: BaseException, lane: str, label: str) -> None:
        self.error: BaseException | None = error
        self.work = f"{label!r} in lane {lane!r}"
        self.epoch = math.inf  # not raised yet
        error.add_note(f"ferryman was doing {self.work}")

    def take_error(self, epoch: int) -> BaseException:
        """Returns the exception to raise, and begins an epoch. Drops it: its traceback refers to the work's memory."""
        error, self.error, self.epoch = self.error, None, epoch
        assert error is not None, "a failure is raised once"
        return error


class _Latch:
    """A flag that is set once, for which threads can wait. `threading.Event` would do, but to make and set one takes
    more than ten times as long (about 3 us), and each visit has several marks."""

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()  # held until the flag is set
        self._lock.acquire()

    def set(self) -> None:
        self._is_set = True
        self._lock.release()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self) -> None:
        if not self._is_set:
            with self._lock:
                pass


class Mark:
    """The end of one piece of work. Made by `Lane.submit`."""

    def __init__(self, group: Lanes, lane: str, label: str, *, timed: bool = False) -> None:
        self.label = label
        self._group = group
        self._lane = lane
        self._number = next(_numbers)
        self._timed = timed
        self._span: tuple[Event, Event] | tuple[float, float] | None = None  # start and end of the work
        self._settled = _Latch()  # host: the work is over; stream: it is issued, and `_event` is recorded
        self._event: Event | None = None
        self._failure: Failure | None = None
        self._instant: Any = None  # the race detector's clock when the mark was settled

    def __repr__(self) -> str:
        return f"<Mark {self.label!r} in lane {self._lane!r}>"

    def wait(self) -> None:
        """Blocks until the work is over. Raises the exception of failed work in any lane of the group."""
        self._group._raise_failure()
        self._block()
        self._group._raise_failure()
        if self._failure is not None:
            raise LaneError(f"{self.label!r} in lane {self._lane!r} was not done, because of {self._failure.work}")

    def passed(self) -> bool:
        """Whether the work is over. Never raises or blocks. A cancelled mark has passed."""
        if not self._settled.is_set():
            return False
        if self._event is not None:
            return self._event.query()
        self._group._witness.learn(self._instant)
        return True

    def seconds(self) -> float:
        """How long the work took. It must have passed, be timed, and not have failed."""
        assert self._span is not None, "the work is timed"
        begin, end = self._span
        if isinstance(begin, float):
            return end - begin  # type: ignore[operator]
        return begin.elapsed_time(end) / 1e3

    def issued(self) -> bool:
        """Whether the work is over or, on a stream, has been launched."""
        return self._settled.is_set()

    def failed(self) -> bool:
        """Whether the work failed or was cancelled."""
        return self._settled.is_set() and self._failure is not None

    def follows(self, other: Mark) -> bool:
        """Whether this is a later mark of the same lane: when it has passed, the other has too."""
        return self._group is other._group and self._lane == other._lane and self._number > other._number

    def precede_caller(self) -> None:
        """Makes the calling thread's current stream wait for this mark."""
        self._group.origin.check()
        self._settled.wait()
        if self._failure is not None:
            self.wait()
        if self._event is None:
            self._group._witness.learn(self._instant)
        else:
            self._event.wait(torch.accelerator.current_stream(self._group.torch_device))

    def _resolve_at(self, stream: torch.Stream | None) -> Mark:
        """Makes this the mark of all work launched on the stream so far. Without a stream, the mark has passed."""
        if stream is not None:
            self._event = new_event(stream.device)
            self._event.record(stream)
        self._instant = self._group._witness.now()
        self._settled.set()
        return self

    def _block(self) -> None:
        self._group.origin.check()
        self._settled.wait()
        if self._event is not None:
            self._event.synchronize()
        else:
            self._group._witness.learn(self._instant)


def _spans(marks: Iterable[Mark]) -> list[tuple[float, float]]:
    """Start and end, in seconds, of the work of marks that have passed. All marks must be of one kind of lane."""
    found = [mark._span for mark in marks if mark._span is not None and not mark.failed()]
    spans: list[tuple[float, float]] = []
    for begin, end in found:
        first = found[0][0]
        if isinstance(begin, float):
            spans.append((begin, end))  # type: ignore[arg-type]
        else:
            assert not isinstance(first, float), "marks of one kind of lane"
            spans.append((first.elapsed_time(begin) / 1e3, first.elapsed_time(end) / 1e3))
    return sorted(spans)


def busy_seconds(marks: Iterable[Mark]) -> float:
    """Seconds in which work of at least one mark ran. All must have passed, be timed, and be of one kind of lane."""
    return covered(_spans(marks))


def covered(spans: Iterable[tuple[float, float]], start: float = -math.inf, stop: float = math.inf) -> float:
    """How much of the time from `start` to `stop` is covered by the spans, which are pairs of start and end.

    Time in which several spans overlap counts once.
    """
    total, until = 0.0, start
    for begin, end in sorted(spans):
        total += max(0.0, min(end, stop) - max(begin, until))
        until = max(until, end)
    return total


def whole_seconds(marks: Iterable[Mark]) -> float:
    """Seconds from the first start to the last end of the work, for marks as in `busy_seconds`."""
    spans = _spans(marks)
    return max(end for _, end in spans) - spans[0][0] if spans else 0.0
