"""Who may use an engine: one thread at a time, in the process that has made it.

Note [Holding the engine]
The user's model refers to what an engine has put into it, but never to the engine itself: an engine that the user drops
is closed (`Engine`). A call that comes through the model holds the engine until it returns, so that nothing is closed
beneath it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from ferryman.runtime import shutdown

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Origin:
    """The process in which this was made. A process that is forked from it has the memory, but none of the threads."""

    def __init__(self) -> None:
        self._forks, self._process = shutdown.forks(), os.getpid()

    @property
    def is_here(self) -> bool:
        return self._forks == shutdown.forks()

    def check(self) -> None:
        if not self.is_here:
            raise ValueError(
                f"an engine of the process {self._process} is used in the process {os.getpid()}, which was forked from "
                "it and has none of its threads. Use the engine, its model and its optimizer only in the process that "
                "has made the engine. In a DataLoader's workers, leave the model out of the dataset; processes that "
                "need the weights can load what engine.save() has written"
            )


class Caller:
    """The thread that uses an engine at the moment, and the call that it makes."""

    def __init__(self, engine: object) -> None:
        self.origin = Origin()
        self.runs_step_here: Callable[[], bool] = lambda: False  # whether the thread that asks runs a micro-batch
        self._engine = weakref.ref(engine)
        self._lock = threading.RLock()  # reentrant: a garbage collection may close another engine anywhere
        self._current: tuple[threading.Thread, str] | None = None

    @contextlib.contextmanager
    def enter(self, call: str) -> Iterator[None]:
        """For a call of the engine, or of its model. Raises if there is one already."""
        self.origin.check()
        engine = self._engine()  # see Note [Holding the engine]
        with shutdown.call():
            with self._lock:
                if self._current is not None:
                    raise ValueError(self._refusal(call))
                self._current = threading.current_thread(), call
            try:
                yield
            finally:
                self._current = None
        del engine

    def when_dropped(self, close: Callable[[], None]) -> weakref.finalize[[], object]:
        """Calls `close` when the user has dropped the engine, unless the result is detached before."""
        engine = self._engine()
        assert engine is not None, "the engine makes its parts itself"
        finalizer: weakref.finalize[[], object] = weakref.finalize(engine, close)
        finalizer.atexit = False  # lanes are closed then, and nobody uses the model any more
        return finalizer

    def is_inside(self) -> bool:
        """Whether the thread that asks makes the current call, or runs the user's code for it."""
        current = self._current
        return current is not None and (current[0] is threading.current_thread() or self.runs_step_here())

    def check_inside(self, call: str) -> None:
        """Raises if another thread makes the current call."""
        if not self.is_inside():
            raise ValueError(self._refusal(call))

    def _refusal(self, call: str) -> str:
        thread, other = self._current or (None, "another call")
        if self.is_inside():
            return (
                f"{call} was called inside {other}, by the model or the loss. An engine makes one call at a time: make "
                f"this one when {other} has returned"
            )
        name = "another thread" if thread is None else f"the thread {thread.name!r}"
        return (
            f"{call} was called in the thread {threading.current_thread().name!r} while {name} is in {other}. An "
            "engine and its model have one caller at a time: have one thread make all calls, or let threads take turns "
            "with a lock of your own"
        )


def one_call_at_a_time(method: _Method) -> _Method:
    """Decorates a method of an object that has a `_caller`: a call of it is refused while there is another one."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._caller.enter(f"engine.{method.__name__}()"):
            return method(self, *args, **kwargs)

    return cast("_Method", call)
