"""Memory: a budget is kept, and what is on the device does not grow with depth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ferryman.engine import Engine
from ferryman.runtime.sizes import show_bytes
from ferryman.verify.context import CheckContext
from ferryman.verify.reference import PlainTraining, adamw
from ferryman.verify.result import Check, Measurements, Verdict
from ferryman.verify.small_models import Transformer, batch, build

_DEPTHS = 4, 16
_SAME = 0.05  # a copy may come back late, and its memory with it


def checks(context: CheckContext) -> Iterator[Check]:
    lacking = context.accelerator.lacks_memory_figures()
    compared = "peak of steps against memory=, half of what plain PyTorch takes: not above it"
    yield Check("memory", "budget", compared, lambda: _budget(context) if lacking is None else Verdict.skipped(lacking))
    compared = f"peaks with {_DEPTHS[0]} and {_DEPTHS[1]} blocks, stash='host': within {_SAME:.0%}"
    yield Check("memory", "depth", compared, lambda: _depth(context) if lacking is None else Verdict.skipped(lacking))


def _model(context: CheckContext, blocks: int) -> Transformer:
    width = 512 if context.accelerator.is_fast else 64  # libraries take megabytes of their own on a fast one
    model = build(lambda: Transformer(blocks, width, tied=False))
    assert isinstance(model, Transformer)
    return model


def _budget(context: CheckContext) -> Verdict:
    model = _model(context, 8)
    plain = _plain_peak(context, model)
    budget = plain // 2
    peak = _Peak(context)
    with Engine(model, adamw(model), device=context.device, memory=budget) as engine:
        engine.step(batch(0))  # with the trial that finds out how large micro-batches may be
        peak.reset()
        for seed in range(1, 3):
            engine.step(batch(seed))
        engine.wait()
        most = peak.bytes()
    figures: Measurements = {"peak": show_bytes(most), "budget": show_bytes(budget), "plain": show_bytes(plain)}
    if most > budget:
        return Verdict.failed(f"{show_bytes(most)} in use where memory={show_bytes(budget)}", figures)
    return Verdict.ok(figures)


def _depth(context: CheckContext) -> Verdict:
    peaks = [_step_peak(context, blocks, stash="host") for blocks in _DEPTHS]
    figures: Measurements = {f"{blocks} blocks": show_bytes(peak) for blocks, peak in zip(_DEPTHS, peaks, strict=True)}
    if peaks[1] > peaks[0] * (1 + _SAME):
        return Verdict.failed(f"four times the blocks take {peaks[1] / peaks[0]:.2f} times the memory", figures)
    return Verdict.ok(figures)


def _step_peak(context: CheckContext, blocks: int, **options: Any) -> int:
    """Of steps that know their order; the least of a few, since copies may be late."""
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
    """With all on the device: weights, gradients, the optimizer's state."""
    peak = _Peak(context)
    PlainTraining(model, context.device).train([batch(0)])
    return peak.bytes()


class _Peak:
    """The most bytes on the device, beyond what was there before."""

    def __init__(self, context: CheckContext) -> None:
        self._accelerator = context.accelerator
        self._before = self._accelerator.memory()
        self.reset()

    def reset(self) -> None:
        self._accelerator.reset_peak()

    def bytes(self) -> int:
        return self._accelerator.peak() - self._before
