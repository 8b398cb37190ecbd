"""The user's Python state: gives each micro-batch its own values of the variables that the user's code changes.

Micro-batches take turns, so a value that one of them has stored (`self.residual = x`) would be overwritten by another
before it is read. Therefore the variables that change in the first step are swapped whenever another micro-batch
continues, like registers at a context switch. Each variable has one of these policies:

- *private*: each micro-batch has its own value. Its initial value is the previous micro-batch's value at that time.
  After the step, the variable has the value of the last micro-batch that changed it.
- *temporary*: the variable is changed and reset within a micro-batch, like a flag that a context manager sets. Each
  micro-batch has its own value. Its initial value is the one from before the step.
- *log*: a list that only grows and cannot be shared, because several units append to it or the loss reads it. Each
  micro-batch has its own list. After the step, the list has the elements of all micro-batches in order.
- *shared*: not swapped, because the order in which the relay runs the code gives the right values. Examples are
  counters in a block, which serves micro-batches in order, a list that one block appends to, or a list of losses,
  which are computed in order.
- *seeded*: the global generators of `random` and numpy. Each micro-batch has its own seed, as for torch's generators.

The cross-check of the first step finds the policy of each variable (`crosscheck.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch

from ferryman.exactness.prefixes import Prefixes
from ferryman.exactness.reach import context_roots
from ferryman.exactness.snapshot import PlainSnapshot, Snapshot, snapshot_of
from ferryman.exactness.survey import Survey
from ferryman.exactness.variables import Array, Elements, Generator, Variable
from ferryman.model.units import Unit

_Saved = Snapshot | PlainSnapshot
Bring = Callable[[torch.Tensor], None]  # brings the elements of a tensor back that may be stowed

_NONE: tuple[list[Variable], list[Variable]] = ([], [])


class VariablePolicy(Enum):
    PRIVATE = "private"
    TEMPORARY = "temporary"
    LOG = "log"
    SHARED = "shared"
    SEEDED = "seeded"


class Knowledge(NamedTuple):
    """The known variables and policies for one kind of step."""

    variables: dict[Any, Variable]
    policies: dict[Any, VariablePolicy]
    by_unit: dict[Unit, tuple[list[Variable], list[Variable]]]  # variables that it can reach: not shared, and shared

    def replace(self, others: Mapping[Any, Variable]) -> Knowledge:
        """The same with other variables in place of those with these keys."""

        def other(variable: Variable) -> Variable:
            return others.get(variable.key, variable)

        return Knowledge(
            {other(variable).key: other(variable) for variable in self.variables.values()},
            {other(self.variables[key]).key: policy for key, policy in self.policies.items()},
            {unit: (list(map(other, own)), list(map(other, shared))) for unit, (own, shared) in self.by_unit.items()},
        )


class UserState:
    """The variables that are known to change, and each micro-batch's view of them while a step runs."""

    def __init__(self) -> None:
        self._variables: dict[Any, Variable] = {}
        self._owners: set[int] = set()
        self._policies: dict[Any, VariablePolicy] = {}
        self.is_known = False  # whether the variables have been determined
        self._by_unit: dict[Unit, tuple[list[Variable], list[Variable]]] = {}
        self._edited: list[Elements] = []  # tensors that are edited in place
        self._arrays: dict[int, Any] = {}  # arrays that are edited in place, by id
        # State of the current step:
        self._prefixes = Prefixes()
        self._apart: list[Variable] = []
        self._views: dict[int, list[_Saved]] = {}  # values of micro-batches that are not running
        self._bases: dict[int, list[_Saved]] = {}  # the values with which each micro-batch began
        self._outside: list[_Saved] = []
        self._originals: list[torch.Tensor] = []  # the tensors of `_edited` before the step
        self._copies: list[torch.Tensor] = []  # their values then, if micro-batches edit the tensors themselves
        self._renews = False
        self._current: int | None = None
        self._inherited: dict[int, dict[int, torch.Tensor]] = {}  # tensors in variables when each micro-batch began
        self._seed = 0

    def __len__(self) -> int:
        return len(self._variables)

    @property
    def variables(self) -> list[Variable]:
        return list(self._variables.values())

    @property
    def edited_tensors(self) -> list[torch.Tensor]:
        """The tensors that are known to be edited in place, as they were bound before the step."""
        return self._originals

    @property
    def owners(self) -> Collection[int]:
        """The ids of the objects that own the variables."""
        return self._owners

    def policy(self, variable: Variable) -> VariablePolicy:
        return self._policies[variable.key]

    def know(
        self, variables: Iterable[Variable], policies: Mapping[Any, VariablePolicy], units: Collection[Unit]
    ) -> None:
        """Sets the variables that change in a step. `units`: all units; the variables that each can reach are found."""
        self.use(Knowledge({variable.key: variable for variable in variables}, dict(policies), {}))
        if self._variables:
            self._by_unit.update((unit, self._reached_by(unit)) for unit in units)

    @property
    def knowledge(self) -> Knowledge:
        return Knowledge(self._variables, self._policies, self._by_unit)

    def use(self, knowledge: Knowledge) -> None:
        """Sets the variables and policies for the next steps."""
        self._variables, self._policies, self._by_unit = knowledge
        self._owners = {id(variable.owner) for variable in self._variables.values()}
        self.is_known = True
        self._edited = [v for v in self._variables.values() if isinstance(v, Elements)]
        self._arrays = {id(v.owner): v.owner for v in self._variables.values() if isinstance(v, Array)}

    def knows(self, variable: Variable) -> bool:
        places = (edited.place for edited in self._edited)
        return variable.key in self._variables or any(place and place.key == variable.key for place in places)

    def of(self, unit: Unit) -> tuple[Sequence[Variable], Sequence[Variable]]:
        """The variables that the unit's code can reach: those with a value per micro-batch, and shared ones."""
        return self._by_unit.get(unit, _NONE)

    def _reached_by(self, unit: Unit) -> tuple[list[Variable], list[Variable]]:
        # All code can reach the values of context variables.
        roots = [*((module, "") for module in unit.modules), *context_roots()]
        owners = Survey(roots, thorough=False).owners
        found = [
            variable
            for variable in self._variables.values()
            if id(variable.owner) in owners
            or (isinstance(variable, Generator) and variable.is_global)
            or (isinstance(variable, Elements) and variable.place is not None and id(variable.place.owner) in owners)
        ]
        shared = [variable for variable in found if self._policies[variable.key] is VariablePolicy.SHARED]
        return [variable for variable in found if variable not in shared], shared

    @property
    def edited(self) -> Mapping[int, Any]:
        """Tensors and arrays of the current micro-batch that are edited in place, by id."""
        if not self._edited:
            return self._arrays
        return self._arrays | {id(tensor): tensor for tensor in (v.get() for v in self._edited)}

    def snapshot(self, values: Iterable[Any]) -> Snapshot:
        """A snapshot of values of variables, or of a unit's arguments, in the current step."""
        return Snapshot(values, self.edited, self._prefixes)

    def is_history(self, tensor: torch.Tensor) -> bool:
        """Whether a long list contained the tensor before the step."""
        return self._prefixes.has(tensor)

    def edited_logs(self) -> list[str]:
        """Names of lists to which the code was expected only to append, but which this step has changed otherwise."""
        found = [] if self._prefixes.check() else ["a list that only grew before"]
        for at, variable in enumerate(self._apart):
            if self._policies[variable.key] is VariablePolicy.LOG:
                views = {number: view[at] for number, view in self._views.items()}
                if self._current is not None:
                    views[self._current] = snapshot_of(variable.get(), self.edited, self._prefixes)
                if not all(view.extends(self._bases[number][at]) for number, view in views.items()):
                    found.append(variable.name)
        return found

    # The exchange.

    def begin(self, seed: int, *, exchange: bool, careful: bool) -> None:
        """Begins a step.

        `exchange`: swap variables, which is not needed if micro-batches run one after the other. `careful`: the step is
        a trial, in which `edited_logs` is not called before its results are used.
        """
        self._apart = [
            variable
            for variable in self._variables.values()
            if (policy := self._policies[variable.key]) is VariablePolicy.SEEDED
            or (exchange and policy is not VariablePolicy.SHARED)
        ]
        self._views, self._bases, self._inherited, self._current, self._seed = {}, {}, {}, None, seed
        with self._prefixes.learning(careful=careful):
            self._outside = self._take()
            self.snapshot([v.get() for v in self._variables.values()])
        self._originals = [v.get() for v in self._edited]
        self._copies = [] if exchange else [original.detach().clone() for original in self._originals]
        self._renews = exchange

    def enter(self, number: int, bring: Bring) -> None:
        """Called before this micro-batch continues: swaps in its values."""
        if number == self._current or not self._variables:
            return
        self._leave()
        if number in self._views:
            self._put(self._views[number])
            self._renew(bring, everything=False)
        else:
            if number - 1 in self._views:
                self._put(self._views[number - 1])
            for variable, outside in zip(self._apart, self._outside, strict=True):
                if self._policies[variable.key] is VariablePolicy.TEMPORARY:
                    variable.put(*outside.restore())
                elif self._policies[variable.key] is VariablePolicy.SEEDED:
                    assert isinstance(variable, Generator)
                    seed_generator(variable.generator, self._seed + number)
            self._renew(bring, everything=True)
            self._bases[number] = self._take()
            held = Snapshot([variable.get() for variable in self.variables], prefixes=self._prefixes).tensors
            self._inherited[number] = {id(tensor): tensor for tensor in held}
        self._current = number

    def end(self, *, bring: Bring = lambda _: None, undo: bool = False) -> None:
        """Ends the step: sets the values that plain accumulation would leave or, with `undo`, those before the step."""
        if self._apart:
            self._leave()
            self._put(self._outside if undo else [self._left_behind(at) for at in range(len(self._apart))])
        if undo:
            for original, copy in zip(self._originals, self._copies, strict=False):
                original.data.copy_(copy)  # edits through `.data` have no version by which the guard finds them
        for variable, original in zip(self._edited, self._originals, strict=True):
            if variable.place is not None and (left := variable.get()) is not original:
                if not undo and isinstance(left, torch.Tensor):
                    bring(left)
                    with torch.no_grad():
                        original.copy_(left.detach())
                variable.place.put(original)
        self._views, self._bases, self._inherited, self._outside, self._apart = {}, {}, {}, [], []
        self._current, self._copies = None, []
        self._prefixes.clear()

    def is_inherited(self, tensor: torch.Tensor) -> bool:
        """Whether the current micro-batch has the tensor from the previous micro-batch or from the last step."""
        return self._current is not None and id(tensor) in self._inherited[self._current]

    def _left_behind(self, at: int) -> _Saved:
        """The final value of a variable: that of the last micro-batch that changed it; for a log, all its elements."""
        policy, left = self._policies[self._apart[at].key], self._outside[at]
        if policy is VariablePolicy.SEEDED:
            return left
        added: list[Any] = []
        for number in sorted(self._views):
            base, mine = self._bases[number][at], self._views[number][at]
            if base.same_as(mine) and not isinstance(self._apart[at], Elements):  # edits in place do not show
                continue
            left = mine
            if policy is VariablePolicy.LOG:
                added += mine.added_since(base)
        if policy is VariablePolicy.LOG and added:
            self._outside[at].restore()
            log = self._apart[at].get()
            log.extend(added)
            return Snapshot([log], prefixes=self._prefixes)
        return left

    def _renew(self, bring: Bring, *, everything: bool) -> None:
        """Gives the micro-batch that continues its own tensors to edit: autograd may have saved those of others.

        Shared tensors get a new copy, with the latest values, each time. Others are copied only when a micro-batch
        begins (`everything`).
        """
        for variable in self._edited if self._renews else ():
            latest = variable.get()
            needed = everything or self._policies[variable.key] is VariablePolicy.SHARED
            if variable.place is not None and needed and isinstance(latest, torch.Tensor):
                bring(latest)
                variable.place.put(latest.detach().clone())

    def _leave(self) -> None:
        if self._current is not None:
            self._views[self._current] = self._take()
            self._current = None

    def _take(self) -> list[_Saved]:
        edited = self._arrays | {id(v.tensor): v.tensor for v in self._edited if v.place is None}
        return [snapshot_of(variable.get(), edited, self._prefixes) for variable in self._apart]

    def _put(self, snapshots: Sequence[_Saved]) -> None:
        for variable, snapshot in zip(self._apart, snapshots, strict=True):
            (variable.place or variable if isinstance(variable, Elements) else variable).put(*snapshot.restore())


def seed_generator(generator: Any, seed: int) -> None:
    """Seeds a generator of `random` or numpy. Numpy accepts a smaller range of seeds."""
    if isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        assert isinstance(generator, np.random.RandomState)
        generator.seed(seed % 2**32)
