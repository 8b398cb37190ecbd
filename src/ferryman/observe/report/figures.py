"""Computes the figures of a recording: how the time of each step was spent, and what bounds it.

A step is bounded by a *resource*. Lanes that share a resource count together: weights, stash and optimizer state all
come in over the same link, so their lanes are one resource, which is busy while any of them is.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferryman.observe.report.recording import Recording
from ferryman.observe.trace import Step, TraceSpan, busy_time

# The lanes of each resource, in the order in which the report shows them.
RESOURCES = {
    "compute": ("compute",),
    "link in": ("h2d", "stash in", "state in"),
    "link out": ("d2h", "stash out", "state out"),
    "device updates": ("update", "norms"),
    "host": ("host", "checks"),
    "other ranks": ("exchange", "share"),
}

# An exchange lasts until all ranks have joined, so this resource includes waiting for other ranks.
_TOGETHER = "other ranks"

# The kind of work by the first word of its label. (Labels of visits end with their direction.)
_KINDS = {
    "fetch": "weights",
    "flush": "gradients",
    "restore": "stash",
    "stow": "stash",
    "state": "state",
    "update": "update",
    "check": "check",
    "land": "gradients",
    "send": "gradients",
    "exchange": "exchange",
    "share": "share",
}
_VISITS = ("forward", "turn", "backward")

# A resource that is busy for this share of the time bounds it; if none is, lanes wait for one another.
BOUND = 0.75
# A rank counts as the slowest if every other rank waits longer by this share of the time. Less may be chance.
_CLEARLY = 0.1


def kind_of(label: str) -> str:
    """The kind of work of a label: forward, turn, backward, weights, gradients, stash, state, update, check, exchange,
    share or other."""
    if label.startswith("visit "):
        return next((visit for visit in _VISITS if label.endswith(f"({visit})")), "forward")
    if label.startswith("fetch gradients "):
        return "gradients"
    return _KINDS.get(label.partition(" ")[0], "other")


def resource_of(lane: str) -> str:
    """The resource of a lane; the lane's own name if it belongs to none."""
    return next((resource for resource, lanes in RESOURCES.items() if lane in lanes), lane)


@dataclass(frozen=True)
class LaneFigures:
    """The use of one lane in one step."""

    busy: float  # seconds
    kinds: Mapping[str, float]  # seconds, by kind of work
    nbytes: int


@dataclass(frozen=True)
class Interval:
    """A step or a phase of it, with the seconds in which each resource was busy."""

    name: str
    start: float
    end: float
    busy: Mapping[str, float]

    @property
    def busiest(self) -> str | None:
        return max(self.busy, key=lambda resource: self.busy[resource]) if self.busy else None

    @property
    def share(self) -> float:
        """The share of the time in which the busiest resource was busy."""
        return max(self.busy.values(), default=0.0) / (self.end - self.start) if self.end > self.start else 0.0

    @property
    def bound(self) -> str | None:
        """The resource that bounds the interval, if one does."""
        return self.busiest if self.share >= BOUND else None


@dataclass(frozen=True)
class Account:
    """How the time of a step was spent, for a step whose spans are kept."""

    step: Step
    lanes: Mapping[str, LaneFigures]
    whole: Interval
    phases: Sequence[Interval]


@dataclass(frozen=True)
class Figures:
    """The figures of one rank."""

    recording: Recording
    accounts: Sequence[Account]
    typical: Account  # of a step of median length
    seconds: float | None  # median step time, without the first step
    tokens_rate: float | None  # per second, likewise
    samples_rate: float | None
    peak: int | None  # bytes, over all steps


def figures_of(recording: Recording) -> Figures:
    steps = [step for i, step in enumerate(recording.steps) if i in recording.kept]
    if not steps:  # a trace without steps is shown as one step
        ends = max(span.end for span in recording.spans)
        steps = [Step(0, recording.spans[0].start, ends, 0, None, None, None, None, {})]
    accounts = [_account(step, spans) for step, spans in zip(steps, _by_step(steps, recording.spans), strict=True)]
    warm = recording.steps[1:] or recording.steps  # without the first step, which includes trials and allocations
    by_length = sorted(accounts[1:] or accounts, key=lambda account: account.step.seconds)
    return Figures(
        recording,
        accounts,
        typical=by_length[(len(by_length) - 1) // 2],
        seconds=_median(step.seconds for step in warm),
        tokens_rate=_median(step.tokens / step.seconds for step in warm if step.tokens and step.seconds),
        samples_rate=_median(step.samples / step.seconds for step in warm if step.samples and step.seconds),
        peak=max((step.peak for step in recording.steps if step.peak is not None), default=None),
    )


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def _by_step(steps: Sequence[Step], spans: Sequence[TraceSpan]) -> list[list[TraceSpan]]:
    """The spans that overlap with each step. Steps are in order and do not overlap."""
    found: list[list[TraceSpan]] = [[] for _ in steps]
    ends = [step.end for step in steps]
    for span in spans:
        for i in range(bisect.bisect_right(ends, span.start), len(steps)):
            if steps[i].start >= span.end:
                break
            found[i].append(span)
    return found


def _account(step: Step, spans: Sequence[TraceSpan]) -> Account:
    lanes: dict[str, list[TraceSpan]] = {}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    return Account(
        step,
        {name: _lane(step, found) for name, found in lanes.items()},
        _interval("step", step.start, step.end, spans),
        _phases(step, spans),
    )


def _lane(step: Step, spans: Sequence[TraceSpan]) -> LaneFigures:
    kinds: dict[str, float] = {}
    for span in spans:
        kind = kind_of(span.label)
        kinds[kind] = kinds.get(kind, 0.0) + min(span.end, step.end) - max(span.start, step.start)
    # The bytes of a span that reaches into another step count where it began.
    nbytes = sum(span.nbytes for span in spans if span.start >= step.start)
    return LaneFigures(busy_time(spans, step.start, step.end), kinds, nbytes)


def _phases(step: Step, spans: Sequence[TraceSpan]) -> list[Interval]:
    """The phases of a step: the forward ends where the turn begins, the backward with the last visit. After that,
    gradients arrive on the host and are checked."""
    visits = [span for span in spans if span.label.startswith("visit ") and span.start >= step.start]
    turned = [span.start for span in visits if kind_of(span.label) != "forward"]
    if not turned:
        return []
    last = min(max(span.end for span in visits), step.end)
    return [
        _interval("forward", step.start, turned[0], spans),
        _interval("backward", turned[0], last, spans),
        _interval("finish", last, step.end, spans),
    ]


def _interval(name: str, start: float, end: float, spans: Sequence[TraceSpan]) -> Interval:
    resources: dict[str, list[TraceSpan]] = {}
    for span in spans:
        if span.end > start and span.start < end:
            resources.setdefault(resource_of(span.lane), []).append(span)
    order = [*RESOURCES, *sorted(resources.keys() - RESOURCES.keys())]
    return Interval(name, start, end, {r: busy_time(resources[r], start, end) for r in order if r in resources})


def slowest(figures: Sequence[Figures]) -> Figures | None:
    """The rank that the others wait for, if there is one: the one that spends least time waiting in exchanges."""

    def waited(of: Figures) -> float:
        """The share of the time spent in exchanges, without the first step."""
        wholes = [account.whole for account in of.accounts[1:] or of.accounts]
        seconds = sum(whole.end - whole.start for whole in wholes)
        return sum(whole.busy.get(_TOGETHER, 0.0) for whole in wholes) / seconds if seconds > 0 else 0.0

    ordered = sorted(figures, key=waited)
    clearly = len(ordered) > 1 and waited(ordered[1]) - waited(ordered[0]) >= _CLEARLY
    return ordered[0] if clearly else None


def together(figures: Sequence[Figures]) -> dict[str, Any]:
    """Figures over all ranks: throughput, the highest memory peak and the slowest rank."""
    rates = {
        "tokens_per_second": [of.tokens_rate for of in figures],
        "samples_per_second": [of.samples_rate for of in figures],
    }
    peaks = [of.peak for of in figures if of.peak is not None]
    return {
        **{name: _sum(known) for name, known in rates.items()},
        "device_peak": max(peaks, default=None),
        "slowest_rank": None if (last := slowest(figures)) is None else last.recording.rank,
    }


def _sum(rates: Iterable[float | None]) -> float | None:
    """The sum of the known rates; None if no rate is known. A rank without data has none."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def summary(figures: Sequence[Figures]) -> dict[str, Any]:
    """The JSON document of `ferryman report --json`: everything but the spans. Times are in seconds."""
    return {**together(figures), "ranks": [_rank(of) for of in figures]}


def _rank(of: Figures) -> dict[str, Any]:
    recording = of.recording
    return {
        "rank": recording.rank,
        "facts": dict(recording.facts),
        "step_seconds": of.seconds,
        "tokens_per_second": of.tokens_rate,
        "samples_per_second": of.samples_rate,
        "device_peak": of.peak,
        "typical_step": of.typical.step.number,
        "bound": of.typical.whole.bound,
        "busiest": of.typical.whole.busiest,
        "busiest_share": of.typical.whole.share,
        "steps": [step_figures(step, recording.updates.get(step.number)) for step in recording.steps],
        "accounts": [account_figures(account) for account in of.accounts],
    }


def step_figures(step: Step, updates: Mapping[str, Any] | None) -> dict[str, Any]:
    loss = None if step.loss is None or step.loss - step.loss != 0 else step.loss  # JSON has no inf and NaN
    return {
        "number": step.number,
        "seconds": step.seconds,
        "loss": loss,
        "micro_batches": step.micro_batches,
        "samples": step.samples,
        "tokens": step.tokens,
        "device_peak": step.peak,
        "busy": dict(step.busy),
        "kept_calls": step.kept_calls,
        "recomputed_calls": step.recomputed_calls,
        "saved_seconds": step.saved_seconds,
        "updates": None if updates is None else dict(updates),
    }


def account_figures(account: Account) -> dict[str, Any]:
    lanes = {
        name: {"busy": lane.busy, "kinds": dict(lane.kinds), "bytes": lane.nbytes}
        for name, lane in account.lanes.items()
    }
    whole, *phases = (
        {
            "name": part.name,
            "start": part.start,
            "end": part.end,
            "busy": dict(part.busy),
            "busiest": part.busiest,
            "share": part.share,
            "bound": part.bound,
        }
        for part in (account.whole, *account.phases)
    )
    return {"number": account.step.number, "lanes": lanes, "whole": whole, "phases": phases}
