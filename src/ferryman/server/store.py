"""Where the server keeps the units' bytes: in RAM, pinned."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ferryman.pinned import PinnedMemory
from ferryman.server.panel import Panel
from ferryman.server.state import UnitState, master_bytes, state_bytes
from ferryman.units import GRADIENT, Item, Unit, gradient_bytes, landing_bytes, trained_elements

_NOTHING = 0xFF  # each byte of what came without values: in any floating-point format not a number


class RamStore:
    """A flat memory for each unit's tensors; and, where the engine updates them, what the optimizer keeps.

    The model's own tensors become views of the first, so the model always shows what the server has. Memory for
    gradients is made when it is first asked for.
    """

    def __init__(self, units: Iterable[Unit], device: torch.device, panel: Panel | None = None) -> None:
        self._device = device
        self._panel = panel
        self._weights: dict[Unit, PinnedMemory] = {}
        self._states: dict[Unit, UnitState] = {}
        self._gradients: dict[tuple[Unit, torch.dtype], PinnedMemory] = {}
        self.trained: dict[Item, bool] = {}  # whether it did when it came
        self._came_as: dict[Item, torch.dtype] = {}
        self._empty: dict[Item, int] = {}  # tensors that came without values, and their version then
        for unit in units:
            self.add(unit)

    def add(self, unit: Unit) -> None:
        memory = self._weights[unit] = PinnedMemory(unit.nbytes, self._device)
        state = None if self._panel is None else UnitState(unit, self._panel, self._device)
        if state is not None:
            self._states[unit] = state
        for item in unit.items:
            self._came_as[item] = item.tensor.dtype
            self.trained[item] = item.trains
            view = item.view(memory.bytes)
            trained = state if item.trains else None
            if item.tensor.is_meta:
                memory.bytes[item.offset : item.offset + item.nbytes].fill_(_NOTHING)
                _give_memory(item.tensor, view)
                self._empty[item] = item.tensor._version
            else:
                if trained is not None:
                    trained.take(item, item.tensor, view)
                else:
                    view.copy_(item.tensor.detach())
                item.tensor.data = view
            if trained is not None:
                trained.taken(item)

    def remove(self, unit: Unit) -> None:
        """Its tensors keep their values, in memory that is no longer pinned."""
        self._empty = {item: version for item, version in self._empty.items() if item not in unit.items}
        if unit in self._states:
            self._states[unit].follow_edits()
        self._give_back(unit)
        mine = [key for key in self._gradients if key[0] is unit]
        for memory in (self._weights.pop(unit), *(self._gradients.pop(key) for key in mine)):
            memory.close()
        if (state := self._states.pop(unit, None)) is not None:
            state.give_states()
            state.close()

    def weights(self, unit: Unit) -> torch.Tensor:
        return self._weights[unit].bytes

    def state(self, unit: Unit) -> UnitState:
        return self._states[unit]

    def take(self, unit: Unit, item: Item, values: torch.Tensor) -> None:
        """A tensor's values from elsewhere, in any dtype; no lane uses them."""
        target = item.tensor.data
        if unit in self._states and item.trains:
            self._states[unit].take(item, values, target)
            self._states[unit].taken(item)
        else:
            target.copy_(values.view(target.shape))

    def gradients(self, unit: Unit, dtype: torch.dtype = GRADIENT) -> torch.Tensor:
        """Flat memory for the unit's gradients."""
        if (unit, dtype) not in self._gradients:
            memory = PinnedMemory(trained_elements(unit) * dtype.itemsize, self._device)
            self._gradients[unit, dtype] = memory
        return self._gradients[unit, dtype].bytes

    @property
    def edited(self) -> bool:
        """Whether the user has changed weights in place since they were taken."""
        return any(state.edited for state in self._states.values())

    def follow_edits(self) -> None:
        """The user may have changed weights in place, or the optimizer's state, between steps."""
        for state in self._states.values():
            state.follow_edits()
            state.take_states()

    def show_states(self) -> None:
        """Puts the optimizer's state where torch looks for it."""
        for state in self._states.values():
            state.give_states()

    def empty(self) -> list[Item]:
        """Tensors that were on meta, and have not been given values since."""
        self._empty = {
            item: version
            for item, version in self._empty.items()
            if item.tensor._version == version and _is_untouched(item.tensor)
        }
        return list(self._empty)

    def check_values(self) -> None:
        for item in self.empty():
            raise ValueError(
                f"{item.name!r} was on the meta device and has not been given values yet: load weights first in place "
                "(model.load_state_dict(...), not assign=True). Buffers that no state_dict has need some, too"
            )

    def close(self) -> None:
        for unit in list(self._weights):
            self.remove(unit)

    def _give_back(self, unit: Unit) -> None:
        """Tensors get the dtype back that they came in."""
        for item in unit.items:
            dtype = self._came_as.pop(item)
            if dtype != item.dtype:
                master = self._states[unit].in_float32(item) if item.trains and unit in self._states else item.tensor
                item.tensor.grad = None
                item.tensor.data = master.detach().to(dtype)


def account(units: Iterable[Unit], panel: Panel | None, *, landing: bool) -> dict[str, int]:
    """Bytes of host memory, by what they are for; `landing`: gradients of all units are there at once."""
    units = list(units)
    found = {"weights": sum(unit.nbytes for unit in units)}
    if panel is not None:
        found["the float32 master's rest"] = sum(master_bytes(unit) for unit in units)
        found["optimizer state"] = sum(state_bytes(unit, panel) for unit in units)
        if landing:
            found["gradients"] = sum(landing_bytes(unit) for unit in units)
    else:
        found["gradients"] = sum(gradient_bytes(unit) for unit in units)
    return found


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
