"""What the server needs of the weights on the device. The relay implements it, with slots or with held weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ferryman.model.spans import Span
from ferryman.model.units import Unit
from ferryman.runtime.marks import Mark


class DeviceWeights(Protocol):
    """The relay's copy of the weights, as far as updates concern it."""

    def memory(self, unit: Unit) -> torch.Tensor | None:
        """The flat memory of a unit whose weights stay on the device; None for a unit that passes through slots."""

    def forget(self) -> None:
        """Called when the user may have changed weights on the host: copies of changed weights are out of date."""

    def updatable_after(self, unit: Unit) -> list[Mark]:
        """The marks after which the unit may be updated: its copy on the device is current, and nothing reads it."""

    def refresh(self, unit: Unit, runs: Sequence[Span], after: Mark) -> Mark | None:
        """Called when the host has updated these weights, after the mark.

        Where they stay on the device they are copied there. Returns the end of the copy, or None if there is none.
        """

    def updated(self, unit: Unit, mark: Mark) -> None:
        """Called when the device has updated weights that stay there: they are current after the mark."""

    def renew(self, unit: Unit) -> None:
        """Called when other ranks update parts of the unit: it must be fetched before it is used again."""
