"""Ctrl-C in a step: raised at the end of a visit, where the engine is in a consistent state."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Context in which SIGINT is deferred until the next `check`. A second SIGINT is raised at once.

    Does nothing in other threads than the main thread, the one that Python interrupts, or if SIGINT has no handler.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._noted = False

    def __enter__(self) -> Interrupts:
        self._noted = False
        self._before = None
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def check(self) -> None:
        if self._noted:
            self._noted = False
            self._before(signal.SIGINT, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if error is None:
                self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted:
            self._before(number, frame)
        self._noted = True
