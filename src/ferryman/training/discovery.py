"""Finds the user's variables that change while a micro-batch runs, and chooses a policy for each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ferryman.exactness.leaves import Gradient
from ferryman.exactness.snapshot import Snapshot, is_same
from ferryman.exactness.user_state import VariablePolicy
from ferryman.exactness.variables import Array, Elements, Generator, Variable
from ferryman.model.units import Unit
from ferryman.relay.driver import Relay
from ferryman.relay.micro_batch import MicroBatch
from ferryman.relay.observer import Observer, Roots

MAX_ATTEMPTS = 4


class Watcher(Observer):
    """Collects the variables that have changed since the last `collect_changes`."""

    def __init__(self, roots: Roots) -> None:
        super().__init__(roots)
        self.found: dict[Any, Variable] = {}
        self._last: list[Any] = []

    def begin(self) -> None:
        super().begin()
        self._last = self._before

    def collect_changes(self) -> list[Variable]:
        """The variables that have changed since the last call."""
        assert self.survey is not None
        changed = self.survey.changed(self._last)
        if changed:
            self._last = self.survey.capture()
        self.found |= {variable.key: variable for variable in changed}
        return changed

    def undo(self) -> None:
        if self.survey is not None:
            self.collect_changes()  # a micro-batch that has failed did not park
        super().undo()


class Discovery(Watcher):
    """Compares variables at every park, which also finds those that are changed and restored within a micro-batch."""

    def __init__(self, relay: Relay, roots: Roots, units: Sequence[Unit]) -> None:
        super().__init__(roots)
        self._relay, self._units = relay, units
        self._early: set[Any] = set()  # variables that change before a micro-batch's last call
        relay.state.know((), {}, ())

    def parked(self, batch: MicroBatch) -> None:
        changed = self.collect_changes()
        if not batch.done:
            self._early |= {variable.key for variable in changed}

    def run(self, trial: Callable[[], None]) -> None:
        """Runs a trial that this watches, and teaches the relay what it has found. If the code fails, it may be because
        the relay did not know a variable yet: a tensor that a unit has stored has no gradient then, and one that a unit
        finds in a variable may be on its way to the host. So the trial runs again as long as it finds more."""
        for _ in range(MAX_ATTEMPTS):
            known = set(self.found)
            try:
                trial()
                break
            except Exception:
                if self.found.keys() == known:
                    raise
                self._relay.lanes.drain()
                self._relay.recover()
                self.teach()
        self.teach()

    def teach(self, ends: Sequence[dict[Any, Snapshot]] = ()) -> None:
        """Passes the variables found to the relay. `ends`: their values at the end of each of several micro-batches."""
        policies = {key: _first_policy(v, key in self._early, ends) for key, v in self.found.items()}
        self._relay.state.know(self.found.values(), policies, self._units)

    def logs_of_one_unit(self) -> list[Variable]:
        """Lists with the policy LOG that at most one unit can reach."""
        state = self._relay.state
        reached = Counter(v.key for unit in self._units for found in state.of(unit) for v in found)
        return [v for v in state.variables if state.policy(v) is VariablePolicy.LOG and reached[v.key] <= 1]


def _first_policy(variable: Variable, early: bool, ends: Sequence[dict[Any, Snapshot]]) -> VariablePolicy:
    if isinstance(variable, Generator) and variable.is_global:
        return VariablePolicy.SEEDED
    if not early or isinstance(variable, Gradient):
        # Changed where losses are computed, or in the backward; gradients are sums in any order.
        return VariablePolicy.SHARED
    values = [at_end[variable.key] for at_end in ends if variable.key in at_end]
    if values and not isinstance(variable, Array | Elements):  # edits in place do not show in these
        if len(values) > 1 and all(value.same_as(values[0]) for value in values):
            return VariablePolicy.TEMPORARY
        if _grows(values):
            return VariablePolicy.LOG
        if _counts(values):
            return VariablePolicy.SHARED
    return VariablePolicy.PRIVATE


def _grows(values: Sequence[Snapshot]) -> bool:
    """Whether these are the values of a list to which each micro-batch has appended, and done nothing else."""
    lists = [value.members() for value in values if value.is_list]
    return len(lists) == len(values) > 1 and all(
        len(after) > len(before) and is_same(after[: len(before)], before)
        for before, after in itertools.pairwise(lists)
    )


def _counts(values: Sequence[Snapshot]) -> bool:
    numbers = [value.atom for value in values]
    return all(type(number) is int for number in numbers) and all(a < b for a, b in itertools.pairwise(numbers))
