"""Where the server keeps the units' bytes: in RAM, pinned."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from ferryman.distributed.ranks import Ranks, Share
from ferryman.model.units import (
    GRADIENT,
    Item,
    Unit,
    gradient_bytes,
    landing_dtype,
    overlap,
)
from ferryman.runtime.pinned import PinnedMemory
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.state import UnitState, bounds, part_elements, put_weights, state_bytes

_NOTHING = 0xFF  # each byte of tensors without values yet: NaN in any floating-point format


class RamStore:
    """A flat memory for each unit's tensors and, if there is an optimizer, its state.

    The model's own tensors become views of the first, so the model always shows the server's weights. Memory for
    gradients is allocated at first use.

    Ranks of one node share the memory for the weights of units. Residents have memory of their own on each rank, since
    a model may write there (a count, a running mean). All values come from the first rank.
    """

    def __init__(
        self, units: Iterable[Unit], device: torch.device, optimizer_view: OptimizerView | None, ranks: Ranks
    ) -> None:
        self._device = device
        self._optimizer_view = optimizer_view
        self._ranks = ranks
        self._weights: dict[Unit, PinnedMemory] = {}
        self._states: dict[Unit, UnitState] = {}
        self._gradients: dict[tuple[Unit, torch.dtype], PinnedMemory] = {}
        self._sums: dict[tuple[Unit, torch.dtype], PinnedMemory] = {}
        self.trained: dict[Item, bool] = {}  # whether the tensor required gradients when it was added
        self._came_as: dict[Item, torch.dtype] = {}  # the dtypes that the user gave the tensors
        self._empty: dict[Item, int] = {}  # tensors that came on meta, and their versions then
        self._late: set[Item] = set()  # tensors that came on meta, until `follow_edits`
        for unit in units:
            self.add(unit)

    def add(self, unit: Unit) -> None:
        ranks = self._ranks
        common = ranks.shared_bytes(unit.nbytes) if self._is_common(unit) else None
        memory = self._weights[unit] = PinnedMemory(unit.nbytes, self._device, common)
        state = (
            None if self._optimizer_view is None else UnitState(unit, self._optimizer_view, self._device, ranks.share)
        )
        if state is not None:
            self._states[unit] = state
        for item in unit.items:
            self._came_as[item] = item.tensor.dtype
            self.trained[item] = item.trains
            view = item.view(memory.bytes)
            if item.tensor.is_meta:
                if self.writes(unit):
                    memory.bytes[item.offset : item.offset + item.nbytes].fill_(_NOTHING)
                _give_memory(item.tensor, view)
                self._empty[item] = item.tensor._version
                self._late.add(item)
            else:
                values = item.tensor.detach()
                self._put(unit, item, values if ranks.alone else ranks.broadcast(values.clone()), view)
                item.tensor.data = view
            if state is not None and item.trains:
                state.taken(item)
        ranks.all_gather_object("taking weights")  # a barrier: all ranks have written their parts

    def remove(self, unit: Unit, *, together: bool = True) -> None:
        """Removes a unit. Its tensors keep their values, in memory that is neither pinned nor shared."""
        self._empty = {item: version for item, version in self._empty.items() if item not in unit.items}
        if unit in self._states:
            self._states[unit].follow_edits()
        self._give_back(unit, together=together)
        memories = [self._weights.pop(unit)]
        for of_unit in (self._gradients, self._sums):
            memories += [of_unit.pop(key) for key in list(of_unit) if key[0] is unit]
        for memory in memories:
            memory.close()
        if (state := self._states.pop(unit, None)) is not None:
            if self._ranks.alone:
                state.give_states()
            else:  # a rank has only a part of the state
                state.give_back_states()
            state.close()

    def weights(self, unit: Unit) -> torch.Tensor:
        """The unit's working copy: flat bytes."""
        return self._weights[unit].bytes

    def state(self, unit: Unit) -> UnitState:
        return self._states[unit]

    def take(self, unit: Unit, item: Item, values: torch.Tensor, start: int = 0) -> None:
        """Stores a tensor's values, given in any dtype, from the element `start` on. No lane may have work.

        With several ranks, all call this with the same values.
        """
        self._put(unit, item, values, item.tensor.data, start)
        self._late.discard(item)
        if unit in self._states and item.trains:
            self._states[unit].taken(item)

    def _put(self, unit: Unit, item: Item, values: torch.Tensor, into: torch.Tensor, start: int = 0) -> None:
        """Writes values into the unit's memory, and their lower bits into this rank's masters."""
        if unit not in self._states or not item.trains:
            if self.writes(unit):
                into.view(-1)[start : start + values.numel()].copy_(values.reshape(-1))
            return
        if self.writes(unit) and not self._ranks.alone:
            put_weights(values, into, start)  # also the parts that ranks of other nodes own
        self._states[unit].take(item, values, into, start)

    def _is_common(self, unit: Unit) -> bool:
        """Whether the ranks of the node share the unit's memory."""
        return self._ranks.share_memory and bool(unit.modules)

    def writes(self, unit: Unit) -> bool:
        """Whether this rank writes the parts of the unit's memory that no rank owns, such as frozen tensors."""
        return self._ranks.leads or not self._is_common(unit)

    def gradients(self, unit: Unit, dtype: torch.dtype = GRADIENT) -> torch.Tensor:
        """Flat memory for this rank's gradients of the unit, as bytes."""
        if (unit, dtype) not in self._gradients:
            memory = PinnedMemory(unit.trained_elements * dtype.itemsize, self._device)
            self._gradients[unit, dtype] = memory
        return self._gradients[unit, dtype].bytes

    def summed_gradients(self, unit: Unit, dtype: torch.dtype) -> torch.Tensor:
        """Flat memory for the gradients of the elements that this rank owns, summed over all ranks.

        A single rank owns everything, and its gradients are the sums: the memory is that of `gradients`.
        """
        if self._ranks.alone:
            return self.gradients(unit, dtype)
        assert self._optimizer_view is not None
        if (unit, dtype) not in self._sums:
            nbytes = part_elements(unit, self._optimizer_view, self._ranks.share) * dtype.itemsize
            self._sums[unit, dtype] = PinnedMemory(nbytes, self._device)
        return self._sums[unit, dtype].bytes

    @property
    def edited(self) -> bool:
        """Whether the user has changed weights in place since they were stored."""
        return any(state.edited for state in self._states.values())

    def follow_edits(self) -> None:
        """Takes over weights that the user has changed in place between steps, and the optimizer's state."""
        for state in self._states.values():
            if not self._ranks.alone and (changed := [item for item in state.edited if item not in self._late]):
                raise ValueError(
                    f"{changed[0].name!r} was changed in place while an engine of {self._ranks.size} ranks has it. "
                    "Ranks share weights, so each rank would have made the change again. Change weights before the "
                    "engine is made, or load them: engine.load_weights(directory)"
                )
            state.follow_edits()
        self.take_states()
        self._late.clear()

    def take_states(self) -> None:
        """Takes over the contents of `optimizer.state`, if the user has read or replaced it."""
        if self._optimizer_view is not None and self._optimizer_view.shows_states:
            for state in self._states.values():
                state.take_states(shown=True)
            self._optimizer_view.hide_states()

    def show_states(self) -> None:
        """Fills `optimizer.state`."""
        if not self._ranks.alone:
            raise ValueError(
                f"optimizer.state, or optimizer.state_dict(): each of {self._ranks.size} ranks has a part of the "
                "optimizer's state. engine.save(directory) writes all of it, and engine.load(directory) reads it on "
                "any number of ranks"
            )
        for state in self._states.values():
            state.give_states(in_place=True)

    def empty(self) -> list[Item]:
        """Tensors that came on meta and have no values yet."""
        self._empty = {
            item: version
            for item, version in self._empty.items()
            if item.tensor._version == version and _is_untouched(item.tensor)
        }
        return list(self._empty)

    def check_values(self) -> None:
        """Refuses to go on while a tensor has no values."""
        for item in self.empty():
            raise ValueError(
                f"{item.name!r} was on the meta device and has not been given values yet. Load weights first, in place "
                "(model.load_state_dict(...), not assign=True). Buffers that are not in the state_dict need values, too"
            )

    def close(self, *, together: bool = True) -> None:
        """Removes all units. `together`: all ranks call this, so masters can be gathered."""
        for unit in list(self._weights):
            self.remove(unit, together=together)

    def _give_back(self, unit: Unit, *, together: bool) -> None:
        """Gives tensors the dtypes and the memory back that they had before the engine."""
        for item in unit.items:
            dtype = self._came_as.pop(item)
            if dtype != item.dtype:
                values = item.tensor
                if item.trains and unit in self._states and (together or self._ranks.alone):
                    values = self._in_float32(unit, item)
                item.tensor.grad = None
                item.tensor.data = values.detach().to(dtype)
            elif self._is_common(unit):
                item.tensor.data = item.tensor.detach().clone()

    def _in_float32(self, unit: Unit, item: Item) -> torch.Tensor:
        """The weights of a tensor in float32, gathered from the ranks that own its parts."""
        assert self._optimizer_view is not None
        mine, ranks = self._states[unit].in_float32(item), self._ranks
        if ranks.alone:
            return mine.view(item.tensor.shape)
        cuts, begin = bounds(unit, self._optimizer_view, ranks.share), unit.trained_offsets[item]
        whole = torch.empty(item.tensor.numel(), dtype=torch.float32, device="cpu")
        for owner in range(ranks.size):
            if (both := overlap(item, begin, cuts[owner], cuts[owner + 1] - cuts[owner])) is not None:
                ranks.broadcast(whole[both[0]].copy_(mine) if owner == ranks.rank else whole[both[0]], owner)
        return whole.view(item.tensor.shape)


def account(
    units: Iterable[Unit],
    optimizer_view: OptimizerView | None,
    *,
    landing: bool,
    shares: Collection[Share] = (Share(),),
) -> dict[str, int]:
    """Bytes of host memory by purpose. `landing`: there is memory for the gradients of all units at once.

    `shares`: the ranks to count, all of one node, where they share the weights of units.
    """
    units = list(units)
    common = sum(unit.nbytes for unit in units if unit.modules)
    found = {"weights": common + len(shares) * sum(unit.nbytes for unit in units if not unit.modules)}
    if optimizer_view is None:
        found["gradients"] = len(shares) * sum(gradient_bytes(unit) for unit in units)
        return found
    parts = {unit: sum(part_elements(unit, optimizer_view, share) for share in shares) for unit in units}
    found["master weights"] = sum(part * unit.master_itemsize for unit, part in parts.items())
    found["optimizer state"] = sum(state_bytes(unit, optimizer_view, share) for unit in units for share in shares)
    if landing:
        found["gradients"] = sum(part * landing_dtype(unit).itemsize for unit, part in parts.items())
    return found


def _give_memory(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Gives a tensor on meta memory. It stays the same object, since an optimizer may refer to it."""
    made = view.data  # with a version counter of its own: a view shares that of the whole memory
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, made)


def _is_untouched(tensor: torch.Tensor) -> bool:
    """Whether all bytes are as at first. This also finds writes through `.data`, which do not count as versions."""
    return bool((tensor.detach().reshape(-1).view(torch.uint8) == _NOTHING).all())
