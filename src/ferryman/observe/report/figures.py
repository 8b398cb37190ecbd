"""The figures of a recording: where each step's time went, and what bounds it.

A step is bounded by a *resource*: lanes that share one count together. Fetches, stashes and optimizer state that come
in all cross the same link, so their lanes are one resource, busy while any of them is.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferryman.observe.report.recording import Recording
from ferryman.observe.trace import Step, TraceSpan, busy_time

# By resource, its lanes; in the order in which they are shown.
RESOURCES = {
    "compute": ("compute",),
    "link in": ("h2d", "stash in", "state in"),
    "link out": ("d2h", "stash out", "state out"),
    "device updates": ("update", "look"),
    "host": ("host", "checks"),
    "other ranks": ("exchange", "share"),
}

# Busy with what others do, too: an exchange lasts until all ranks have come to it.
_TOGETHER = "other ranks"

# By kind of work, the first word of its label; visits have their direction at the end.
_KINDS = {
    "fetch": "weights",
    "flush": "gradients",
    "restore": "stash",
    "stow": "stash",
    "empty": "stash",
    "state": "state",
    "update": "update",
    "look": "look",
    "check": "look",
    "land": "gradients",
    "send": "gradients",
    "exchange": "exchange",
    "share": "share",
}
_VISITS = ("forward", "turn", "backward")

# A resource that is busy for this share of the time bounds it; with less, lanes wait for one another.
BOUND = 0.75
# The others wait for a rank if each of them waits for so much more of the time than it does; with less, it is chance.
_CLEARLY = 0.1


def kind_of(label: str) -> str:
    """What sort of work it is: forward, turn, backward, weights, gradients, stash, state, update, look, exchange,
    share, other."""
    if label.startswith("visit "):
        return next((visit for visit in _VISITS if label.endswith(f"({visit})")), "forward")
    if label.startswith("fetch gradients "):
        return "gradients"
    return _KINDS.get(label.partition(" ")[0], "other")


def resource_of(lane: str) -> str:
    """The lane's own name, if it shares none."""
    return next((resource for resource, lanes in RESOURCES.items() if lane in lanes), lane)


@dataclass(frozen=True)
class LaneFigures:
    """Of one lane, within one step."""

    busy: float
    kinds: Mapping[str, float]  # seconds
    nbytes: int


@dataclass(frozen=True)
class Interval:
    """A part of a step, or all of it, with the seconds in which each resource was busy."""

    name: str
    start: float
    end: float
    busy: Mapping[str, float]

    @property
    def busiest(self) -> str | None:
        return max(self.busy, key=lambda resource: self.busy[resource]) if self.busy else None

    @property
    def share(self) -> float:
        """Of the stretch's time, in which the busiest resource was."""
        return max(self.busy.values(), default=0.0) / (self.end - self.start) if self.end > self.start else 0.0

    @property
    def bound(self) -> str | None:
        """The resource that bounds it, if one does."""
        return self.busiest if self.share >= BOUND else None


@dataclass(frozen=True)
class Account:
    """Where the time of a step went whose spans are kept."""

    step: Step
    lanes: Mapping[str, LaneFigures]
    whole: Interval
    phases: Sequence[Interval]


@dataclass(frozen=True)
class Figures:
    """Of one rank."""

    recording: Recording
    accounts: Sequence[Account]
    typical: Account  # of a step of median length
    seconds: float | None  # of a step, the median but for the first
    tokens_rate: float | None  # a second, likewise
    samples_rate: float | None
    peak: int | None  # bytes, over all steps


def figures_of(recording: Recording) -> Figures:
    steps = [step for i, step in enumerate(recording.steps) if i in recording.kept]
    if not steps:  # a trace of something else than steps: all of it is shown as one
        ends = max(span.end for span in recording.spans)
        steps = [Step(0, recording.spans[0].start, ends, 0, None, None, None, None, {})]
    accounts = [_account(step, spans) for step, spans in zip(steps, _by_step(steps, recording.spans), strict=True)]
    warm = recording.steps[1:] or recording.steps  # the first step allocates and learns
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
    """The spans that are at least partly within each step; steps are in order and apart."""
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
    # What reaches over an end counts where it began.
    nbytes = sum(span.nbytes for span in spans if span.start >= step.start)
    return LaneFigures(busy_time(spans, step.start, step.end), kinds, nbytes)


def _phases(step: Step, spans: Sequence[TraceSpan]) -> list[Interval]:
    """The forward ends where the turn begins; after the last visit gradients land, and the step is seen to be good."""
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
    """The rank that the others wait for, if there is one: who comes last waits least, over all steps but the first."""

    def waited(of: Figures) -> float:
        """As a share of the time."""
        wholes = [account.whole for account in of.accounts[1:] or of.accounts]
        seconds = sum(whole.end - whole.start for whole in wholes)
        return sum(whole.busy.get(_TOGETHER, 0.0) for whole in wholes) / seconds if seconds > 0 else 0.0

    ordered = sorted(figures, key=waited)
    clearly = len(ordered) > 1 and waited(ordered[1]) - waited(ordered[0]) >= _CLEARLY
    return ordered[0] if clearly else None


def together(figures: Sequence[Figures]) -> dict[str, Any]:
    """Of all ranks: what they do in a second, the highest peak, and who is slowest."""
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
    """None if none is known; a rank may have had no data."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def summary(figures: Sequence[Figures]) -> dict[str, Any]:
    """What `--json` prints: everything but the spans, as JSON can say it. Times are seconds."""
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
    loss = None if step.loss is None or step.loss - step.loss != 0 else step.loss  # JSON knows no inf and no NaN
    return {
        "number": step.number,
        "seconds": step.seconds,
        "loss": loss,
        "micro_batches": step.micro_batches,
        "samples": step.samples,
        "tokens": step.tokens,
        "device_peak": step.peak,
        "busy": dict(step.busy),
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
