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
    values: torch.Tensor | None


class BatchEdits:
    """Of one step: the user's tensors in its micro-batches, as they were before."""

    def __init__(self) -> None:
        self._before: dict[int, _Noted] = {}
        self.found = False  # whether there were any

    def note(self, tensors: Sequence[torch.Tensor], *, keep: bool) -> None:
        """A micro-batch begins with these. To `keep` their values takes time: else they cannot be put back."""
        for tensor in tensors:
            if id(tensor) not in self._before:
                # On the host: on the device it would count against the budget.
                values = tensor.detach().to("cpu", copy=True) if keep else None
                self._before[id(tensor)] = _Noted(tensor, tensor._version, values)

    def put_back(self) -> bool:
        """Undoes edits; returns whether there were some that could not be undone."""
        lost = False
        for tensor, version, values in self._before.values():
            edited = tensor._version != version
            if values is None:
                lost |= edited
            # What was not edited is not written to: it may be in memory that is read-only.
            elif edited or not torch.equal(tensor.detach().cpu(), values):
                tensor.data.copy_(values)
                edited = True
            self.found |= edited
        self._before.clear()
        return lost

    def forget(self) -> None:
        """The step is good: edits stay."""
        self._before.clear()
