"""Where the server keeps the units' bytes: in RAM, pinned."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ferryman.pinned import PinnedMemory
from ferryman.units import Item, Unit

GRADIENT = torch.float32  # gradients of all micro-batches are added up in this


class RamStore:
    """A flat memory for each unit's tensors, and one for the gradients of those that train.

    The model's own tensors become views of the first, so the model always shows what the server has.
    """

    def __init__(self, units: Iterable[Unit], device: torch.device) -> None:
        self._weights: dict[Unit, PinnedMemory] = {}
        self._gradients: dict[Unit, PinnedMemory] = {}
        for unit in units:
            memory = self._weights[unit] = PinnedMemory(unit.nbytes, device)
            for item in unit.items:
                view = item.view(memory.bytes)
                view.copy_(item.tensor.detach())
                item.tensor.data = view
            self._gradients[unit] = PinnedMemory(gradient_bytes(unit), device)

    def weights(self, unit: Unit) -> torch.Tensor:
        return self._weights[unit].bytes

    def gradients(self, unit: Unit) -> torch.Tensor:
        return self._gradients[unit].bytes

    def close(self) -> None:
        for memory in (*self._weights.values(), *self._gradients.values()):
            memory.close()


def gradient_bytes(unit: Unit) -> int:
    return sum(item.tensor.numel() for item in unit.trained) * GRADIENT.itemsize


def gradient_views(unit: Unit, flat: torch.Tensor) -> dict[Item, torch.Tensor]:
    """Each trained tensor's part of a flat memory for the unit's gradients."""
    views, offset = {}, 0
    wide = flat[: gradient_bytes(unit)].view(GRADIENT)
    for item in unit.trained:
        views[item] = wide[offset : offset + item.tensor.numel()].view(item.tensor.shape)
        offset += item.tensor.numel()
    return views
