"""Decides when a step is checked before it runs, and what is checked while it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ferryman.exactness.guard import Guard
from ferryman.exactness.reach import context_roots
from ferryman.exactness.survey import Survey
from ferryman.exactness.user_state import Knowledge
from ferryman.exactness.variables import Variable
from ferryman.model.units import Unit
from ferryman.plan.batch import Part
from ferryman.plan.fit import Choice
from ferryman.relay.driver import Relay
from ferryman.relay.observer import Roots
from ferryman.relay.step_state import LossRun
from ferryman.training.crosscheck import TRIED, CrossCheck, second_run_differs

# The second runs of calls are compared with the first ones in the first steps, and then at intervals.
_FIRST_STEPS = 3
_STEP_INTERVAL = 32


class FirstSteps:
    """Remembers which kinds of steps of one relay have been checked."""

    def __init__(self, relay: Relay, model: nn.Module, loss: Callable[..., Any], units: Sequence[Unit]) -> None:
        self._relay = relay
        inside = frozenset(module for unit in units for top in unit.modules for module in top.modules())

        def own() -> set[int]:
            return {id(module) for module in model.modules()} | {id(tensor) for tensor in relay.own_leaves()}

        self.roots = Roots([(model, "model"), (loss, "the loss")], inside, own)
        self._units = units
        self._checked: dict[Any, Knowledge] = {}  # by kind of step: what the check has found
        self._one_by_one: dict[Any, str] = {}  # kinds of steps whose micro-batches cannot take turns, and why
        self._context: list[tuple[Any, str]] = []  # values of context variables in the last trial
        self._survey: Survey | None = None
        self._tried: tuple[int, list[float]] | None = None  # the seed and the losses of the last trial
        self._steps = 0

    def is_new(self, parts: Sequence[Part]) -> bool:
        self._survey_new_objects()
        return bool(parts) and (_kind_of(parts) not in self._checked or self._has_other_context())

    def _survey_new_objects(self) -> None:
        """Surveys again if the user's variables now refer to objects that the last survey has not seen.

        What a trial has found about a list or dict that was replaced by another between steps (`model.log = []`) holds
        for the other one. Objects in places that did not exist, such as what a new hook refers to, need a new trial.
        """
        known = {key for knowledge in self._checked.values() for key in knowledge.variables}
        if self._survey is None or not self._survey.meets_new_objects(known):
            return
        old, self._survey = self._survey, self._make_survey()
        containers = self._survey.containers()
        replaced = dict[Any, Variable]()
        for knowledge in self._checked.values():
            for key, variable in knowledge.variables.items():
                if id(variable.owner) not in self._survey.owners and variable.name in containers:
                    replaced[key] = containers[variable.name].variable
                elif id(variable.owner) not in self._survey.owners and id(variable.owner) in old.owners:
                    self.forget()
                    return
        if not self._survey.names() <= old.names():
            self.forget()
            return
        if replaced:
            self._checked = {kind: knowledge.replace(replaced) for kind, knowledge in self._checked.items()}

    def _make_survey(self) -> Survey:
        # Contents of what is known to be edited are copied, so that the step can be undone and run again.
        edited = {id(v.owner) for knowledge in self._checked.values() for v in knowledge.variables.values()}
        return self.roots.survey(thorough=False, edited=edited)

    def _has_other_context(self) -> bool:
        """Whether a context variable whose value changes in a step now refers to another object."""
        names = [variable.name for variable in self._relay.state.variables]
        seen = {id(value) for value, _ in self._context}
        return any(
            id(value) not in seen and any(name.startswith(root) for name in names) for value, root in context_roots()
        )

    def check(self, parts: Sequence[Part], loss_runs: Sequence[LossRun], seed: int, choice: Choice) -> None:
        """Runs the cross-check for a new kind of step."""
        crosscheck = CrossCheck(self._relay, self.roots, self._units)
        losses = crosscheck.run(loss_runs, seed, stash_on_host=choice.stash_on_host, keep=choice.keep)
        if crosscheck.differs:
            self._one_by_one[_kind_of(parts)] = crosscheck.differs
            warnings.warn(
                f"{crosscheck.differs} So micro-batches run one after the other, and each unit is fetched for each of "
                "them, which takes longer. They take turns if such state is set before it is read in the same "
                "micro-batch, or updated after engine.step()",
                stacklevel=8,  # the caller of engine.step or engine.forward_backward
            )
        self._tried = seed, [loss / part.weight for loss, part in zip(losses, parts, strict=False)]
        self._checked[_kind_of(parts)] = self._relay.state.knowledge
        self._survey, self._context = None, context_roots()

    def forget(self) -> None:
        """Drops all results, because a variable has changed that no check has seen."""
        self._checked.clear()
        self._one_by_one.clear()

    def can_interleave(self, parts: Sequence[Part]) -> bool:
        """Whether micro-batches of a step of this kind can take turns."""
        return not (parts and _kind_of(parts) in self._one_by_one)

    @property
    def differences(self) -> list[str]:
        """How results differ in steps whose micro-batches cannot take turns."""
        return list(self._one_by_one.values())

    def begin(self, parts: Sequence[Part], seed: int, *, skips: bool) -> Guard:
        """Begins a step and returns its guard. `skips`: the step skips blocks, which trials do not."""
        self._relay.checksums.begin(on=self._steps < _FIRST_STEPS or self._steps % _STEP_INTERVAL == 0)
        self._steps += 1
        known = self._checked.get(_kind_of(parts)) if parts else None
        if known is not None and known.variables is not self._relay.state.knowledge.variables:
            self._relay.state.use(known)
        if self._survey is None:
            self._survey = self._make_survey()
        expected: list[float] = []
        if self._tried is not None and self._tried[0] == seed and not skips:
            expected = [loss * part.weight for loss, part in zip(self._tried[1], parts, strict=False)]
        self._tried = None
        return Guard(self._survey, self._relay.state, expected)

    def end(self) -> None:
        """Ends a step. Raises a ValueError if a unit's second run gave other outputs than its first."""
        if (unit := self._relay.checksums.disagreement()) is not None:
            raise ValueError(second_run_differs(unit, self._relay.state.variables))


def _kind_of(parts: Sequence[Part]) -> Any:
    """The kind of a step: its number of micro-batches, and the structure of their contents."""
    return min(len(parts), TRIED), _describe(parts[0].content)


def _describe(content: Any) -> Any:
    """The structure of a content, without the lengths of lists and the sizes of tensors."""
    if isinstance(content, torch.Tensor):
        return content.dtype, content.dim()
    if isinstance(content, Mapping):
        return type(content), frozenset((key, _describe(member)) for key, member in content.items())
    if isinstance(content, list):
        return list, frozenset(map(_describe, content))
    return (tuple, *map(_describe, content)) if isinstance(content, tuple) else type(content)
