"""Weights that the user's code edits in a forward, as `nn.Embedding(max_norm=...)` does; they are refused by name.

Plain PyTorch keeps such an edit. Here it would be made in a slot, and be lost with it; on the host it would be made
twice, since units run twice. Edits show in a tensor's version. Those through `.data` do not, so one pass of a trial
also compares the bytes of all weights, by their sum; and those of residents are compared in the steps in which second
runs are (`checksums.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ferryman.model.units import Item

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size


class WeightEdits:
    """Of tensors that are bound for a time: the unit's on a visit, or the residents' in a step.

    `can_undo`: a copy of them is kept, so that what is refused is undone as well.
    """

    def __init__(self, bound: Sequence[tuple[Item, torch.Tensor]], *, by_bytes: bool, can_undo: bool = False) -> None:
        self._weights = [pair for pair in bound if isinstance(pair[0].tensor, nn.Parameter)]
        self._copies = [tensor.detach().clone() for _, tensor in self._weights if can_undo]
        self._versions = [tensor._version for _, tensor in self._weights]
        self._sums = self._sum_bytes() if by_bytes or can_undo else None

    def check(self) -> None:
        """A ValueError if one of them was edited since; bytes are compared once."""
        for (item, tensor), version in zip(self._weights, self._versions, strict=True):
            if tensor._version != version:
                self._refuse(item)
        before, self._sums = self._sums, None
        if before is not None and not torch.equal(now := self._sum_bytes(), before):
            self._refuse(self._weights[int((now != before).nonzero()[0])][0])

    def _sum_bytes(self) -> torch.Tensor:
        sums = [sum_bytes(tensor.detach()).to(torch.int64) for _, tensor in self._weights]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)

    def _refuse(self, item: Item) -> None:
        for (_, tensor), values in zip(self._weights, self._copies, strict=False):
            tensor.data.copy_(values)
        raise ValueError(
            f"{item.name!r} is edited in place while the model or the loss runs. The engine moves weights between host "
            "and device and runs parts of the model twice, so such edits would be lost or made twice. Edit weights "
            "between steps, after engine.step(); in place of nn.Embedding(max_norm=...), for example, renormalise "
            "there. What is not trained, such as the average that a teacher holds, can also be a buffer"
        )


def sum_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of integers of the elements' size, which may overflow: in a wider type, some devices would make a wider copy."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = real.reshape(-1).view(_INTEGERS[real.itemsize])
    return integers.sum(dtype=integers.dtype)
