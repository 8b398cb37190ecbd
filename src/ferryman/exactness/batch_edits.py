"""Edits of a batch by user code, such as masks written into it. Those of trials and of failed steps are undone.

On a device, micro-batches are copies of the user's tensors; where these are on the device already, as they always are
with device="cpu", they are the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class _Noted(NamedTuple):
    tensor: torch.Tensor
    version: int
    values: torch.Tensor


class BatchEdits:
    """Of one step: the user's tensors in its micro-batches, as they were before."""

    def __init__(self) -> None:
        self._before: dict[int, _Noted] = {}

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        """A micro-batch begins with these."""
        for tensor in tensors:
            if id(tensor) not in self._before:
                # On the host: on the device it would count against the budget.
                values = tensor.detach().to("cpu", copy=True)
                self._before[id(tensor)] = _Noted(tensor, tensor._version, values)

    def put_back(self) -> None:
        for tensor, version, values in self._before.values():
            # What was not edited is not written to: it may be in memory that is read-only.
            if tensor._version != version or not torch.equal(tensor.detach().cpu(), values):
                tensor.data.copy_(values)
        self._before.clear()

    def forget(self) -> None:
        """The step is good: edits stay."""
        self._before.clear()
