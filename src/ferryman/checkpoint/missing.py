"""Values for what no file has: tensors that a model computes for itself, such as tables for rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch

from ferryman.checkpoint.contents import Contents
from ferryman.model.units import Item


def fill_missing(contents: Contents) -> None:
    """Has a model of transformers set what came on meta and is in no file. Of others, a step will say what is missing.

    What a module has already is put back afterwards: it may set more than is missing.
    """
    initialise: Any = getattr(contents.model, "_init_weights", None)
    if initialise is None:
        return
    empty, in_files = set(contents.store.empty()), contents.names()
    owners = {place.module for item in empty for place in item.places}
    items: dict[int, Item] = {id(item.tensor): item for unit in contents.units for item in unit.items}
    units = contents.unit_of()
    for module in owners:
        own = [items[id(t)] for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        if any(item in in_files for item in own if item in empty):
            continue  # weights that a file should have are not made up
        if not all(contents.store.writes(units[item]) for item in own):
            continue  # in memory that another rank fills
        before = [(item, item.tensor.detach().clone()) for item in own if item not in empty]
        with torch.no_grad():
            initialise(module)
        for item, values in before:
            item.tensor.data.copy_(values)
