"""What ran when: one row per lane, in the Chrome trace format (open it in https://ui.perfetto.dev)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Span(NamedTuple):
    """One piece of work. Times are seconds since the trace began."""

    lane: str
    label: str
    start: float
    end: float
    nbytes: int


class Note(NamedTuple):
    """Something that became known at a moment."""

    label: str
    at: float
    values: Mapping[str, Any]


class _DeviceSpan(NamedTuple):
    """A span whose times its device knows, and only once the work has run."""

    lane: str
    label: str
    begin: torch.Event
    end: torch.Event
    nbytes: int


class Trace:
    """Collects spans from any thread.

    An accelerator's work is timed by its own events. They are compared with an anchor, an event whose time on the
    host's clock is known, so that all lanes share one time axis.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._lanes: list[str] = []
        self._spans: list[Span] = []
        self._notes: list[Note] = []
        self._unread: list[_DeviceSpan] = []
        self._anchors: dict[torch.device, tuple[torch.Event, float]] = {}

    def now(self) -> float:
        return self.at(time.perf_counter())

    def at(self, moment: float) -> float:
        """A moment of `time.perf_counter`, as the trace has it."""
        return moment - self._began

    def add_lane(self, name: str, stream: torch.Stream | None = None) -> None:
        """Gives a lane its row. A stream must be idle now: its device's anchor is recorded there."""
        with self._lock:
            if name not in self._lanes:
                self._lanes.append(name)
            if stream is not None and stream.device not in self._anchors:
                anchor = torch.Event(stream.device, enable_timing=True)
                anchor.record(stream)
                anchor.synchronize()
                self._anchors[stream.device] = (anchor, self.now())

    def add(self, span: Span) -> None:
        with self._lock:
            self._spans.append(span)

    def note(self, label: str, values: Mapping[str, Any]) -> None:
        """Such as the figures of a step."""
        with self._lock:
            self._notes.append(Note(label, self.now(), values))

    def notes(self) -> list[Note]:
        with self._lock:
            return list(self._notes)

    def add_device_span(self, lane: str, label: str, begin: torch.Event, end: torch.Event, nbytes: int) -> None:
        """The events are timed, and recorded on a stream of a lane that the trace knows."""
        with self._lock:
            self._unread.append(_DeviceSpan(lane, label, begin, end, nbytes))

    def spans(self) -> list[Span]:
        """All spans of work that has ended, in order of their start."""
        with self._lock:
            unread, self._unread = self._unread, []
            for span in unread:
                if not span.end.query():
                    self._unread.append(span)
                    continue
                anchor, at = self._anchors[span.end.device]
                start, end = (at + anchor.elapsed_time(event) / 1e3 for event in (span.begin, span.end))
                self._spans.append(Span(span.lane, span.label, start, end, span.nbytes))
            self._spans.sort(key=lambda span: span.start)
            return list(self._spans)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file whole or not at all."""
        spans = self.spans()
        rows = {name: row for row, name in enumerate(self._lanes)}
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "ferryman"}}]
        for name, row in rows.items():
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": row, "args": {"sort_index": row}})
        for span in spans:
            event = {
                "ph": "X",
                "name": span.label,
                "pid": 0,
                "tid": rows[span.lane],
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"bytes": span.nbytes},
            }
            if span.nbytes and span.end > span.start:
                event["args"] = {"bytes": span.nbytes, "GB/s": span.nbytes / (span.end - span.start) / 1e9}
            events.append(event)
        for note in self.notes():
            what = {"ph": "i", "s": "g", "pid": 0, "tid": 0, "name": note.label}
            events.append({**what, "ts": note.at * 1e6, "args": dict(note.values)})
        target = Path(path)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
