"""The trial of the first step: is the relay's result that of plain accumulation?

Before any weight changes, the first few micro-batches run, and all that they do is undone:

1. One after the other, forward only, to find which variables of the user change (`survey.py`); then the first of them
   once more, to find tensors that leave units in ways that the engine does not know (`escapes.py`) and weights that are
   edited (`weight_edits.py`).
2. One after the other, forward and backward, as plain accumulation does. What each unit's second run gives is compared
   with its first (`checksums.py`).
3. Interleaved, as the step will run them. Losses, gradients and what is left behind in variables must be as in 2. A
   variable that is left behind otherwise gets another policy (`user_state.py`), and 3 runs again.

What does not agree in the end is refused, by name.
"""

from __future__ import annotations

import contextvars
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ferryman.exactness.snapshot import (
    ARRAYS,
    TOLERANCE,
    Snapshot,
    generator_state,
    is_closed,
    is_near,
    same_state,
    slot_names,
)
from ferryman.exactness.survey import HOOKS
from ferryman.exactness.user_state import Policy
from ferryman.exactness.variables import Variable
from ferryman.model.units import Item, Unit
from ferryman.relay.driver import Relay
from ferryman.relay.micro_batch import MicroBatch, ThreadState
from ferryman.relay.observer import Roots
from ferryman.relay.trial import run_trial
from ferryman.training.discovery import Discovery, Watcher

Work = Callable[[], torch.Tensor]

TRIED = 3  # micro-batches: the third sees what the second has made of the first one's state

_ATTEMPTS = 4

_GRADIENT_TOLERANCE = 1e-2  # of its norm: a wrong gradient is off by as much as it is long


class CrossCheck:
    """Of one relay; `roots` are the values that the user's code starts from, with their names."""

    def __init__(self, relay: Relay, roots: Roots, units: Sequence[Unit]) -> None:
        self._relay = relay
        self._roots = roots
        self._units = units

    def run(self, works: Sequence[Work], seed: int, *, stash_on_host: bool) -> list[float]:
        """Learns what there is to know for steps of these micro-batches; a ValueError says what cannot be right.

        Returns the losses of the first of them.
        """
        relay, works = self._relay, works[:TRIED]

        def trial(
            works: Sequence[Work], observer: Discovery | _Trial, *, in_turn: bool, forward_only: bool = False
        ) -> None:
            run_trial(
                relay,
                works,
                seed,
                observer,
                stash_on_host=stash_on_host,
                in_turn=in_turn,
                forward_only=forward_only,
                check=True,
            )

        discovery = Discovery(relay, self._roots, self._units)
        trial(works[:2], discovery, in_turn=True, forward_only=True)
        discovery.teach()
        with relay.escapes.tracing():
            trial(works[:1], _Trial(relay, self._roots), in_turn=True, forward_only=True)
        for _ in range(_ATTEMPTS):
            known = set(discovery.found)
            discovery.teach()
            in_turn = _Trial(relay, self._roots)
            trial(works, in_turn, in_turn=True)
            discovery.found |= in_turn.found
            if discovery.found.keys() == known:
                break
        self._check_second_runs()
        discovery.teach(in_turn.ends)
        losses = _floats(in_turn.losses)
        if len(works) == 1:
            return losses

        again: _Trial | None = None  # in turn once more, to see what differs by itself

        def interleave() -> tuple[_Trial, list[Variable]]:
            nonlocal again
            interleaved = _Trial(relay, self._roots)
            trial(works, interleaved, in_turn=False)
            self._check_second_runs()
            wrong = in_turn.left_otherwise(interleaved)
            if wrong and again is None:
                again = _Trial(relay, self._roots)
                trial(works, again, in_turn=True)
                in_turn.noisy = frozenset(variable.name for variable in in_turn.left_otherwise(again))
                wrong = in_turn.left_otherwise(interleaved)
            return interleaved, wrong

        def is_right(policies: dict[Any, Policy]) -> bool:
            relay.state.know(relay.state.variables, policies, self._units)
            try:
                interleaved, wrong = interleave()
            except ValueError:
                relay.lanes.drain()
                relay.recover()
                return False
            return not wrong and in_turn.difference(interleaved) is None

        if (logs := discovery.logs_of_one_unit()) and self._share_logs(logs, is_right):
            return losses
        interleaved, wrong = self._find_policies(interleave)
        self._compare(in_turn, interleaved, wrong)
        return losses

    def _share_logs(self, logs: Sequence[Variable], is_right: Callable[[dict[Any, Policy]], bool]) -> bool:
        """Shares lists that only grew, as far as that gives what it gives in turn; returns whether all is right then.

        As a log, a list would be right as well, but code that looks at its length ("if it has 100 elements, empty it")
        would see the elements of earlier micro-batches too late. No trial sees that, since it happens later.
        """
        state = self._relay.state
        before = {v.key: state.policy(v) for v in state.variables}
        names = dict.fromkeys(map(_last_name, logs))
        tries = [set(names), *({name} for name in [*names][:_ATTEMPTS] if len(names) > 1)]
        best = before
        for tried in tries:
            policies = best | {v.key: Policy.SHARED for v in logs if _last_name(v) in tried}
            if is_right(policies):
                best = policies
            if len(tried) == len(names) and best is policies:
                return True
        state.know(state.variables, best, self._units)
        return False

    def _find_policies(self, interleave: Callable[[], tuple[_Trial, list[Variable]]]) -> tuple[_Trial, list[Variable]]:
        """Tries other policies for variables that are left otherwise than in turn; returns what the last good ones
        gave, and what is still left otherwise.

        The first of them comes first, with those of the same name elsewhere: others may be wrong because of it.
        """
        relay, tried = self._relay, set[str]()
        interleaved, wrong = interleave()
        while len(tried) < _ATTEMPTS and (names := [n for v in wrong if (n := _last_name(v)) not in tried]):
            tried.add(names[0])
            before = {v.key: relay.state.policy(v) for v in relay.state.variables}
            changed = {v.key: _other(before[v.key]) for v in wrong if _last_name(v) == names[0]}
            relay.state.know(relay.state.variables, before | changed, self._units)
            try:
                found = interleave()
            except ValueError:
                relay.lanes.drain()
                relay.recover()
                found = interleaved, wrong
            if any(v.key in changed for v in found[1]):
                relay.state.know(relay.state.variables, before, self._units)  # no better
            else:
                interleaved, wrong = found
        return interleaved, wrong

    def _check_second_runs(self) -> None:
        unit = self._relay.checksums.disagreement()
        if unit is not None:
            raise ValueError(second_run_differs(unit, self._relay.state.variables))

    def _compare(self, in_turn: _Trial, interleaved: _Trial, wrong: Sequence[Variable]) -> None:
        found = in_turn.difference(interleaved)
        if found is None and wrong:
            found = f"{wrong[0].name} is left behind with another value"
        if found is None:
            return
        names = [variable.name for variable in wrong or self._relay.state.variables]
        changed = f"These change while micro-batches take turns: {', '.join(names[:8])}. " if names else ""
        raise ValueError(
            f"micro-batches that take turns do not give what they give one after the other: {found}. {changed}"
            "Each micro-batch has its own copy of such values, taken when it begins; what an earlier micro-batch does "
            "to them after that comes too late for it. Set such state before it is read in the same micro-batch, "
            "update it after engine.step(), or use micro_batches=1"
        )


def second_run_differs(unit: str, variables: Sequence[Variable]) -> str:
    """What the user is told of a unit whose second run gives something else."""
    known = [variable.name for variable in variables]
    seen = f" Known to change, and put back: {', '.join(known[:8])}." if known else ""
    return (
        f"the unit {unit!r} gives other outputs when it runs again in the backward, with the same inputs and random "
        f"numbers. It draws from something that cannot be put back (a clock, a file, an iterator, a generator outside "
        f"of Python).{seen} Draw from torch, random or numpy, or move the draw out of the unit and pass its result in"
    )


class _Trial(Watcher):
    """Notes losses, gradients, and what variables hold."""

    def __init__(self, relay: Relay, roots: Roots) -> None:
        super().__init__(roots)
        self._relay = relay
        self.ends: list[dict[Any, Snapshot]] = []  # known variables as each micro-batch left them
        self.losses: list[torch.Tensor] = []
        self._gradients: dict[tuple[int, Item], list[torch.Tensor]] = {}  # the sum and the norm of each
        self._left: dict[str, Any] = {}
        self.noisy: frozenset[str] = frozenset()  # variables that are left otherwise each time: measured seconds

    def begin(self) -> None:
        super().begin()
        self.ends.append(self._known())

    def parked(self, batch: MicroBatch) -> None:
        if batch.done:
            self.look()
            self.ends.append(self._known())

    def gradient(self, batch: MicroBatch, item: Item, gradient: torch.Tensor) -> None:
        sums = torch.stack([gradient.sum(dtype=torch.float32), torch.linalg.vector_norm(gradient, dtype=torch.float32)])
        self._gradients.setdefault((batch.number, item), []).append(sums)

    def end(self, losses: dict[int, torch.Tensor], left: ThreadState | None) -> None:
        self.losses = [losses[number] for number in sorted(losses)]
        self._left = {v.name: _plain(_value(v)) for v in self._relay.state.variables}
        edited = self._relay.buffers.edited
        self._left |= {item.name: item.tensor.detach().to("cpu", copy=True).double() for item in edited}
        if left is not None:
            begun_with = contextvars.copy_context()
            context = {key: value for key, value in left.context.items() if begun_with.get(key) is not value}
            self._left |= {f"context variable {key.name!r}": _plain(value) for key, value in context.items()}
            self._left["thread-local variables"] = _plain(list(left.held))

    def _known(self) -> dict[Any, Snapshot]:
        return {v.key: Snapshot([v.get()]) for v in self._relay.state.variables}

    # Two trials compared.

    def left_otherwise(self, other: _Trial) -> list[Variable]:
        """Variables that the other one has left with another value."""
        variables = [variable for variable in self._relay.state.variables if variable.name not in self.noisy]
        return [v for v in variables if not _agree(self._left.get(v.name), other._left.get(v.name))]

    def difference(self, other: _Trial) -> str | None:
        """The first loss or gradient that is another one, in words."""
        for number, (one, two) in enumerate(zip(_floats(self.losses), _floats(other.losses), strict=True)):
            if not _agree(one, two):
                return f"the loss of micro-batch {number} is {two:.6g}, and {one:.6g} one after the other"
        mine, theirs = self._sums(), other._sums()
        for number, item in {**mine, **theirs}:
            a, b = mine.get((number, item)), theirs.get((number, item))
            if a is None or b is None:
                return f"the gradient of {item.name!r} from micro-batch {number} is there in one and not in the other"
            if (math.isfinite(a[0]) and abs(a[0] - b[0]) > _GRADIENT_TOLERANCE * a[1]) or not _agree(a[1], b[1]):
                return f"the gradient of {item.name!r} from micro-batch {number} is another one"
        for name, value in self._left.items():
            if name not in self.noisy and name in other._left and not _agree(value, other._left[name]):
                return f"{name} is left behind with another value"
        return None

    def _sums(self) -> dict[tuple[int, Item], tuple[float, float]]:
        """Of all calls of a micro-batch: the sum of sums, and the root of the sum of squared norms."""
        found = {}
        for key, parts in self._gradients.items():
            values = torch.stack(parts).tolist()
            found[key] = sum(total for total, _ in values), math.sqrt(sum(norm * norm for _, norm in values))
        return found


def _value(variable: Variable) -> Any:
    """Without the keys of hooks, which are other ones each time that a hook is registered."""
    value = variable.get()
    return list(value.values()) if _last_name(variable) in HOOKS and isinstance(value, dict) else value


def _last_name(variable: Variable) -> str:
    return variable.name.rpartition(".")[2]


def _other(policy: Policy) -> Policy:
    return Policy.PRIVATE if policy is Policy.SHARED else Policy.SHARED


def _floats(tensors: Sequence[torch.Tensor]) -> list[float]:
    return torch.stack([t.float() for t in tensors]).tolist() if tensors else []


def _plain(value: Any, depth: int = 0) -> Any:
    """What can be compared of a value, without anything that belongs to a run."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().double() if value.numel() < 2**16 else value.detach().sum().item()
    if isinstance(value, ARRAYS) and np.asarray(value).dtype.kind in "biuf":
        return torch.from_numpy(np.array(value, dtype=np.float64))
    if depth > 4 or value is None or isinstance(value, bool | int | float | str):
        return value if depth <= 4 else None
    if isinstance(value, dict):
        return {_plain_key(key): _plain(member, depth + 1) for key, member in dict.items(value)}
    if isinstance(value, list | tuple):
        return [_plain(member, depth + 1) for member in value]
    state = generator_state(value)
    if state is not None:
        return _State(state)
    if isinstance(value, nn.Module | type) or is_closed(value) or callable(value):
        return type(value).__name__
    attributes = {**getattr(value, "__dict__", {}), **{n: getattr(value, n, None) for n in slot_names(value)}}
    return [type(value).__name__, {name: _plain(member, depth + 1) for name, member in attributes.items()}]


def _plain_key(key: Any) -> str:
    return f"a reference to {id(key())}" if isinstance(key, weakref.ref) else str(key)


class _State(NamedTuple):
    """Of a random number generator."""

    state: Any


def _agree(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return is_near(a, b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=TOLERANCE, atol=1e-6, equal_nan=True)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_agree(a[key], b[key]) for key in a)
    if isinstance(a, _State) and isinstance(b, _State):
        return same_state(a.state, b.state)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_agree(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)
