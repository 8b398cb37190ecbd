"""Shutdown of a process whose script has not closed its engines.

A thread that returns from C++ while the interpreter shuts down aborts the process. So lanes finish their work before
that, and daemon threads that use an engine go to sleep at a point where the engine is in a consistent state.

Some of the work needs other ranks. They do the same or report that they have failed. Waits here use the same timeout as
everywhere else. A script that ends with an exception reports that first, so that its own lanes do not wait either.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferryman.distributed.ranks import Ranks
    from ferryman.runtime.lanes import Lanes

_PATIENCE = 60.0  # seconds for daemon threads to reach a point where they can sleep: user code in a step may block
_GRACE = 1.0  # seconds for daemon threads between two calls of an engine to make the next call

open_lanes: weakref.WeakSet[Lanes] = weakref.WeakSet()  # their threads keep them alive
open_ranks: set[Ranks] = set()  # includes ranks of dropped engines, because other ranks may wait for them


class _Daemons:
    """Daemon threads that use engines. They do not end before the interpreter does."""

    def __init__(self) -> None:
        self.sleep = False  # set when the process ends
        self._changed = threading.Condition()
        self._calls: weakref.WeakKeyDictionary[threading.Thread, int] = weakref.WeakKeyDictionary()  # running
        self._sleeping: set[threading.Thread] = set()

    def count(self, calls: int) -> None:
        """Called when the calling thread begins (1) or ends (-1) a call of an engine."""
        with self._changed:
            thread = threading.current_thread()
            self._calls[thread] = self._calls.get(thread, 0) + calls
            self._changed.notify_all()

    def sleep_for_good(self) -> None:
        with self._changed:
            self._sleeping.add(threading.current_thread())
            self._changed.notify_all()
        threading.Event().wait()

    def wait(self) -> None:
        """Blocks until all daemon threads sleep, or until the timeouts."""
        self.sleep = True
        with self._changed:
            self._changed.wait_for(lambda: not any(self._calls[thread] for thread in self._awake()), _PATIENCE)
            self._changed.wait_for(lambda: not self._awake(), _GRACE)

    def _awake(self) -> list[threading.Thread]:
        return [thread for thread in list(self._calls) if thread.is_alive() and thread not in self._sleeping]


_daemons, _forks = _Daemons(), 0


@contextlib.contextmanager
def call() -> Iterator[None]:
    """Context in which the calling thread uses an engine."""
    if not threading.current_thread().daemon:
        yield
        return
    sleep_at_end()
    _daemons.count(1)
    try:
        yield
    finally:
        _daemons.count(-1)
        sleep_at_end()


def sleep_at_end() -> None:
    """Stops a daemon thread here if the process is ending. Called where the engine is in a consistent state."""
    if _daemons.sleep and threading.current_thread().daemon:
        _daemons.sleep_for_good()


def forks() -> int:
    """The number of forks between the first process that imported this module and the current process."""
    return _forks


def _end() -> None:
    error = getattr(sys, "last_value", None)  # an uncaught exception
    if error is not None:
        for ranks in open_ranks:
            ranks.fail(error)
    _daemons.wait()
    for lanes in list(open_lanes):
        with contextlib.suppress(Exception):  # nothing is left to handle it
            lanes.close()
    for ranks in open_ranks:
        ranks.leave()


def _forget() -> None:
    """Called in a forked child, because threads and connections belong to the parent."""
    global _daemons, _forks
    _forks += 1
    _daemons = _Daemons()
    open_lanes.clear()
    open_ranks.clear()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
