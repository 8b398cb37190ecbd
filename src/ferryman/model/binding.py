"""Binds tensors to modules as their parameters and buffers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from ferryman.model.units import Item, Place


def bind(tensors: Sequence[tuple[Item, torch.Tensor]]) -> None:
    for item, tensor in tensors:
        for place in item.places:
            _members(place)[place.attribute] = tensor
        if item.is_recurrent:
            for place in item.places:
                if isinstance(place.module, nn.RNNBase):
                    _bind_flat_weight(place.module, place.attribute, tensor)


class Binding:
    """Tensors that are bound to the same places several times, which are looked up once."""

    def __init__(self, tensors: Sequence[tuple[Item, torch.Tensor]]) -> None:
        self._places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
            (_members(place), place.attribute, tensor)
            for item, tensor in tensors
            if not item.is_recurrent
            for place in item.places
        ]
        self._recurrent = [pair for pair in tensors if pair[0].is_recurrent]
        self._tensors = tensors

    def others(self) -> list[Item]:
        """Items in whose places the user's code has put other tensors since they were bound."""
        if not self._recurrent and all(members.get(name) is tensor for members, name, tensor in self._places):
            return []
        return [item for item, tensor in self._tensors if is_assigned(item, tensor)]

    def bind(self) -> None:
        for members, attribute, tensor in self._places:
            members[attribute] = tensor
        if self._recurrent:
            bind(self._recurrent)


def _members(place: Place) -> dict[str, Any]:
    """The module's own dictionary that has the place's tensor. To set the attribute would take several times as long,
    and plain tensors are refused as parameters."""
    module = place.module
    return module._parameters if place.attribute in module._parameters else module._buffers


def _bind_flat_weight(module: nn.RNNBase, attribute: str, tensor: torch.Tensor) -> None:
    """Updates the list of weights with which `nn.LSTM` and other RNNs compute.

    They rebuild the list if its weak references do not match the parameters, so these are updated as well.
    """
    if attribute in module._flat_weights_names:
        at = module._flat_weights_names.index(attribute)
        module._flat_weights[at] = tensor
        module._flat_weight_refs[at] = weakref.ref(cast("nn.Parameter", tensor))


def is_assigned(item: Item, tensor: torch.Tensor) -> bool:
    """Whether another tensor was assigned to the item (`self.mean = ...`)."""
    return any(place.current() is not tensor for place in item.places)


def adopt_assigned(item: Item, tensor: torch.Tensor) -> None:
    """Copies a tensor that was assigned to a buffer into the buffer's own memory, and binds that memory again."""
    for place in item.places:
        current = place.current()
        if current is tensor:
            continue
        if current is None or current.shape != tensor.shape or current.dtype != tensor.dtype:
            now = "None" if current is None else f"{tuple(current.shape)} of {current.dtype}"
            raise ValueError(
                f"the buffer {item.name!r} was {tuple(tensor.shape)} of {tensor.dtype} and is assigned {now}; a "
                "buffer must keep its shape and dtype while an engine uses it. Use a plain attribute if they change"
            )
        with torch.no_grad():
            tensor.copy_(current.detach())
        bind([(item, tensor)])
