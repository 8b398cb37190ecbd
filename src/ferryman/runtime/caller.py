"""Ensures that only one thread at a time uses an engine, in the process that has made the engine.

Note [Holding the engine]
The user's model refers to parts of the engine, but never to the engine itself, so that an engine is closed when the
user drops it (`Engine`). A call of the model holds a reference to the engine until it returns, so that the engine is
not closed during the call.
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
    """The process in which this object was made. A forked process has its memory, but none of its threads."""

    def __init__(self) -> None:
        self._forks, self._process = shutdown.forks(), os.getpid()

    @property
    def is_here(self) -> bool:
        return self._forks == shutdown.forks()

    def check(self) -> None:
        if self._forks != shutdown.forks():  # `is_here`; this is called several times in each visit
            raise ValueError(
                f"an engine of the process {self._process} is used in the process {os.getpid()}, which was forked from "
                "it and has none of its threads. Use the engine, its model and its optimizer only in the process that "
                "has made the engine. In a DataLoader's workers, leave the model out of the dataset; processes that "
                "need the weights can load a checkpoint of engine.save()"
            )


class Caller:
    """The thread that is using an engine, and its current call."""

    def __init__(self, engine: object) -> None:
        self.origin = Origin()
        self.runs_step_here: Callable[[], bool] = lambda: False  # whether the calling thread runs a micro-batch
        self._engine = weakref.ref(engine)
        self._lock = threading.RLock()  # reentrant: garbage collection may close another engine at any point
        self._current: tuple[threading.Thread, str] | None = None

    @contextlib.contextmanager
    def enter(self, call: str) -> Iterator[None]:
        """Context of a call of the engine or its model. Raises a ValueError if another call is running."""
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
        """Calls `close` when the user has dropped the engine, unless the returned finalizer is detached first."""
        engine = self._engine()
        assert engine is not None, "the engine makes its parts itself"
        finalizer: weakref.finalize[[], object] = weakref.finalize(engine, close)
        finalizer.atexit = False  # at exit lanes are closed, and the model is no longer used
        return finalizer

    def is_inside(self) -> bool:
        """Whether the calling thread makes the current call, or runs the user's code for it."""
        current = self._current
        return current is not None and (current[0] is threading.current_thread() or self.runs_step_here())

    def check_inside(self, call: str) -> None:
        """Raises a ValueError if the calling thread does not belong to the current call."""
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
    """Decorates a method of an object with a `_caller`: refuses calls of it during another call."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._caller.enter(f"engine.{method.__name__}()"):
            return method(self, *args, **kwargs)

    return cast("_Method", call)
