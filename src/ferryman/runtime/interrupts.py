"""Ctrl-C in a step: it is raised at the end of a visit, where nothing is half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Within, SIGINT is remembered and raised at the next `check`; a second SIGINT is raised at once.

    Only in the main thread, the one that Python interrupts, and only if SIGINT has a handler there.
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
