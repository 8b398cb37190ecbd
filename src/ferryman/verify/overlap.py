"""Overlap checks: copies overlap with compute and with copies in the other direction, on bare lanes and in a step.

These are measurements. The best of several rounds counts, since other load on the machine can only make it slower;
limits are generous, and a check that fails is tried again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ferryman.engine import Engine
from ferryman.observe.trace import Trace, busy_time
from ferryman.runtime.lanes import Lanes
from ferryman.runtime.pinned import PinnedMemory
from ferryman.verify.context import CheckContext
from ferryman.verify.result import Check, Measurements, Outcome, Verdict
from ferryman.verify.small_models import Batch, Transformer, batch, build

# The time of lanes that run at once, divided by the sum of their times alone: 1 is no overlap; with two lanes of equal
# length, 0.5 is perfect overlap.
_MAX_RATIO = 0.85
_MIN_DUPLEX = 0.1  # the smallest part of the less busy direction's time in which the other is busy, too
_DOMINANT_SHARE = 0.75  # of the sum of all lanes: if one lane takes more, overlap cannot be shown
_MAX_ATTEMPTS = 3

_COPY_SECONDS = 0.04  # of a bare copy, and of kernels beside it, on a simulated device
_SIMULATED_BYTES = 2**20  # small, so that simulated copies need little CPU time
_LINK_BYTES = 2**27  # of a bare copy, on a real link
_MICRO_BATCHES = 4
_LENGTH = 64  # tokens per sample


def checks(context: CheckContext) -> Iterator[Check]:
    rounds = 3 if context.quick else 7
    for name, compared, measure in (
        ("link", f"copies in and out at once against one after the other: at most {_MAX_RATIO}", _link),
        (
            "link and compute",
            f"copies and kernels at once against one after the other: at most {_MAX_RATIO}",
            _link_and_compute,
        ),
        (
            "step",
            f"a step against the sum of its lanes, each alone: at most {_MAX_RATIO}; fetches and flushes at once: at "
            f"least {_MIN_DUPLEX} of the shorter",
            lambda context, rounds: _Steps(context, rounds).judge(),
        ),
    ):
        yield Check("overlap", name, compared, functools.partial(_best_verdict, measure, context, rounds))


def _best_verdict(measure: Callable[[CheckContext, int], Verdict], context: CheckContext, rounds: int) -> Verdict:
    """Tries a measurement several times. Returns the first verdict that is OK, else one that has failed."""
    if context.accelerator.is_host:
        return Verdict.skipped("the device is the CPU, and units are used in place")
    verdicts: list[Verdict] = []
    while len(verdicts) < _MAX_ATTEMPTS:
        verdicts.append(measure(context, rounds))
        if verdicts[-1].outcome is Outcome.OK:
            return verdicts[-1]
    return next((verdict for verdict in verdicts if verdict.outcome is Outcome.FAILED), verdicts[-1])


# Bare lanes.


def _link(context: CheckContext, rounds: int) -> Verdict:
    with _BareLanes(context) as bare:
        seconds = bare.best([("in",), ("out",), ("in", "out")], rounds)
    ratio = seconds[2] / (seconds[0] + seconds[1])
    figures: Measurements = dict(zip(("in", "out", "at once"), map(_ms, seconds), strict=True))
    figures["of the sum"] = round(ratio, 2)
    if ratio > _MAX_RATIO:
        return Verdict.inconclusive("this link carries one direction at a time, or the machine is busy", figures)
    return Verdict.ok(figures)


def _link_and_compute(context: CheckContext, rounds: int) -> Verdict:
    with _BareLanes(context) as bare:
        bare.calibrate()
        seconds = bare.best([("in", "out"), ("compute",), ("compute", "in", "out")], rounds)
    ratio = seconds[2] / (seconds[0] + seconds[1])
    figures: Measurements = dict(zip(("copies", "kernels", "at once"), map(_ms, seconds), strict=True))
    figures["of the sum"] = round(ratio, 2)
    if max(seconds[:2]) > _DOMINANT_SHARE * sum(seconds[:2]):
        return Verdict.inconclusive("one takes so much longer than the other that overlap cannot be shown", figures)
    if ratio > _MAX_RATIO:
        return Verdict.failed("copies do not overlap with kernels on this device", figures)
    return Verdict.ok(figures)


class _BareLanes:
    """Copies in both directions and kernels, each on a lane of its own, without an engine."""

    def __init__(self, context: CheckContext) -> None:
        self._accelerator = context.accelerator
        self.nbytes = _SIMULATED_BYTES if self._accelerator.is_simulated else _LINK_BYTES
        self._times = 1  # matrix products per piece of work

    def __enter__(self) -> _BareLanes:
        device = self._accelerator.device
        self._stack = contextlib.ExitStack()
        if self._accelerator.is_simulated:
            rate = self.nbytes / _COPY_SECONDS
            self._stack.enter_context(self._accelerator.link(h2d=rate, d2h=rate))
        source, target = (PinnedMemory(self.nbytes, device) for _ in range(2))
        for memory in (source, target):
            self._stack.callback(memory.close)
        there = [torch.zeros(self.nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._square = torch.ones((2048 if self._accelerator.is_fast else 256,) * 2, device=device, dtype=torch.float32)
        self._product = torch.empty_like(self._square)
        self._accelerator.synchronize()
        self._lanes = self._stack.enter_context(Lanes(device))
        h2d, d2h = self._lanes.device("in"), self._lanes.device("out")
        compute = self._lanes.device("compute", apart=True)
        self._work: dict[str, Callable[[], object]] = {
            "in": lambda: h2d.copy([(there[0], source.bytes)], label="in"),
            "out": lambda: d2h.copy([(target.bytes, there[1])], label="out"),
            "compute": lambda: compute.submit(self._multiply),
        }
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def calibrate(self) -> None:
        """Makes kernels take about as long as copies. (On a simulated device they run for a fixed time.)"""
        if self._accelerator.is_simulated:
            return
        wanted = self.best([("in", "out")], 1)[0]
        self._run(("compute",))
        while self.best([("compute",)], 5)[0] < 0.7 * wanted and self._times < 2**16:
            self._times *= 2

    def best(self, together: Sequence[tuple[str, ...]], rounds: int) -> list[float]:
        """The best time in seconds of each combination; every round runs all of them, and the first is not counted."""
        taken = [[self._run(names) for names in together] for _ in range(rounds + 1)]
        return [min(column) for column in zip(*taken[1:], strict=True)]

    def _run(self, names: tuple[str, ...]) -> float:
        begin = time.perf_counter()
        for name in names:
            self._work[name]()
        self._lanes.wait()
        return time.perf_counter() - begin

    def _multiply(self) -> None:
        end = time.perf_counter() + (_COPY_SECONDS if self._accelerator.is_simulated else 0.0)
        for number in itertools.count(1):
            torch.mm(self._square, self._square, out=self._product)
            if number >= self._times and time.perf_counter() >= end:
                break


# Steps.


class _Step(NamedTuple):
    seconds: float
    compute: float  # seconds of all visits
    bytes_in: int
    bytes_out: int
    duplex: float  # share of the less busy direction's time in which the other direction is busy, too


class _Steps:
    """Steps of a model whose fetches take about as long as its compute."""

    def __init__(self, context: CheckContext, rounds: int) -> None:
        self._accelerator, self._rounds = context.accelerator, rounds
        self._context = context
        self._samples = _MICRO_BATCHES

    def judge(self) -> Verdict:
        with self._engine(held=True) as (alone, alone_trace), self._engine(held=False) as (engine, trace):
            warm = [(self._step(alone, alone_trace), self._step(engine, trace)) for _ in range(2)]
            rates = self._rates(alone, alone_trace, warm[-1][1].bytes_in)
            computes, steps = [], []
            for _ in range(self._rounds):
                computes.append(self._step(alone, alone_trace).compute)
                with self._link_of(rates):
                    steps.append(self._step(engine, trace))
        took = min(step.seconds for step in steps)
        lanes = min(computes), steps[-1].bytes_in / rates[0], steps[-1].bytes_out / rates[1]
        duplex, ratio = statistics.median(step.duplex for step in steps), took / sum(lanes)
        figures: Measurements = dict(zip(("compute", "in", "out"), map(_ms, lanes), strict=True))
        figures |= {"step": _ms(took), "of the longest": round(took / max(lanes), 2), "of the sum": round(ratio, 2)}
        figures["both ways"] = round(duplex, 2)
        if max(lanes) > _DOMINANT_SHARE * sum(lanes):
            return Verdict.inconclusive(
                "one lane takes so much longer than the others that overlap cannot be shown", figures
            )
        if ratio > _MAX_RATIO:
            return Verdict.failed("a step takes almost as long as its lanes one after the other", figures)
        if duplex < _MIN_DUPLEX and _link(self._context, self._rounds).outcome is not Outcome.OK:
            return Verdict.inconclusive("this link carries one direction at a time, or the machine is busy", figures)
        if duplex < _MIN_DUPLEX:
            return Verdict.failed("in a step, one direction of the link waits for the other", figures)
        return Verdict.ok(figures)

    @contextlib.contextmanager
    def _engine(self, *, held: bool) -> Iterator[tuple[Engine, Trace]]:
        """With `held`, nothing is fetched, so compute overlaps with nothing but gradients on their way out. Otherwise
        both do the same, since both recompute."""
        trace, width = Trace(), 1024 if self._accelerator.is_fast else 96
        model = build(lambda: Transformer(4, width, tied=False, length=_LENGTH))
        with Engine(
            model, device=self._accelerator.device, held=held, stash="device", recompute="always", trace=trace
        ) as engine:
            yield engine, trace

    def _link_of(self, rates: tuple[float, float]) -> contextlib.AbstractContextManager[None]:
        simulated = self._accelerator.is_simulated
        return self._accelerator.link(h2d=rates[0], d2h=rates[1]) if simulated else contextlib.nullcontext()

    def _step(self, engine: Engine, trace: Trace) -> _Step:
        begin = trace.now()
        engine.forward_backward(self._batch, _MICRO_BATCHES)
        took = trace.now() - begin
        engine.zero_grad()
        self._accelerator.synchronize()
        spans = [span for span in trace.spans() if span.start >= begin]
        fetches, flushes = ([span for span in spans if span.lane == lane] for lane in ("h2d", "d2h"))
        seconds = busy_time(fetches), busy_time(flushes)
        both = sum(seconds) - busy_time([*fetches, *flushes])
        return _Step(
            took,
            compute=sum(span.end - span.start for span in spans if span.label.startswith("visit")),
            bytes_in=sum(span.nbytes for span in fetches),
            bytes_out=sum(span.nbytes for span in flushes),
            duplex=both / min(seconds) if min(seconds) else 0.0,
        )

    def _rates(self, alone: Engine, trace: Trace, bytes_in: int) -> tuple[float, float]:
        """The rates of the link alone, in and out. A simulated link is set so that fetches take as long as compute; on
        a real one, the batch is made so large that compute takes as long as fetches."""

        def compute() -> float:
            return min(self._step(alone, trace).compute for _ in range(3))

        if self._accelerator.is_simulated:
            rate = bytes_in / compute()
            return rate, rate
        with _BareLanes(self._context) as bare:
            seconds = bare.best([("in",), ("out",)], self._rounds)
        rates = bare.nbytes / seconds[0], bare.nbytes / seconds[1]
        for _ in range(4):
            more = bytes_in / rates[0] / compute()
            samples = _MICRO_BATCHES * max(1, min(256, round(self._samples * more / _MICRO_BATCHES)))
            if samples == self._samples:
                break
            self._samples = samples
            self._step(alone, trace)  # warm-up: the first step of a new size allocates
        return rates

    @property
    def _batch(self) -> Batch:
        return batch(0, self._samples, _LENGTH)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
