"""Tensors in modules: which one a parameter's or buffer's places have now."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from ferryman.model.units import Item


def bind(tensors: Sequence[tuple[Item, torch.Tensor]]) -> None:
    for item, tensor in tensors:
        for place in item.places:
            place.bind(tensor)
            if isinstance(place.module, nn.RNNBase):
                _bind_flat_weight(place.module, place.attribute, tensor)


def _bind_flat_weight(module: nn.RNNBase, attribute: str, tensor: torch.Tensor) -> None:
    """`nn.LSTM` and its like compute with a list of their own that refers to their parameters, and make it anew where
    the weak references beside it show that a parameter is another tensor."""
    if attribute in module._flat_weights_names:
        at = module._flat_weights_names.index(attribute)
        module._flat_weights[at] = tensor
        module._flat_weight_refs[at] = weakref.ref(cast("nn.Parameter", tensor))


def is_buffer(item: Item) -> bool:
    return not isinstance(item.tensor, nn.Parameter)


def is_assigned(item: Item, tensor: torch.Tensor) -> bool:
    """Whether the module has another tensor for its buffer now (`self.mean = ...`)."""
    return any(place.current() is not tensor for place in item.places)


def adopt_assigned(item: Item, tensor: torch.Tensor) -> None:
    """A buffer that was assigned: its values count, in the memory that the buffer has."""
    for place in item.places:
        current = place.current()
        if current is tensor:
            continue
        if current is None or current.shape != tensor.shape or current.dtype != tensor.dtype:
            now = "None" if current is None else f"{tuple(current.shape)} of {current.dtype}"
            raise ValueError(
                f"the buffer {item.name!r} is assigned {now}, and was {tuple(tensor.shape)} of {tensor.dtype}; a "
                "buffer keeps its shape and dtype while an engine has it. Use a plain attribute for what changes"
            )
        with torch.no_grad():
            tensor.copy_(current.detach())
        for other in item.places:
            other.bind(tensor)
