"""Reads trace files: the lanes, spans, steps, memory samples and facts of each rank."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ferryman.observe.trace import Sample, Step, TraceSpan, trace_path

_UPDATES = "updates of step "  # prefix of the server's notes


@dataclass
class Recording:
    """What one rank recorded. Times are in seconds."""

    rank: int
    facts: Mapping[str, Any]
    lanes: list[str] = field(default_factory=list)
    spans: list[TraceSpan] = field(default_factory=list)  # in order of their start
    samples: list[Sample] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)  # indices in `steps` of the steps that have spans
    updates: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # by the step's number

    def ran_with(self, other: Recording) -> bool:
        """Whether both belong to the same run: the same number of ranks, at the same time."""
        if self.facts.get("ranks") != other.facts.get("ranks"):
            return False
        (low, high), (begin, end) = self._times(), other._times()
        return low < end and begin < high

    def _times(self) -> tuple[float, float]:
        began = self.facts.get("began", 0.0)
        return began + self.spans[0].start, began + max(span.end for span in self.spans)

    def shift(self, seconds: float) -> None:
        """Moves all times by this many seconds."""
        self.spans = [span._replace(start=span.start + seconds, end=span.end + seconds) for span in self.spans]
        self.samples = [sample._replace(at=sample.at + seconds) for sample in self.samples]
        self.steps = [replace(step, start=step.start + seconds, end=step.end + seconds) for step in self.steps]


def read(*paths: str | os.PathLike[str]) -> list[Recording]:
    """Reads one recording per rank, on a common time axis. Raises a ValueError if a file is not a trace of ferryman.

    If only the first rank's file is given, the files of the other ranks are found beside it by their names.
    """
    if len(paths) == 1:
        return _in_order(_with_others(Path(paths[0])))
    return _in_order([(Path(path), recording) for path in paths for recording in _read(Path(path))])


def _with_others(path: Path) -> list[tuple[Path, Recording]]:
    """The recordings in this file and in those of the other ranks beside it. Files left by other runs are ignored."""
    found = [(path, recording) for recording in _read(path)]
    lead = found[0][1]
    for rank in range(1, lead.facts.get("ranks", 1) if len(found) == 1 and lead.rank == 0 else 0):
        beside = trace_path(path, rank)
        if beside.exists():
            found += [(beside, other) for other in _read(beside) if other.ran_with(lead)]
    return found


def _in_order(found: list[tuple[Path, Recording]]) -> list[Recording]:
    """Sorts recordings by rank and moves them to the time axis of the first."""
    found = sorted(found, key=lambda pair: pair[1].rank)
    for (path, one), (other, two) in itertools.pairwise(found):
        if one.rank == two.rank:
            raise ValueError(f"{path} and {other} both belong to rank {one.rank}; give one trace for each rank")
    recordings = [recording for _, recording in found]
    began = recordings[0].facts.get("began")
    for recording in recordings[1:]:
        if began is not None and (at := recording.facts.get("began")) is not None:
            recording.shift(at - began)
    return recordings


def _read(source: Path) -> list[Recording]:
    content = _load(source)
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{source} is JSON, but not a trace: 'traceEvents' is missing. {_HOW}")
    names = [(e.get("pid"), e.get("args")) for e in events if e.get("ph") == "M" and e.get("name") == "process_name"]
    ranks = sorted(pid for pid, args in names if args == {"name": "ferryman"})
    if not ranks:
        raise ValueError(f"{source} is a trace, but was not recorded by ferryman. {_HOW}")
    facts = (content.get("otherData") or {}).get("ferryman") or {}
    try:
        recordings = [
            _recording(rank, facts.get(str(rank)) or {}, [e for e in events if e.get("pid") == rank]) for rank in ranks
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{source} is damaged: {type(error).__name__} {error} in one of its events. {_HOW}") from error
    ran = [recording for recording in recordings if recording.spans]
    if not ran:
        raise ValueError(f"{source} is empty: no work ran while it was recorded. {_HOW}")
    return ran


_HOW = "Record one with trace = ferryman.observe.trace.Trace(); Engine(..., trace=trace); trace.save('trace.json')"


def _load(source: Path) -> Any:
    try:
        text = source.read_text()
    except FileNotFoundError:
        raise ValueError(f"there is no file {source}. {_HOW}") from None
    except IsADirectoryError:
        raise ValueError(f"{source} is a directory; give a trace file, such as {source / 'trace.json'}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{source} is not a trace: it is not a text file. {_HOW}") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not a trace: {error}. {_HOW}") from None


def _recording(rank: int, facts: Mapping[str, Any], events: list[dict[str, Any]]) -> Recording:
    recording = Recording(rank, facts)
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    recording.lanes = [name for name in rows.values() if name != "steps"]
    for event in events:
        match event["ph"]:
            case "X" if rows[event["tid"]] == "steps":
                recording.steps.append(_step(event))
                if event["args"].get("kept", True):
                    recording.kept.add(len(recording.steps) - 1)
            case "X":
                start, seconds = event["ts"] / 1e6, event["dur"] / 1e6
                nbytes = event["args"].get("bytes", 0)
                recording.spans.append(TraceSpan(rows[event["tid"]], event["name"], start, start + seconds, nbytes))
            case "C":
                recording.samples.append(Sample(event["ts"] / 1e6, event["args"]["allocated"]))
            case "i" if event["name"].startswith(_UPDATES):
                recording.updates[int(event["name"].removeprefix(_UPDATES))] = event["args"]
    recording.spans.sort(key=lambda span: span.start)
    recording.samples.sort()
    return recording


def _step(event: Mapping[str, Any]) -> Step:
    args, start = event["args"], event["ts"] / 1e6
    counts = (args["micro_batches"], args["samples"], args["tokens"])
    calls = (args.get("kept_calls"), args.get("recomputed_calls"), args.get("saved_seconds"))  # not in older traces
    loss = None if args["loss"] is None else float(args["loss"])
    return Step(args["number"], start, start + event["dur"] / 1e6, *counts, loss, args["peak"], args["busy"], *calls)
