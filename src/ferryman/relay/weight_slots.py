"""Slots for weights: device memory that units pass through. All of it is allocated once.

Which unit goes into which slot is decided by a pure function of what the slots hold and what is needed next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from ferryman.model.spans import Span
from ferryman.model.units import Item, Unit
from ferryman.relay.parameter_server import ParameterServer
from ferryman.runtime.lanes import Lane
from ferryman.runtime.marks import Mark

T = TypeVar("T")

Collect = Callable[[Unit, Item, torch.Tensor], None]  # takes the gradient of a unit's parameter as soon as it is there

_LOOK_AHEAD = 64  # visits


def next_use(unit: T | None, upcoming: Sequence[T]) -> int:
    """How many visits from now; more than any if it is not among them."""
    try:
        return upcoming.index(unit)
    except ValueError:
        return len(upcoming)


def choose_fetch(loaded: Sequence[T | None], busy: Collection[int], upcoming: Sequence[T]) -> tuple[T, int] | None:
    """The next unit to fetch, and the slot to put it in; None while it is too early for any.

    The unit is the first needed that no slot has. Its slot is the one whose unit, at the time it comes, is needed
    last (Belady's rule), other than that of the visit before it; it is fetched as soon as that slot is free, that is,
    neither in `busy` nor needed once more until then.
    """
    for distance, unit in enumerate(upcoming):
        if unit in loaded:
            continue
        excluded = busy if distance == 0 else {loaded.index(upcoming[distance - 1])}
        slots = [slot for slot in range(len(loaded)) if slot not in excluded]
        if not slots:
            return None
        slot = max(slots, key=lambda slot: next_use(loaded[slot], upcoming[distance:]))
        return None if slot in busy or loaded[slot] in upcoming[:distance] else (unit, slot)
    return None


def fetched_visits(order: Sequence[T], slots: int) -> list[int]:
    """The visits of a step of this order for which their unit is fetched, with empty slots at its start."""
    loaded: list[T | None] = [None] * slots
    found: list[int] = []
    for at, unit in enumerate(order):
        if unit not in loaded:
            chosen = choose_fetch(loaded, (), order[at : at + _LOOK_AHEAD])
            assert chosen is not None, "the unit that is needed now can always be fetched"
            loaded[chosen[1]] = unit
            found.append(at)
        upcoming = order[at + 1 : at + 1 + _LOOK_AHEAD]
        while (ahead := choose_fetch(loaded, {loaded.index(unit)}, upcoming)) is not None:
            loaded[ahead[1]] = ahead[0]
            found.append(at + 1 + upcoming.index(ahead[0]))
    return found


def count_fetches(order: Sequence[T], slots: int) -> int:
    """How many fetches a step of this order takes."""
    return len(fetched_visits(order, slots))


@dataclass(eq=False)
class WeightSlot:
    """Device memory for the weights of one unit at a time."""

    memory: torch.Tensor  # bytes
    unit: Unit | None = None  # whose weights it has, or is about to have
    fetched: Mark | None = None  # the end of the copy that brings them
    released: Mark | None = None  # the end of the last visit that used the slot
    tensors: dict[Unit, list[tuple[Item, torch.Tensor]]] = field(default_factory=dict)  # views of `memory`, made once

    def fill(self, unit: Unit, fetched: Mark) -> None:
        self.unit, self.fetched = unit, fetched

    def ready(self) -> list[Mark]:
        """The marks after which the unit's weights can be used."""
        return [] if self.fetched is None else [self.fetched]


class UnitOnDevice(NamedTuple):
    """A unit's tensors on the device, and the marks after which they can be used."""

    slot: WeightSlot
    tensors: list[tuple[Item, torch.Tensor]]
    ready: list[Mark]


class WeightSlots:
    """Weights on the device. Where the device is the host itself, units are used where they are."""

    def __init__(self, device: torch.device, count: int, server: ParameterServer, h2d: Lane, collect: Collect) -> None:
        self.fetches = 0
        self._device = device
        self._collect = collect
        self._in_place = device.type == "cpu"
        self._server = server
        self._h2d = h2d
        # In place one slot, without memory of its own, has the tensors of all units.
        self._slots: Sequence[WeightSlot] = [self._make_slot(0) for _ in range(1 if self._in_place else count)]

    def make_room_for(self, units: Sequence[Unit]) -> None:
        """Between steps: each slot can take any of these units from now on. Tensors of other units are dropped."""
        largest = 0 if self._in_place else max(unit.nbytes for unit in units)
        if any(slot.memory.nbytes != largest for slot in self._slots):
            count, self._slots = len(self._slots), []  # gives the old memory back before the new is allocated
            self._slots = [self._make_slot(largest) for _ in range(count)]
        for slot in self._slots:
            slot.tensors = {unit: tensors for unit, tensors in slot.tensors.items() if unit in units}
        self.forget()

    def enter(self, unit: Unit, upcoming: Sequence[Unit]) -> UnitOnDevice:
        """Begins to fetch the unit, if no slot has it, and those of the `upcoming` units for which there is room."""
        while (needed := self._next_fetch(unit, upcoming)) is not None:
            coming, slot = needed
            source, target = self._server.weights(coming), slot.memory[: coming.nbytes]
            after = [*([] if slot.released is None else [slot.released]), *self._server.weights_ready(coming)]
            mark = self._h2d.copy([(target, source)], after=after, label=f"fetch {coming.name}")
            self._server.record_fetch(coming, mark, coming.nbytes)
            slot.fill(coming, mark)
            self.fetches += 1
        slot = self._slot_of(unit)
        ready = self._server.weights_ready(unit) if self._in_place else slot.ready()
        return UnitOnDevice(slot, self._tensors(unit, slot), ready)

    def leave(self, slot: WeightSlot, end: Mark) -> None:
        """The visit that used the slot ends with this mark."""
        slot.released = end

    def forget(self, *, everything: bool = False) -> None:
        """The host's weights may have changed: what the slots have is out of date.

        `everything` is for weights that stay on the device: also those of which no change is known.
        """
        for slot in self._slots:
            slot.unit = None

    def all_tensors(self) -> Iterator[torch.Tensor]:
        """Those that units have had in the slots so far."""
        for slot in self._slots:
            for tensors in slot.tensors.values():
                yield from (tensor for _, tensor in tensors)

    def memory(self, unit: Unit) -> torch.Tensor | None:
        """The memory of a unit whose weights stay on the device; here, of none."""
        return None

    def updatable_after(self, unit: Unit) -> list[Mark]:
        """The marks after which the device can update weights that stay there; here there are none."""
        return []

    def refresh(self, unit: Unit, runs: Sequence[Span], after: Mark) -> Mark | None:
        """The host has updated a part of a unit. It is fetched when it is needed, and not before."""
        return None

    def updated(self, unit: Unit, mark: Mark) -> None:
        """The device has updated a part of a unit and copied it to the host. It is fetched when it is needed."""

    def renew(self, unit: Unit) -> None:
        """Other ranks have updated parts of a unit: it must be fetched again."""
        for slot in self._slots:
            if slot.unit is unit:
                slot.unit = None

    def close(self) -> None:
        """Gives the device's memory back."""
        self._slots = []

    def _make_slot(self, nbytes: int) -> WeightSlot:
        return WeightSlot(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def _next_fetch(self, unit: Unit, upcoming: Sequence[Unit]) -> tuple[Unit, WeightSlot] | None:
        """What to fetch next, and into which slot: first the unit itself, if need be."""
        if self._in_place:
            return None
        loaded = [slot.unit for slot in self._slots]
        if unit in loaded:
            chosen = choose_fetch(loaded, {loaded.index(unit)}, upcoming[:_LOOK_AHEAD])
        else:
            chosen = choose_fetch(loaded, (), [unit, *upcoming[:_LOOK_AHEAD]])
            assert chosen is not None, "the unit that is needed now can always be fetched"
        return None if chosen is None else (chosen[0], self._slots[chosen[1]])

    def _slot_of(self, unit: Unit) -> WeightSlot:
        return self._slots[0] if self._in_place else next(slot for slot in self._slots if slot.unit is unit)

    def _tensors(self, unit: Unit, slot: WeightSlot) -> list[tuple[Item, torch.Tensor]]:
        """The unit's tensors in a slot: parameters are of that type, so that autograd and modules accept them."""
        if unit not in slot.tensors:
            flat = self._server.weights(unit) if self._in_place else slot.memory
            with torch.inference_mode(False):  # they outlive the evaluation that they may be made in
                slot.tensors[unit] = [(item, self._as_member(unit, item, item.view(flat).data)) for item in unit.items]
        return slot.tensors[unit]

    def _as_member(self, unit: Unit, item: Item, view: torch.Tensor) -> torch.Tensor:
        if not isinstance(item.tensor, nn.Parameter):
            return view
        parameter = nn.Parameter(view, requires_grad=item.trains)
        if item.trains:
            # Taken as soon as it is there: otherwise a unit's gradients would be in memory twice.
            parameter.register_post_accumulate_grad_hook(lambda p: self._collect(unit, item, p))
        return parameter
