"""Slots for gradients: device memory where those of a unit are added up. All of it is allocated once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ferryman.model.units import Item, Unit, gradient_bytes, gradient_views, landing_bytes, landing_dtype, narrow_bytes
from ferryman.runtime.lanes import Lane
from ferryman.runtime.marks import Mark
from ferryman.server.server import Server


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
        self._free: list[list[Mark]] = [[] for _ in range(count)]  # the ends of what emptied the slot
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
        narrow = max(narrow_bytes(unit) for unit in units) if self._server.has_optimizer else 0
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

    def enter(self, unit: Unit) -> tuple[dict[Item, torch.Tensor], list[Mark]]:
        """The views to add to, and the marks after which they may be used."""
        if unit in self._held:
            slot = self._held.index(unit)
            return gradient_views(unit, self._memory[slot]), self._free[slot]
        if None not in self._held:
            self._flush(min(range(len(self._held)), key=lambda slot: self._since[slot]), for_good=False)  # longest held
        # The one that was flushed first: the others' flushes may still be under way.
        slot = min((slot for slot, held in enumerate(self._held) if held is None), key=lambda slot: self._emptied[slot])
        self._held[slot], self._since[slot] = unit, self.flushes
        if unit in self._kept and not self._discards:  # go on from there
            source, target = self._server.gradient_buffer(unit), self._memory[slot][: gradient_bytes(unit)]
            after, label = [*self._free[slot], self._kept.pop(unit)], f"fetch gradients of {unit.name}"
            self._free[slot] = [self._h2d.copy([(target, source)], after=after, label=label)]
        return gradient_views(unit, self._memory[slot]), self._free[slot]

    def add(self, unit: Unit, item: Item, into: torch.Tensor, gradient: torch.Tensor, *, last: bool) -> None:
        """The first gradient is copied and the others are added, as AccumulateGrad does, but in float32.

        The `last` one of a step that ends with an update goes on into what will cross, in one pass.
        """
        first = item not in self._added
        self._added.add(item)
        scale = self._server.loss_scale
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
                torch.mul(wide[item], self._server.loss_scale, out=narrow)

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
        self._free = [[] for _ in self._free]
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
        after = [] if used is None else [used]
        if self._discards:
            self._free[slot] = after
        elif for_good:
            memory = (self._narrow if narrow_bytes(unit) else self._memory)[slot]
            flat = memory[: landing_bytes(unit)].view(landing_dtype(unit))
            items = [item for item in unit.trained if item in self._added]
            self._free[slot] = self._server.send_gradients(unit, flat, items, after)
        else:
            source, target = self._memory[slot][: gradient_bytes(unit)], self._server.gradient_buffer(unit)
            before = [*after, *self._server.weights_ready(unit)]
            self._kept[unit] = self._d2h.copy([(target, source)], after=before, label=f"flush {unit.name}")
            self._free[slot] = [self._kept[unit]]
