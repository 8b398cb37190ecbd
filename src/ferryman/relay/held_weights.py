"""Held weights: all weights fit on the device and stay there; gradients and optimizer state are on the host.

Weights that the device updates need no copy to the device. Weights that the host updates are copied to the device
subgroup by subgroup, as soon as each is updated. If the user may have changed weights between steps, all are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ferryman.model.spans import Span
from ferryman.model.units import Unit
from ferryman.relay.weight_slots import WeightSlot, WeightSlots, versions_of
from ferryman.runtime.device_memory import carve
from ferryman.runtime.marks import Mark

_AHEAD = 2  # units to fetch ahead of time, if they are out of date


@dataclass(eq=False)
class HeldSlot(WeightSlot):
    """Device memory that belongs to one unit. Fetches of the whole unit and updates write to it."""

    versions: list[int] | None = None  # of the host's tensors when they were fetched; None: the slot is out of date
    updated: Mark | None = None  # the end of the last update on the device

    def fill(self, unit: Unit, fetched: Mark) -> None:
        super().fill(unit, fetched)
        self.versions, self.updated = versions_of(unit), None

    def ready(self) -> list[Mark]:
        return [mark for mark in (self.fetched, self.updated) if mark is not None]


class HeldWeights(WeightSlots):
    """One slot for each unit, of the unit's size."""

    _slots: Sequence[HeldSlot]
    _moves = False

    def make_room_for(self, units: Sequence[Unit]) -> None:
        self._tensors.clear()
        self._slots = []  # frees the old memory before new memory is allocated
        memories = carve([unit.nbytes for unit in units], self._device)
        self._slots = [HeldSlot(memory, unit=unit) for memory, unit in zip(memories, units, strict=True)]

    def forget(self, *, everything: bool = False) -> None:
        for slot in self._slots:
            assert slot.unit is not None
            if everything or slot.versions != versions_of(slot.unit):
                slot.versions = None

    def fetch_ahead(self, order: Sequence[Unit], *, latest_first: bool, most: int | None = None) -> None:
        pass  # the weights are there, and updates refresh them

    def fetched_ahead(self) -> list[Unit]:
        return [slot.unit for slot in self._slots if slot.unit is not None and slot.versions is not None]

    def drop_ahead(self) -> None:
        for slot in self._slots:
            slot.versions = None  # an edit through `.data` has no new version

    def memory(self, unit: Unit) -> torch.Tensor | None:
        slot = self._find(unit)
        return None if slot is None else slot.memory

    def updatable_after(self, unit: Unit) -> list[Mark]:
        slot = self._find(unit)
        if slot is None:
            return []
        self.enter(unit, ())  # fetches weights that the user has changed since the backward
        return [] if slot.released is None else [slot.released]

    def refresh(self, unit: Unit, runs: Sequence[Span], after: Mark) -> Mark | None:
        slot = self._find(unit)
        if slot is None or slot.versions is None:
            return None
        copies = [(slot.memory[span.offset : span.offset + span.host.nbytes], span.host) for span in runs]
        before = [after, *([] if slot.released is None else [slot.released])]
        slot.fetched = self._h2d.copy(copies, after=before, label=f"fetch {unit.name}")
        return slot.fetched

    def updated(self, unit: Unit, mark: Mark) -> None:
        slot = self._find(unit)
        if slot is not None:
            slot.updated = mark

    def renew(self, unit: Unit) -> None:
        slot = self._find(unit)
        if slot is not None:
            slot.versions = None

    def _find(self, unit: Unit) -> HeldSlot | None:
        """The unit's slot; residents have none here."""
        return next((slot for slot in self._slots if slot.unit is unit), None)

    def _next_fetch(self, unit: Unit, upcoming: Sequence[Unit]) -> tuple[Unit, WeightSlot] | None:
        for needed in (unit, *upcoming[:_AHEAD]):
            slot = self._find(needed)
            if slot is not None and slot.versions is None:
                return needed, slot
        return None
