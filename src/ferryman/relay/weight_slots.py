"""Slots for weights: device memory that units pass through. All of it is allocated once.

Which unit goes into which slot is decided by a pure function of what the slots hold and
what is needed next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
from torch import nn

from ferryman.model.spans import Span
from ferryman.model.units import Item, Unit
from ferryman.runtime.lanes import Lane
from ferryman.runtime.marks import Mark
from ferryman.server.server import Server

T = TypeVar("T")

Collect = Callable[[Item, torch.Tensor], None]  # takes the gradient from a parameter that has one

_LOOK_AHEAD = 64  # visits


def next_use(unit: T | None, upcoming: Sequence[T]) -> int:
    """How many visits from now; more than any if it is not among them."""
    try:
        return upcoming.index(unit)
    except ValueError:
        return len(upcoming)


def choose_fetch(held: Sequence[T | None], busy: Collection[int], upcoming: Sequence[T]) -> tuple[T, int] | None:
    """The next unit to fetch, and the slot to put it in; None while it is too early for any.

    The unit is the first needed that no slot holds. Its slot is the one whose unit, at the time it comes, is needed
    last (Belady's rule), other than that of the visit before it; it is fetched as soon as that slot is free, that is,
    neither in `busy` nor needed once more until then.
    """
    for distance, unit in enumerate(upcoming):
        if unit in held:
            continue
        kept = busy if distance == 0 else {held.index(upcoming[distance - 1])}
        slots = [slot for slot in range(len(held)) if slot not in kept]
        if not slots:
            return None
        slot = max(slots, key=lambda slot: next_use(held[slot], upcoming[distance:]))
        return None if slot in busy or held[slot] in upcoming[:distance] else (unit, slot)
    return None


def fetched_visits(order: Sequence[T], slots: int) -> list[int]:
    """The visits of a step of this order for which their unit is fetched, with empty slots at its start."""
    held: list[T | None] = [None] * slots
    found: list[int] = []
    for at, unit in enumerate(order):
        if unit not in held:
            chosen = choose_fetch(held, (), order[at : at + _LOOK_AHEAD])
            assert chosen is not None, "the unit that is needed now can always be fetched"
            held[chosen[1]] = unit
            found.append(at)
        upcoming = order[at + 1 : at + 1 + _LOOK_AHEAD]
        while (ahead := choose_fetch(held, {held.index(unit)}, upcoming)) is not None:
            held[ahead[1]] = ahead[0]
            found.append(at + 1 + upcoming.index(ahead[0]))
    return found


def count_fetches(order: Sequence[T], slots: int) -> int:
    """How many fetches a step of this order takes."""
    return len(fetched_visits(order, slots))


class WeightSlots:
    """Weights on the device. Where the device is the host itself, units are used where they are."""

    def __init__(self, device: torch.device, count: int, server: Server, h2d: Lane, collect: Collect) -> None:
        self.fetches = 0
        self._device = device
        self._collect = collect
        self._in_place = device.type == "cpu"
        self._server = server
        self._h2d = h2d
        slots = 0 if self._in_place else count
        self._memory = [torch.empty(0, dtype=torch.uint8, device=device)] * slots
        self._held: list[Unit | None] = [None] * slots
        self._ready: list[Mark | None] = [None] * slots
        self._free: list[Mark | None] = [None] * slots  # the end of the visit that used the slot last
        self._bound: dict[tuple[Unit, int], list[tuple[Item, torch.Tensor]]] = {}

    def make_room_for(self, units: Sequence[Unit]) -> None:
        """Between steps: each slot is as large as the largest of these from now on, and nothing of others is kept."""
        largest = max(unit.nbytes for unit in units)
        if any(memory.nbytes != largest for memory in self._memory):
            self._bound.clear()
            count = len(self._memory)
            self._memory.clear()  # before the others are there
            self._memory = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(count)]
        self._bound = {key: tensors for key, tensors in self._bound.items() if key[0] in units}
        self.forget()

    def enter(self, unit: Unit, upcoming: Sequence[Unit]) -> tuple[int, list[Mark]]:
        """The slot with the unit's weights, and the marks after which they are there. Begins to fetch what is next."""
        if self._in_place:
            return -1, self._server.weights_ready(unit)
        if unit not in self._held:
            chosen = choose_fetch(self._held, (), [unit, *upcoming[:_LOOK_AHEAD]])
            assert chosen is not None, "the unit that is needed now can always be fetched"
            self._fetch(*chosen)
        slot = self._held.index(unit)
        while (ahead := choose_fetch(self._held, {slot}, upcoming[:_LOOK_AHEAD])) is not None:
            self._fetch(*ahead)
        return slot, [mark for mark in [self._ready[slot]] if mark is not None]

    def leave(self, slot: int, end: Mark) -> None:
        if not self._in_place:
            self._free[slot] = end

    def forget(self, *, everything: bool = False) -> None:
        """The host's weights may have changed: what the slots hold is old. `everything`: whether they have or not."""
        self._held = [None] * len(self._held)

    def memory(self, unit: Unit) -> torch.Tensor | None:
        """Of a unit whose weights stay on the device: here, of none."""
        return None

    def settle(self, unit: Unit) -> list[Mark]:
        """After which the device can update weights that stay there."""
        return []

    def refresh(self, unit: Unit, runs: Sequence[Span], after: Mark) -> Mark | None:
        """The host has updated a part of a unit, which is fetched when it is needed."""
        return None

    def updated(self, unit: Unit, mark: Mark) -> None:
        """The device has, and has told the host."""

    def renew(self, unit: Unit) -> None:
        """Other ranks have; it is fetched when it is needed."""
        self._held = [None if held is unit else held for held in self._held]

    def tensors(self, unit: Unit, slot: int) -> list[tuple[Item, torch.Tensor]]:
        """The unit's tensors in a slot, made once: parameters, so that autograd and modules take them for such."""
        if (unit, slot) not in self._bound:
            flat = self._server.weights(unit) if self._in_place else self._memory[slot]
            with torch.inference_mode(False):  # they outlive the evaluation that they may be made in
                self._bound[unit, slot] = [(item, self._as_member(item, item.view(flat).data)) for item in unit.items]
        return self._bound[unit, slot]

    def close(self) -> None:
        self._bound.clear()
        self._memory.clear()

    def _as_member(self, item: Item, view: torch.Tensor) -> torch.Tensor:
        if not isinstance(item.tensor, nn.Parameter):
            return view
        parameter = nn.Parameter(view, requires_grad=item.trains)
        if item.trains:
            # Taken as soon as it is there: no second copy of a unit's gradients comes to be.
            parameter.register_post_accumulate_grad_hook(lambda p: self._collect(item, p))
        return parameter

    def _fetch(self, unit: Unit, slot: int) -> None:
        source, target = self._server.weights(unit), self._memory[slot][: unit.nbytes]
        free = self._free[slot]
        after = [*([] if free is None else [free]), *self._server.weights_ready(unit)]
        mark = self._h2d.copy([(target, source)], after=after, label=f"fetch {unit.name}")
        self._server.record_fetch(unit, mark, unit.nbytes)
        self._submitted(unit, slot, mark)
        self.fetches += 1

    def _submitted(self, unit: Unit, slot: int, mark: Mark) -> None:
        self._held[slot], self._ready[slot] = unit, mark
