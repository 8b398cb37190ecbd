"""The plan: how large units are and how many slots there are, so that a budget of device memory is kept.

What is always on the device is a sum over the plan:

    weight slots x largest unit + gradient slots x widest gradients + residents, with their gradients

The rest of the budget is for what micro-batches need while they run, which `relay/fit.py` measures. A coarse cut is
better than a fine one, since every boundary between units is a stash; two slots are better than one, since only then a
fetch runs beside the compute. So blocks are cut before slots are given up.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from ferryman.cost.sizes import show_bytes
from ferryman.units import Unit, find_units, gradient_bytes, module_sizes

# Of a budget, at first only this much for what is always there; more if it cannot be done with less.
_SHARES = (0.5, 0.75)


class Need(NamedTuple):
    """What a micro-batch takes beside what is always on the device, and the unit where it takes most."""

    nbytes: int
    where: str


@dataclass(frozen=True)
class Plan:
    """What is decided before anything is allocated."""

    units: tuple[Unit, ...]
    residents: Unit
    weight_slots: int
    gradient_slots: int
    limit: int | None = None  # bytes beyond which blocks were cut
    budget: int | None = None

    @property
    def account(self) -> dict[str, int]:
        """Bytes that are on the device all the time, by what they are for."""
        return {
            "weight slots": self.weight_slots * max(unit.nbytes for unit in self.units),
            "gradient slots": self.gradient_slots * max(gradient_bytes(unit) for unit in self.units),
            "residents": self.residents.nbytes + gradient_bytes(self.residents),
        }

    @property
    def fixed(self) -> int:
        return sum(self.account.values())

    def explain(self) -> str:
        """The account in words, with what dominates it."""
        largest = max(self.units, key=lambda unit: unit.nbytes)
        widest = max(self.units, key=gradient_bytes)
        sizes = {
            "weight slots": f"{self.weight_slots} x {show_bytes(largest.nbytes)} for weights "
            f"(the largest unit is {largest.name!r})",
            "gradient slots": f"{self.gradient_slots} x {show_bytes(gradient_bytes(widest))} for gradients in float32",
            "residents": f"{show_bytes(self.account['residents'])} for what stays on the device",
        }
        order = sorted(sizes, key=lambda part: -self.account[part])
        return ", ".join(sizes[part] for part in order if self.account[part])


def make_plan(
    model: nn.Module,
    *,
    budget: int | None,
    slots: int | None,
    units: Sequence[str] | None,
    resident: Sequence[str],
    needed: Need | None = None,
) -> Plan:
    """The coarsest plan that leaves room in the budget; a ValueError with the smallest budget if there is none.

    `needed`: what a micro-batch of one sample takes, once that is known.
    """
    grades = _grades(model, budget, slots, units, resident)
    if budget is None:
        return grades[0][0]
    rooms = [int(share * budget) for share in _SHARES] if needed is None else [budget - needed.nbytes]
    for grade in grades:
        for room in rooms:
            for plan in grade:
                if plan.fixed <= room:
                    return _with_more_slots(plan, rooms[0]) if slots is None else plan
    least = min(itertools.chain(*grades), key=lambda plan: plan.fixed)
    if needed is None:
        if least.fixed <= budget:
            return least
        smallest, beside = least.fixed, "and what micro-batches need while they run comes on top"
    else:
        smallest = least.fixed + needed.nbytes
        beside = f"and {show_bytes(needed.nbytes)} for a micro-batch of one sample (the most in {needed.where!r})"
    raise ValueError(
        f"memory={show_bytes(budget)} is too small for this model: {show_bytes(smallest)} is the smallest that would "
        f"do, {least.explain()}, {beside}"
    )


def _grades(
    model: nn.Module, budget: int | None, slots: int | None, units: Sequence[str] | None, resident: Sequence[str]
) -> list[list[Plan]]:
    """All plans: those of one grade have as many slots and overlap alike; the best grade, and the coarsest, first."""
    cuts: dict[tuple[str, ...], Plan] = {}
    for limit in [None] if budget is None else [None, *module_sizes(model)]:
        found, residents = find_units(model, limit=limit, units=units, resident=resident)
        # A unit with several modules holds its slot through the whole backward.
        shared = sum(len(unit.modules) > 1 for unit in found)
        cuts.setdefault(
            tuple(unit.name for unit in found), Plan(found, residents, slots or 2, 2 + shared, limit, budget)
        )
    lesser = [
        [replace(plan, weight_slots=slots or weights, gradient_slots=gradients) for plan in cuts.values()]
        for weights, gradients in ((2, 2), (2, 1), (1, 1))
    ]
    return [list(cuts.values()), *lesser]


def _with_more_slots(plan: Plan, room: int) -> Plan:
    """Each slot more spares a fetch a step; with one for every unit, weights come over once."""
    largest = max(unit.nbytes for unit in plan.units)
    more = min((room - plan.fixed) // largest, len(plan.units) - plan.weight_slots) if largest else 0
    return replace(plan, weight_slots=plan.weight_slots + max(0, more))
