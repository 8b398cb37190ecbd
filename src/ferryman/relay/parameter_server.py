"""The relay's interface to the parameter server. The relay imports nothing from `server/`."""

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
        """The factor by which losses, and therefore gradients, are multiplied; 1.0 except in float16."""

    @property
    def has_optimizer(self) -> bool:
        """Whether there can be updates. Otherwise, all gradients are left for the user in float32."""

    def weights(self, unit: Unit) -> torch.Tensor:
        """The unit's weights on the host, as flat bytes, in the dtypes that they have on the device."""

    def weights_ready(self, unit: Unit) -> list[Mark]:
        """The marks after which the unit's weights on the host include its last update."""

    def record_fetch(self, unit: Unit, mark: Mark, nbytes: int) -> None:
        """Reports a copy of the unit's weights to the device. The server must not change them before the mark."""

    def gradient_buffer(self, unit: Unit) -> torch.Tensor:
        """Host memory, as flat bytes, for float32 gradients of the unit that are left for the user."""

    def send_gradients(
        self, unit: Unit, gradients: torch.Tensor, items: Collection[Item], after: Sequence[Mark]
    ) -> list[Mark]:
        """Receives the gradients of a unit whose backward is over, for an update.

        `gradients` is a flat tensor on the device, in the unit's landing dtype, and complete after the marks. Only
        `items` have a gradient. The server decides for each subgroup whether the device or the host updates it.
        Returns the marks after which the memory may be overwritten.
        """

    def send_loss(self, loss: torch.Tensor, after: Sequence[Mark]) -> None:
        """Receives a micro-batch's loss, complete after the marks. A loss that is not finite stops the update."""

    def wait_for_updates(self) -> None:
        """Blocks until all updates are done."""
