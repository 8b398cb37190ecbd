"""What updates on the device take there: berths for subgroups that pass through, and what stays.

A *berth* is memory for all that an update of one subgroup needs: weights, what they lack in float32, the optimizer's
state and, where it lies on the host, the gradient. There are three, so that one subgroup comes in, one is updated and
one goes out at the same time. Under `static` the subgroups of the device have berths of their own.

With deferred updates a gradient waits for the norm of all. Those of the device's subgroups wait on the device, in
*holds*, where memory grows with the model anyway: under `static`, and where all weights are held. Where units are
relayed, device memory is constant, so there they wait on the host like the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ferryman.model.units import (
    GRADIENT,
    GRAIN,
    Subgroup,
    Unit,
    cut_into_subgroups,
    landing_dtype,
    master_itemsize,
    trained_elements,
    weight_itemsize,
)
from ferryman.plan.policy import Policy

BERTHS = 3

SUBGROUP = 1 << 20  # elements, where nothing asks for fewer
JOINT = 1 << 18  # of several ranks, whose gradients of a subgroup are all in one host's memory at a time
LEAST = 1 << 14  # below this, an update on the device is launched more slowly than the host makes it

# Two memories for what an update, and a look at a gradient, have in between: bytes for an element of a subgroup.
_SCRATCH = 2 * 12

# Of a budget, at most this much for berths.
_SHARE = 1 / 8


@dataclass(frozen=True)
class Staging:
    """How subgroups are cut, and who may have them."""

    policy: Policy
    subgroup: int  # elements
    arrays: Callable[[Unit], int | None]  # numbers that are kept of each element; None: it cannot be done on a device
    deferred: bool
    holds_gradients: bool = True  # whether they may wait on the device at all
    cuts: Callable[[Unit], list[int]] | None = None  # of several ranks, where each one's elements begin and end
    rank: int = 0
    for_ranks: bool = False  # deferred, where nothing asks for it but that there are several

    @property
    def note(self) -> str | None:
        """Why updates wait, for who has not asked for it."""
        if not self.for_ranks:
            return None
        return (
            "Updates are deferred because there are several ranks: what a device may update is known when the "
            "gradients of all have come. Until then they wait on the host, in 2 or 4 bytes a parameter; with the "
            "policy 'host' they do not"
        )

    @property
    def berths(self) -> int:
        """That subgroups pass through; what stays on the device has its own."""
        return BERTHS if self.policy.kind in ("stride", "auto") else 0

    @property
    def on_device(self) -> bool:
        """Whether the device may have any."""
        return self.policy.kind != "host"

    def subgroups(self, units: Iterable[Unit]) -> list[Subgroup]:
        """Those that the device can update, in the order given: what a policy counts."""
        able = (unit for unit in units if self.arrays(unit) is not None)
        return [subgroup for unit in able for subgroup in cut_into_subgroups(unit, self.subgroup, *self._part(unit))]

    def owned(self, units: Iterable[Unit]) -> list[Subgroup]:
        """Those that are the device's for good."""
        if self.policy.kind not in ("static", "stride"):
            return []
        return [s for index, s in enumerate(self.subgroups(units)) if self.policy.device_owns(index)]

    def resident(self, units: Sequence[Unit]) -> list[Subgroup]:
        """Those whose state stays on the device."""
        return self.owned(units) if self.policy.kind == "static" else []

    def berth_bytes(self, units: Iterable[Unit]) -> int:
        return self.subgroup * max((self._element_bytes(unit) for unit in units), default=0)

    def holding(self, units: Sequence[Unit], *, held: bool) -> list[Subgroup]:
        """Those whose gradients can wait on the device."""
        if not self._holds(held=held):
            return []
        return self.subgroups(units) if self.policy.kind == "auto" else self.owned(units)

    def cut_for(self, units: Iterable[Unit]) -> Staging:
        """The same, with subgroups no larger than there is need for."""
        return replace(self, subgroup=min(self.subgroup, largest_subgroup(units)))

    def account(self, units: Sequence[Unit], *, held: bool) -> dict[str, int]:
        """Bytes on the device."""
        if not self.on_device:
            return {}
        element = {unit: self._element_bytes(unit) for unit in units}
        state = self._owned_elements(units) if self.policy.kind == "static" else {}
        waiting = self._waiting_elements(units) if self._holds(held=held) else {}
        return {
            "update staging": self.berths * self.subgroup * max(element.values(), default=0)
            + _SCRATCH * self.subgroup
            + 8 * most_tensors(units),  # a sum of squares for each
            "state on the device": sum(count * element[unit] for unit, count in state.items()),
            "gradients on the device": sum(count * landing_dtype(u).itemsize for u, count in waiting.items()),
        }

    def _part(self, unit: Unit) -> tuple[int, int]:
        """The elements that are updated by this rank."""
        if self.cuts is None:
            return 0, trained_elements(unit)
        cuts = self.cuts(unit)
        return cuts[self.rank], cuts[self.rank + 1]

    def _elements(self, unit: Unit) -> int:
        """How many; of several ranks the most that one has, so that all have the same plan."""
        if self.cuts is None:
            return trained_elements(unit)
        return max(high - low for low, high in itertools.pairwise(self.cuts(unit)))

    def _holds(self, *, held: bool) -> bool:
        """Whether gradients can wait on the device."""
        return self.deferred and self.on_device and self.holds_gradients and (held or self.policy.kind == "static")

    def _waiting_elements(self, units: Iterable[Unit]) -> dict[Unit, int]:
        """As many as `holding` has, without a list of subgroups, of which a large model has half a million."""
        if self.policy.kind != "auto":
            return self._owned_elements(units)
        return {unit: self._elements(unit) for unit in units if self.arrays(unit) is not None}

    def _owned_elements(self, units: Iterable[Unit]) -> dict[Unit, int]:
        """The same for `owned`."""
        found, start = dict[Unit, int](), 0
        for unit in units:
            total = self._elements(unit) if self.arrays(unit) is not None else 0
            if not total:
                continue
            last = start + -(-total // self.subgroup) - 1  # the only one that may be shorter
            short = total - (last - start) * self.subgroup
            found[unit] = self.policy.owned(start, last) * self.subgroup + self.policy.owned(last, last + 1) * short
            start = last + 1
        return found

    def _element_bytes(self, unit: Unit) -> int:
        arrays = self.arrays(unit)
        if arrays is None:
            return 0
        return weight_itemsize(unit) + master_itemsize(unit) + (arrays + 1) * GRADIENT.itemsize


def hold_bytes(subgroup: Subgroup) -> int:
    return subgroup.size * landing_dtype(subgroup.unit).itemsize


def most_tensors(units: Iterable[Unit]) -> int:
    """That a unit trains."""
    return max((len(unit.trained) for unit in units), default=0)


def largest_subgroup(units: Iterable[Unit]) -> int:
    """No more than there is."""
    return min(SUBGROUP, max((_rounded(trained_elements(unit)) for unit in units), default=GRAIN))


def subgroup_for(budget: int, most: int) -> int:
    """The largest that leaves most of a budget for other things."""
    size = most
    while size > LEAST and (BERTHS * 16 + _SCRATCH) * size > _SHARE * budget:
        size = max(LEAST, _rounded(size // 2))
    return size


def _rounded(elements: int) -> int:
    return max(GRAIN, -(-elements // GRAIN) * GRAIN)
