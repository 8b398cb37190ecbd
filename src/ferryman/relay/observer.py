"""Observers of trials: the relay calls them at fixed points of a trial, while no micro-batch runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ferryman.exactness.reach import context_roots
from ferryman.exactness.survey import Survey
from ferryman.model.units import Item
from ferryman.relay.micro_batch import MicroBatch, ThreadState

if TYPE_CHECKING:
    from ferryman.relay.call import Call


class Roots(NamedTuple):
    """Objects from which the search for the user's variables starts."""

    values: Sequence[tuple[Any, str]]  # with their names
    inside: Collection[nn.Module]  # the modules of units; the relay takes care of their buffers
    own: Callable[[], Collection[int]]  # the current ids of the engine's modules and parameters

    def survey(self, *, thorough: bool, edited: Collection[int] = ()) -> Survey:
        return Survey([*self.values, *context_roots()], self.inside, self.own(), edited, thorough=thorough)


class Observer:
    """Undoes a trial's changes of the user's variables. Subclasses also record events of the trial."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self.survey: Survey | None = None
        self._before: list[Any] = []

    def begin(self) -> None:
        """Called when the model is on the device, before any micro-batch runs."""
        self.survey = self._roots.survey(thorough=True)
        self._before = self.survey.capture()

    def resumes(self, batch: MicroBatch) -> None:
        """Called before the micro-batch continues."""

    def parked(self, batch: MicroBatch) -> None:
        """Called when the micro-batch has parked again or has ended."""

    def gradient(self, batch: MicroBatch, item: Item, gradient: torch.Tensor) -> None:
        """Called with each call's gradient of a parameter."""

    def run_again(
        self, call: Call, inputs: list[torch.Tensor], run: Callable[[], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Runs a call's forward with a graph, in its backward, and returns the outputs."""
        return run()

    def end(self, losses: dict[int, torch.Tensor], left: ThreadState | None) -> None:
        """Called when all micro-batches are done, before their effects are undone.

        `left`: the thread state at the end of the last micro-batch.
        """

    def undo(self) -> None:
        """Called last, also after an exception, while the model is still on the device."""
        if self.survey is not None:
            self.survey.put_back(self._before)
