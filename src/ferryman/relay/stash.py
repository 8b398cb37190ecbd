"""The stash: inputs that calls save for their backward, and tensors of micro-batches that wait.

`Stash` leaves tensors on the device. That is fastest, but takes memory that grows with depth and micro-batches.
`HostStash` (`host_stash.py`) leaves no tensors of a parked micro-batch on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ferryman.relay.kept_graph import Hold
from ferryman.relay.micro_batch import MicroBatch
from ferryman.relay.tensor_identity import version_of


class Stashed(Protocol):
    """An input that a call will need again."""

    @property
    def source(self) -> tuple[int, int]:
        """Identifies its bytes on the host, as long as these exist: a key, and the number of bytes."""

    def prefetch(self) -> None:
        """Starts to bring it to the device, ahead of `recall`."""

    def is_edited(self) -> bool:
        """Whether the tensor itself was edited in place since it was saved."""

    def recall(self) -> torch.Tensor | None:
        """The detached tensor on the device; None if it was edited, and there is no copy from before that."""


class OnDevice(NamedTuple):
    """A saved input that is left on the device."""

    alias: torch.Tensor
    version: int | None

    @property
    def source(self) -> tuple[int, int]:
        return id(self.alias), 0

    def prefetch(self) -> None:
        pass

    def is_edited(self) -> bool:
        return version_of(self.alias) != self.version

    def recall(self) -> torch.Tensor | None:
        return None if self.is_edited() else self.alias


class Stash:
    """The stash of a step. This one leaves all tensors on the device, so most of its methods have nothing to do."""

    moves = False  # whether tensors may leave the device

    def track(self, batch: MicroBatch, tensors: Sequence[torch.Tensor]) -> None:
        """Registers tensors that belong to the micro-batch."""

    def save(self, batch: MicroBatch, tensor: torch.Tensor) -> Stashed:
        """Saves a call's input with its current value."""
        alias = tensor.detach()  # shares the version counter, which reveals edits
        return OnDevice(alias, version_of(alias))

    def hold(self, batch: MicroBatch, tensor: torch.Tensor) -> Stashed:
        """Leaves a call's input on the device until the result is dropped."""
        return self.save(batch, tensor)

    def hold_saved(self, storages: Collection[int]) -> Hold | None:
        """Leaves what a kept graph has saved on the device until the result is dropped."""
        return None

    def watch(self, batch: MicroBatch) -> contextlib.AbstractContextManager[Any]:
        """Context in which the micro-batch runs. Tensors that it makes belong to it."""
        return contextlib.nullcontext()

    def stow(self, batch: MicroBatch) -> None:
        """Called when the micro-batch is parked, before others run."""

    def restore(self, batch: MicroBatch) -> None:
        """Called ahead of the micro-batch's next run: starts to restore the tensors that its call needs."""

    def follow(self, batch: MicroBatch) -> None:
        """Called before the micro-batch runs: makes compute wait for tensors that are being restored."""

    def use(self, batch: MicroBatch, tensor: torch.Tensor) -> None:
        """Called before the micro-batch uses a tensor, which may be stowed or belong to another micro-batch."""

    def edited(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called when a unit has edited these tensors in place."""

    def checking(self) -> contextlib.AbstractContextManager[None]:
        """Context in which in-place edits that the stash has not seen raise a ValueError."""
        return contextlib.nullcontext()

    def bring_back(self) -> None:
        """Restores all tensors that the user still holds at the end of the step."""

    def forget(self) -> None:
        """Drops everything that belongs to the step."""
