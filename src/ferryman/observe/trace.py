"""What ran when: one row per lane, in the Chrome trace format (open it in https://ui.perfetto.dev).

A saved trace is also all that `ferryman report` needs: steps with their figures, the device's memory over time, and
facts about the run are in it.
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

from ferryman.runtime.files import replacing_file
from ferryman.runtime.marks import covered

# Looking at the device's memory may take this share of the time.
_LOOKING = 0.02
# Of steps whose spans are gone the figures of so many are kept at most; of more, those of every 2nd, 4th...
_FIGURES = 10_000


def trace_path(path: str | os.PathLike[str], rank: int) -> Path:
    """Where a rank saves its trace, if the first one's is at `path`: beside it, as `trace.rank1.json`."""
    first = Path(path)
    return first.with_name(f"{first.stem}.rank{rank}{first.suffix}") if rank else first


class Span(NamedTuple):
    """One piece of work. Times are seconds since the trace began."""

    lane: str
    label: str
    start: float
    end: float
    nbytes: int


def busy_time(spans: Iterable[Span], start: float = -math.inf, end: float = math.inf) -> float:
    """How much of the time from start to end at least one of the spans covers."""
    return covered(((span.start, span.end) for span in spans), start, end)


class Note(NamedTuple):
    """Something that became known of a step at a moment."""

    step: int
    label: str
    at: float
    values: Mapping[str, Any]


class Sample(NamedTuple):
    """Bytes allocated on the device at a moment, as the thread that launches work sees it."""

    at: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """The figures of one step.

    Updates that wait for the norm of all gradients run beside the next step, and are in that one's time.
    """

    number: int  # counted from 1
    start: float
    end: float
    micro_batches: int
    samples: int | None
    tokens: int | None
    loss: float | None
    peak: int | None  # the most bytes that were on the device; None: the device is the host
    busy: Mapping[str, float]  # seconds within the step, by lane

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def share(self, lane: str) -> float:
        """Of the step's time, the part in which the lane was busy."""
        return self.busy.get(lane, 0.0) / self.seconds if self.seconds else 0.0


class _DeviceSpan(NamedTuple):
    """A span whose times its device knows, and only once the work has run."""

    number: int  # of those that were issued
    lane: str
    label: str
    begin: torch.Event
    end: torch.Event
    nbytes: int


class _Ended(NamedTuple):
    """A step whose spans may not all be known yet."""

    figures: Step  # but for `busy`
    issued: int  # device spans until its end


@dataclass
class _Chapter:
    """What was recorded until a step's end, and not before the last one's."""

    step: Step | None = None  # None: it has not ended, or waits for its spans
    spans: list[Span] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class Trace:
    """Collects spans from any thread.

    An accelerator's work is timed by its own events. They are compared with an anchor, an event whose time on the
    host's clock is known, so that all lanes share one time axis.

    `keep_steps` is for long runs: spans and memory samples of the last so many steps are kept, and of those before only
    the figures; of very many, those of every 2nd, 4th... so that these never take more than some 40 MB.

    `steps()` and `last_step` can be read while training goes on, and never wait: of the newest step they count what has
    run so far. A step that is traced resets the device's peak statistics at its start.
    """

    def __init__(self, *, keep_steps: int | None = None) -> None:
        if keep_steps is not None and (type(keep_steps) is not int or keep_steps < 1):
            raise ValueError(f"keep_steps={keep_steps!r}: a whole number of steps, 1 or more, or None to keep all")
        self._began = time.perf_counter()
        self._began_at = time.time()  # by the clock that all ranks have
        self._lock = threading.Lock()
        self._lanes: list[str] = []
        self._notes: dict[int, Note] = {}  # by step, of those whose spans are kept; in order
        self._last_note: Note | None = None
        self._facts: dict[str, Any] = {}
        self._issued = 0
        self._unread: deque[_DeviceSpan] = deque()
        self._anchors: dict[torch.device, tuple[torch.Event, float]] = {}
        self._next_look = 0.0
        # The newest step to have ended waits for its last spans, and counts among those that are kept.
        self._keep = math.inf if keep_steps is None else keep_steps - 1
        self._kept: deque[_Chapter] = deque()
        self._recent = _Chapter()
        self._older: list[tuple[Step, Note | None]] = []  # every nth of those whose spans are gone
        self._every = 1
        self._gone = 0  # steps whose spans are
        self._ended: deque[_Ended] = deque()
        self._step_began = (0, 0.0)  # its number, and when

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
            self._recent.spans.append(span)

    def add_host_span(self, lane: str, label: str, begin: float, end: float, nbytes: int) -> None:
        """Begin and end are moments of `time.perf_counter`."""
        self.add(Span(lane, label, self.at(begin), self.at(end), nbytes))

    def note(self, step: int, label: str, values: Mapping[str, Any]) -> None:
        """One for each step, such as the figures of its updates; it may come while the next one runs."""
        with self._lock:
            self._notes.pop(step, None)
            self._notes[step] = self._last_note = Note(step, label, self.now(), values)

    def notes(self) -> list[Note]:
        """Of the steps whose figures are kept, in order."""
        with self._lock:
            return [*(note for _, note in self._older if note is not None), *self._notes.values()]

    @property
    def last_note(self) -> Note | None:
        """The newest."""
        return self._last_note

    def know(self, facts: Mapping[str, Any]) -> None:
        """Facts about the run, which JSON can say; they replace what was known under their names."""
        with self._lock:
            self._facts.update(facts)

    @property
    def facts(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._facts)

    def add_device_span(self, lane: str, label: str, begin: torch.Event, end: torch.Event, nbytes: int) -> None:
        """The events are timed, and recorded on a stream of a lane that the trace knows."""
        with self._lock:
            self._unread.append(_DeviceSpan(self._issued, lane, label, begin, end, nbytes))
            self._issued += 1

    def sample_memory(self) -> None:
        """Notes what is allocated on the device, if there is one; passes where it was looked at just now."""
        if self._anchors and (now := self.now()) >= self._next_look:
            began = time.thread_time()  # not the clock: one look that is held up would keep off all others
            allocated, _ = self._memory()
            with self._lock:
                self._recent.samples.append(Sample(now, allocated))
                self._next_look = now + (time.thread_time() - began) / _LOOKING

    # Steps.

    def begin_step(self, number: int) -> None:
        """A step begins now; one that has begun and not ended came to nothing."""
        for device in self._anchors:
            torch.accelerator.reset_peak_memory_stats(device)
        self._step_began = number, self.now()

    def end_step(
        self, *, loss: float | None, micro_batches: int, samples: int | None = None, tokens: int | None = None
    ) -> None:
        """The step that has begun ends now."""
        number, start = self._step_began
        peak = self._memory()[1] if self._anchors else None
        with self._lock:
            step = Step(number, start, self.now(), micro_batches, samples, tokens, loss, peak, {})
            self._ended.append(_Ended(step, self._issued))
            self._read()
            # The newest waits: its last spans, on the host too, end in the next.
            while len(self._ended) > 1 and not (self._unread and self._unread[0].number < self._ended[0].issued):
                self._close_chapter(self._ended.popleft().figures)

    def steps(self) -> list[Step]:
        """All steps that have ended and whose figures are kept, in order."""
        return [step for step, _ in self._all_steps()]

    def _all_steps(self) -> list[tuple[Step, bool]]:
        """With whether the spans are kept, too."""
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

    # What was recorded.

    def spans(self) -> list[Span]:
        """All spans that are kept of work that has ended, in order of their start."""
        with self._lock:
            self._read()
            chapters = [*self._kept, self._recent]
            return sorted(itertools.chain(*(chapter.spans for chapter in chapters)), key=lambda span: span.start)

    def samples(self) -> list[Sample]:
        """All samples of the device's memory that are kept, in order."""
        with self._lock:
            return list(itertools.chain(*(chapter.samples for chapter in (*self._kept, self._recent))))

    def _read(self) -> None:
        """Device spans whose work has ended become spans."""
        for _ in range(len(self._unread)):
            span = self._unread.popleft()
            if not span.end.query():
                self._unread.append(span)
                continue
            anchor, at = self._anchors[span.end.device]
            start, end = (at + anchor.elapsed_time(event) / 1e3 for event in (span.begin, span.end))
            self._recent.spans.append(Span(span.lane, span.label, start, end, span.nbytes))

    def _close_chapter(self, step: Step) -> None:
        """All spans of the step are known. What reaches into the next one's time stays with that."""
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
            assert gone is not None, "a chapter is kept when its step has ended"
            self._let_go(gone)

    def _let_go(self, step: Step) -> None:
        """The step's spans are gone, and its figures are kept if its turn has come."""
        note = self._notes.pop(step.number, None)
        while self._notes and (first := next(iter(self._notes.values()))).at < step.start:
            del self._notes[first.step]  # of what was no step, or came after its step had gone
        if self._gone % self._every == 0:
            self._older.append((step, note))
        self._gone += 1
        if len(self._older) > _FIGURES:
            self._older = self._older[::2]
            self._every *= 2

    def _memory(self) -> tuple[int, int]:
        """Allocated now, and at most since the statistics were reset.

        Not `torch.accelerator.memory_stats`, which asks the same and then sorts it, for most of the time it takes.
        """
        now = peak = 0
        for device in self._anchors:
            stats = torch._C._accelerator_getDeviceStats(device.index or 0)["allocated_bytes"]["all"]
            now, peak = now + stats["current"], peak + stats["peak"]
        return now, peak

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file whole or not at all."""
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
            names = ("number", "micro_batches", "samples", "tokens", "loss", "peak", "busy")
            figures = {**{name: getattr(step, name) for name in names}, "kept": kept}
            events.append(_event(f"step {step.number}", len(rows), step.start, step.end, _sayable(figures)))
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
            events.append({**told, "ts": note.at * 1e6, "args": _sayable(note.values)})
        if self._every > 1:
            facts["thinned"] = {"every": self._every, "steps": self._gone + len(self._kept) + len(self._ended)}
        for event in events:
            event["pid"] = rank
        about = {"ferryman": {str(rank): _sayable(facts)}}
        content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
        with replacing_file(path) as file:
            file.write_text(json.dumps(content, allow_nan=False))


def _event(name: str, row: int, start: float, end: float, args: Mapping[str, Any]) -> dict[str, Any]:
    what = {"ph": "X", "name": name, "tid": row}
    return {**what, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args}


def _with_busy(step: Step, spans: Iterable[Span]) -> Step:
    lanes: dict[str, list[Span]] = {}
    for span in spans:
        if span.end > step.start and span.start < step.end:
            lanes.setdefault(span.lane, []).append(span)
    return replace(step, busy={lane: busy_time(found, step.start, step.end) for lane, found in lanes.items()})


def _sayable(value: Any) -> Any:
    """JSON knows no inf and no NaN: they are written as texts, which `float` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _sayable(item) for key, item in value.items()}
    return [_sayable(item) for item in value] if isinstance(value, list | tuple) else value
