"""The cross-check: compares the relay's result for a new kind of step with plain accumulation.

Before any weight changes, the first few micro-batches run, and everything that they do is undone:

1. One after the other, forward only, to find the user's variables that change (`survey.py`). Then the first one runs
   again, to find tensors that leave units in ways that the engine does not track (`escapes.py`) and weights that are
   edited (`weight_edits.py`).
2. One after the other, forward and backward, as in plain accumulation. The outputs of each unit's second run are
   compared with those of its first (`checksums.py`).
3. Interleaved, as in the step, which may keep graphs. Losses, gradients and the final values of variables must equal
   those of 2. A variable whose final value differs gets another policy (`user_state.py`), and 3 runs again.

If there is still a difference, micro-batches of such steps cannot take turns, and run one after the other.
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
from ferryman.exactness.user_state import VariablePolicy
from ferryman.exactness.variables import Variable
from ferryman.model.units import Item, Unit
from ferryman.plan.keep import NOTHING, Keep
from ferryman.relay.driver import Relay
from ferryman.relay.micro_batch import MicroBatch, ThreadState
from ferryman.relay.observer import Roots
from ferryman.relay.step_state import LossRun
from ferryman.relay.trial import run_trial
from ferryman.training.discovery import MAX_ATTEMPTS, Discovery, Watcher

TRIED = 3  # micro-batches per trial: the third one sees how the second has changed the state of the first

_GRADIENT_TOLERANCE = 1e-2  # relative to the gradient's norm; the error of a wrong gradient is about its norm


class CrossCheck:
    """Compares trials of one relay. `roots` are the values from which the user's code starts, with their names."""

    def __init__(self, relay: Relay, roots: Roots, units: Sequence[Unit]) -> None:
        self._relay = relay
        self._roots = roots
        self._units = units
        self.differs = ""  # how results differ when micro-batches take turns

    def run(self, loss_runs: Sequence[LossRun], seed: int, *, stash_on_host: bool, keep: Keep = NOTHING) -> list[float]:
        """Finds the variables and their policies for steps of these micro-batches. Raises a ValueError if results
        differ. Returns the losses of the micro-batches that it has tried.
        """
        relay, loss_runs = self._relay, loss_runs[:TRIED]

        def trial(
            loss_runs: Sequence[LossRun],
            observer: Discovery | _TrialRecord,
            *,
            interleaved: bool,
            forward_only: bool = False,
        ) -> None:
            run_trial(
                relay,
                loss_runs,
                seed,
                observer,
                stash_on_host=stash_on_host,
                keep=keep if interleaved else NOTHING,
                interleaved=interleaved,
                forward_only=forward_only,
                check=True,
            )

        discovery = Discovery(relay, self._roots, self._units)
        discovery.run(lambda: trial(loss_runs[:2], discovery, interleaved=False, forward_only=True))
        in_own_thread = _TrialRecord(relay, self._roots, looks_for_others=True)
        with relay.escapes.tracing():
            trial(loss_runs[:1], in_own_thread, interleaved=False, forward_only=True)
        for _ in range(MAX_ATTEMPTS):
            known = set(discovery.found)
            discovery.teach()
            sequential = _TrialRecord(relay, self._roots)
            trial(loss_runs, sequential, interleaved=False)
            discovery.found |= sequential.found
            if discovery.found.keys() == known:
                break
        losses = _floats(sequential.losses)
        if not relay.computes_in_own_threads and not _agree(losses[0], _floats(in_own_thread.losses)[0]):
            # The user's code keeps state per thread in a place that no survey finds.
            relay.computes_in_own_threads = True
            return self.run(loss_runs, seed, stash_on_host=stash_on_host, keep=keep)
        self._check_second_runs()
        discovery.teach(sequential.ends)
        if len(loss_runs) == 1:
            return losses
        if in_own_thread.other:
            replaced = f"{in_own_thread.other} is replaced by another tensor while units run"
            self.differs = _describe_difference(f"{replaced} (torch.func.functional_call)", [])
            return losses

        again: _TrialRecord | None = None  # a second sequential trial, which finds variables that differ in every run

        def run_again() -> _TrialRecord:
            nonlocal again
            if again is None:
                again = _TrialRecord(relay, self._roots)
                trial(loss_runs, again, interleaved=False)
                sequential.noisy = frozenset(variable.name for variable in sequential.left_otherwise(again))
            return again

        def interleave() -> tuple[_TrialRecord, list[Variable]]:
            interleaved = _TrialRecord(relay, self._roots)
            trial(loss_runs, interleaved, interleaved=True)
            self._check_second_runs()
            wrong = sequential.left_otherwise(interleaved)
            if wrong and again is None:
                run_again()
                wrong = sequential.left_otherwise(interleaved)
            return interleaved, wrong

        def is_right(policies: dict[Any, VariablePolicy]) -> bool:
            relay.state.know(relay.state.variables, policies, self._units)
            try:
                interleaved, wrong = interleave()
            except ValueError:
                relay.lanes.drain()
                relay.recover()
                return False
            return not wrong and sequential.difference(interleaved) is None

        if (logs := discovery.logs_of_one_unit()) and self._share_logs(logs, is_right):
            return losses
        interleaved, wrong = self._find_policies(interleave)
        difference = sequential.difference(interleaved)
        if difference is not None and not wrong and self._separate_counters(is_right):
            return losses
        if difference is None and wrong:
            difference = f"{wrong[0].name} has another value in the end"
        if difference is not None:
            if (found := sequential.difference(run_again())) is not None:
                raise ValueError(
                    f"two runs of the same micro-batches, one after the other, give other results: {found}. Your model "
                    "or loss depends on something that the engine cannot restore, such as an iterator, a file, a clock "
                    "or the state of a library. Read such values before engine.step(), and pass them in with the batch"
                )
            changing = [variable.name for variable in (*wrong, *relay.state.variables)]
            names = dict.fromkeys([*changing, *(item.name for item in relay.buffers.edited)])
            self.differs = _describe_difference(difference, [*names])
            discovery.teach()  # as in the sequential trial
        return losses

    def _share_logs(self, logs: Sequence[Variable], is_right: Callable[[dict[Any, VariablePolicy]], bool]) -> bool:
        """Shares lists that only grew, if results still equal those of the sequential trial. Returns whether all are.

        With the policy LOG, trials give the same results. But code that reads the list's length ("if it has 100
        elements, empty it") would see the elements of earlier micro-batches too late, and trials are too short to show
        that.
        """
        state = self._relay.state
        before = {v.key: state.policy(v) for v in state.variables}
        names = dict.fromkeys(map(_last_name, logs))
        tries = [set(names), *({name} for name in [*names][:MAX_ATTEMPTS] if len(names) > 1)]
        best = before
        for tried in tries:
            policies = best | {v.key: VariablePolicy.SHARED for v in logs if _last_name(v) in tried}
            if is_right(policies):
                best = policies
            if len(tried) == len(names) and best is policies:
                return True
        state.know(state.variables, best, self._units)
        return False

    def _find_policies(
        self, interleave: Callable[[], tuple[_TrialRecord, list[Variable]]]
    ) -> tuple[_TrialRecord, list[Variable]]:
        """Tries other policies for variables whose final values differ from those of the sequential trial. Returns the
        last good trial, and the variables that still differ.

        It begins with the first variable, and those of the same name elsewhere: others may differ because of it.
        """
        relay, tried = self._relay, set[str]()
        interleaved, wrong = interleave()
        while len(tried) < MAX_ATTEMPTS and (names := [n for v in wrong if (n := _last_name(v)) not in tried]):
            tried.add(names[0])
            before = {v.key: relay.state.policy(v) for v in relay.state.variables}
            first = next(v for v in wrong if _last_name(v) == names[0])
            # An attribute and the elements of its tensor have one name, and are treated alike.
            changed = {v.key: _other(before[first.key]) for v in wrong if _last_name(v) == names[0]}
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
        name = self._relay.checksums.disagreement()
        if name is not None:
            raise ValueError(second_run_differs(name, self._relay.state.variables))

    def _separate_counters(self, is_right: Callable[[dict[Any, VariablePolicy]], bool]) -> bool:
        """Gives each micro-batch its own value of counters that it reads again after other micro-batches have counted.
        Returns whether results are then those of the sequential trial."""
        state = self._relay.state
        before = {v.key: state.policy(v) for v in state.variables}
        counters = [v for v in state.variables if state.policy(v) is VariablePolicy.SHARED and type(v.get()) is int]
        names = dict.fromkeys(map(_last_name, counters))
        for tried in [{name} for name in [*names][:MAX_ATTEMPTS]] + ([set(names)] if len(names) > 1 else []):
            private = {v.key: VariablePolicy.PRIVATE for v in counters if _last_name(v) in tried}
            if is_right(before | private):
                return True
        state.know(state.variables, before, self._units)
        return False


def _describe_difference(found: str, names: Sequence[str]) -> str:
    changed = f" These change while micro-batches take turns: {', '.join(names[:8])}." if names else ""
    return f"micro-batches give other results when they take turns than one after the other: {found}.{changed}"


def second_run_differs(unit: str, variables: Sequence[Variable]) -> str:
    """The error message for a unit whose second run gives other outputs."""
    known = [variable.name for variable in variables]
    seen = f" These change and are restored: {', '.join(known[:8])}." if known else ""
    return (
        f"the unit {unit!r} gives other outputs when it runs again in the backward, with the same inputs and random "
        f"numbers. It reads from something that cannot be restored (a clock, a file, an iterator, a generator outside "
        f"of Python).{seen} Use torch, random or numpy, or read it outside of the unit and pass the result in"
    )


class _TrialRecord(Watcher):
    """Records losses, gradients and the values of variables."""

    def __init__(self, relay: Relay, roots: Roots, *, looks_for_others: bool = False) -> None:
        super().__init__(roots)
        self._relay = relay
        self._looks_for_others = looks_for_others
        self.other: str | None = None  # a tensor that was replaced while a unit was called; see `bound_model.py`
        self.ends: list[dict[Any, Snapshot]] = []  # known variables as each micro-batch left them
        self.losses: list[torch.Tensor] = []
        self._gradients: dict[tuple[int, Item], list[list[float]]] = {}  # the sum and the norm of each
        self._left: dict[str, Any] = {}
        self.noisy: frozenset[str] = frozenset()  # variables that differ in every run, such as measured seconds

    def begin(self) -> None:
        super().begin()
        self.ends.append(self._known())

    def parked(self, batch: MicroBatch) -> None:
        if self._looks_for_others and self.other is None:
            self.other = self._relay.bound_model.other()
        if batch.done:
            self.collect_changes()
            self.ends.append(self._known())

    def gradient(self, batch: MicroBatch, item: Item, gradient: torch.Tensor) -> None:
        sums = torch.stack([gradient.sum(dtype=torch.float32), torch.linalg.vector_norm(gradient, dtype=torch.float32)])
        self._gradients.setdefault((batch.number, item), []).append(sums.tolist())

    def end(self, losses: dict[int, torch.Tensor], left: ThreadState | None) -> None:
        self.losses = [losses[number] for number in sorted(losses)]
        self._left = {v.name: _plain(_value(v)) for v in self._relay.state.variables}
        edited = self._relay.buffers.edited
        self._left |= {item.name: item.tensor.detach().to("cpu", copy=True).double() for item in edited}
        if left is not None:
            begun_with = contextvars.copy_context()
            context = {key: value for key, value in left.context.items() if begun_with.get(key) is not value}
            self._left |= {f"context variable {key.name!r}": _plain(value) for key, value in context.items()}
            self._left["thread-local variables"] = _plain(list(left.thread_locals))

    def _known(self) -> dict[Any, Snapshot]:
        return {v.key: Snapshot([v.get()]) for v in self._relay.state.variables}

    # Two trials compared.

    def left_otherwise(self, other: _TrialRecord) -> list[Variable]:
        """Variables whose final values differ in the other trial."""
        variables = [variable for variable in self._relay.state.variables if variable.name not in self.noisy]
        return [v for v in variables if not _agree(self._left.get(v.name), other._left.get(v.name))]

    def difference(self, other: _TrialRecord) -> str | None:
        """Describes the first loss, gradient or final value that differs."""
        for number, (one, two) in enumerate(zip(_floats(self.losses), _floats(other.losses), strict=True)):
            if not _agree(one, two):
                return f"the loss of micro-batch {number} is {two:.6g}, and {one:.6g} one after the other"
        mine, theirs = self._sums(), other._sums()
        for number, item in {**mine, **theirs}:
            a, b = mine.get((number, item)), theirs.get((number, item))
            if a is None or b is None:
                return f"the gradient of {item.name!r} from micro-batch {number} exists in only one of the two runs"
            if (math.isfinite(a[0]) and abs(a[0] - b[0]) > _GRADIENT_TOLERANCE * a[1]) or not _agree(a[1], b[1]):
                return f"the gradient of {item.name!r} from micro-batch {number} differs"
        for name, value in self._left.items():
            if name not in self.noisy and name in other._left and not _agree(value, other._left[name]):
                return f"{name} has another value in the end"
        return None

    def _sums(self) -> dict[tuple[int, Item], tuple[float, float]]:
        """For all calls of a micro-batch together: the sum of sums, and the root of the sum of squared norms."""
        found = {}
        for key, parts in self._gradients.items():
            found[key] = sum(total for total, _ in parts), math.sqrt(sum(norm * norm for _, norm in parts))
        return found


def _value(variable: Variable) -> Any:
    """The variable's value, without the keys of hooks: each registration has a new one."""
    value = variable.get()
    return list(value.values()) if _last_name(variable) in HOOKS and isinstance(value, dict) else value


def _last_name(variable: Variable) -> str:
    return variable.name.rpartition(".")[2]


def _other(policy: VariablePolicy) -> VariablePolicy:
    return VariablePolicy.PRIVATE if policy is VariablePolicy.SHARED else VariablePolicy.SHARED


def _floats(tensors: Sequence[torch.Tensor]) -> list[float]:
    return torch.stack([t.float() for t in tensors]).tolist() if tensors else []


def _plain(value: Any, depth: int = 0) -> Any:
    """Reduces a value to what can be compared between two runs."""
    if depth and isinstance(value, nn.Parameter):
        return id(value)  # in a container, such as an optimizer's groups: it is a variable of its own
    if isinstance(value, torch.Tensor):
        value = value if value.layout is torch.strided else value.to_dense()
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
    if isinstance(key, torch.Tensor):  # of an optimizer's state
        return f"a tensor: {id(key)}"
    return f"a reference to {id(key())}" if isinstance(key, weakref.ref) else str(key)


class _State(NamedTuple):
    """The state of a random number generator."""

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
