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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
from ferryman.plan.schedule import Traffic

BERTHS = 3

SUBGROUP = 1 << 20  # elements, where nothing asks for fewer
JOINT = 1 << 18  # of several ranks, whose gradients of a subgroup are all in one host's memory at a time
LEAST = 1 << 14  # below this, an update on the device is launched more slowly than the host makes it

# Two memories for what an update, and a look at a gradient, have in between: bytes for an element of a subgroup.
_SCRATCH = 2 * 12

# Of a budget, at most this much for berths.
_SHARE = 1 / 8

# How many of the subgroups with numbers from `start` to before `stop` are selected.
Selection = Callable[[int, int], int]


class _Cut(NamedTuple):
    """How a unit's trained elements, or a rank's part of them, are cut into subgroups."""

    unit: Unit
    number: int  # of its first subgroup; subgroups are counted over the whole model, in forward order
    start: int
    stop: int  # elements
    size: int  # of a subgroup, in elements; the last one may be smaller

    @property
    def next_number(self) -> int:
        return self.number - (self.start - self.stop) // self.size

    def selected(self, selection: Selection) -> list[Subgroup]:
        """The subgroups that are selected."""
        every = enumerate(cut_into_subgroups(self.unit, self.size, self.start, self.stop), self.number)
        return [subgroup for number, subgroup in every if selection(number, number + 1)]

    def selected_elements(self, selection: Selection) -> int:
        """The elements of these subgroups, without a list of them: a large model has half a million subgroups."""
        last = self.next_number - 1
        if last < self.number:
            return 0
        smaller = (last - self.number + 1) * self.size - (self.stop - self.start)
        return selection(self.number, last + 1) * self.size - selection(last, last + 1) * smaller


@dataclass(frozen=True)
class Staging:
    """How units are cut into subgroups, and which of these the device may update."""

    policy: Policy
    subgroup: int  # elements
    arrays: Callable[[Unit], int | None]  # state tensors of its optimizer; None: a device cannot update the unit
    deferred: bool
    holds_gradients: bool = True  # whether gradients may wait on the device at all
    cuts: Callable[[Unit], list[int]] | None = None  # with several ranks, the boundaries between their parts
    rank: int = 0
    for_ranks: bool = False  # updates are deferred only because there are several ranks

    @property
    def note(self) -> str | None:
        """Why updates are deferred, for a user who did not ask for it."""
        if not self.for_ranks:
            return None
        return (
            "Updates are deferred because there are several ranks: what a device may update is known when the "
            "gradients of all have come. Until then they wait on the host, in 2 or 4 bytes a parameter; with the "
            "policy 'host' they do not"
        )

    @property
    def berths(self) -> int:
        """Berths that subgroups share. Subgroups whose state stays on the device have their own."""
        return BERTHS if self.policy.kind in ("stride", "auto") else 0

    @property
    def on_device(self) -> bool:
        """Whether the device may update any subgroup."""
        return self.policy.kind != "host"

    # The rules. Each is a `Selection`, so that subgroups can be listed and their elements counted by the same rule.

    @property
    def _owned(self) -> Selection:
        """Subgroups that the device always updates; under `auto` that is decided while training runs."""
        return self.policy.owned if self.policy.kind in ("static", "stride") else _none

    @property
    def _resident(self) -> Selection:
        """Subgroups whose state stays on the device."""
        return self._owned if self.policy.kind == "static" else _none

    def _holding(self, *, held: bool) -> Selection:
        """Subgroups whose gradients can wait on the device for the global norm. `held`: all weights stay there."""
        if not self.deferred or not self.holds_gradients or not (held or self.policy.kind == "static"):
            return _none
        return _all if self.policy.kind == "auto" else self._owned

    # By these rules, the subgroups of this rank.

    def subgroups(self, units: Iterable[Unit]) -> list[Subgroup]:
        """Subgroups that the device can update, in the order of `units`: those that a policy counts."""
        return self._selected(units, _all)

    def owned(self, units: Iterable[Unit]) -> list[Subgroup]:
        return self._selected(units, self._owned)

    def resident(self, units: Iterable[Unit]) -> list[Subgroup]:
        return self._selected(units, self._resident)

    def holding(self, units: Iterable[Unit], *, held: bool) -> list[Subgroup]:
        return self._selected(units, self._holding(held=held))

    def holds_any(self, units: Iterable[Unit], *, held: bool) -> bool:
        return any(cut.selected_elements(self._holding(held=held)) for cut in self._cuts(units, self._own_part))

    def _selected(self, units: Iterable[Unit], selection: Selection) -> list[Subgroup]:
        if selection is _none:
            return []
        return [subgroup for cut in self._cuts(units, self._own_part) for subgroup in cut.selected(selection)]

    def _cuts(self, units: Iterable[Unit], part: Callable[[Unit], tuple[int, int]]) -> Iterator[_Cut]:
        number = 0
        for unit in units:
            if self.arrays(unit) is not None:
                cut = _Cut(unit, number, *part(unit), self.subgroup)
                number = cut.next_number
                yield cut

    def _own_part(self, unit: Unit) -> tuple[int, int]:
        """The elements that this rank updates."""
        if self.cuts is None:
            return 0, trained_elements(unit)
        cuts = self.cuts(unit)
        return cuts[self.rank], cuts[self.rank + 1]

    def _largest_part(self, unit: Unit) -> tuple[int, int]:
        """As many elements as the rank with the largest part updates: all ranks must make the same plan."""
        if self.cuts is None:
            return 0, trained_elements(unit)
        return 0, max(high - low for low, high in itertools.pairwise(self.cuts(unit)))

    # Bytes.

    def element_bytes(self, unit: Unit) -> int:
        """Bytes of a berth for each element of the unit; 0 if a device cannot update it."""
        if self.arrays(unit) is None:
            return 0
        return weight_itemsize(unit) + self._state_bytes(unit) + GRADIENT.itemsize

    def _state_bytes(self, unit: Unit) -> int:
        """Bytes per element beside the weights: what these lack in float32, and the optimizer's state."""
        return master_itemsize(unit) + (self.arrays(unit) or 0) * GRADIENT.itemsize

    def berth_bytes(self, units: Iterable[Unit]) -> int:
        """Bytes of a berth that fits a subgroup of any of these units."""
        return self.subgroup * max((self.element_bytes(unit) for unit in units), default=0)

    def traffic(self, units: Sequence[Unit], *, held: bool) -> tuple[Traffic, int]:
        """Bytes per parameter that cross the link if its gradient is on the device; and bytes of that gradient."""
        able = [unit for unit in units if self.arrays(unit) is not None]
        weights = max((weight_itemsize(unit) for unit in able), default=0)
        state = max((self._state_bytes(unit) for unit in able), default=0)
        gradient = max((landing_dtype(unit).itemsize for unit in able), default=0)
        back = weights if held else 0  # what the host has updated goes back to the device
        return Traffic(gradient, back, state + weights - back, state + weights), gradient

    def cut_for(self, units: Iterable[Unit]) -> Staging:
        """The same, with subgroups no larger than the largest unit needs."""
        return replace(self, subgroup=min(self.subgroup, largest_subgroup(units)))

    def account(self, units: Sequence[Unit], *, held: bool) -> dict[str, int]:
        """Bytes on the device, by what they are for."""
        if not self.on_device:
            return {}
        cuts = list(self._cuts(units, self._largest_part))
        resident, holding = self._resident, self._holding(held=held)
        return {
            "update staging": self.berths * self.berth_bytes(units)
            + _SCRATCH * self.subgroup
            + 8 * most_tensors(units),  # a sum of squares for each
            "state on the device": sum(cut.selected_elements(resident) * self.element_bytes(cut.unit) for cut in cuts),
            "gradients on the device": sum(
                cut.selected_elements(holding) * landing_dtype(cut.unit).itemsize for cut in cuts
            ),
        }


def _all(start: int, stop: int) -> int:
    return stop - start


def _none(start: int, stop: int) -> int:
    return 0


def hold_bytes(subgroup: Subgroup) -> int:
    """Bytes of a subgroup's gradient while it waits on the device."""
    return subgroup.size * landing_dtype(subgroup.unit).itemsize


def most_tensors(units: Iterable[Unit]) -> int:
    """The number of trained tensors in the unit that has most of them."""
    return max((len(unit.trained) for unit in units), default=0)


def largest_subgroup(units: Iterable[Unit]) -> int:
    """The size of a subgroup that no unit is too small for."""
    return min(SUBGROUP, max((_rounded(trained_elements(unit)) for unit in units), default=GRAIN))


def subgroup_for(budget: int, most: int) -> int:
    """The largest subgroup, of at most `most` elements, that leaves most of a budget for other things."""
    size = most
    while size > LEAST and (BERTHS * 16 + _SCRATCH) * size > _SHARE * budget:
        size = max(LEAST, _rounded(size // 2))
    return size


def _rounded(elements: int) -> int:
    return max(GRAIN, -(-elements // GRAIN) * GRAIN)
