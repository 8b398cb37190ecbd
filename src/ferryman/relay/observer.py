"""Observers of trials: the relay calls them at certain points of a trial, while no micro-batch runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ferryman.exactness.reach import context_roots
from ferryman.exactness.survey import Survey
from ferryman.model.units import Item
from ferryman.relay.micro_batch import MicroBatch, ThreadState


class Roots(NamedTuple):
    """Where the user's code starts from."""

    values: Sequence[tuple[Any, str]]  # with their names
    inside: Collection[nn.Module]  # the modules of units; the relay takes care of their buffers
    own: Callable[[], Collection[int]]  # the identities of the engine's modules and parameters, as they are now

    def survey(self, *, thorough: bool, edited: Collection[int] = ()) -> Survey:
        return Survey([*self.values, *context_roots()], self.inside, self.own(), edited, thorough=thorough)


class Observer:
    """Undoes what a trial did to the user's variables. Subclasses also record what happens in it."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self.survey: Survey | None = None
        self._before: list[Any] = []

    def begin(self) -> None:
        """The model is on the device, and nothing has run."""
        self.survey = self._roots.survey(thorough=True)
        self._before = self.survey.capture()

    def resumes(self, batch: MicroBatch) -> None:
        """The micro-batch is about to go on."""

    def parked(self, batch: MicroBatch) -> None:
        """The micro-batch has parked again, or has ended."""

    def gradient(self, batch: MicroBatch, item: Item, gradient: torch.Tensor) -> None:
        """One call's gradient of a parameter."""

    def end(self, losses: dict[int, torch.Tensor], left: ThreadState | None) -> None:
        """All micro-batches are done, and their effects are still there.

        `left`: the thread-local state that the last micro-batch has ended with.
        """

    def undo(self) -> None:
        """Called last, also after an exception; the model is still on the device."""
        if self.survey is not None:
            self.survey.put_back(self._before)
