"""Race checks: delaying a lane must not change the result; a control, which leaves out one wait, must change it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ferryman.engine import Engine
from ferryman.model.units import Unit
from ferryman.runtime.marks import Mark
from ferryman.server.gradient_checks import NonFiniteError
from ferryman.verify import small_models
from ferryman.verify.context import SUBGROUP, CheckContext, distance
from ferryman.verify.delays import Delays, replaced
from ferryman.verify.reference import MICRO_BATCHES, PlainTraining, Tensors, adamw, values_of
from ferryman.verify.result import Check, Measurements, Outcome, Verdict

_BATCHES = [small_models.features(seed) for seed in range(2)]
_CONTROL_DELAYS = 1, 4, 16  # multiples of the usual delay, tried in turn: a busy machine may hide a missing wait

# Differences relative to the norm of the weights, for devices where plain PyTorch is not reproducible.
_SAME, _DIFFERENT = 1e-5, 1e-4
# Allowed difference from plain PyTorch: a wait that is always missing would give the same wrong result every time.
_PLAIN_TOLERANCE = 1e-5

Without = Callable[[Engine], contextlib.AbstractContextManager[None]]


class RaceCase(NamedTuple):
    late: Collection[str]  # lanes to delay
    wait: str  # the wait that the control leaves out
    without: Without
    held: bool = False


def checks(context: CheckContext) -> Iterator[Check]:
    runs = _Runs(context)
    rounds = 1 if context.quick else 2
    cases = _ON_HOST if context.accelerator.is_host else _CASES if context.quick else _CASES | _HELD
    for name, case in cases.items():
        late = " and ".join(case.late)
        compared = (
            f"{len(_BATCHES)} steps with {late} delayed, {rounds} x, against no delay: same bits; and plain PyTorch"
        )
        yield Check("races", name, compared, lambda case=case: runs.check(case, rounds))  # type: ignore[misc]


class _Runs:
    """Runs of one model that are compared with one another."""

    def __init__(self, context: CheckContext) -> None:
        self._context = context
        self._accelerator = context.accelerator
        self._undelayed: dict[bool, Tensors] = {}  # by whether weights are held
        self._delays: Delays | None = None

    def check(self, case: RaceCase, rounds: int) -> Verdict:
        if self._delays is None:
            self._delays = Delays(self._accelerator)
        if case.held not in self._undelayed:
            with self._engine(case) as (engine, model):
                self._undelayed[case.held] = self._train(engine, model)
        plain = self._off_plain(case)
        off = 0.0
        for _ in range(rounds):
            with self._engine(case) as (engine, model), self._delays.late(engine, case.late):
                off = max(off, self._off(case, self._train(engine, model)))
        shown = self._control(case)
        figures: Measurements = {
            "late": "bitwise" if off == 0 else off,
            "plain": plain,
            f"control, no wait for {case.wait}": shown or "same",
        }
        if off > (0 if self._context.repeats else _SAME):
            return Verdict.failed(f"weights changed by {off:.1e} of their norm when lanes were delayed", figures)
        if plain > _PLAIN_TOLERANCE:
            return Verdict.failed(f"weights differ from plain PyTorch by {plain:.1e} of their norm", figures)
        if shown is None:
            return Verdict.inconclusive(
                "leaving out a wait (the control) did not change the result, so the check proves nothing here",
                figures,
            )
        return Verdict(Outcome.OK, figures)

    def _control(self, case: RaceCase) -> str | None:
        """How the missing wait becomes visible; None if it does not."""
        assert self._delays is not None
        for times in _CONTROL_DELAYS:
            try:
                with (
                    self._engine(case) as (engine, model),
                    self._delays.late(engine, case.late, times=times),
                    case.without(engine),
                ):
                    off = self._off(case, self._train(engine, model))
            except NonFiniteError:
                return "not finite"
            except RuntimeError as error:
                if "race" not in str(error):
                    raise
                return "a race"
            except ValueError as error:
                # On the CPU, an update that comes in the middle of a step looks like an edit by the model.
                if "is edited in place while the model or the loss runs" not in str(error):
                    raise
                return "weights changed in a step"
            finally:
                self._accelerator.forget_races()
            if off > (0 if self._context.repeats else _DIFFERENT):
                return f"{off:.1e}"
        return None

    @contextlib.contextmanager
    def _engine(self, case: RaceCase) -> Iterator[tuple[Engine, nn.Module]]:
        model = small_models.build(small_models.Stack)
        # A fixed policy: which subgroups the device updates must not depend on time.
        options: dict[str, Any] = {"updates": "stride:2", "subgroup": SUBGROUP, "stash": "host", "held": case.held}
        if self._accelerator.is_host:
            options = {"updates": "host"}
        engine = Engine(model, adamw(model), device=self._context.device, **options)
        try:
            yield engine, model
        except BaseException:
            self._accelerator.forget_races()
            with contextlib.suppress(RuntimeError):  # another race that has not been reported yet
                engine.close()
            raise
        engine.close()

    def _train(self, engine: Engine, model: nn.Module) -> Tensors:
        for seed, batch in enumerate(_BATCHES):
            torch.manual_seed(seed)
            engine.step(batch, MICRO_BATCHES)
        engine.wait()
        return values_of(model.named_parameters())

    def _off(self, case: RaceCase, weights: Tensors) -> float:
        return _relative(weights, self._undelayed[case.held])

    def _off_plain(self, case: RaceCase) -> float:
        return _relative(self._undelayed[case.held], self._plain)

    @functools.cached_property
    def _plain(self) -> Tensors:
        return PlainTraining(small_models.build(small_models.Stack), self._context.device).train(_BATCHES).weights


def _relative(weights: Tensors, others: Tensors) -> float:
    return distance(weights, others) / distance({name: torch.zeros_like(x) for name, x in others.items()}, others)


# Controls: each leaves out one wait.


def _without_fetched_weights(engine: Engine) -> contextlib.AbstractContextManager[None]:
    weights = engine._parts.relay.weights
    real = weights.enter
    return replaced(weights, "enter", lambda unit, upcoming: real(unit, upcoming)._replace(ready=[]))


def _without_free_slots(engine: Engine) -> contextlib.AbstractContextManager[None]:
    return replaced(engine._parts.relay.weights, "leave", lambda slot, end: None)


def _without_flushes(engine: Engine) -> contextlib.AbstractContextManager[None]:
    slots = engine._parts.relay.gradients
    real = slots.flush

    def flush(unit: Unit, **how: Any) -> None:
        slot = slots._slot_of(unit)
        real(unit, **how)
        if slot is not None:
            slot.free = []

    return replaced(slots, "flush", flush)


def _without_updates(engine: Engine) -> contextlib.AbstractContextManager[None]:
    return replaced(engine._parts.server, "weights_ready", lambda unit: [])


def _without_state(engine: Engine) -> contextlib.AbstractContextManager[None]:
    updates = engine._parts.server._device_updates
    assert updates is not None, "the device has a share of the updates here"
    lane = updates._in
    real = lane.copy

    def copy(*args: Any, **how: Any) -> Mark:
        real(*args, **how)
        return Mark(lane._group, lane.name, "nothing")._resolve_at(None)

    return replaced(lane, "copy", copy)


def _without_stash(engine: Engine) -> contextlib.AbstractContextManager[None]:
    return replaced(engine._parts.relay._host_stash, "follow", lambda batch: None)


def _without_host(engine: Engine) -> contextlib.AbstractContextManager[None]:
    weights, h2d = engine._parts.relay.weights, engine._parts.relay.weights._h2d
    real = weights.refresh
    return replaced(weights, "refresh", lambda unit, runs, after: real(unit, runs, h2d.here()))


_ON_HOST = {"updates late": RaceCase(["host"], "updates before weights are used", _without_updates)}
_CASES = {
    "weights late": RaceCase(["h2d"], "weights", _without_fetched_weights),
    "compute late": RaceCase(["compute"], "a free slot", _without_free_slots),
    "gradients late": RaceCase(["d2h"], "a flushed slot", _without_flushes),
    "state late": RaceCase(["state in", "state out"], "state", _without_state),
    "stash late": RaceCase(["stash in", "stash out"], "the stash", _without_stash),
    "updates late": RaceCase(["host"], "updates before a fetch", _without_updates),
}
_HELD = {"updates late, held": RaceCase(["host"], "updates before weights return", _without_host, held=True)}
