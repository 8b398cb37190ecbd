"""Races: with any lane late, results stay what they were; and without one of the waits they do not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ferryman.engine import Engine
from ferryman.runtime.marks import Mark
from ferryman.server.gradient_checks import NonFiniteError
from ferryman.verify import models
from ferryman.verify.bench import SUBGROUP, Bench, distance
from ferryman.verify.delays import Delays, replaced
from ferryman.verify.reference import MICRO_BATCHES, Plain, Tensors, adamw
from ferryman.verify.result import Check, Figures, Outcome, Verdict

_BATCHES = [models.features(seed) for seed in range(2)]
_TRIES = 1, 4, 16  # times the delay: a busy machine may hide what a control should show

# Of the weights' norm, where the device does not repeat itself: results that are the same, and that are not.
_SAME, _OTHER = 1e-5, 1e-4
_PLAIN = 1e-5  # that a run may be off plain PyTorch: waits might always be missing, with the same wrong result

Without = Callable[[Engine], contextlib.AbstractContextManager[None]]


class Case(NamedTuple):
    late: Collection[str]  # lanes
    wait: str  # that the control leaves out
    without: Without
    held: bool = False


def checks(bench: Bench) -> Iterator[Check]:
    runs = _Runs(bench)
    rounds = 1 if bench.quick else 2
    cases = _ON_HOST if bench.accelerator.is_host else _CASES if bench.quick else _CASES | _HELD
    for name, case in cases.items():
        late = " and ".join(case.late)
        compared = (
            f"{len(_BATCHES)} steps with {late} late, {rounds} x, against none late: same bits; and plain PyTorch"
        )
        yield Check("races", name, compared, lambda case=case: runs.check(case, rounds))  # type: ignore[misc]


class _Runs:
    """Runs of one model, that are compared with one another."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._accelerator = bench.accelerator
        self._undelayed: dict[bool, Tensors] = {}  # by whether weights are held
        self._delays: Delays | None = None

    def check(self, case: Case, rounds: int) -> Verdict:
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
        figures: Figures = {
            "late": "bitwise" if off == 0 else off,
            "plain": plain,
            f"control, no wait for {case.wait}": shown or "same",
        }
        if off > (0 if self._bench.repeats else _SAME):
            return Verdict.failed(f"weights changed by {off:.1e} of their norm when lanes were late", figures)
        if plain > _PLAIN:
            return Verdict.failed(f"weights are off plain PyTorch's by {plain:.1e} of their norm, late or not", figures)
        if shown is None:
            return Verdict.inconclusive(
                "the control, with a wait left out, gave the same: delays do nothing here, and so this shows nothing",
                figures,
            )
        return Verdict(Outcome.OK, figures)

    def _control(self, case: Case) -> str | None:
        """What is seen without one of the waits; None if nothing."""
        assert self._delays is not None
        for times in _TRIES:
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
            finally:
                self._accelerator.forget_races()
            if off > (0 if self._bench.repeats else _OTHER):
                return f"{off:.1e}"
        return None

    @contextlib.contextmanager
    def _engine(self, case: Case) -> Iterator[tuple[Engine, nn.Module]]:
        model = models.build(models.Stack)
        # Who updates what must not depend on time.
        options: dict[str, Any] = {"updates": "stride:2", "subgroup": SUBGROUP, "stash": "host", "held": case.held}
        if self._accelerator.is_host:
            options = {"updates": "host"}
        engine = Engine(model, adamw(model), device=self._bench.device, **options)
        try:
            yield engine, model
        except BaseException:
            self._accelerator.forget_races()
            with contextlib.suppress(RuntimeError):  # another race, that nobody has seen yet
                engine.close()
            raise
        engine.close()

    def _train(self, engine: Engine, model: nn.Module) -> Tensors:
        for seed, batch in enumerate(_BATCHES):
            torch.manual_seed(seed)
            engine.step(batch, MICRO_BATCHES)
        engine.wait()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    def _off(self, case: Case, weights: Tensors) -> float:
        return _relative(weights, self._undelayed[case.held])

    def _off_plain(self, case: Case) -> float:
        return _relative(self._undelayed[case.held], self._plain)

    @functools.cached_property
    def _plain(self) -> Tensors:
        return Plain(models.build(models.Stack), self._bench.device).train(_BATCHES).weights


def _relative(weights: Tensors, others: Tensors) -> float:
    return distance(weights, others) / distance({name: torch.zeros_like(x) for name, x in others.items()}, others)


# Each leaves one wait out.


def _without_fetched_weights(engine: Engine) -> contextlib.AbstractContextManager[None]:
    real = engine._parts.relay.weights.enter
    return replaced(engine._parts.relay.weights, "enter", lambda unit, upcoming: (real(unit, upcoming)[0], []))


def _without_free_slots(engine: Engine) -> contextlib.AbstractContextManager[None]:
    return replaced(engine._parts.relay.weights, "leave", lambda slot, end: None)


def _without_flushes(engine: Engine) -> contextlib.AbstractContextManager[None]:
    slots = engine._parts.relay._gradients
    real = slots._flush

    def flush(slot: int, *, for_good: bool) -> None:
        real(slot, for_good=for_good)
        slots._free[slot] = []

    return replaced(slots, "_flush", flush)


def _without_updates(engine: Engine) -> contextlib.AbstractContextManager[None]:
    return replaced(engine._parts.server, "weights_ready", lambda unit: [])


def _without_state(engine: Engine) -> contextlib.AbstractContextManager[None]:
    updates = engine._parts.server._device_updates
    assert updates is not None, "the device has a share of the updates here"
    lane = updates._in
    real = lane.copy

    def copy(*args: Any, **how: Any) -> Mark:
        real(*args, **how)
        return Mark(lane._group, lane.name, "nothing")._settle_at(None)

    return replaced(lane, "copy", copy)


def _without_stash(engine: Engine) -> contextlib.AbstractContextManager[None]:
    return replaced(engine._parts.relay._host_stash, "follow", lambda batch: None)


def _without_host(engine: Engine) -> contextlib.AbstractContextManager[None]:
    weights, h2d = engine._parts.relay.weights, engine._parts.relay.weights._h2d
    real = weights.refresh
    return replaced(weights, "refresh", lambda unit, runs, after: real(unit, runs, h2d.here()))


_ON_HOST = {"updates late": Case(["host"], "updates before weights are used", _without_updates)}
_CASES = {
    "weights late": Case(["h2d"], "weights", _without_fetched_weights),
    "compute late": Case(["compute"], "a free slot", _without_free_slots),
    "gradients late": Case(["d2h"], "a flushed slot", _without_flushes),
    "state late": Case(["state in", "state out"], "state", _without_state),
    "stash late": Case(["stash in", "stash out"], "the stash", _without_stash),
    "updates late": Case(["host"], "updates before a fetch", _without_updates),
}
_HELD = {"updates late, held": Case(["host"], "updates before weights return", _without_host, held=True)}
