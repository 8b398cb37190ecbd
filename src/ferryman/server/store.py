"""Where the server keeps the units' bytes: in RAM, pinned."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ferryman.pinned import PinnedMemory
from ferryman.units import Item, Unit, gradient_bytes

_NOTHING = 0xFF  # each byte of what came without values: in any floating-point format not a number


class RamStore:
    """A flat memory for each unit's tensors, and one for the gradients of those that train.

    The model's own tensors become views of the first, so the model always shows what the server has.
    """

    def __init__(self, units: Iterable[Unit], device: torch.device) -> None:
        self._device = device
        self._weights: dict[Unit, PinnedMemory] = {}
        self._gradients: dict[Unit, PinnedMemory] = {}
        self._empty: dict[Item, int] = {}  # tensors that came without values, and their version then
        for unit in units:
            self.add(unit)

    def add(self, unit: Unit) -> None:
        memory = self._weights[unit] = PinnedMemory(unit.nbytes, self._device)
        for item in unit.items:
            view = item.view(memory.bytes)
            if item.tensor.is_meta:
                memory.bytes[item.offset : item.offset + item.nbytes].fill_(_NOTHING)
                _give_memory(item.tensor, view)
                self._empty[item] = item.tensor._version
            else:
                view.copy_(item.tensor.detach())
                item.tensor.data = view
        self._gradients[unit] = PinnedMemory(gradient_bytes(unit), self._device)

    def remove(self, unit: Unit) -> None:
        """Its tensors keep their values, in memory that is no longer pinned."""
        self._empty = {item: version for item, version in self._empty.items() if item not in unit.items}
        for memory in (self._weights.pop(unit), self._gradients.pop(unit)):
            memory.close()

    def weights(self, unit: Unit) -> torch.Tensor:
        return self._weights[unit].bytes

    def gradients(self, unit: Unit) -> torch.Tensor:
        return self._gradients[unit].bytes

    def without_values(self) -> Item | None:
        """A tensor that was on meta, and has not been given values since."""
        self._empty = {
            item: version
            for item, version in self._empty.items()
            if item.tensor._version == version and _is_untouched(item.tensor)
        }
        return next(iter(self._empty), None)

    def close(self) -> None:
        for memory in (*self._weights.values(), *self._gradients.values()):
            memory.close()


def _give_memory(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Puts a tensor that is on meta into memory. It stays the same object: an optimizer may have it."""
    made = view.data  # with a version of its own: a view has that of the whole memory
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, made)


def _is_untouched(tensor: torch.Tensor) -> bool:
    """Also what is written through `.data`, which has no part in the version, shows here."""
    return bool((tensor.detach().reshape(-1).view(torch.uint8) == _NOTHING).all())
