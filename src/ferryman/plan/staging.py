"""The device memory that updates on the device need.

A *berth* is memory for everything that an update of one subgroup needs: weights, the bits that these lack in float32,
the optimizer state and, if it is on the host, the gradient. There are three berths, so that one subgroup comes in, one
is updated and one goes out at the same time. Under `static`, each subgroup of the device has a berth of its own.

With deferred updates, gradients wait for their global norm. Gradients of the device's subgroups wait on the device, in
*gradient berths*, if device memory grows with the model anyway: under `static`, and if all weights are held. If units
are relayed, device memory must stay constant, so these gradients wait on the host like all others.

Note [How large subgroups are]
Each subgroup costs the same time in Python and in the driver, whatever its size. So what crosses the link for it should
take about 2 ms, many times as long: its state in one direction if the device may update it, otherwise its gradient. The
rate is that of the link, measured before the plan is made. A slow link does not make subgroups smaller than a million
elements: the host's own share of the work has no use for smaller ones. No subgroup is larger than the largest unit, and
berths, whose size follows from that of subgroups, take a small part of the budget.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ferryman.model.units import (
    GRADIENT,
    GRAIN,
    SHORTEST_COMPACT,
    Subgroup,
    Unit,
    cut_into_subgroups,
    landing_dtype,
)
from ferryman.plan.policy import Policy
from ferryman.plan.schedule import Traffic

BERTHS = 3

# Sizes of subgroups, in elements; see Note [How large subgroups are].
SUBGROUP = 1 << 20  # the default, unless the link is fast
_MAX_SUBGROUP = 1 << 24
_RANKS_DIVISOR = 4  # with several ranks: a host holds the gradients of a subgroup from each rank
MIN_DEVICE_SUBGROUP = 1 << 14  # launching a smaller update on the device takes longer than updating it on the host

_SCRATCHES = 2  # scratch memories: that of an update, and that of a gradient check
_SCRATCH_ITEMSIZE = 12  # bytes per element of a subgroup in each

_WIRE_SECONDS = 2e-3  # for which a subgroup should occupy the link

_MAX_BERTH_SHARE = 1 / 8  # the largest fraction of a budget for berths

_TYPICAL_BERTH_ITEMSIZE = 16  # bytes per element, with Adam

# The number of selected subgroups in `range(start, stop)`.
Selection = Callable[[int, int], int]


class _Cut(NamedTuple):
    """The subgroups of a unit's trained elements, or of a rank's part of them."""

    unit: Unit
    number: int  # of its first subgroup; subgroups are numbered over the whole model, in forward order
    start: int
    stop: int  # elements
    size: int  # of a subgroup, in elements; the last one may be smaller

    @property
    def next_number(self) -> int:
        return self.number - (self.start - self.stop) // self.size

    def selected(self, selection: Selection) -> list[Subgroup]:
        """The selected subgroups."""
        every = enumerate(cut_into_subgroups(self.unit, self.size, self.start, self.stop), self.number)
        return [subgroup for number, subgroup in every if selection(number, number + 1)]

    def selected_elements(self, selection: Selection) -> int:
        """The number of elements in the selected subgroups. It lists none: a large model has half a million."""
        last = self.next_number - 1
        if last < self.number:
            return 0
        smaller = (last - self.number + 1) * self.size - (self.stop - self.start)
        return selection(self.number, last + 1) * self.size - selection(last, last + 1) * smaller


@dataclass(frozen=True)
class Staging:
    """How units are cut into subgroups, and which subgroups the device may update."""

    policy: Policy
    subgroup: int  # elements
    # Bytes of optimizer state per element, small tensors excepted; None: the host must update it.
    state_itemsize: Callable[[Unit], float | None]
    deferred: bool
    may_have_gradient_berths: bool = True  # whether gradients may wait on the device
    cuts: Callable[[Unit], list[int]] | None = None  # with several ranks, the boundaries between their parts
    rank: int = 0
    for_ranks: bool = False  # updates are deferred only because there are several ranks
    # If state is compact: how many bytes more the unit's small tensors have, whose state is not.
    small_state: Callable[[Unit], int] | None = None

    @property
    def note(self) -> str | None:
        """Explains why updates are deferred to a user who did not request it."""
        if not self.for_ranks:
            return None
        return (
            "Updates are deferred because there are several ranks: a device can update a subgroup only when the "
            "gradients of all ranks have arrived. Until then they wait on the host, in 2 or 4 bytes per parameter. The "
            "policy 'host' does not need that"
        )

    @property
    def berths(self) -> int:
        """The number of berths that subgroups share. Subgroups whose state stays on the device have their own."""
        return BERTHS if self.policy.kind in ("stride", "auto") else 0

    @property
    def on_device(self) -> bool:
        """Whether the device may update any subgroup."""
        return self.policy.kind != "host"

    # Each rule is a `Selection`, so that the same rule lists subgroups and counts their elements.

    @property
    def _owned(self) -> Selection:
        """Subgroups that the device always updates; `auto` decides during training."""
        return self.policy.owned if self.policy.kind in ("static", "stride") else _none

    @property
    def _resident(self) -> Selection:
        """Subgroups whose state stays on the device."""
        return self._owned if self.policy.kind == "static" else _none

    def _gradient_berths(self, *, held: bool) -> Selection:
        """Subgroups whose gradients wait on the device for the global norm. `held`: all weights are there."""
        if not self.deferred or not self.may_have_gradient_berths or not (held or self.policy.kind == "static"):
            return _none
        return _all if self.policy.kind == "auto" else self._owned

    # This rank's subgroups, by these rules.

    def subgroups(self, units: Iterable[Unit]) -> list[Subgroup]:
        """All subgroups that the device can update, in the order of `units`."""
        return self._selected(units, _all)

    def owned(self, units: Iterable[Unit]) -> list[Subgroup]:
        return self._selected(units, self._owned)

    def resident(self, units: Iterable[Unit]) -> list[Subgroup]:
        return self._selected(units, self._resident)

    def with_gradient_berths(self, units: Iterable[Unit], *, held: bool) -> list[Subgroup]:
        return self._selected(units, self._gradient_berths(held=held))

    def has_gradient_berths(self, units: Iterable[Unit], *, held: bool) -> bool:
        return any(cut.selected_elements(self._gradient_berths(held=held)) for cut in self._cuts(units, self._own_part))

    def _selected(self, units: Iterable[Unit], selection: Selection) -> list[Subgroup]:
        if selection is _none:
            return []
        return [subgroup for cut in self._cuts(units, self._own_part) for subgroup in cut.selected(selection)]

    def _cuts(self, units: Iterable[Unit], part: Callable[[Unit], tuple[int, int]]) -> Iterator[_Cut]:
        number = 0
        for unit in units:
            if self.state_itemsize(unit) is not None:
                cut = _Cut(unit, number, *part(unit), self.subgroup)
                number = cut.next_number
                yield cut

    def _own_part(self, unit: Unit) -> tuple[int, int]:
        """The elements that this rank updates."""
        if self.cuts is None:
            return 0, unit.trained_elements
        cuts = self.cuts(unit)
        return cuts[self.rank], cuts[self.rank + 1]

    def _largest_part(self, unit: Unit) -> tuple[int, int]:
        """The elements of the largest part of any rank, since all ranks must make the same plan."""
        if self.cuts is None:
            return 0, unit.trained_elements
        return 0, max(high - low for low, high in itertools.pairwise(self.cuts(unit)))

    # Bytes.

    def bytes_for(self, unit: Unit, elements: int) -> int:
        """Bytes of berths for so many elements of a unit, at most; 0 if a device cannot update it."""
        if self.state_itemsize(unit) is None or not elements:
            return 0
        each = unit.weight_itemsize + self._state_bytes(unit) + GRADIENT.itemsize
        nbytes = elements * each + (0 if self.small_state is None else self.small_state(unit))
        return math.ceil(nbytes / GRADIENT.itemsize) * GRADIENT.itemsize  # the next berth must be aligned

    @property
    def scratch(self) -> int:
        """Elements for which an update on the device has temporary memory."""
        return self.subgroup if self.small_state is None else max(self.subgroup, SHORTEST_COMPACT)

    def _state_bytes(self, unit: Unit) -> float:
        """Bytes per element, apart from weights: the bits that these lack in float32, and the optimizer state."""
        return unit.master_itemsize + (self.state_itemsize(unit) or 0)

    def berth_bytes(self, units: Iterable[Unit]) -> int:
        """Bytes of a berth that fits a subgroup of any of these units."""
        return max((self.bytes_for(unit, self.subgroup) for unit in units), default=0)

    def traffic(self, units: Sequence[Unit], *, held: bool) -> tuple[Traffic, int]:
        """Bytes per parameter that cross the link if its gradient is on the device, and bytes of that gradient."""
        able = [unit for unit in units if self.state_itemsize(unit) is not None]
        weights = max((unit.weight_itemsize for unit in able), default=0)
        state = max((self._state_bytes(unit) for unit in able), default=0)
        gradient = max((landing_dtype(unit).itemsize for unit in able), default=0)
        back = weights if held else 0  # weights that the host has updated go back to the device
        return Traffic(gradient, back, state + weights - back, state + weights), gradient

    def cut_for(self, units: Iterable[Unit]) -> Staging:
        """A copy with subgroups that are not larger than the largest unit."""
        return replace(self, subgroup=min(self.subgroup, largest_subgroup(units)))

    def allocations(self, units: Sequence[Unit], *, held: bool) -> dict[str, list[int]]:
        """Bytes of all allocations on the device, by purpose."""
        if not self.on_device:
            return {}
        cuts = list(self._cuts(units, self._largest_part))
        resident, waiting = self._resident, self._gradient_berths(held=held)
        state = sum(self.bytes_for(cut.unit, cut.selected_elements(resident)) for cut in cuts)
        gradients = sum(cut.selected_elements(waiting) * landing_dtype(cut.unit).itemsize for cut in cuts)
        return {
            "update staging": [
                *[_SCRATCH_ITEMSIZE * self.scratch] * _SCRATCHES,
                self.berths * self.berth_bytes(units),
                8 * most_tensors(units),  # a sum of squares for each tensor
            ],
            "state on the device": [state],
            "gradients on the device": [gradients],
        }


def _all(start: int, stop: int) -> int:
    return stop - start


def _none(start: int, stop: int) -> int:
    return 0


def gradient_berth_bytes(subgroup: Subgroup) -> int:
    """Bytes of a subgroup's gradient while it waits on the device."""
    return subgroup.size * landing_dtype(subgroup.unit).itemsize


def most_tensors(units: Iterable[Unit]) -> int:
    """The largest number of trained tensors in a unit."""
    return max((len(unit.trained) for unit in units), default=0)


def largest_subgroup(units: Iterable[Unit]) -> int:
    """The size of subgroups in which the largest unit is one subgroup."""
    return max((_rounded(unit.trained_elements) for unit in units), default=GRAIN)


def subgroup_on(link: float | None, itemsize: float, ranks: int) -> int:
    """The default size of subgroups. See Note [How large subgroups are].

    `link`: bytes per second; None: there is no link. `itemsize`: bytes per element that cross it in one direction.
    """
    wanted = SUBGROUP if link is None else _rounded(math.ceil(min(_MAX_SUBGROUP, link * _WIRE_SECONDS / itemsize)))
    return max(SUBGROUP, wanted) // (_RANKS_DIVISOR if ranks > 1 else 1)


def subgroup_for(budget: int, most: int) -> int:
    """The largest subgroup, of at most `most` elements, whose berths use only a small part of the budget."""
    size = most
    itemsize = BERTHS * _TYPICAL_BERTH_ITEMSIZE + _SCRATCHES * _SCRATCH_ITEMSIZE
    while size > MIN_DEVICE_SUBGROUP and itemsize * size > _MAX_BERTH_SHARE * budget:
        size = max(MIN_DEVICE_SUBGROUP, _rounded(size // 2))
    return size


def _rounded(elements: int) -> int:
    return max(GRAIN, -(-elements // GRAIN) * GRAIN)
