"""Signals that stop a training run: SIGINT (Ctrl-C), SIGTERM and SIGHUP."""

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
    """Context manager that handles signals with `_note`. SIGHUP stays ignored where it is, as under nohup."""

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
    """Within this context every signal raises KeyboardInterrupt, so that files being written are cleaned up."""

    def _note(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)


class StopRequest(_SignalHandlers):
    """Within this context a signal is recorded in `asked`, and the training loop stops after the current step.

    A second SIGINT raises KeyboardInterrupt at once. During a step, the engine delays SIGINT until its state is
    consistent, and passes it on to this handler then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: str | None = None  # the reason to stop: the name of the signal

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked == "SIGINT":
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name

    @property
    def code(self) -> int:
        """The reason as a number, which ranks exchange; 0 if there is none."""
        return 0 if self.asked is None else 1 + _REASONS.index(self.asked)

    @staticmethod
    def reason(codes: Iterable[float]) -> str | None:
        """The reason of the first rank that was asked to stop; None if none was."""
        return next((_REASONS[int(code) - 1] for code in codes if code), None)
