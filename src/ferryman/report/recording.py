"""A trace file, read: for each rank its lanes, spans, steps, memory and facts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ferryman.trace import Sample, Span, Step

_UPDATES = "updates of step "  # as the server names its notes


@dataclass
class Recording:
    """What one rank has recorded. Times are seconds."""

    rank: int
    facts: Mapping[str, Any]
    lanes: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)  # in order of their start
    samples: list[Sample] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)  # positions in `steps` of those whose spans are there
    updates: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # by the step's number


def read(path: str | os.PathLike[str]) -> list[Recording]:
    """One recording for each rank; a ValueError that says what is wrong with the file, if it is no trace of ours."""
    source = Path(path)
    content = _load(source)
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{source} is JSON, but no trace: 'traceEvents' is missing. {_HOW}")
    names = [(e.get("pid"), e.get("args")) for e in events if e.get("ph") == "M" and e.get("name") == "process_name"]
    ranks = sorted(pid for pid, args in names if args == {"name": "ferryman"})
    if not ranks:
        raise ValueError(f"{source} is a trace, but not one of ferryman's. {_HOW}")
    facts = (content.get("otherData") or {}).get("ferryman") or {}
    try:
        recordings = [
            _recording(rank, facts.get(str(rank)) or {}, [e for e in events if e.get("pid") == rank]) for rank in ranks
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{source} is damaged: {type(error).__name__} {error} in one of its events. {_HOW}") from error
    ran = [recording for recording in recordings if recording.spans]
    if not ran:
        raise ValueError(f"{source} is empty: nothing ran while it was recorded. {_HOW}")
    return ran


_HOW = "Record one with trace = ferryman.trace.Trace(); Engine(..., trace=trace); trace.save('trace.json')"


def _load(source: Path) -> Any:
    try:
        text = source.read_text()
    except FileNotFoundError:
        raise ValueError(f"there is no file {source}. {_HOW}") from None
    except IsADirectoryError:
        raise ValueError(f"{source} is a directory; a trace is a file in it, such as {source / 'trace.json'}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{source} is not a trace: it is not even text. {_HOW}") from None
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
                recording.spans.append(Span(rows[event["tid"]], event["name"], start, start + seconds, nbytes))
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
    loss = None if args["loss"] is None else float(args["loss"])
    return Step(args["number"], start, start + event["dur"] / 1e6, *counts, loss, args["peak"], args["busy"])
