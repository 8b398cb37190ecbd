"""Being asked to stop: by Ctrl-C, or by whoever runs the machine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OUTPUT_CLOSED = "a closed output"
_REASONS = (*(number.name for number in _SIGNALS), OUTPUT_CLOSED)


class _SignalHandlers:
    """Within, signals are heard by `_note`. SIGHUP only where it is not ignored, as it is under nohup."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Any:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class InterruptOnSignal(_SignalHandlers):
    """Within, each of them interrupts at once, as Ctrl-C does, so that whoever writes a file cleans up."""

    def _note(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)


class StopRequest(_SignalHandlers):
    """Within, they are noted, for a loop to stop where it can; a second SIGINT interrupts at once.

    The engine holds a SIGINT back until nothing is half done in its step, and hands it on to here then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: str | None = None  # by which signal

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked == "SIGINT":
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name

    # As a number, for ranks to compare.

    @property
    def code(self) -> int:
        return 0 if self.asked is None else 1 + _REASONS.index(self.asked)

    @staticmethod
    def reason(codes: Iterable[float]) -> str | None:
        """Of the first rank that was asked."""
        return next((_REASONS[int(code) - 1] for code in codes if code), None)
