"""Slots for gradients: device memory in which a unit's gradients are summed. All of it is allocated once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ferryman.model.units import (
    Item,
    Unit,
    aligned,
    gradient_bytes,
    gradient_views,
    landing_bytes,
    landing_dtype,
    narrow_bytes,
)
from ferryman.plan.slot_sizes import SlotSizes, gradient_slot_bytes, gradient_slot_sizes
from ferryman.relay.parameter_server import ParameterServer
from ferryman.relay.slot import Slot, memories_of, overlap
from ferryman.runtime.device_memory import carve
from ferryman.runtime.lanes import Lane
from ferryman.runtime.marks import Mark


class Sums(NamedTuple):
    """A unit's gradients in a slot."""

    wide: torch.Tensor  # bytes of the sums in float32
    narrow: torch.Tensor  # bytes of the sums in the dtype in which they are sent, if that is not float32
    wide_views: Mapping[Item, torch.Tensor]  # for the unit's parameters
    narrow_views: Mapping[Item, torch.Tensor]


_NO_SUMS = Sums(
    torch.empty(0, dtype=torch.uint8, device="cpu"), torch.empty(0, dtype=torch.uint8, device="cpu"), {}, {}
)


@dataclass(eq=False)
class GradientSlot(Slot):
    """Device memory for the gradients of one unit at a time."""

    serves: tuple[Unit, ...] = ()  # the units that may take it
    sums: Sums = _NO_SUMS  # those of `unit`
    places: dict[Unit, Sums] = field(default_factory=dict)  # made once
    free: list[Mark] = field(default_factory=list)  # the marks after which the slot can be written
    used: Mark | None = None  # the end of the last visit that added to the slot
    taken_at: int = 0  # the number of flushes before the unit took the slot
    emptied_at: int = 0  # the number of flushes when the slot was emptied

    def take(self, unit: Unit, nbytes: int, flushes: int) -> None:
        self.unit, self.taken, self.taken_at = unit, nbytes, flushes
        if unit not in self.places:
            memory, end = self.part(nbytes), gradient_bytes(unit)
            wide, narrow = memory[:end], memory[aligned(end) :][: narrow_bytes(unit)]
            views = gradient_views(unit, narrow, landing_dtype(unit)) if narrow.nbytes else {}
            self.places[unit] = Sums(wide, narrow, gradient_views(unit, wide), views)
        self.sums = self.places[unit]

    def drop(self) -> None:
        self.unit, self.sums = None, _NO_SUMS


class GradientSlots:
    """Sums the gradients of a unit over micro-batches in float32, and then sends them to the host.

    In a step that ends with an update, a unit's gradients are sent to the server in the dtype of the weights when its
    backward is over. In other steps they are copied to the host in float32 and left for the user. If another unit needs
    the slot before the backward is over, the sums are also copied to the host in float32, and fetched again when the
    unit is back.

    Residents have a slot of their own.
    """

    def __init__(
        self, device: torch.device, count: int, residents: Unit, server: ParameterServer, h2d: Lane, d2h: Lane
    ) -> None:
        self._device = device
        self._server, self._h2d, self._d2h = server, h2d, d2h
        self._count = count
        self._sizes = SlotSizes(0, is_single=True)
        self._slots: list[GradientSlot] = []
        self._residents = residents
        (memory,) = carve([self._bytes_of(residents)], device)
        self._resident_slot = GradientSlot(memory, serves=(residents,))
        self._flushes = 0
        self._for_update = False
        self._discards = False
        self._on_host: dict[Unit, Mark] = {}  # units with sums on the host, and the ends of the copies to the host
        self._added: set[Item] = set()  # tensors that have a gradient, from this step or an earlier one
        self._narrowed: set[Item] = set()  # tensors whose sum is in `narrow` already

    def make_room_for(self, units: Sequence[Unit]) -> None:
        """Between steps: resizes the slots so that they can hold the gradients of these units."""
        assert all(slot.unit is None for slot in self._all_slots()), "between steps all gradients are on the host"
        sizes, serves = gradient_slot_sizes(units, self._count, self._server.has_optimizer)
        if sizes != self._sizes or not self._slots:
            self._slots.clear()  # frees the old memory before new memory is allocated
            memories = carve(sizes.memories, self._device)
            self._sizes, self._slots = sizes, [GradientSlot(*where) for where in memories_of(sizes, memories)]
        for slot, served in zip(self._slots, serves, strict=True):
            slot.serves = served
        there = {*units, self._residents}
        for slot in self._slots:
            slot.places = {unit: place for unit, place in slot.places.items() if unit in there}
        self._on_host = {unit: mark for unit, mark in self._on_host.items() if unit in there}
        self._added.intersection_update(item for unit in there for item in unit.items)

    def begin(self, *, for_update: bool) -> None:
        """Begins a step. `for_update`: the step ends with an update, so gradients are sent to the server."""
        self._for_update = for_update

    @contextlib.contextmanager
    def discarding(self) -> Iterator[None]:
        """Context in which gradients are summed as usual and then dropped. Earlier gradients do not change."""
        added, self._added, self._discards = self._added, set(), True
        try:
            yield
        finally:
            self._added, self._discards = added, False
            for slot in self._all_slots():
                slot.drop()

    def enter(self, unit: Unit) -> list[Mark]:
        """Gives the unit a slot, if it has none. Returns the marks after which gradients can be added there."""
        slot = self._slot_of(unit)
        if slot is None:
            slot = self._take_slot(unit)
            if unit in self._on_host and not self._discards:  # continue from these sums
                source, target = self._server.gradient_buffer(unit), slot.sums.wide
                after, label = [*slot.free, self._on_host.pop(unit)], f"fetch gradients of {unit.name}"
                slot.free = [self._h2d.copy([(target, source)], after=after, label=label)]
        return slot.free

    def add(self, unit: Unit, item: Item, gradient: torch.Tensor, *, last: bool) -> torch.Tensor | None:
        """Adds one call's gradient in float32. As in AccumulateGrad, the first is copied and the others are added.

        The `last` one in a step that ends with an update is written directly to the memory that will be sent.

        Returns the sum in float32 to which further gradients in this visit are added as they are; None if they are
        scaled, or if the last one goes elsewhere.
        """
        slot = self._slot_of(unit)
        assert slot is not None, "a call enters the unit's slot before its backward"
        into, first = slot.sums.wide_views[item], item not in self._added
        self._added.add(item)
        scale, sends = self._server.loss_scale, self._sends(unit)
        if scale != 1:
            if first:
                into.copy_(gradient).mul_(1 / scale)
            else:
                into.add_(gradient, alpha=1 / scale)
        elif last and sends:
            narrow = slot.sums.narrow_views[item]
            if first:
                narrow.copy_(gradient)
            else:
                torch.add(into, gradient, out=narrow)
            self._narrowed.add(item)
        elif first:
            into.copy_(gradient)
        else:
            into.add_(gradient)
        return None if scale != 1 or sends else into

    def complete(self, unit: Unit) -> None:
        """At the end of the unit's backward: converts the remaining sums to the dtype in which they are sent.

        The kernels are launched on the caller's lane.
        """
        slot = self._slot_of(unit)
        if slot is None or not self._sends(unit):
            return
        for item, narrow in slot.sums.narrow_views.items():
            if item in self._added and item not in self._narrowed:
                torch.mul(slot.sums.wide_views[item], self._server.loss_scale, out=narrow)

    def complete_all(self) -> None:
        """Completes all units that have a slot."""
        for slot in self._all_slots():
            if slot.unit is not None:
                self.complete(slot.unit)

    def leave(self, unit: Unit, end: Mark) -> None:
        """Records the end of a visit that may have added to the unit's gradients."""
        slot = self._slot_of(unit)
        if slot is not None:
            slot.used = end

    def flush(self, unit: Unit, *, for_update: bool | None = None) -> None:
        """Starts to empty the unit's slot, if it has one.

        `for_update`: send the gradients to the server for an update; otherwise copy them to the host in float32. The
        default is the argument of `begin`.
        """
        slot = self._slot_of(unit)
        if slot is None:
            return
        self._flushes += 1
        slot.emptied_at = self._flushes
        after = [] if slot.used is None else [slot.used]
        if self._discards:
            slot.free = after
        elif self._for_update if for_update is None else for_update:
            memory = slot.sums.narrow if narrow_bytes(unit) else slot.sums.wide
            flat = memory[: landing_bytes(unit)].view(landing_dtype(unit))
            items = [item for item in unit.trained if item in self._added]
            slot.free = self._server.send_gradients(unit, flat, items, after)
        else:
            copies = [(self._server.gradient_buffer(unit), slot.sums.wide)]
            after += self._server.weights_ready(unit)
            self._on_host[unit] = self._d2h.copy(copies, after=after, label=f"flush {unit.name}")
            slot.free = [self._on_host[unit]]
        slot.drop()

    def flush_all(self, end: Mark) -> None:
        """At the end of a step: flushes residents, and units with calls that had no backward."""
        for slot in self._all_slots():
            if slot.unit is not None:
                slot.used = end
                self.flush(slot.unit)

    def wait(self) -> None:
        """Blocks until all gradients that are left for the user are on the host."""
        for mark in self._on_host.values():
            mark.wait()

    @property
    def on_host(self) -> dict[Unit, list[Item]]:
        """Units whose sums are on the host in float32, each with its tensors that have a gradient."""
        return {unit: [item for item in unit.trained if item in self._added] for unit in self._on_host}

    @property
    def has_one_for_each(self) -> bool:
        """Whether each unit has a slot of its own."""
        return all(len(slot.serves) == 1 for slot in self._slots)

    @property
    def are_empty(self) -> bool:
        """Whether no tensor has a gradient."""
        return not self._added

    def has(self, item: Item) -> bool:
        return item in self._added

    def add_from_user(self, unit: Unit, item: Item, mark: Mark) -> None:
        """Registers a gradient that the user put into the host's buffer before the mark. Later ones are added to it."""
        self._added.add(item)
        self._on_host.setdefault(unit, mark)

    def clear_of(self, items: Sequence[Item]) -> None:
        """Clears the gradients of these tensors."""
        self._added.difference_update(items)
        self._on_host = {u: mark for u, mark in self._on_host.items() if any(item in self._added for item in u.trained)}

    def clear(self) -> None:
        """Clears all gradients."""
        self._added.clear()
        self._narrowed.clear()
        self._on_host.clear()
        for slot in self._all_slots():
            slot.drop()

    def forget_marks(self) -> None:
        """After a failure, when all lanes are idle: drops all marks, and gradients that did not arrive on the host."""
        self._on_host = {unit: mark for unit, mark in self._on_host.items() if not mark.failed()}
        self._added.intersection_update(item for unit in self._on_host for item in unit.items)
        for slot in self._all_slots():
            slot.free, slot.used = [], None

    def close(self) -> None:
        """Frees the device's memory."""
        self.clear()
        self._slots.clear()
        self._resident_slot = GradientSlot(torch.empty(0, dtype=torch.uint8, device=self._device))

    def _bytes_of(self, unit: Unit) -> int:
        return gradient_slot_bytes(unit, self._server.has_optimizer)

    def _all_slots(self) -> list[GradientSlot]:
        return [*self._slots, self._resident_slot]

    def _slot_of(self, unit: Unit) -> GradientSlot | None:
        if unit is self._residents:
            return self._resident_slot if self._resident_slot.unit is unit else None
        for slot in self._slots:
            if slot.unit is unit:
                return slot
        return None

    def _take_slot(self, unit: Unit) -> GradientSlot:
        slot, nbytes = self._resident_slot, self._bytes_of(unit)
        if unit is not self._residents:
            while not (free := [slot for slot in self._serving(unit) if self._is_free(slot, nbytes)]):
                longest = min((s for s in self._serving(unit) if s.unit is not None), key=lambda slot: slot.taken_at)
                assert longest.unit is not None
                self.flush(longest.unit, for_update=False)
            # Take the slot that was flushed first: the flushes of the others may still be running.
            slot = min(free, key=lambda slot: slot.emptied_at)
            other = self._other_end(slot)
            if other is not None and overlap(slot, other, nbytes):
                slot.free = [*slot.free, *other.free]
        slot.take(unit, nbytes, self._flushes)
        return slot

    def _serving(self, unit: Unit) -> list[GradientSlot]:
        return [slot for slot in self._slots if unit in slot.serves]

    def _is_free(self, slot: GradientSlot, nbytes: int) -> bool:
        other = self._other_end(slot)
        return slot.unit is None and (other is None or other.unit is None or not overlap(slot, other, nbytes))

    def _other_end(self, slot: GradientSlot) -> GradientSlot | None:
        """The slot with which this one shares its memory."""
        other = self._sizes.other_end(slot.number)
        return None if other is None else self._slots[other]

    def _sends(self, unit: Unit) -> bool:
        """Whether the unit's gradients are sent for an update in a dtype other than float32."""
        return self._for_update and not self._discards and narrow_bytes(unit) > 0
