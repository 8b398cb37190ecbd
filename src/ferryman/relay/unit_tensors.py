"""The tensors of a unit on the device: the same objects for as long as the engine has the unit, in whichever slot its
weights are.

A graph that is kept from the forward to the backward refers to a unit's parameters: its last nodes collect their
gradients, and a custom autograd function or a hook may refer to any of them. Between the two visits the slot is
overwritten, and the unit may come back to another one. So a parameter is one object, whose memory moves with the unit.

Note [Aliases]
Nothing but these tensors may refer to the memory of a slot when the visit is over. For each unit in each slot there is
a storage of its own, which shares the slot's memory. What refers to a storage is counted, so that one number tells
whether a call has left something behind that refers to weights (a view that an autograd function has stored). The
storage of the whole allocation would not do: copies on other lanes refer to it as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils import dlpack

from ferryman.model.units import Item, Unit

Collect = Callable[[Unit, Item, torch.Tensor], None]  # receives each gradient of a unit's parameters


class SlotViews(NamedTuple):
    """The views of one slot's memory for the tensors of a unit."""

    flat: torch.Tensor  # bytes
    views: list[torch.Tensor]


class UnitTensors:
    """A unit's parameters and buffers. Parameters are instances of `nn.Parameter`, as modules require."""

    def __init__(self, unit: Unit, there: SlotViews, collect: Collect, *, moves: bool) -> None:
        self.moves = moves  # whether the unit's weights can be overwritten between two visits
        self.flat = there.flat
        self.pairs = [
            (item, _as_member(unit, item, view, collect)) for item, view in zip(unit.items, there.views, strict=True)
        ]

    def move_to(self, there: SlotViews) -> None:
        """Makes these tensors refer to the memory of another slot."""
        if self.flat is there.flat:
            return
        self.flat = there.flat
        with torch.inference_mode(False):
            for (_, tensor), view in zip(self.pairs, there.views, strict=True):
                tensor.data = view

    def has_aliases(self) -> bool:
        """Whether anything but these tensors refers to the memory in which the unit is now. See Note [Aliases]."""
        if not self.moves or not self.flat.numel():
            return False
        storage = self.flat.untyped_storage()
        count: int = torch._C._storage_Use_Count(storage._cdata)
        return count > 2 + 2 * len(self.pairs)  # `storage`, `flat`, and for each tensor itself and its view

    def within(self, address: int) -> bool:
        """Whether this is an address in the unit's memory."""
        return 0 <= address - self.flat.data_ptr() < self.flat.numel()


def views_in(unit: Unit, memory: torch.Tensor, *, alone: bool) -> SlotViews:
    """The unit's tensors in this memory. `alone`: they get a storage that nothing else refers to."""
    flat = memory[: unit.nbytes]
    if alone and unit.nbytes:
        flat = dlpack.from_dlpack(flat.__dlpack__())
    with torch.inference_mode(False):  # they may be made in an evaluation, and outlive it
        return SlotViews(flat, [item.view(flat).data for item in unit.items])


def _as_member(unit: Unit, item: Item, view: torch.Tensor, collect: Collect) -> torch.Tensor:
    with torch.inference_mode(False):
        if not isinstance(item.tensor, nn.Parameter):
            return view.detach()
        parameter = nn.Parameter(view, requires_grad=item.trains)
    if item.trains:
        # Collect each gradient as soon as it exists: otherwise all gradients of a unit would be in memory twice.
        parameter.register_post_accumulate_grad_hook(lambda p: collect(unit, item, p))
    return parameter
