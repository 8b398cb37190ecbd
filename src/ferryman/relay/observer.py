"""What wants to see a trial run: the driver tells it, when no micro-batch runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ferryman.exactness.reach import context_roots
from ferryman.exactness.survey import Survey
from ferryman.model.units import Item
from ferryman.relay.micro_batch import MicroBatch, ThreadState


class Roots(NamedTuple):
    """Where the user's code starts from."""

    values: Sequence[tuple[Any, str]]  # and their names
    inside: Collection[nn.Module]  # modules of units, whose buffers are the relay's


class Observer:
    """Undoes what a run did to the user's variables; others see more."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self.survey: Survey | None = None
        self._before: list[Any] = []

    def begin(self) -> None:
        """The model is bound for the step, and nothing has run."""
        self.survey = Survey([*self._roots.values, *context_roots()], self._roots.inside, thorough=True)
        self._before = self.survey.look()

    def resumes(self, batch: MicroBatch) -> None:
        """The micro-batch is about to go on."""

    def parked(self, batch: MicroBatch) -> None:
        """The micro-batch has parked again, or has ended."""

    def gradient(self, batch: MicroBatch, item: Item, gradient: torch.Tensor) -> None:
        """One call's gradient of a parameter."""

    def end(self, losses: dict[int, torch.Tensor], left: ThreadState | None) -> None:
        """All is over, and what it has changed is still there. `left`: by the last micro-batch, in its thread."""

    def undo(self) -> None:
        """Comes last, also after an exception: the model is still bound."""
        if self.survey is not None:
            self.survey.put_back(self._before)
