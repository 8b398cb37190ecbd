"""Weights that all fit on the device, and stay there: only gradients and the optimizer's state are on the host.

What the device updates is there already. What the host updates is copied over when it is, subgroup by subgroup; and so
is a unit of which the user has changed a tensor in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ferryman.model.spans import Span
from ferryman.model.units import Unit
from ferryman.relay.weight_slots import WeightSlots
from ferryman.runtime.marks import Mark

_AHEAD = 2  # units that are fetched before they are needed, where they must be


class HeldWeights(WeightSlots):
    """A slot for each unit, of its size."""

    def make_room_for(self, units: Sequence[Unit]) -> None:
        self._bound.clear()
        self._memory.clear()  # before the others are there
        self._memory = [torch.empty(unit.nbytes, dtype=torch.uint8, device=self._device) for unit in units]
        self._held = list(units)
        self._free = [None] * len(units)
        self._fresh: dict[Unit, list[int]] = {}  # units that are as on the host, and their tensors' versions
        self._changed: dict[Unit, dict[str, Mark]] = {}  # the ends of what wrote to a slot last

    def enter(self, unit: Unit, upcoming: Sequence[Unit]) -> tuple[int, list[Mark]]:
        for needed in (unit, *upcoming[:_AHEAD]):
            self._bring(needed)
        return self._held.index(unit), list(self._changed[unit].values())

    def forget(self, *, everything: bool = False) -> None:
        kept = {} if everything else self._fresh
        self._fresh = {unit: versions for unit, versions in kept.items() if versions == _versions(unit)}

    def memory(self, unit: Unit) -> torch.Tensor | None:
        return self._memory[self._held.index(unit)] if unit in self._held else None

    def settle(self, unit: Unit) -> list[Mark]:
        if unit not in self._held:
            return []
        self._bring(unit)  # the user may have changed them since their backward
        return [mark for mark in [self._free[self._held.index(unit)]] if mark is not None]

    def refresh(self, unit: Unit, runs: Sequence[Span], after: Mark) -> Mark | None:
        slot = self.memory(unit)
        if slot is None or unit not in self._fresh:
            return None
        free = self._free[self._held.index(unit)]
        copies = [(slot[run.offset : run.offset + run.host.nbytes], run.host) for run in runs]
        before = [after, *([] if free is None else [free])]
        mark = self._changed[unit]["copied"] = self._h2d.copy(copies, after=before, label=f"fetch {unit.name}")
        return mark

    def updated(self, unit: Unit, mark: Mark) -> None:
        if unit in self._held:
            self._changed.setdefault(unit, {})["updated"] = mark

    def renew(self, unit: Unit) -> None:
        self._fresh.pop(unit, None)

    def close(self) -> None:
        super().close()
        self._fresh.clear()

    def _bring(self, unit: Unit) -> None:
        """From the host, if what is there is old."""
        if unit not in self._fresh:
            self._fetch(unit, self._held.index(unit))
            self._fresh[unit] = _versions(unit)

    def _submitted(self, unit: Unit, slot: int, mark: Mark) -> None:
        self._changed[unit] = {"copied": mark}


def _versions(unit: Unit) -> list[int]:
    """Which count the user's edits, and not the server's updates."""
    return [item.tensor._version for item in unit.items]
