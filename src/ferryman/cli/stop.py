"""Being asked to stop: by Ctrl-C, or by whoever runs the machine."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Stop:
    """Within, SIGINT and SIGTERM are noted, for a loop to stop where it can; a second SIGINT interrupts at once.

    The engine holds a SIGINT back until nothing is half done in its step, and hands it on to here then.
    """

    def __init__(self) -> None:
        self.asked: str | None = None  # by which signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked == "SIGINT":
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
