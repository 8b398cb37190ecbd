"""Refuses edits of weights by the user's code in a forward, such as those of `nn.Embedding(max_norm=...)`.

Plain PyTorch keeps such an edit. Here an edit on the device would be lost when the slot is used again, and an edit on
the host would be made twice, because units run twice. Most edits change the version of a tensor. Edits through `.data`
do not, so one pass of a trial also compares the sums of the bytes of all weights. For residents, steps that compare
second runs (`checksums.py`) do so too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ferryman.model.units import Item

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size


class WeightEdits:
    """Finds edits of weights that are bound for a time: a unit's during a visit, or the residents' during a step.

    `by_bytes`: also compare the sums of bytes. `can_undo`: keep copies, so that refused edits are undone.
    """

    def __init__(self, bound: Sequence[tuple[Item, torch.Tensor]], *, by_bytes: bool, can_undo: bool = False) -> None:
        self._weights = [pair for pair in bound if not pair[0].is_buffer]
        self._copies = [tensor.detach().clone() for _, tensor in self._weights if can_undo]
        self._versions = [tensor._version for _, tensor in self._weights]
        self._sums = self._sum_bytes() if by_bytes or can_undo else None

    def check(self) -> None:
        """Raises a ValueError if a weight was edited. Only the first call compares bytes."""
        for (item, tensor), version in zip(self._weights, self._versions, strict=True):
            if tensor._version != version:
                self._refuse(item)
        before, self._sums = self._sums, None
        if before is not None and not torch.equal(now := self._sum_bytes(), before):
            self._refuse(self._weights[int((now != before).nonzero()[0])][0])

    def _sum_bytes(self) -> torch.Tensor:
        sums = [sum_bytes(tensor.detach()).to(torch.int64) for _, tensor in self._weights]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device="cpu")

    def _refuse(self, item: Item) -> None:
        for (_, tensor), values in zip(self._weights, self._copies, strict=False):
            tensor.data.copy_(values)
        raise ValueError(
            f"{item.name!r} is edited in place while the model or the loss runs. The engine moves weights between host "
            "and device and runs parts of the model twice, so such edits would be lost or made twice. Edit weights "
            "between steps, after engine.step(): for example, renormalize there instead of using "
            "nn.Embedding(max_norm=...). Weights that are not trained, such as a teacher's moving average, can also be "
            "buffers"
        )


def sum_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the elements as integers of the same size. It may overflow; summing in a wider type would make some
    devices allocate a wider copy."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = real.reshape(-1).view(_INTEGERS[real.itemsize])
    return integers.sum(dtype=integers.dtype)
