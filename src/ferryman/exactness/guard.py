"""Checks before the first weight of a step changes: whether variables of the user's code have changed for the first
time, and whether losses equal those of the trial."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ferryman.exactness.snapshot import is_near
from ferryman.exactness.survey import Survey
from ferryman.exactness.user_state import UserState


class StepAgainError(Exception):
    """The step must run again, in another way. No weight was changed; the step is undone.

    `refusal`: the error for the user if all attempts end like this.
    """

    def __init__(self, reason: str, refusal: Exception) -> None:
        super().__init__(reason)
        self.refusal = refusal


class NewStateError(StepAgainError):
    """A variable that no trial has seen changing has changed in a step."""

    def __init__(self, names: list[str]) -> None:
        refusal = ValueError(
            f"these variables changed in a step for the first time, after its trial: {', '.join(names)}. No weight was "
            "changed, and all gradients were dropped. Call the engine again: it will check these variables first"
        )
        super().__init__(", ".join(names), refusal)


class OutOfRoomError(StepAgainError):
    """The device's memory was not enough for a step, though trials had found room."""

    def __init__(self, error: torch.OutOfMemoryError) -> None:
        super().__init__(str(error), error)


@contextlib.contextmanager
def repeating(refusal: Exception | None) -> Iterator[None]:
    """Context in which a step is prepared again after `refusal`. If it cannot run with less memory, the error for the
    user is that it has run out of memory."""
    try:
        yield
    except ValueError as error:
        if isinstance(refusal, torch.OutOfMemoryError):
            raise refusal from error
        raise


class NotRepeatableError(ValueError):
    """A step cannot be run again with the same result."""


# Parts of errors that code raises if it keeps a tensor with its graph where another micro-batch can read it.
_OF_SHARED_GRAPHS = (
    "through the graph a second time",
    "modified by an inplace operation",
    "runs a second time",
    "keeps tensors with their graph",
)


class Guard:
    """Compares the user's variables at the start of one step with those before the first weight changes.

    `expected`: the losses of the first micro-batches, if a trial has just run them.
    """

    def __init__(self, survey: Survey, state: UserState, expected: Sequence[float] = ()) -> None:
        self.survey, self._state = survey, state
        self._expected = expected
        self._before: list[Any] | None = None

    def begin(self) -> None:
        self._before = self.survey.capture()

    def check(self, losses: Mapping[int, torch.Tensor]) -> None:
        """Raises a ValueError or a NewStateError if the step must not continue. Calls after a success do nothing."""
        if self._before is None:
            return
        self._check_losses(losses)
        if new := self._state.edited_logs() or self._new():
            raise NewStateError(new)
        self._before = None

    def reason_to_repeat(self, error: BaseException) -> StepAgainError | None:
        """Why a step that `error` has ended may succeed if it runs again; None if it would not, or if weights may have
        changed.

        If variables have changed for the first time, they may be the reason for `error`: before they are known, all
        micro-batches see the value that the last one has stored.
        """
        if self._before is None or not isinstance(error, RuntimeError | ValueError):
            return None
        if isinstance(error, torch.OutOfMemoryError):
            return OutOfRoomError(error)
        if not any(words in str(error) for words in _OF_SHARED_GRAPHS):
            return None
        return NewStateError(new) if (new := self._new()) else None

    def _new(self) -> list[str]:
        assert self._before is not None
        return [variable.name for variable in self.survey.changed(self._before) if not self._state.knows(variable)]

    def put_back(self, error: StepAgainError) -> None:
        """Undoes the step's changes of the user's variables after `error`, so that the step can be run again."""
        if self._before is None:  # the step has passed the check
            raise NotRepeatableError(f"{error} is edited in a step for the first time. Call the engine again")
        try:
            self.survey.put_back(self._before)
        except ValueError as failure:
            raise NotRepeatableError(
                f"these changed in a step for the first time: {error}. The engine would undo the step and run it "
                f"again, but cannot: {failure}. No weight was changed"
            ) from failure

    def _check_losses(self, losses: Mapping[int, torch.Tensor]) -> None:
        for number, expected in enumerate(self._expected):
            if not is_near(found := float(losses[number]), expected):
                raise NotRepeatableError(
                    f"the loss of micro-batch {number} is {found:.6g}, and was {expected:.6g} when the engine tried "
                    "the step just before, with the same weights, data and random numbers. Your model or loss "
                    "depends on something that the engine cannot restore, such as an iterator, a file, a clock or the "
                    "state of a library. Read such values before engine.step(), and pass them in with the batch"
                )
