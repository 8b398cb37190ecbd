"""What the relay needs of the parameter server. The relay imports nothing else of the host's side."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from ferryman.model.units import Item, Unit
from ferryman.runtime.marks import Mark


class ParameterServer(Protocol):
    """The owner of all weights and gradients on the host."""

    @property
    def loss_scale(self) -> float:
        """The factor that losses, and so gradients, are multiplied by; 1.0 except in float16."""

    @property
    def has_optimizer(self) -> bool:
        """Whether there can be updates. Otherwise gradients are only left for the user, in float32."""

    def weights(self, unit: Unit) -> torch.Tensor:
        """The unit's weights on the host, in the dtype that they have on the device, as flat bytes."""

    def weights_ready(self, unit: Unit) -> list[Mark]:
        """The marks after which the unit's weights on the host include its last update."""

    def record_fetch(self, unit: Unit, mark: Mark, nbytes: int) -> None:
        """Reports a copy of the unit's weights to the device: they must not be changed before the mark."""

    def gradient_buffer(self, unit: Unit) -> torch.Tensor:
        """Host memory, as flat bytes, for float32 gradients of the unit that are left for the user."""

    def send_gradients(
        self, unit: Unit, gradients: torch.Tensor, items: Collection[Item], after: Sequence[Mark]
    ) -> list[Mark]:
        """Takes the gradients of a unit whose backward is over, for an update.

        `gradients` is flat, on the device, in the unit's landing dtype, and complete after the marks; only `items` have
        one. The server decides for each subgroup whether it is used on the device or crosses to the host. Returns the
        marks after which the memory may be overwritten.
        """

    def send_loss(self, loss: torch.Tensor, after: Sequence[Mark]) -> None:
        """Takes the loss of one micro-batch, complete after the marks. A loss that is not finite stops the update."""

    def wait_for_updates(self) -> None:
        """Blocks until all updates are done."""
