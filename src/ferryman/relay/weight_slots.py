"""Slots for weights: device memory that units are fetched into. All of it is allocated once.

`plan/slot_sizes.py` says how large the slots are, and `plan/slot_policy.py` which unit is fetched into which slot.

Note [Fetches ahead of a step]
When all updates of a step have been submitted, the first units of the next step are fetched, each after its own update.
So these fetches overlap with the updates of other units, and the next step does not begin with an idle device. They
are valid only if nobody can have changed the host's weights since: every use of their values between steps is detected
(`model/reads.py`), edits of tensors are counted by their versions, and loading, new blocks, evaluations and failures
drop what was fetched. The ranks of a node share the host's weights, so before a step they tell each other whether
somebody has used them.

Note [Pieces]
A device serves copies of one direction one after the other, in the order in which they become ready. A small copy that
compute waits for (a stash, an input, a resident) would wait behind all of a unit that is being fetched. So a fetch is
cut into pieces that take about 2 ms on the link, at the rate of the last fetch. Only the first piece that has not ended
is ready, because the others follow it on their stream. So another copy waits for at most one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ferryman.model.spans import Span
from ferryman.model.units import Item, Unit
from ferryman.plan.slot_policy import LOOK_AHEAD, weight_slot_policy
from ferryman.plan.slot_sizes import SlotSizes, weight_slot_sizes
from ferryman.relay.parameter_server import ParameterServer
from ferryman.relay.slot import Slot, memories_of, overlap
from ferryman.relay.unit_tensors import Collect, SlotViews, UnitTensors, views_in
from ferryman.runtime.device_memory import carve
from ferryman.runtime.lanes import Lane
from ferryman.runtime.marks import Mark

_PIECE_SECONDS = 2e-3  # for which a piece occupies the link; see Note [Pieces]
_SMALLEST_PIECE = 1 << 14  # bytes; less takes longer to launch than to copy
_FIRST_RATE = 4e9  # bytes per second, until a fetch was measured: less than most links have
_NOTHING = SlotSizes(0, is_single=True)  # in place, one slot without memory of its own has the tensors of all units


def piece_bytes(rate: float) -> int:
    """The size of the pieces of a fetch, over a link of `rate` bytes per second. See Note [Pieces]."""
    return max(_SMALLEST_PIECE, int(rate * _PIECE_SECONDS) // _SMALLEST_PIECE * _SMALLEST_PIECE)


class LinkRate:
    """The rate of the last fetch whose end is known."""

    def __init__(self) -> None:
        self.rate = _FIRST_RATE  # bytes per second
        self._measured: tuple[Mark, int] | None = None  # a fetch that may not have ended yet, and its bytes

    def observe(self, fetch: Mark, nbytes: int) -> None:
        """Measures the last fetch, if it has ended, and then this one, which was just submitted."""
        if self._measured is not None:
            last, last_bytes = self._measured
            if not last.passed():
                return
            if last_bytes and not last.failed() and (seconds := last.seconds()) > 0:
                self.rate = last_bytes / seconds
        self._measured = fetch, nbytes


@dataclass(eq=False)
class WeightSlot(Slot):
    """Device memory for the weights of one unit at a time. `unit`: those that are there, or are being fetched."""

    fetched: Mark | None = None  # the end of the fetch
    released: Mark | None = None  # the end of the last visit that used the slot
    ahead: list[int] | None = None  # if fetched ahead of a step: the versions of the host's tensors at that time
    views: dict[Unit, SlotViews] = field(default_factory=dict)  # of `memory`, made once

    def fill(self, unit: Unit, fetched: Mark) -> None:
        self.unit, self.fetched, self.ahead, self.taken = unit, fetched, None, unit.nbytes

    def ready(self) -> list[Mark]:
        """The marks after which the unit's weights can be used."""
        return [] if self.fetched is None else [self.fetched]


def versions_of(unit: Unit) -> list[int]:
    """Versions of the host's tensors. They count the user's edits, but not the server's updates."""
    return [item.tensor._version for item in unit.items]


class UnitOnDevice(NamedTuple):
    """A unit's tensors on the device, and the marks after which they can be used."""

    slot: WeightSlot
    of_unit: UnitTensors
    ready: list[Mark]

    @property
    def tensors(self) -> list[tuple[Item, torch.Tensor]]:
        return self.of_unit.pairs


class WeightSlots:
    """Weights on the device. If the device is the CPU, units are used in place, without copies."""

    _moves = True  # whether a unit may come back to another slot, and its slot may be overwritten between two visits

    def __init__(self, device: torch.device, count: int, server: ParameterServer, h2d: Lane, collect: Collect) -> None:
        self.fetches = 0
        self._device = device
        self._collect = collect
        self._in_place = device.type == "cpu"
        self._server = server
        self._h2d = h2d
        self._link = LinkRate()
        self._tensors: dict[Unit, UnitTensors] = {}  # units that have been in a slot
        self._count = count
        self._slots: Sequence[WeightSlot] = ()
        self._set_sizes(_NOTHING)

    def make_room_for(self, units: Sequence[Unit]) -> None:
        """Between steps: resizes the slots for these units. Drops tensors of other units."""
        sizes = _NOTHING if self._in_place else weight_slot_sizes(units, self._count)
        if sizes != self._policy.sizes:
            self._tensors.clear()
            self._set_sizes(sizes)
        for slot in self._slots:
            slot.views = {unit: views for unit, views in slot.views.items() if unit in units}
        self._tensors = {unit: tensors for unit, tensors in self._tensors.items() if unit in units}
        self.forget(everything=True)

    def enter(self, unit: Unit, upcoming: Sequence[Unit]) -> UnitOnDevice:
        """Starts to fetch the unit, if it is in no slot, and those of the `upcoming` units for which there is room."""
        while (needed := self._next_fetch(unit, upcoming)) is not None:
            coming, slot = needed
            after, pieces = self._before_fetch(coming, slot), self._pieces(coming, slot)
            self._fetched(coming, slot, self._h2d.copy(pieces, after=after, label=f"fetch {coming.name}"))
        slot = self._slot_of(unit)
        slot.ahead = None  # from now on, an update may follow
        ready = self._server.weights_ready(unit) if self._in_place else slot.ready()
        return UnitOnDevice(slot, self._tensors_in(slot, unit), ready)

    def fetch_ahead(self, order: Sequence[Unit], *, latest_first: bool, most: int | None = None) -> None:
        """Between steps: fetches the first units of `order`, at most `most`, into the slots.

        All updates of these units have been submitted. `latest_first`: the last of them is updated first, and so it is
        fetched first. See Note [Fetches ahead of a step].
        """
        if self._in_place:
            return
        self.forget(everything=True)
        loaded: list[Unit | None] = [None] * len(self._slots)
        found: list[tuple[Unit, WeightSlot]] = []
        while len(found) != most and (fetch := self._policy.choose(loaded, (), order[:LOOK_AHEAD])) is not None:
            fetch.put_into(loaded)
            found.append((fetch.unit, self._slots[fetch.slot]))
        for unit, slot in reversed(found) if latest_first else found:
            after, pieces = self._before_fetch(unit, slot), self._pieces(unit, slot)
            self._fetched(unit, slot, self._h2d.copy(pieces, after=after, label=f"fetch {unit.name}"))
            slot.ahead = versions_of(unit)

    def fetched_ahead(self) -> list[Unit]:
        """The units that were fetched ahead and have not been used."""
        return [slot.unit for slot in self._slots if slot.unit is not None and slot.ahead is not None]

    def drop_ahead(self) -> None:
        """Drops units that were fetched ahead: somebody may have changed the host's weights since."""
        for slot in self._slots:
            if slot.ahead is not None:
                slot.unit = slot.ahead = None

    def leave(self, slot: WeightSlot, end: Mark) -> None:
        """Records the end of the visit that used the slot."""
        slot.released = end

    def forget(self, *, everything: bool = False) -> None:
        """Marks the slots as out of date, because the host's weights may have changed.

        `everything`: also those with no known change, which stay on the device or were fetched ahead of a step.
        """
        for slot in self._slots:
            if everything or slot.unit is None or slot.ahead != versions_of(slot.unit):
                slot.unit = slot.ahead = None

    def all_tensors(self) -> Iterator[torch.Tensor]:
        """All tensors of units that have been in a slot."""
        for tensors in self._tensors.values():
            yield from (tensor for _, tensor in tensors.pairs)

    def memory(self, unit: Unit) -> torch.Tensor | None:
        """The device memory of a unit whose weights stay on the device; None here, where none do."""
        return None

    def updatable_after(self, unit: Unit) -> list[Mark]:
        """The marks after which the device can update a unit's weights that stay there; none here."""
        return []

    def refresh(self, unit: Unit, runs: Sequence[Span], after: Mark) -> Mark | None:
        """Called when the host has updated a part of a unit. Here the unit is fetched only when it is needed."""
        return None

    def updated(self, unit: Unit, mark: Mark) -> None:
        """Called when the device has updated a part of a unit and copied it to the host. Does nothing here."""

    def renew(self, unit: Unit) -> None:
        """Marks a unit as out of date because other ranks have updated parts of it."""
        for slot in self._slots:
            if slot.unit is unit:
                slot.unit = None

    def close(self) -> None:
        """Frees the device's memory."""
        self._slots = []
        self._tensors.clear()

    def _before_fetch(self, unit: Unit, slot: WeightSlot) -> list[Mark]:
        """The marks after which the unit can be fetched. (Fetches that came before are on the same lane.)"""
        released, other = [slot.released], self._other_end(slot)
        if other is not None and overlap(slot, other, unit.nbytes):
            released.append(other.released)
        return [*(mark for mark in released if mark is not None), *self._server.weights_ready(unit)]

    def _pieces(self, unit: Unit, slot: WeightSlot) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The copies of a fetch. See Note [Pieces]."""
        size = piece_bytes(self._link.rate)
        return list(zip(slot.part(unit.nbytes).split(size), self._server.weights(unit).split(size), strict=True))

    def _fetched(self, unit: Unit, slot: WeightSlot, mark: Mark) -> None:
        self._link.observe(mark, unit.nbytes)
        self._server.record_fetch(unit, mark, unit.nbytes)
        other = self._other_end(slot)
        if other is not None and overlap(slot, other, unit.nbytes):
            other.unit = other.ahead = None  # overwritten
        slot.fill(unit, mark)
        self.fetches += 1

    def _set_sizes(self, sizes: SlotSizes) -> None:
        self._slots = ()  # frees the old memory before new memory is allocated
        self._policy = weight_slot_policy(sizes)
        memories = carve(sizes.memories, self._device)
        self._slots = [WeightSlot(*where) for where in memories_of(sizes, memories)]

    def _other_end(self, slot: WeightSlot) -> WeightSlot | None:
        """The slot with which this one shares its memory."""
        other = self._policy.sizes.other_end(slot.number)
        return None if other is None else self._slots[other]

    def _next_fetch(self, unit: Unit, upcoming: Sequence[Unit]) -> tuple[Unit, WeightSlot] | None:
        """The next unit to fetch, and its slot. If `unit` itself must be fetched, it comes first."""
        if self._in_place:
            return None
        loaded = [slot.unit for slot in self._slots]
        if unit in loaded:
            fetch = self._policy.choose(loaded, (loaded.index(unit),), upcoming[:LOOK_AHEAD])
        else:
            fetch = self._policy.choose(loaded, (), [unit, *upcoming[:LOOK_AHEAD]])
            assert fetch is not None, "the unit that is needed now can always be fetched"
        return None if fetch is None else (fetch.unit, self._slots[fetch.slot])

    def _slot_of(self, unit: Unit) -> WeightSlot:
        return self._slots[0] if self._in_place else next(slot for slot in self._slots if slot.unit is unit)

    def _tensors_in(self, slot: WeightSlot, unit: Unit) -> UnitTensors:
        """The unit's tensors, which refer to the memory of this slot from now on."""
        moves = self._moves and not self._in_place
        if unit not in slot.views:
            memory = self._server.weights(unit) if self._in_place else slot.part(unit.nbytes)
            slot.views[unit] = views_in(unit, memory, alone=moves)
        views = slot.views[unit]
        if unit not in self._tensors:
            self._tensors[unit] = UnitTensors(unit, views, self._collect, moves=moves)
        self._tensors[unit].move_to(views)
        return self._tensors[unit]
