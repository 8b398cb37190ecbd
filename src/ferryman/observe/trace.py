"""A trace of which work ran when, with one row per lane, in the Chrome trace format (see https://ui.perfetto.dev).

A saved trace also contains everything that `ferryman report` needs: the figures of each step, device memory over time
and facts about the run.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ferryman.plan.keep import CallCounts
from ferryman.runtime.device_memory import usage
from ferryman.runtime.files import replacing_file
from ferryman.runtime.marks import Event, covered, new_event

# Sampling device memory may take at most this share of the time.
_MAX_SAMPLING_SHARE = 0.02
# Steps whose figures are kept after their spans have been dropped. Beyond that, only every 2nd, 4th, ... step is kept.
_MAX_OLD_STEPS = 10_000


def trace_path(path: str | os.PathLike[str], rank: int) -> Path:
    """The file for a rank's trace, if the first rank's is `path`: beside it, such as `trace.rank1.json`."""
    first = Path(path)
    return first.with_name(f"{first.stem}.rank{rank}{first.suffix}") if rank else first


class TraceSpan(NamedTuple):
    """One piece of work. Times are seconds since the trace began."""

    lane: str
    label: str
    start: float
    end: float
    nbytes: int


def busy_time(spans: Iterable[TraceSpan], start: float = -math.inf, end: float = math.inf) -> float:
    """Seconds between start and end that are covered by at least one span."""
    return covered(((span.start, span.end) for span in spans), start, end)


class Note(NamedTuple):
    """Values about a step that became known at some time, such as the figures of its updates."""

    step: int
    label: str
    at: float
    values: Mapping[str, Any]


class Sample(NamedTuple):
    """Bytes allocated on the device at some time, as seen by the thread that launches work."""

    at: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """The figures of one step.

    Deferred updates run during the next step and count as part of its time.
    """

    number: int  # counted from 1
    start: float
    end: float
    micro_batches: int
    samples: int | None
    tokens: int | None
    loss: float | None
    peak: int | None  # highest number of bytes allocated on the device; None if the device is the CPU
    busy: Mapping[str, float]  # seconds in which each lane was busy
    kept_calls: int | None = None  # calls whose forward ran once
    recomputed_calls: int | None = None  # calls whose forward ran again in the backward
    saved_seconds: float | None = None  # of forwards that did not run again; None: not known

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def share(self, lane: str) -> float:
        """The share of the step's time in which the lane was busy."""
        return self.busy.get(lane, 0.0) / self.seconds if self.seconds else 0.0


# The figures of a step in a trace file.
_CALLS = ("kept_calls", "recomputed_calls", "saved_seconds")
_FIGURES = ("number", "micro_batches", "samples", "tokens", "loss", "peak", "busy", *_CALLS)


class _DeviceSpan(NamedTuple):
    """A span that is timed by device events, which can be read once the work has run."""

    number: int  # in the order of issue
    lane: str
    label: str
    begin: Event
    end: Event
    nbytes: int


class _Ended(NamedTuple):
    """A step whose spans may not all be known yet."""

    figures: Step  # without `busy`
    issued: int  # number of device spans issued until its end


@dataclass
class _Chapter:
    """What was recorded between the end of one step and the end of the next."""

    step: Step | None = None  # None if the step has not ended, or not all of its spans are known
    spans: list[TraceSpan] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class Trace:
    """Collects spans from any thread.

    Work on an accelerator is timed by device events. They are compared with an anchor, an event whose time on the host
    clock is known, so that all lanes share one time axis.

    `keep_steps` is for long runs: spans and memory samples are kept for the last `keep_steps` steps, and only figures
    for older ones; after 10,000 of these, figures of every 2nd, 4th, ... step, so that they take at most some 40 MB.

    `steps()` and `last_step` can be read during training and never wait: for the newest step they count the work that
    has completed. A traced step resets the device's peak memory statistics at its start.
    """

    def __init__(self, *, keep_steps: int | None = None) -> None:
        if keep_steps is not None and (type(keep_steps) is not int or keep_steps < 1):
            raise ValueError(f"keep_steps={keep_steps!r}: must be an integer of at least 1, or None to keep all steps")
        self._began = time.perf_counter()
        self._began_at = time.time()  # the wall clock, by which traces of several ranks are aligned
        self._lock = threading.Lock()
        self._lanes: list[str] = []
        self._notes: dict[int, Note] = {}  # by step, for steps whose spans are kept; in order
        self._last_note: Note | None = None
        self._facts: dict[str, Any] = {}
        self._issued = 0
        self._unread: deque[_DeviceSpan] = deque()
        self._devices: dict[str, torch.device] = {}  # of lanes that are streams
        self._anchors: dict[torch.device, tuple[Event, float]] = {}
        self._next_sample = 0.0
        # The newest step that has ended still waits for its last spans; it counts as one of the kept steps.
        self._keep = math.inf if keep_steps is None else keep_steps - 1
        self._kept: deque[_Chapter] = deque()
        self._recent = _Chapter()
        self._older: list[tuple[Step, Note | None]] = []  # every nth step whose spans have been dropped
        self._every = 1
        self._gone = 0  # number of steps whose spans have been dropped
        self._ended: deque[_Ended] = deque()
        self._step_began = (0, 0.0)  # number and start of the current step

    def now(self) -> float:
        return self.at(time.perf_counter())

    def at(self, moment: float) -> float:
        """Converts a time of `time.perf_counter` to seconds since the trace began."""
        return moment - self._began

    def add_lane(self, name: str, stream: torch.Stream | None = None) -> None:
        """Adds a row for a lane. A stream must be idle, since the anchor of its device is recorded on it."""
        with self._lock:
            if name not in self._lanes:
                self._lanes.append(name)
            if stream is not None:
                self._devices[name] = stream.device
            if stream is not None and stream.device not in self._anchors:
                anchor = new_event(stream.device, timed=True)
                anchor.record(stream)
                anchor.synchronize()
                self._anchors[stream.device] = (anchor, self.now())

    def add(self, span: TraceSpan) -> None:
        with self._lock:
            self._recent.spans.append(span)

    def add_host_span(self, lane: str, label: str, begin: float, end: float, nbytes: int) -> None:
        """Adds a span of host work. `begin` and `end` are times of `time.perf_counter`."""
        self.add(TraceSpan(lane, label, self.at(begin), self.at(end), nbytes))

    def note(self, step: int, label: str, values: Mapping[str, Any]) -> None:
        """Adds or replaces the note of a step, such as the figures of its updates, also during the next step."""
        with self._lock:
            self._notes.pop(step, None)
            self._notes[step] = self._last_note = Note(step, label, self.now(), values)

    def notes(self) -> list[Note]:
        """The notes of all steps whose figures are kept, in order."""
        with self._lock:
            return [*(note for _, note in self._older if note is not None), *self._notes.values()]

    @property
    def last_note(self) -> Note | None:
        """The newest note."""
        return self._last_note

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Adds or replaces facts about the run, as JSON values."""
        with self._lock:
            self._facts.update(facts)

    @property
    def facts(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._facts)

    def add_device_span(self, lane: str, label: str, begin: Event, end: Event, nbytes: int) -> None:
        """Adds a span of device work. The events have timing enabled, and belong to a lane added with its stream."""
        with self._lock:
            self._unread.append(_DeviceSpan(self._issued, lane, label, begin, end, nbytes))
            self._issued += 1

    def sample_memory(self) -> None:
        """Samples device memory, if the device is an accelerator and the last sample is old enough."""
        if self._anchors and (now := self.now()) >= self._next_sample:
            # CPU time: a sample that was merely interrupted must not delay the next for long.
            began = time.thread_time()
            allocated, _ = self._memory()
            with self._lock:
                self._recent.samples.append(Sample(now, allocated))
                self._next_sample = now + (time.thread_time() - began) / _MAX_SAMPLING_SHARE

    # Steps.

    def begin_step(self, number: int) -> None:
        """Starts a step. A step that was started and not ended is discarded."""
        for device in self._anchors:
            torch.accelerator.reset_peak_memory_stats(device)
        self._step_began = number, self.now()

    def end_step(
        self,
        *,
        loss: float | None,
        micro_batches: int,
        samples: int | None = None,
        tokens: int | None = None,
        calls: CallCounts | None = None,
    ) -> None:
        """Ends the current step."""
        number, start = self._step_began
        peak = self._memory()[1] if self._anchors else None
        with self._lock:
            step = Step(number, start, self.now(), micro_batches, samples, tokens, loss, peak, {}, *(calls or ()))
            self._ended.append(_Ended(step, self._issued))
            self._read()
            # The newest step stays open: its last spans end during the next step.
            while len(self._ended) > 1 and not (self._unread and self._unread[0].number < self._ended[0].issued):
                self._close_chapter(self._ended.popleft().figures)

    def steps(self) -> list[Step]:
        """All steps that have ended and whose figures are kept, in order."""
        return [step for step, _ in self._all_steps()]

    def _all_steps(self) -> list[tuple[Step, bool]]:
        """All steps, each with whether its spans are kept."""
        with self._lock:
            self._read()
            older = [(step, False) for step, _ in self._older]
            kept = [(chapter.step, True) for chapter in self._kept if chapter.step is not None]
            return [*older, *kept, *((_with_busy(step, self._recent.spans), True) for step, _ in self._ended)]

    @property
    def last_step(self) -> Step | None:
        """The newest step that has ended."""
        with self._lock:
            self._read()
            return _with_busy(self._ended[-1].figures, self._recent.spans) if self._ended else None

    # Reading.

    def spans(self) -> list[TraceSpan]:
        """All kept spans of completed work, in the order of their start."""
        with self._lock:
            self._read()
            chapters = [*self._kept, self._recent]
            return sorted(itertools.chain(*(chapter.spans for chapter in chapters)), key=lambda span: span.start)

    def samples(self) -> list[Sample]:
        """All kept samples of device memory, in order."""
        with self._lock:
            return list(itertools.chain(*(chapter.samples for chapter in (*self._kept, self._recent))))

    def _read(self) -> None:
        """Converts device spans whose work has completed."""
        for _ in range(len(self._unread)):
            span = self._unread.popleft()
            if not span.end.query():
                self._unread.append(span)
                continue
            anchor, at = self._anchors[self._devices[span.lane]]
            start, end = (at + anchor.elapsed_time(event) / 1e3 for event in (span.begin, span.end))
            self._recent.spans.append(TraceSpan(span.lane, span.label, start, end, span.nbytes))

    def _close_chapter(self, step: Step) -> None:
        """Closes the chapter of a step whose spans are all known. Spans that reach into the next step stay with it."""
        recent = self._recent
        self._kept.append(
            _Chapter(
                _with_busy(step, recent.spans),
                [span for span in recent.spans if span.end < step.end],
                [sample for sample in recent.samples if sample.at <= step.end],
            )
        )
        self._recent = _Chapter(
            None,
            [span for span in recent.spans if span.end >= step.end],
            [sample for sample in recent.samples if sample.at > step.end],
        )
        while len(self._kept) > self._keep:
            gone = self._kept.popleft().step
            assert gone is not None, "kept chapters belong to steps that have ended"
            self._drop_spans(gone)

    def _drop_spans(self, step: Step) -> None:
        """Keeps the figures of every nth step whose spans are dropped."""
        note = self._notes.pop(step.number, None)
        while self._notes and (first := next(iter(self._notes.values()))).at < step.start:
            del self._notes[first.step]  # a note without a step, or one that came too late
        if self._gone % self._every == 0:
            self._older.append((step, note))
        self._gone += 1
        if len(self._older) > _MAX_OLD_STEPS:
            self._older = self._older[::2]
            self._every *= 2

    def _memory(self) -> tuple[int, int]:
        """Bytes allocated now, and their peak since the statistics were reset."""
        found = [usage(device, "allocated") for device in self._anchors]
        return sum(each.now for each in found), sum(each.peak for each in found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace to a file, atomically."""
        rows = {name: row for row, name in enumerate(self._lanes)}
        facts = {**self.facts, "began": self._began_at}
        rank = facts.get("rank", 0)
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": "ferryman"}}]
        steps = self._all_steps()
        for name, row in (*rows.items(), *([("steps", len(rows))] if steps else [])):
            order = -1 if row == len(rows) else row
            events.append({"ph": "M", "name": "thread_name", "tid": row, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", "tid": row, "args": {"sort_index": order}})
        for step, kept in steps:
            figures = {name: getattr(step, name) for name in _FIGURES} | {"kept": kept}
            events.append(_event(f"step {step.number}", len(rows), step.start, step.end, _json_safe(figures)))
        for span in self.spans():
            args: dict[str, float] = {"bytes": span.nbytes}
            if span.nbytes and span.end > span.start:
                args = {"bytes": span.nbytes, "GB/s": span.nbytes / (span.end - span.start) / 1e9}
            events.append(_event(span.label, rows[span.lane], span.start, span.end, args))
        for sample in self.samples():
            what = {"ph": "C", "name": "device memory"}
            events.append({**what, "ts": sample.at * 1e6, "args": {"allocated": sample.nbytes}})
        for note in self.notes():
            told = {"ph": "i", "s": "g", "tid": 0, "name": note.label}
            events.append({**told, "ts": note.at * 1e6, "args": _json_safe(note.values)})
        if self._every > 1:
            facts["thinned"] = {"every": self._every, "steps": self._gone + len(self._kept) + len(self._ended)}
        for event in events:
            event["pid"] = rank
        about = {"ferryman": {str(rank): _json_safe(facts)}}
        content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
        with replacing_file(path) as file:
            file.write_text(json.dumps(content, allow_nan=False))


def _event(name: str, row: int, start: float, end: float, args: Mapping[str, Any]) -> dict[str, Any]:
    what = {"ph": "X", "name": name, "tid": row}
    return {**what, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args}


def _with_busy(step: Step, spans: Iterable[TraceSpan]) -> Step:
    lanes: dict[str, list[TraceSpan]] = {}
    for span in spans:
        if span.end > step.start and span.start < step.end:
            lanes.setdefault(span.lane, []).append(span)
    return replace(step, busy={lane: busy_time(found, step.start, step.end) for lane, found in lanes.items()})


def _json_safe(value: Any) -> Any:
    """Replaces inf and NaN, which JSON does not have, by strings that `float` can read."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _json_safe(item) for key, item in value.items()}
    return [_json_safe(item) for item in value] if isinstance(value, list | tuple) else value
