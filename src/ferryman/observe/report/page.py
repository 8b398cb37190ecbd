"""Writes the figures and spans of a recording as one self-contained HTML file."""

from __future__ import annotations

import html
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ferryman.observe.report.figures import (
    RESOURCES,
    Account,
    Figures,
    account_figures,
    figures_of,
    kind_of,
    resource_of,
    together,
)
from ferryman.observe.report.recording import Recording, read
from ferryman.runtime.files import replacing_file

_SCRIPTS = ("format.js", "charts.js", "timeline.js", "sections.js")

# The figures of updates that the page shows.
_UPDATES = ("device_share", "bytes_in", "bytes_out", "host_waited", "device_waited", "predicted_rate", "achieved_rate")


def write_report(
    trace: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> list[Figures]:
    """Writes the report of a trace file, atomically; returns the figures of each rank.

    With several ranks, give the file of the first rank, beside which the others are found (`trace_path`), or all files.
    """
    traces = [trace] if isinstance(trace, str | os.PathLike) else list(trace)
    path = Path(target)
    if path.exists() and not overwrite:
        raise ValueError(f"{path} already exists; use overwrite=True (--force) to replace it, or choose another name")
    if not path.parent.is_dir():
        raise ValueError(f"the directory {path.parent} for {path.name} does not exist; create it first")
    figures = [figures_of(recording) for recording in read(*traces)]
    with replacing_file(path) as file:
        file.write_text(render(figures, Path(traces[0]).name), encoding="utf-8")
    return figures


def render(figures: Sequence[Figures], name: str) -> str:
    """The HTML text of the report."""
    files = resources.files("ferryman.observe.report")

    def asset(file: str) -> str:
        return (files / file).read_text(encoding="utf-8")

    origin = min(min(of.recording.spans[0].start, of.accounts[0].step.start) for of in figures)
    content = {"name": name, "together": together(figures), "ranks": [_rank(of, origin) for of in figures]}
    # Escape "<", so that the data cannot end its script element.
    data = json.dumps(content, allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(f"{name}: ferryman report"),
        "style": asset("page.css"),
        "script": "\n".join(asset(script) for script in _SCRIPTS),
        "data": data.replace("<", "\\u003c"),
    }
    return re.sub(r"{{(\w+)}}", lambda mark: parts[mark[1]], asset("page.html"))  # in one pass: parts may contain marks


def _rank(of: Figures, origin: float) -> dict[str, Any]:
    """The data of one rank for the page. Times are microseconds since `origin`."""
    recording = of.recording
    labels: dict[str, int] = {}
    lanes = _lanes(recording, labels, origin)
    units = _units(labels)
    return {
        "rank": recording.rank,
        "facts": dict(recording.facts),
        "has_steps": bool(recording.steps),
        "seconds": of.seconds,
        "tokens_rate": of.tokens_rate,
        "samples_rate": of.samples_rate,
        "peak": of.peak,
        "typical": of.accounts.index(of.typical),
        "lanes": lanes,
        "labels": [{"text": text, "kind": kind_of(text), "short": _short(text, units)} for text in labels],
        "memory": {
            "at": [_micro(sample.at - origin) for sample in recording.samples],
            "bytes": [sample.nbytes for sample in recording.samples],
        },
        "steps": _steps(recording),
        "accounts": [_account(account, origin) for account in of.accounts],
    }


def _lanes(recording: Recording, labels: dict[str, int], origin: float) -> list[dict[str, Any]]:
    """The spans of each lane, as columns (a third of the size of rows). Numbers the labels in `labels`."""
    lanes = {
        name: {"name": name, "resource": resource_of(name), "start": [], "length": [], "label": [], "bytes": []}
        for name in sorted(recording.lanes, key=_place)
    }
    for span in recording.spans:
        lane: dict[str, Any] = lanes[span.lane]
        lane["start"].append(_micro(span.start - origin))
        lane["length"].append(_micro(span.end - span.start))
        lane["label"].append(labels.setdefault(span.label, len(labels)))
        lane["bytes"].append(span.nbytes)
    return [lane for lane in lanes.values() if lane["start"]]


def _place(lane: str) -> tuple[int, int]:
    """Sort key that puts lanes of one resource together."""
    resource = resource_of(lane)
    if resource not in RESOURCES:
        return len(RESOURCES), 0
    return list(RESOURCES).index(resource), RESOURCES[resource].index(lane)


def _units(labels: Iterable[str]) -> dict[str, str]:
    """The units named in the labels of visits, longest name first, each without the prefix that all of them share."""
    units = {text.removeprefix("visit ").rpartition(" (")[0] for text in labels if text.startswith("visit ")}
    first, last = (min(units).split("."), max(units).split(".")) if units else ([], [])
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first[:-1], last[:-1], strict=False))
    common = "".join(f"{part}." for part, _ in shared)  # a prefix of the first and the last name is shared by all
    return {unit: unit.removeprefix(common) for unit in sorted(units, key=len, reverse=True) if unit}


def _short(label: str, units: Mapping[str, str]) -> str:
    """The short name of the unit in a label; the label itself if it names none."""
    return next((short for unit, short in units.items() if unit in label), label)


def _steps(recording: Recording) -> dict[str, list[Any]]:
    """The figures of all steps, as columns."""
    steps = recording.steps
    updates = [recording.updates.get(step.number, {}) for step in steps]
    return {
        "number": [step.number for step in steps],
        "seconds": [step.seconds for step in steps],
        "loss": [_finite(step.loss) for step in steps],
        "peak": [step.peak for step in steps],
        **{name: [_finite(of.get(name)) for of in updates] for name in _UPDATES},
        "policy": [of.get("updates") for of in updates],
    }


def _account(account: Account, origin: float) -> dict[str, Any]:
    step = account.step
    figures = account_figures(account)
    for part in (figures["whole"], *figures["phases"]):
        part["start"], part["end"] = _micro(part["start"] - origin), _micro(part["end"] - origin)
    about = {"micro_batches": step.micro_batches, "samples": step.samples, "tokens": step.tokens, "peak": step.peak}
    about |= {"kept_calls": step.kept_calls, "recomputed_calls": step.recomputed_calls}
    return {**figures, **about}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _finite(value: Any) -> Any:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
