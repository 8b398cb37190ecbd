"""What is looked at in a step before its first weight changes: variables of the user that have changed for the first
time, and whether losses are those of the trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ferryman.exactness.snapshot import is_near
from ferryman.exactness.survey import Survey
from ferryman.exactness.user_state import UserState


class NewStateError(Exception):
    """Something has changed in a step that no check has seen changing; it has been put back. No weight was changed."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))


class NotRepeatableError(ValueError):
    """A step does not give what its trial has given."""


class Guard:
    """Of one step: compares what a survey sees at its start with what it sees before the first weight changes.

    `expected`: the losses of the first micro-batches, if a trial has just run them.
    """

    def __init__(self, survey: Survey, state: UserState, expected: Sequence[float] = ()) -> None:
        self.survey, self._state = survey, state
        self._expected = expected
        self._before: list[Any] | None = None

    def begin(self) -> None:
        self._before = self.survey.look()

    def check(self, losses: Mapping[int, torch.Tensor]) -> None:
        """A ValueError, or a NewStateError, if the step must not go on. Only its first call looks."""
        if self._before is None:
            return
        self._check_losses(losses)
        before, self._before = self._before, None
        if edited := self._state.edited_logs():
            self.survey.put_back(before)
            raise NewStateError(edited)
        if new := [v.name for v in self.survey.changed(before) if not self._state.knows(v)]:
            self.survey.put_back(before)
            raise NewStateError(new)

    def _check_losses(self, losses: Mapping[int, torch.Tensor]) -> None:
        for number, expected in enumerate(self._expected):
            if not is_near(found := float(losses[number]), expected):
                raise NotRepeatableError(
                    f"the loss of micro-batch {number} is {found:.6g}, and was {expected:.6g} when the engine tried "
                    "the step a moment before, with the same weights, data and random numbers. Your model or loss "
                    "depends on something that the engine cannot put back, such as an iterator, a file, a clock or the "
                    "state of a library. Read such values before engine.step(), and pass them in with the batch"
                )
