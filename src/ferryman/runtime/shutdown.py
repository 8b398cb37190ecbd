"""The end of a process whose script has not closed its engines.

A thread that returns from C++ while the interpreter shuts down aborts the process. So lanes finish their work before,
and daemon threads that use an engine, or come to use one, sleep from then on at a point where nothing is half done.

Some of the work needs other ranks. They do the same, or report that they have failed; waits have the same timeout as
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

_PATIENCE = 60.0  # seconds for daemon threads to reach a point where they can sleep; user code may block in a step
_GRACE = 1.0  # seconds for daemon threads that are between two calls of an engine to make the next one

open_lanes: weakref.WeakSet[Lanes] = weakref.WeakSet()  # kept alive by their threads
open_ranks: set[Ranks] = set()  # also those of an engine that was dropped, since other ranks may wait for it


class _Daemons:
    """Daemon threads that use engines: those that do not end before the interpreter does."""

    def __init__(self) -> None:
        self.sleep = False  # from the end of the process on
        self._changed = threading.Condition()
        self._calls: weakref.WeakKeyDictionary[threading.Thread, int] = weakref.WeakKeyDictionary()  # under way
        self._sleeping: set[threading.Thread] = set()

    def count(self, calls: int) -> None:
        """The thread that calls has begun or ended a call of an engine."""
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
        """Blocks until all of them sleep, as far as they can be waited for."""
        self.sleep = True
        with self._changed:
            self._changed.wait_for(lambda: not any(self._calls[thread] for thread in self._awake()), _PATIENCE)
            self._changed.wait_for(lambda: not self._awake(), _GRACE)

    def _awake(self) -> list[threading.Thread]:
        return [thread for thread in list(self._calls) if thread.is_alive() and thread not in self._sleeping]


_daemons, _forks = _Daemons(), 0


@contextlib.contextmanager
def call() -> Iterator[None]:
    """Within, the calling thread uses an engine."""
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
    """Nothing is half done: a daemon thread does not go on from here when the process ends."""
    if _daemons.sleep and threading.current_thread().daemon:
        _daemons.sleep_for_good()


def forks() -> int:
    """The number of forks between the first process that has imported this and the one that calls."""
    return _forks


def _end() -> None:
    error = getattr(sys, "last_value", None)  # an exception that nobody caught
    if error is not None:
        for ranks in open_ranks:
            ranks.fail(error)
    _daemons.wait()
    for lanes in list(open_lanes):
        with contextlib.suppress(Exception):  # there is nobody left to handle it
            lanes.close()
    for ranks in open_ranks:
        ranks.leave()


def _forget() -> None:
    """After a fork, in the child: threads and connections belong to the parent."""
    global _daemons, _forks
    _forks += 1
    _daemons = _Daemons()
    open_lanes.clear()
    open_ranks.clear()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
