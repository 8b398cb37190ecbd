"""The plan: the size of units and the number of slots, chosen to stay within a budget of device memory.

The memory that is always in use on the device is

    weight slots and gradient slots (`slot_sizes.py`) + residents, with their gradients
    + memory for updates on the device (`staging.py`) + what the allocator adds (`runtime/segments.py`)

If all units are *held*, their sum takes the place of the weight slots. The rest of the budget is for micro-batches
while they run; `plan/fit.py` measures what they need. Large units are better than small ones, since every boundary
between units is a stash. Two slots are better than one, since only two let a fetch overlap with compute. So blocks are
cut before slots are given up. Units that the user has named are not cut.

Note [How much is filled]
Weights cross once per sweep, for any size of micro-batches; a stash crosses for each sample. So whole blocks with
micro-batches of one sample are faster than parts of blocks with larger micro-batches, and the units may fill nearly all
of the budget. If a sample does not fit beside them, the first batch shows it, and a smaller plan is made. Each slot
beyond two saves one fetch per step; micro-batches take precedence over such slots.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from ferryman.model.unit_discovery import find_cuts, module_sizes
from ferryman.model.units import DtypeOf, Unit, own_dtype
from ferryman.plan.slot_sizes import (
    SHARED,
    SlotSizes,
    gradient_slot_bytes,
    gradient_slot_sizes,
    weight_slot_sizes,
)
from ferryman.plan.staging import Staging
from ferryman.runtime.segments import Segments
from ferryman.runtime.sizes import show_bytes, show_count

# Largest fractions of a budget for memory that is always in use: in general, with all units held, and with more than
# two slots. See Note [How much is filled]
_MAX_FIXED, _MAX_FIXED_HELD, _MAX_FIXED_MORE_SLOTS = 7 / 8, 3 / 4, 1 / 2

_REMEASURE_MARGIN = 1.02  # measured again under a recommended budget, a micro-batch may need a little more


class Need(NamedTuple):
    """The device memory that a running micro-batch needs, and the unit in which it needs the most."""

    nbytes: int  # in addition to the memory that is always in use
    where: str
    is_all: bool = True  # False: the measurement was stopped there, so more is needed

    def __str__(self) -> str:
        return f"a micro-batch of one sample needs {show_bytes(self.nbytes)} in {self.where!r}"


class PlanTooLargeError(Exception):
    """The plan leaves micro-batches too little room; a smaller plan leaves them `need`."""

    def __init__(self, need: Need) -> None:
        super().__init__(str(need))
        self.need = need


@dataclass(frozen=True)
class Plan:
    """The decisions that are made before anything is allocated."""

    units: tuple[Unit, ...]
    residents: Unit
    weight_slots: int
    gradient_slots: int
    staging: Staging
    updates: bool = False  # whether the engine updates the weights; if so, gradients cross in the weights' dtype
    limit: int | None = None  # blocks of more bytes than this were cut
    held: bool = False  # whether all weights stay on the device
    segments: Segments = Segments()  # noqa: RUF009 - frozen
    predicted_rate: float | None = None  # of updates, in parameters per second; None: not known yet
    achieved_rate: float | None = None

    @property
    def account(self) -> dict[str, int]:
        """Bytes of device memory that are always reserved, by purpose."""
        allocations = self._allocations
        account = {purpose: sum(sizes) for purpose, sizes in allocations.items()}
        added = self.segments.reserved(itertools.chain(*allocations.values())) - sum(account.values())
        return {**account, "allocator": added} if added else account

    @property
    def _allocations(self) -> dict[str, list[int]]:
        """Bytes of all allocations that last as long as the plan, by purpose. Each purpose has as few as possible."""
        return {
            "weight slots": [self._weight_bytes],
            "gradient slots": [self._gradient_bytes],
            "residents": [self.residents.nbytes, gradient_slot_bytes(self.residents, self.updates)],
            **self.staging.allocations(self.in_forward_order, held=self.held),
        }

    @property
    def in_forward_order(self) -> tuple[Unit, ...]:
        """All units in the order in which a step needs them, beginning with the residents."""
        return (self.residents, *self.units)

    def with_staging(self, staging: Staging) -> Plan:
        return replace(self, staging=staging.cut_for(self.in_forward_order))

    @functools.cached_property
    def weight_slot_sizes(self) -> SlotSizes:
        return weight_slot_sizes(self.units, self.weight_slots)

    @functools.cached_property
    def _weight_bytes(self) -> int:
        return sum(unit.nbytes for unit in self.units) if self.held else self.weight_slot_sizes.nbytes

    @functools.cached_property
    def _gradient_bytes(self) -> int:
        return gradient_slot_sizes(self.units, self.gradient_slots, self.updates).sizes.nbytes

    @property
    def fixed(self) -> int:
        return sum(self.account.values())

    def __str__(self) -> str:
        rates = {"predicted": self.predicted_rate, "achieved": self.achieved_rate}
        known = ", ".join(f"{rate / 1e6:.0f} {name}" for name, rate in rates.items() if rate is not None)
        when = "deferred" if self.staging.deferred else "eager"
        lines = [
            f"{show_count(len(self.units), 'unit')}, {'held on the device' if self.held else 'relayed'}",
            f"{show_bytes(self.fixed)} always on the device: {self.explain()}",
        ]
        if self.updates:
            size = self.staging.subgroup
            lines.append(f"updates: {self.staging.policy}, {when}, in subgroups of at most {size} parameters")
            lines.append(f"update rate, Mparam/s: {known or 'not known yet'}")
        return "\n".join(lines)

    def explain(self) -> str:
        """The account in words, largest entry first."""
        largest, account = max(self.units, key=lambda unit: unit.nbytes), self.account
        whose = "all weights" if self.held else f"weights of {show_count(self.weight_slots, 'unit')}"
        sizes = {
            "weight slots": f"{show_bytes(account['weight slots'])} for {whose} (the largest is {largest.name!r}, "
            f"{show_bytes(largest.nbytes)})",
            "gradient slots": f"{show_bytes(account['gradient slots'])} for gradients of "
            f"{show_count(self.gradient_slots, 'unit')}",
            "residents": f"{show_bytes(account['residents'])} for what stays on the device",
            "update staging": f"{show_bytes(account.get('update staging', 0))} for updates on the device, of subgroups "
            f"of {self.staging.subgroup} parameters",
            "state on the device": f"{show_bytes(account.get('state on the device', 0))} for optimizer state",
            "gradients on the device": f"{show_bytes(account.get('gradients on the device', 0))} for gradients that "
            "wait for the norm",
            "allocator": f"{show_bytes(account.get('allocator', 0))} that the device's allocator adds, which takes "
            "whole segments",
        }
        order = sorted(account, key=lambda part: -account[part])
        return ", ".join(sizes[part] for part in order if account[part])


def make_plan(
    model: nn.Module,
    *,
    budget: int | None,
    slots: int | None,
    units: Sequence[str] | None,
    resident: Sequence[str],
    staging: Sequence[Staging],
    held: bool | None = False,
    keeps: bool = False,
    updates: bool = False,
    dtype_of: DtypeOf = own_dtype,
    needed: Need | None = None,
    smallest: bool = False,
    segments: Segments = Segments(),  # noqa: B008 - frozen
) -> Plan:
    """Makes the plan with the largest units that leaves room in the budget.

    Raises a ValueError that says how much memory is needed if there is no such plan.

    `units`: modules named by the user, which are not cut. `staging`: ways to update, the best first; a later one is
    used if the earlier ones leave no room. `held`: whether all weights stay on the device; None: if the budget
    allows it. `keeps`: calls may keep their graphs, so gradients stay on the device too, if there is room: see
    `relay/straight.py`. `needed`: the need of a micro-batch of one sample, once it is known. `smallest`: return the
    plan that uses the least memory instead. `segments`: those of the device's allocator.
    """
    as_they_are = budget is None or units is not None
    limits = [None] if as_they_are else [None, *module_sizes(model, dtype_of)]
    cuts = find_cuts(model, limits, units=units, resident=resident, dtype_of=dtype_of)
    plans = [
        Plan(found, rest, slots or 2, 2, staging[0], updates, limit, segments=segments)
        for limit, (found, rest) in cuts.items()
    ]
    grades = _grades(plans, slots, staging, held, keeps)
    if budget is None:
        return grades[0][0]
    fixed = {id(plan): plan.fixed for grade in grades for plan in grade}
    least = min(itertools.chain(*grades), key=lambda plan: fixed[id(plan)])
    if smallest:
        return least
    for plan in itertools.chain(*grades):
        room = (
            int((_MAX_FIXED_HELD if plan.held else _MAX_FIXED) * budget) if needed is None else budget - needed.nbytes
        )
        if keeps and plan.held and plan.gradient_slots >= len(plan.units) > SHARED:
            room = min(room, int(_MAX_FIXED_MORE_SLOTS * budget))  # the rest is for graphs
        if fixed[id(plan)] <= room:
            more = not plan.held and slots is None
            return _with_more_slots(plan, min(room, int(_MAX_FIXED_MORE_SLOTS * budget))) if more else plan
    if needed is None and fixed[id(least)] <= budget:
        return least
    finer = "" if units is None else ". Units that are named (units=) are not cut: name smaller ones, or none"
    raise ValueError(f"memory={show_bytes(budget)} is too small for this model: {_what_would_do(least, needed)}{finer}")


def _what_would_do(least: Plan, needed: Need | None) -> str:
    if needed is None:
        return (
            f"{show_bytes(least.fixed)} is needed before any activations, {least.explain()}; a micro-batch of one "
            "sample needs more, which is measured at the first batch"
        )
    total = show_bytes(least.fixed + int(needed.nbytes * _REMEASURE_MARGIN))
    return (
        f"{f'{total} would be enough' if needed.is_all else f'more than {total} is needed'}, {least.explain()}, and "
        f"{show_bytes(needed.nbytes)} for a micro-batch of one sample (the most in {needed.where!r})"
    )


def _grades(
    cuts: Sequence[Plan], slots: int | None, staging: Sequence[Staging], held: bool | None, keeps: bool
) -> list[list[Plan]]:
    """All plans, in grades of the same number of slots. The best grade is first, and in it the one of largest units."""
    # A unit with several modules occupies its gradient slot through the whole backward.
    best = [replace(plan, gradient_slots=2 + sum(len(u.modules) > 1 for u in plan.units)) for plan in cuts]
    # If all units are held, cutting them only makes gradient slots smaller.
    staying = [] if held is False or slots is not None else [[replace(plan, held=True)] for plan in (*best, *cuts)]
    if staying and keeps:
        staying.insert(0, [replace(staying[0][0], gradient_slots=len(cuts[0].units))])
    lesser = [
        [
            replace(plan, weight_slots=min(slots, len(plan.units)) if slots else weights, gradient_slots=gradients)
            for plan in cuts
        ]
        for weights, gradients in ((2, 2), (2, 1), (1, 1))
    ]
    grades = staying if held else [*staying, best, *lesser]
    # Updates on the device are given up before slots are: without a second slot nothing overlaps at all.
    return [[plan.with_staging(way) for plan in grade] for grade in grades for way in staging]


def _with_more_slots(plan: Plan, room: int) -> Plan:
    """Each additional slot saves one fetch per step; with a slot for every unit, each is fetched once."""
    every, sizes = weight_slot_sizes(plan.units, len(plan.units)), plan.weight_slot_sizes
    if every.is_single:
        return plan
    room -= plan.fixed - sizes.nbytes
    takes = itertools.accumulate((every.shared, *every.others))  # with two slots, with three, ...
    most = max((count for count, nbytes in enumerate(takes, 2) if nbytes <= room), default=0)
    return replace(plan, weight_slots=max(plan.weight_slots, most))
