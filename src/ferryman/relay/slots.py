"""Device memory that units pass through: slots for weights, slots for gradients.

All of it is allocated once. Which unit goes into which slot is decided by a pure function of what the slots hold and
what is needed next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from ferryman.lanes import Lane, Mark
from ferryman.server.server import Server
from ferryman.units import Item, Unit, gradient_bytes, gradient_views, landing_bytes, landing_dtype, narrow_bytes

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


def count_fetches(order: Sequence[T], slots: int) -> int:
    """How many fetches a step of this order takes, with empty slots at its start."""
    held: list[T | None] = [None] * slots
    fetches = 0
    for at, unit in enumerate(order):
        if unit not in held:
            chosen = choose_fetch(held, (), order[at : at + _LOOK_AHEAD])
            assert chosen is not None, "the unit that is needed now can always be fetched"
            held[chosen[1]] = unit
            fetches += 1
        upcoming = order[at + 1 : at + 1 + _LOOK_AHEAD]
        while (ahead := choose_fetch(held, {held.index(unit)}, upcoming)) is not None:
            held[ahead[1]] = ahead[0]
            fetches += 1
    return fetches


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

    def enter(self, unit: Unit, upcoming: Sequence[Unit]) -> tuple[int, Mark | None]:
        """The slot with the unit's weights, and the mark after which they are there. Begins to fetch what is next."""
        if self._in_place:
            return -1, self._server.ready(unit)
        if unit not in self._held:
            chosen = choose_fetch(self._held, (), [unit, *upcoming[:_LOOK_AHEAD]])
            assert chosen is not None, "the unit that is needed now can always be fetched"
            self._fetch(*chosen)
        slot = self._held.index(unit)
        while (ahead := choose_fetch(self._held, {slot}, upcoming[:_LOOK_AHEAD])) is not None:
            self._fetch(*ahead)
        return slot, self._ready[slot]

    def leave(self, slot: int, end: Mark) -> None:
        if not self._in_place:
            self._free[slot] = end

    def forget(self) -> None:
        """The host's weights have changed: what the slots hold is old."""
        self._held = [None] * len(self._held)

    def tensors(self, unit: Unit, slot: int) -> list[tuple[Item, torch.Tensor]]:
        """The unit's tensors in a slot, made once: parameters, so that autograd and modules take them for such."""
        if (unit, slot) not in self._bound:
            flat = self._server.store.weights(unit) if self._in_place else self._memory[slot]
            with torch.inference_mode(False):  # they outlive the evaluation that they may be made in
                self._bound[unit, slot] = [(item, self._as_member(item, item.view(flat))) for item in unit.items]
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
        source, target = self._server.store.weights(unit), self._memory[slot][: unit.nbytes]
        before = [self._free[slot], self._server.ready(unit)]
        self._held[slot] = unit
        self._ready[slot] = self._h2d.submit(
            lambda: target.copy_(source, non_blocking=True),
            after=[mark for mark in before if mark is not None],
            label=f"fetch {unit.name}",
            nbytes=unit.nbytes,
        )
        self.fetches += 1


def bind(tensors: Sequence[tuple[Item, torch.Tensor]]) -> None:
    for item, tensor in tensors:
        for place in item.places:
            place.bind(tensor)


class GradientSlots:
    """Where the gradients of a unit's micro-batches are added up in float32, until they cross to the host.

    In a step that ends with an update they cross for good, in the dtype of the weights and by subgroups, when the
    unit's backward is over. Else they cross in float32 and are *kept* there; so are those of a unit whose slot is
    needed for another one before its backward is over. What is kept is fetched again when the unit is back.
    """

    def __init__(self, device: torch.device, count: int, server: Server, h2d: Lane, d2h: Lane) -> None:
        self.flushes = 0
        self._device = device
        self._server, self._h2d, self._d2h = server, h2d, d2h
        self._memory = [torch.empty(0, dtype=torch.uint8, device=device)] * count
        self._narrow = [torch.empty(0, dtype=torch.uint8, device=device)] * count  # as they cross, if not in float32
        self._for_good = False  # whether they cross for an update
        self._discards = False
        self._held: list[Unit | None] = [None] * count
        self._free: list[Mark | None] = [None] * count  # the end of the copy that emptied the slot
        self._used: list[Mark | None] = [None] * count  # the end of the visit that last added to it
        self._since: list[int] = [0] * count  # the flush before which the slot was taken
        self._emptied: list[int] = [0] * count  # the flush that emptied it last
        self._kept: dict[Unit, Mark] = {}  # units with gradients in float32 on the host, or on their way there
        self._added: set[Item] = set()  # tensors that have a gradient, from this sweep or an earlier one
        self._narrowed: set[Item] = set()  # of those, in the slots' other half already

    def make_room_for(self, units: Sequence[Unit]) -> None:
        """Between steps: each slot can hold the gradients of any of these from now on."""
        assert not any(self._held), "between steps all gradients are on the host"
        wide = max(gradient_bytes(unit) for unit in units)
        narrow = max(narrow_bytes(unit) for unit in units) if self._server.updates else 0
        self._resize(self._memory, wide)
        self._resize(self._narrow, narrow)
        self._kept = {unit: mark for unit, mark in self._kept.items() if unit in units}
        self._added.intersection_update(item for unit in units for item in unit.items)

    def _resize(self, memory: list[torch.Tensor], nbytes: int) -> None:
        if any(slot.nbytes != nbytes for slot in memory):
            count = len(memory)
            memory.clear()  # before the others are there
            memory += [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(count)]

    def begin(self, *, for_good: bool) -> None:
        """A step begins; `for_good`: it ends with an update."""
        self._for_good = for_good

    @contextlib.contextmanager
    def discarding(self) -> Iterator[None]:
        """Within, gradients are added up as ever and then forgotten; those there were are left alone."""
        added, self._added, self._discards = self._added, set(), True
        try:
            yield
        finally:
            self._added, self._discards = added, False
            self._held = [None] * len(self._held)

    def enter(self, unit: Unit) -> tuple[dict[Item, torch.Tensor], Mark | None]:
        """The views to add to, and the mark after which they may be used."""
        if unit in self._held:
            slot = self._held.index(unit)
            return gradient_views(unit, self._memory[slot]), self._free[slot]
        if None not in self._held:
            self._flush(min(range(len(self._held)), key=lambda slot: self._since[slot]), for_good=False)  # longest held
        # The one that was flushed first: the others' flushes may still be under way.
        slot = min((slot for slot, held in enumerate(self._held) if held is None), key=lambda slot: self._emptied[slot])
        self._held[slot], self._since[slot] = unit, self.flushes
        if unit in self._kept and not self._discards:  # go on from there
            source, target = self._server.store.gradients(unit), self._memory[slot][: gradient_bytes(unit)]
            after = [mark for mark in (self._free[slot], self._kept.pop(unit)) if mark is not None]
            self._free[slot] = self._h2d.submit(
                lambda: target.copy_(source, non_blocking=True),
                after=after,
                label=f"fetch gradients of {unit.name}",
                nbytes=target.nbytes,
            )
        return gradient_views(unit, self._memory[slot]), self._free[slot]

    def add(self, unit: Unit, item: Item, into: torch.Tensor, gradient: torch.Tensor, *, last: bool) -> None:
        """The first gradient is copied and the others are added, as AccumulateGrad does, but in float32.

        The `last` one of a step that ends with an update goes on into what will cross, in one pass.
        """
        first = item not in self._added
        self._added.add(item)
        scale = self._server.scale.value
        if scale != 1:
            if first:
                into.copy_(gradient).mul_(1 / scale)
            else:
                into.add_(gradient, alpha=1 / scale)
        elif last and self._for_good and not self._discards and narrow_bytes(unit):
            narrow = self._narrow_views(unit)[item]
            if first:
                narrow.copy_(gradient)
            else:
                torch.add(into, gradient, out=narrow)
            self._narrowed.add(item)
        elif first:
            into.copy_(gradient)
        else:
            into.add_(gradient)

    def complete(self, unit: Unit) -> None:
        """The unit's backward is over: what is not yet as it will cross is made so, on the lane of the caller."""
        if not self._for_good or self._discards or unit not in self._held or not narrow_bytes(unit):
            return
        wide = gradient_views(unit, self._memory[self._held.index(unit)])
        for item, narrow in self._narrow_views(unit).items():
            if item in self._added and item not in self._narrowed:
                torch.mul(wide[item], self._server.scale.value, out=narrow)

    def leave(self, unit: Unit, end: Mark, *, finished: bool) -> None:
        """A visit that may have added to the unit's gradients is over; `finished`: its backward is, too."""
        if unit not in self._held:
            return
        slot = self._held.index(unit)
        self._used[slot] = end
        if finished:
            self._flush(slot, for_good=self._for_good)

    def held(self) -> list[Unit]:
        return [unit for unit in self._held if unit is not None]

    def flush_all(self, end: Mark) -> None:
        """For units of which some calls had no backward, as their output was not used."""
        for slot, unit in enumerate(self._held):
            if unit is not None:
                self._used[slot] = end
                self._flush(slot, for_good=self._for_good)

    def wait(self) -> None:
        """Blocks until all gradients that are kept are on the host."""
        for mark in self._kept.values():
            mark.wait()

    @property
    def kept(self) -> dict[Unit, list[Item]]:
        """Units whose gradients are on the host in float32, and which tensors have some."""
        return {unit: [item for item in unit.trained if item in self._added] for unit in self._kept}

    def has(self, item: Item) -> bool:
        return item in self._added

    def take(self, unit: Unit, item: Item, mark: Mark) -> None:
        """A tensor's gradient is on the host since the mark, and is gone on from."""
        self._added.add(item)
        self._kept.setdefault(unit, mark)

    def clear_of(self, items: Sequence[Item]) -> None:
        """The gradients of these tensors start from nothing again."""
        self._added.difference_update(items)
        self._kept = {u: mark for u, mark in self._kept.items() if any(item in self._added for item in u.trained)}

    def clear(self) -> None:
        """Gradients start from nothing again."""
        self._added.clear()
        self._narrowed.clear()
        self._kept.clear()
        self._held = [None] * len(self._held)

    def forget_marks(self) -> None:
        """No lane has work any more: there is nothing to wait for, and what has not arrived is lost."""
        self._kept = {unit: mark for unit, mark in self._kept.items() if not mark.failed()}
        self._added.intersection_update(item for unit in self._kept for item in unit.items)
        self._free = [None] * len(self._free)
        self._used = [None] * len(self._used)

    def close(self) -> None:
        self.clear()
        self._memory.clear()
        self._narrow.clear()

    def _narrow_views(self, unit: Unit) -> dict[Item, torch.Tensor]:
        return gradient_views(unit, self._narrow[self._held.index(unit)], landing_dtype(unit))

    def _flush(self, slot: int, *, for_good: bool) -> None:
        unit, used = self._held[slot], self._used[slot]
        assert unit is not None
        self._held[slot] = None
        self.flushes += 1
        self._emptied[slot] = self.flushes
        if self._discards:
            self._free[slot] = used
        elif for_good:
            self._free[slot] = self._send(unit, slot, [used] if used is not None else [])
        else:
            source, target = self._memory[slot][: gradient_bytes(unit)], self._server.store.gradients(unit)
            before = [mark for mark in (used, self._server.ready(unit)) if mark is not None]
            self._free[slot] = self._kept[unit] = self._copy(unit, source, target, before)

    def _send(self, unit: Unit, slot: int, after: list[Mark]) -> Mark | None:
        """To the server, subgroup by subgroup."""
        dtype = landing_dtype(unit)
        memory = (self._narrow if narrow_bytes(unit) else self._memory)[slot]
        flat = memory[: landing_bytes(unit)].view(dtype)
        items = [item for item in unit.trained if item in self._added]
        mark = self._used[slot]
        for subgroup in self._server.subgroups(unit):
            target, before = self._server.receive(unit, subgroup)
            mark = self._copy(unit, flat[subgroup.start : subgroup.stop], target, [*after, *before])
            self._server.landed(unit, subgroup, target, mark, items)
        return mark

    def _copy(self, unit: Unit, source: torch.Tensor, target: torch.Tensor, after: list[Mark]) -> Mark:
        return self._d2h.submit(
            lambda: target.copy_(source, non_blocking=True),
            after=after,
            label=f"flush {unit.name}",
            nbytes=target.nbytes,
        )
