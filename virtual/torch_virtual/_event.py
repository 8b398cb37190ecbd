"""Events that the host can wait for without keeping a core busy."""

from __future__ import annotations

import torch

from torch_virtual import _C


class Event:
    """As `torch.cuda.Event`. With `blocking=True`, `synchronize` lets the host's thread sleep; otherwise it counts as a
    wait that spins, like that of `torch.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._event = _C.Event(enable_timing)
        self._blocking = blocking

    def record(self, stream: torch.Stream | None = None) -> None:
        self._event.record(*_ids(stream))

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Makes the stream wait for the event."""
        self._event.wait(*_ids(stream))

    def query(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        self._event.synchronize(not self._blocking)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return self._event.elapsed_time(end._event)


def _ids(stream: torch.Stream | None) -> tuple[int, int]:
    stream = torch.accelerator.current_stream() if stream is None else stream
    return stream.device_index, stream.stream_id
