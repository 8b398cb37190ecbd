"""The plan: how large units are and how many slots there are, so that a budget of device memory is kept.

What is always on the device is a sum over the plan:

    weight slots x largest unit + gradient slots x widest gradients + residents, with their gradients
    + what updates on the device take (`staging.py`)

or, where all units are *held*, their sum in place of the weight slots. The rest of the budget is for what micro-batches
need while they run, which `plan/fit.py` measures. A coarse cut is better than a fine one, since every boundary between
units is a stash; two slots are better than one, since only then a fetch runs beside the compute. So blocks are cut
before slots are given up. Units that the user has named are not cut.

Note [How much is filled]
Weights cross once a sweep, whatever the size of micro-batches; a stash crosses for each sample. So whole blocks with
micro-batches of one sample are faster than parts of blocks with larger ones, and a cut may fill the budget but for a
little. Should a sample not fit beside it, the first batch tells, and the plan is made again. Slots beyond two spare a
fetch each, and leave the room to micro-batches before that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from ferryman.model.units import DtypeOf, Unit, find_cuts, gradient_bytes, module_sizes, narrow_bytes, own_dtype
from ferryman.plan.staging import Staging
from ferryman.runtime.sizes import show_bytes

# Of a budget, for what is always there: at most, if it can be done with less; where all units are held, which is given
# up for larger micro-batches; and with more slots than two. See Note [How much is filled]
_MOST, _HELD, _MORE_SLOTS = 7 / 8, 3 / 4, 1 / 2

# What a micro-batch needs is measured anew with the budget that was named, and may be a little more then.
_AGAIN = 1.02


class Need(NamedTuple):
    """What a micro-batch takes beside what is always on the device, and the unit where it takes most."""

    nbytes: int
    where: str
    is_all: bool = True  # False: it was stopped there, and takes more

    def __str__(self) -> str:
        return f"a micro-batch of one sample needs {show_bytes(self.nbytes)} in {self.where!r}"


class PlanTooLargeError(Exception):
    """A plan leaves micro-batches too little room, but training can go on with a smaller one that leaves `need`."""

    def __init__(self, need: Need) -> None:
        super().__init__(str(need))
        self.need = need


@dataclass(frozen=True)
class Plan:
    """What is decided before anything is allocated."""

    units: tuple[Unit, ...]
    residents: Unit
    weight_slots: int
    gradient_slots: int
    staging: Staging
    updates: bool = False  # whether the engine updates the weights, so that gradients cross in their dtype
    limit: int | None = None  # bytes beyond which blocks were cut
    held: bool = False  # whether all weights stay on the device
    predicted_rate: float | None = None  # of updates, in parameters a second; None: not known yet
    achieved_rate: float | None = None

    @property
    def account(self) -> dict[str, int]:
        """Bytes that are on the device all the time, by what they are for."""
        return {
            "weight slots": self._weight_bytes,
            "gradient slots": self.gradient_slots * slot_bytes(self.units, self.updates),
            "residents": self.residents.nbytes + slot_bytes([self.residents], self.updates),
            **self.staging.account(self.in_forward_order, held=self.held),
        }

    @property
    def in_forward_order(self) -> tuple[Unit, ...]:
        """All units as a step needs them: residents are there from its start."""
        return (self.residents, *self.units)

    def with_staging(self, staging: Staging) -> Plan:
        return replace(self, staging=staging.cut_for(self.in_forward_order))

    @property
    def _weight_bytes(self) -> int:
        sizes = [unit.nbytes for unit in self.units]
        return sum(sizes) if self.held else self.weight_slots * max(sizes)

    @property
    def fixed(self) -> int:
        return sum(self.account.values())

    def __str__(self) -> str:
        rates = {"predicted": self.predicted_rate, "achieved": self.achieved_rate}
        known = ", ".join(f"{rate / 1e6:.0f} {name}" for name, rate in rates.items() if rate is not None)
        when = "deferred" if self.staging.deferred else "eager"
        lines = [
            f"{len(self.units)} units, {'held on the device' if self.held else 'relayed'}",
            f"{show_bytes(self.fixed)} always on the device: {self.explain()}",
        ]
        if self.updates:
            size = self.staging.subgroup
            lines.append(f"updates: {self.staging.policy}, {when}, in subgroups of at most {size} parameters")
            lines.append(f"update rate, Mparam/s: {known or 'not known yet'}")
        return "\n".join(lines)

    def explain(self) -> str:
        """The account in words, with what dominates it."""
        largest, account = max(self.units, key=lambda unit: unit.nbytes), self.account
        all_of_them = f"{show_bytes(account['weight slots'])}, all of them,"
        slots = all_of_them if self.held else f"{self.weight_slots} x {show_bytes(largest.nbytes)}"
        sizes = {
            "weight slots": f"{slots} for weights (the largest unit is {largest.name!r})",
            "gradient slots": f"{self.gradient_slots} x {show_bytes(slot_bytes(self.units, self.updates))} "
            "for gradients",
            "residents": f"{show_bytes(account['residents'])} for what stays on the device",
            "update staging": f"{show_bytes(account.get('update staging', 0))} for updates on the device, of subgroups "
            f"of {self.staging.subgroup} parameters",
            "state on the device": f"{show_bytes(account.get('state on the device', 0))} for optimizer state",
            "gradients on the device": f"{show_bytes(account.get('gradients on the device', 0))} for gradients that "
            "wait for the norm",
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
    updates: bool = False,
    dtype_of: DtypeOf = own_dtype,
    needed: Need | None = None,
    smallest: bool = False,
) -> Plan:
    """The coarsest plan that leaves room in the budget; a ValueError that says what is needed if there is none.

    `units`: named by the user, and not cut. `staging`: ways to update, the best first; a lesser one is taken where a
    better one leaves no room. `held`: whether all weights stay on the device; None: if the budget allows. `needed`:
    what a micro-batch of one sample takes, once that is known. `smallest`: the plan that takes least instead.
    """
    as_they_are = budget is None or units is not None
    limits = [None] if as_they_are else [None, *module_sizes(model, dtype_of)]
    cuts = find_cuts(model, limits, units=units, resident=resident, dtype_of=dtype_of)
    plans = [Plan(found, rest, slots or 2, 2, staging[0], updates, limit) for limit, (found, rest) in cuts.items()]
    grades = _grades(plans, slots, staging, held)
    if budget is None:
        return grades[0][0]
    fixed = {id(plan): plan.fixed for grade in grades for plan in grade}
    least = min(itertools.chain(*grades), key=lambda plan: fixed[id(plan)])
    if smallest:
        return least
    for plan in itertools.chain(*grades):
        room = int((_HELD if plan.held else _MOST) * budget) if needed is None else budget - needed.nbytes
        if fixed[id(plan)] <= room:
            more = not plan.held and slots is None
            return _with_more_slots(plan, min(room, int(_MORE_SLOTS * budget))) if more else plan
    if needed is None and fixed[id(least)] <= budget:
        return least
    finer = "" if units is None else ". Units that are named (units=) are not cut: name smaller ones, or none"
    raise ValueError(f"memory={show_bytes(budget)} is too small for this model: {_what_would_do(least, needed)}{finer}")


def _what_would_do(least: Plan, needed: Need | None) -> str:
    if needed is None:
        return (
            f"{show_bytes(least.fixed)} is needed before any activations, {least.explain()}; what a micro-batch of one "
            "sample takes comes on top, and is known at the first batch"
        )
    total = show_bytes(least.fixed + int(needed.nbytes * _AGAIN))
    return (
        f"{f'{total} would do' if needed.is_all else f'more than {total} is needed'}, {least.explain()}, and "
        f"{show_bytes(needed.nbytes)} for a micro-batch of one sample (the most in {needed.where!r})"
    )


def slot_bytes(units: Sequence[Unit], updates: bool) -> int:
    """Of a slot for the gradients of any of these units: in float32, and in the dtype in which they cross."""
    wide = max(gradient_bytes(unit) for unit in units)
    return wide + (max(narrow_bytes(unit) for unit in units) if updates else 0)


def _grades(cuts: Sequence[Plan], slots: int | None, staging: Sequence[Staging], held: bool | None) -> list[list[Plan]]:
    """All plans: those of one grade have as many slots and overlap alike; the best grade, and the coarsest, first."""
    # A unit with several modules holds its slot through the whole backward.
    best = [replace(plan, gradient_slots=2 + sum(len(u.modules) > 1 for u in plan.units)) for plan in cuts]
    # Held, nothing is won by a cut but smaller slots for gradients.
    staying = [] if held is False or slots is not None else [[replace(plan, held=True)] for plan in (*best, *cuts)]
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
    """Each slot more spares a fetch a step; with one for every unit, weights come over once."""
    largest = max(unit.nbytes for unit in plan.units)
    more = min((room - plan.fixed) // largest, len(plan.units) - plan.weight_slots) if largest else 0
    return replace(plan, weight_slots=plan.weight_slots + max(0, more))
