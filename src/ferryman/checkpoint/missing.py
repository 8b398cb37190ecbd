"""Initializes tensors that are in no file because the model computes them, such as rotary embedding tables."""

from __future__ import annotations

from typing import Any

import torch

from ferryman.checkpoint.contents import Contents
from ferryman.model.units import Item


def fill_missing(contents: Contents) -> None:
    """Lets a transformers model initialize tensors that were on the meta device and are in no file.

    For other models, the first step reports what is missing. `_init_weights` may also change tensors that have values,
    so these are restored afterwards.
    """
    initialize: Any = getattr(contents.model, "_init_weights", None)
    if initialize is None:
        return
    empty, in_files = set(contents.store.empty()), contents.names()
    owners = {place.module for item in empty for place in item.places}
    items: dict[int, Item] = {id(item.tensor): item for unit in contents.units for item in unit.items}
    units = contents.unit_of()
    for module in owners:
        own = [items[id(t)] for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        if any(item in in_files for item in own if item in empty):
            continue  # weights that should be in a file are not initialized
        if not all(contents.store.writes(units[item]) for item in own):
            continue  # another rank writes this shared memory
        before = [(item, item.tensor.detach().clone()) for item in own if item not in empty]
        with torch.no_grad():
            initialize(module)
        for item, values in before:
            item.tensor.data.copy_(values)
