"""Edits of a batch by user code, such as masks written into it. Edits by trials and failed steps are undone.

Micro-batches on a device are usually copies of the user's tensors. If the user's tensors are on the device already, as
they always are with device="cpu", the micro-batches are these tensors themselves.
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
    """The original values of the user's tensors in the micro-batches of one step."""

    def __init__(self) -> None:
        self._before: dict[int, _Noted] = {}
        self.found = False  # whether there were any edits

    def note(self, tensors: Sequence[torch.Tensor], *, keep: bool) -> None:
        """Registers a micro-batch's tensors before it runs. `keep`: copy their values, so that edits can be undone."""
        for tensor in tensors:
            if id(tensor) not in self._before:
                # Copy to the host: a copy on the device would count against the budget.
                values = tensor.detach().to("cpu", copy=True) if keep else None
                self._before[id(tensor)] = _Noted(tensor, tensor._version, values)

    def put_back(self) -> bool:
        """Undoes edits. Returns whether some could not be undone."""
        lost = False
        # In reverse order: parts of one tensor may overlap, and the first to be noted has the original values.
        for tensor, version, values in reversed(self._before.values()):
            edited = tensor._version != version
            if values is None:
                lost |= edited
            # Write only to tensors that were edited: others may be in read-only memory.
            elif edited or not torch.equal(tensor.detach().cpu(), values):
                tensor.data.copy_(values)
                edited = True
            self.found |= edited
        self._before.clear()
        return lost

    def forget(self) -> None:
        """Drops the original values after a step that succeeded: edits stay."""
        self._before.clear()
