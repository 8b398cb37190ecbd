"""Locks of the user's code. A lock belongs to a thread, but the code of one micro-batch runs in several threads, and
micro-batches take turns.

A re-entrant lock that the code holds when it calls a unit moves along: the thread that parks releases it, and the one
that continues acquires it. So the unit's code and other micro-batches can take it, as in plain PyTorch, where all of
them run in one thread. Other locks have no owner, so nobody can tell who holds one. If one is held while a unit is
called, another micro-batch that takes it would wait forever, and the call is refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

_REENTRANT: Any = type(threading.RLock())
LOCKS = (_REENTRANT, type(threading.Lock()), threading.Condition, threading.Semaphore)

_PATIENCE = 1.0  # seconds; another thread of the user may hold a lock for a moment

Held = Sequence[Any]  # re-entrant locks, each as often as it is held


class UserLocks:
    """The locks that the user's code can reach, with their names."""

    def __init__(self, found: Sequence[tuple[str, Any]] = ()) -> None:
        locks = [(name, getattr(lock, "_lock", lock)) for name, lock in found]  # a condition has a lock
        self._reentrant = [lock for _, lock in locks if isinstance(lock, _REENTRANT)]
        others = [(name, lock) for name, lock in locks if not isinstance(lock, _REENTRANT)]
        self._others = [(name, lock) for name, lock in others if _is_free(lock)]
        self.of_caller: Held = ()  # held by the caller of the step

    def release(self) -> Held:
        """Releases the re-entrant locks that the calling thread holds, and returns them."""
        held = []
        for lock in self._reentrant:
            while lock._is_owned():
                lock.release()
                held.append(lock)
        return held

    @staticmethod
    def acquire(held: Held) -> None:
        """Acquires what another thread has released."""
        for lock in held:
            lock.acquire()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Context of a step, in which the caller's locks are held by whichever thread runs its code."""
        self.of_caller = self.release()
        try:
            yield
        finally:
            self.acquire(self.of_caller)

    def refuse_held(self, unit: str) -> None:
        """Refuses locks that are held while the unit is called, if other micro-batches run before it is served."""
        for name, lock in self._others:
            if not _is_free(lock) and not _is_free(lock, timeout=_PATIENCE):
                raise ValueError(
                    f"the lock {name!r} is held while the unit {unit!r} is called. Micro-batches take turns at calls "
                    "of units, so another one that takes the lock would wait forever. Release the lock before the "
                    "call, use a threading.RLock, or micro_batches=1"
                )


def _is_free(lock: Any, timeout: float | None = None) -> bool:
    if lock.acquire(blocking=False) if timeout is None else lock.acquire(timeout=timeout):
        lock.release()
        return True
    return False
