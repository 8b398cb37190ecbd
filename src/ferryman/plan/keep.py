"""Which calls keep the graph of their forward until their backward, and which run their forward again.

A kept graph saves the time of one forward, and takes the memory of its saved activations from the forward of its call
to its backward. A plan names, for each module, how many micro-batches keep their calls of it: the first ones. Calls at
the turn are not part of it, since their graphs are always kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

HOST_RESERVE = 1 / 8  # of the host's memory: what kept graphs leave free where the device is the host


class CallCost(NamedTuple):
    """What the graphs of one micro-batch's calls of a module take, and what they save."""

    nbytes: int  # that the graphs save, without inputs and outputs of the calls
    inputs: int  # bytes, which would leave the device if the stash is on the host
    seconds: float  # of the forwards

    def __add__(self, other: Any) -> CallCost:
        return CallCost(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def taken(self, *, stash_on_host: bool) -> int:
        """The bytes that keeping them takes."""
        return self.nbytes + (self.inputs if stash_on_host else 0)


class CallCounts(NamedTuple):
    """How many backwards of calls used the graph of their forward, and how many ran the forward again."""

    kept: int  # the graph of the forward was kept, at the turn too
    recomputed: int  # the forward has run again
    saved_seconds: float | None  # of forwards that did not run again, without those at the turn; None: not known

    def __str__(self) -> str:
        saved = f", which saved {self.saved_seconds * 1e3:.1f} ms" if self.saved_seconds else ""
        return f"{self.kept} calls kept{saved}, {self.recomputed} recomputed"


Costs = Mapping[Any, CallCost]  # by module


@dataclass(frozen=True)
class Keep:
    """The calls that keep their graphs."""

    counts: Mapping[Any, int] | None = field(default_factory=dict)  # by module; None: all calls of all modules
    if_free: bool = False  # only while the host has memory to spare; for a device that is the host itself
    nbytes: int | None = None  # that they are expected to take
    seconds: float | None = None  # that they are expected to save
    whole: bool = False  # all calls of a step keep their graphs, apart from those whose code does not allow it

    def has(self, module: Any, micro_batch: int) -> bool:
        return self.counts is None or micro_batch < self.counts.get(module, 0)

    def __bool__(self) -> bool:
        return self.counts is None or any(self.counts.values())

    def covers(self, other: Keep) -> bool:
        """Whether this keeps all calls that the other one keeps."""
        if self.counts is None or other.counts is None:
            return self.counts is None
        return all(count <= self.counts.get(module, 0) for module, count in other.counts.items())


NOTHING, EVERYTHING = Keep(), Keep(None, whole=True)


def fill(costs: Costs, micro_batches: int, room: int, *, stash_on_host: bool) -> Keep:
    """The calls that save the most time in so many bytes: those first that save most seconds per byte."""

    def value(cost: CallCost) -> float:
        taken = cost.taken(stash_on_host=stash_on_host)
        return cost.seconds / taken if taken else math.inf

    counts = {}
    for module, cost in sorted(costs.items(), key=lambda pair: value(pair[1]), reverse=True):
        taken = cost.taken(stash_on_host=stash_on_host)
        counts[module] = min(micro_batches, max(0, room // taken)) if taken else micro_batches
        room -= counts[module] * taken
    return Keep(counts)


def bytes_of(keep: Keep, costs: Costs, *, micro_batches: int, stash_on_host: bool) -> int:
    """The bytes that the kept calls of a step take."""
    return sum(
        count * costs[module].taken(stash_on_host=stash_on_host)
        for module, count in _counts(keep, costs, micro_batches).items()
    )


def seconds_of(keep: Keep, costs: Costs, *, micro_batches: int) -> float:
    """The seconds that the kept calls of a step save."""
    return sum(count * costs[module].seconds for module, count in _counts(keep, costs, micro_batches).items())


def is_all(keep: Keep, costs: Costs, micro_batches: int) -> bool:
    """Whether all calls are kept."""
    return all(count >= micro_batches for count in _counts(keep, costs, micro_batches).values())


def _counts(keep: Keep, costs: Costs, micro_batches: int) -> Mapping[Any, int]:
    if keep.counts is None:
        return dict.fromkeys(costs, micro_batches)
    return {module: keep.counts.get(module, 0) for module in costs}


def extrapolate(one: Costs, two: Costs, samples: int) -> Costs:
    """The costs for so many samples, given those for one and for two."""
    more = samples - 1
    return {
        module: CallCost(
            cost.nbytes + max(0, two[module].nbytes - cost.nbytes) * more,
            cost.inputs + max(0, two[module].inputs - cost.inputs) * more,
            cost.seconds + max(0.0, two[module].seconds - cost.seconds) * more,
        )
        for module, cost in one.items()
        if module in two
    }
