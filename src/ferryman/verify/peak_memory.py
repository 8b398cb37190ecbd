"""Memory checks: the budget is kept, and device memory does not grow with depth."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from ferryman.engine import Engine
from ferryman.runtime.sizes import show_bytes
from ferryman.verify.context import CheckContext
from ferryman.verify.reference import PlainTraining, adamw
from ferryman.verify.result import Check, Measurements, Verdict
from ferryman.verify.small_models import Transformer, batch, build

_DEPTHS = 4, 16  # blocks
_LENGTHS = 16, 5, 11, 16, 3, 8, 13, 16  # tokens per sample, in each step; no later one is longer than the first
_TOLERANCE = 0.05  # a late copy may free its memory late


def checks(context: CheckContext) -> Iterator[Check]:
    lacking = context.accelerator.lacks_memory_figures()
    for name, compared, check in (
        ("budget", "reserved peak of steps against memory=, half of what plain PyTorch reserves: not above", _budget),
        (
            "lengths",
            f"reserved memory over {len(_LENGTHS)} steps of varying length against memory=: not above",
            _lengths,
        ),
        (
            "depth",
            f"peaks with {_DEPTHS[0]} and {_DEPTHS[1]} blocks, stash='host', recompute='always': within "
            f"{_TOLERANCE:.0%}",
            _depth,
        ),
    ):
        run = functools.partial(check, context) if lacking is None else functools.partial(Verdict.skipped, lacking)
        yield Check("memory", name, compared, run)


def _model(context: CheckContext, blocks: int) -> Transformer:
    width = 512 if context.accelerator.is_fast else 64  # on a GPU, libraries take megabytes of their own
    model = build(lambda: Transformer(blocks, width, tied=False))
    assert isinstance(model, Transformer)
    return model


def _budget(context: CheckContext) -> Verdict:
    model = _model(context, 8)
    plain = _plain_peak(context, model)
    budget = plain // 2
    peak = _Peak(context)
    with Engine(model, adamw(model), device=context.device, memory=budget) as engine:
        engine.step(batch(0))  # includes the trial that chooses the size of micro-batches
        peak.reset()
        for seed in range(1, 3):
            engine.step(batch(seed))
        engine.wait()
        most = peak.bytes()
    figures: Measurements = {"peak": show_bytes(most), "budget": show_bytes(budget), "plain": show_bytes(plain)}
    if most > budget:
        return Verdict.failed(f"the peak is {show_bytes(most)} with memory={show_bytes(budget)}", figures)
    return Verdict.ok(figures)


def _lengths(context: CheckContext) -> Verdict:
    model = _model(context, 8)
    budget = _plain_peak(context, model) // 2
    peak, most = _Peak(context), list[int]()
    with Engine(model, adamw(model), device=context.device, memory=budget) as engine:
        for seed, length in enumerate(_LENGTHS):
            peak.reset()
            engine.step(batch(seed, length=length))
            engine.wait()
            most.append(peak.bytes())
    figures: Measurements = {"peak": show_bytes(max(most)), "budget": show_bytes(budget)}
    if max(most[1:]) > budget:  # the first has a trial, which may exceed it
        return Verdict.failed(f"the peak is {show_bytes(max(most[1:]))} with memory={show_bytes(budget)}", figures)
    return Verdict.ok(figures)


def _depth(context: CheckContext) -> Verdict:
    peaks = [_step_peak(context, blocks, stash="host", recompute="always") for blocks in _DEPTHS]
    figures: Measurements = {f"{blocks} blocks": show_bytes(peak) for blocks, peak in zip(_DEPTHS, peaks, strict=True)}
    if peaks[1] > peaks[0] * (1 + _TOLERANCE):
        return Verdict.failed(f"four times as many blocks take {peaks[1] / peaks[0]:.2f} times the memory", figures)
    return Verdict.ok(figures)


def _step_peak(context: CheckContext, blocks: int, **options: Any) -> int:
    """The lowest peak of a few steps after the first, since late copies can raise it."""
    peaks: list[int] = []
    peak = _Peak(context)
    with Engine(_model(context, blocks), device=context.device, **options) as engine:
        for _ in range(2 if context.quick else 4):
            peak.reset()
            engine.forward_backward(batch(0), 4)
            engine.zero_grad()
            peaks.append(peak.bytes())
    return min(peaks[1:])


def _plain_peak(context: CheckContext, model: Transformer) -> int:
    """The peak of plain PyTorch, with weights, gradients and optimizer state on the device."""
    peak = _Peak(context)
    PlainTraining(model, context.device).train([batch(0)])
    return peak.bytes()


class _Peak:
    """Measures the peak of reserved device memory, without what was reserved before."""

    def __init__(self, context: CheckContext) -> None:
        self._accelerator = context.accelerator
        self._before = self._accelerator.memory()
        self.reset()

    def reset(self) -> None:
        self._accelerator.reset_peak()

    def bytes(self) -> int:
        return self._accelerator.peak() - self._before
