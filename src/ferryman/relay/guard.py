"""Watches for variables of the user that change for the first time after the first step."""

from __future__ import annotations

from typing import Any

from ferryman.relay.survey import Survey
from ferryman.relay.user_state import UserState


class NewStateError(Exception):
    """Something has changed in a step that no check has seen changing; it has been put back. No weight was changed."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))


class Guard:
    """Of one step: compares what a survey sees at its start with what it sees before the first weight changes."""

    def __init__(self, survey: Survey, state: UserState) -> None:
        self._survey, self._state = survey, state
        self._before: list[Any] | None = None

    def begin(self) -> None:
        self._before = self._survey.look()

    def check(self) -> None:
        if self._before is None:
            return
        before, self._before = self._before, None
        if new := [v.name for v in self._survey.changed(before) if not self._state.knows(v)]:
            self._survey.put_back(before)
            raise NewStateError(new)
