"""Parity checks: in every mode, a step equals plain PyTorch with the same micro-batches on the same device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ferryman.engine import Engine
from ferryman.verify import small_models
from ferryman.verify.context import SUBGROUP, CheckContext, distance, exceeded, max_difference, max_magnitude
from ferryman.verify.reference import MICRO_BATCHES, Tensors, Trained, adamw, gradients_of, values_of
from ferryman.verify.result import Check, Measurements, Verdict

# The terms of a tied tensor's gradient are summed in another order.
_TIED_TOLERANCE = 1e-6  # relative to the largest gradient


class _Limits(NamedTuple):
    """Tolerances where results are not bitwise equal."""

    losses: float  # after the first step, since weights then differ by rounding
    weights: float  # relative to the distance that training has moved them
    # On devices where plain PyTorch is not reproducible.
    unsteady_gradients: float  # relative to the largest gradient
    unsteady_weights: float


# Host kernels round Adam's square root differently than torch in the last bits. Occasionally that moves a bf16 or fp16
# weight to its neighboring value, and changes the gradients of all later steps.
_LIMITS = {
    "fp32": _Limits(1e-5, 1e-5, 1e-5, 1e-3),
    "bf16": _Limits(2e-3, 1e-2, 2e-2, 5e-2),
    "fp16": _Limits(2e-3, 1e-2, 5e-3, 5e-2),
}


class ParityCase(NamedTuple):
    name: str
    make: Callable[[], nn.Module]
    options: dict[str, Any]

    @property
    def precision(self) -> str:
        return str(self.options.get("precision", "fp32"))


def checks(context: CheckContext) -> Iterator[Check]:
    steps = len(context.batches)
    compared = f"losses, gradients, weights after {steps} steps against plain PyTorch"
    for case in _cases(context):
        yield Check("parity", case.name, compared, lambda case=case: _compare(context, case))  # type: ignore[misc]
    compared = "weights after 3 steps, saved and loaded after the second, against an uninterrupted run: same bits"
    yield Check("parity", "checkpoint", compared, lambda: _resume(context))


def _cases(context: CheckContext) -> Iterator[ParityCase]:
    """Every mode at least once; `quick` leaves out those most similar to others."""
    relayed: dict[str, Any] = {"updates": "host"}
    yield ParityCase("eager", small_models.tied, relayed | {"stash": "device"})
    yield ParityCase("deferred, clipped", small_models.tied, relayed | {"max_grad_norm": 0.3})
    if not context.accelerator.is_host:
        shared: dict[str, Any] = {"subgroup": SUBGROUP}
        held, clipped = shared | {"held": True}, {"max_grad_norm": 0.3}
        yield ParityCase("stash on the host", small_models.tied, relayed | {"stash": "host"})
        yield ParityCase("stride:2, relayed", small_models.tied, shared | {"updates": "stride:2"})
        yield ParityCase("static:0.5, held, clipped", small_models.tied, held | clipped | {"updates": "static:0.5"})
        yield ParityCase("auto, relayed, clipped", small_models.tied, shared | clipped | {"updates": "auto"})
        if not context.quick:
            yield ParityCase("host, held", small_models.tied, held | {"updates": "host"})
            yield ParityCase("stride:2, held, clipped", small_models.tied, held | clipped | {"updates": "stride:2"})
            yield ParityCase("static:0.5, relayed", small_models.tied, shared | {"updates": "static:0.5"})
            yield ParityCase("auto, held", small_models.tied, held | {"updates": "auto"})
            yield ParityCase("bf16, stride:2, clipped", small_models.untied, shared | clipped | _in("bf16", "stride:2"))
            yield ParityCase("fp16, static:0.5, held", small_models.untied, held | _in("fp16", "static:0.5"))
    yield ParityCase("bf16", small_models.untied, _in("bf16", "host"))
    yield ParityCase("fp16", small_models.untied, _in("fp16", "host"))
    if not context.quick:
        yield ParityCase("GPT-2 of transformers", small_models.gpt2, {})
        yield ParityCase("Llama of transformers", small_models.llama, {})


def _in(precision: str, updates: str) -> dict[str, Any]:
    return {"precision": precision, "updates": updates}


def _compare(context: CheckContext, case: ParityCase) -> Verdict:
    if (lacking := context.accelerator.lacks(case.precision)) is not None:
        return Verdict.skipped(lacking)
    if case.make in (small_models.gpt2, small_models.llama) and not small_models.has_transformers():
        return Verdict.skipped("transformers is not installed")
    model = small_models.build(case.make)
    tied, start = small_models.tied_names(model), values_of(model.named_parameters())
    with Engine(model, adamw(model), device=context.device, **case.options) as engine:
        scale = engine.loss_scale
        ours = train(engine, model, context)
        stats = engine.stats()
        if engine.loss_scale != scale:
            return Verdict.inconclusive(f"gradients overflowed in {case.precision}, and steps were skipped", {})
    ours = replace(ours, weights=values_of(model.named_parameters()))  # closing the engine restored the float32 masters
    theirs = context.reference(case.make, case.precision, case.options.get("max_grad_norm"), scale)
    figures, wrong = _judge(ours, theirs, start, tied, _LIMITS[case.precision], repeats=context.repeats)
    policy = case.options.get("updates", "auto")
    if stats is not None and policy != "host" and not context.accelerator.is_host:
        figures["on device"] = f"{stats.device_share:.0%}"
        if not stats.device_share and policy != "auto":
            wrong.append(f"updates={policy!r} updated nothing on the device")
    return Verdict.failed("; ".join(wrong), figures) if wrong else Verdict.ok(figures)


def _resume(context: CheckContext) -> Verdict:
    """Random states are part of the checkpoint, so nothing is seeded after the save."""
    options: dict[str, Any] = {"updates": "static:0.5", "subgroup": SUBGROUP, "max_grad_norm": 0.3}
    if context.accelerator.is_host:
        options = {"max_grad_norm": 0.3}
    *before, last = context.batches[:3]
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for resumed in (False, True):
            model = small_models.build(small_models.tied)
            with Engine(model, adamw(model), device=context.device, **options) as engine:
                if resumed:
                    torch.manual_seed(1)
                    engine.load(Path(directory, "checkpoint"))
                else:
                    torch.manual_seed(0)
                    for batch in before:
                        engine.step(batch, MICRO_BATCHES)
                    engine.save(Path(directory, "checkpoint"))
                    saved = values_of(model.named_parameters())
                engine.step(last, MICRO_BATCHES)
            found.append(values_of(model.named_parameters()))
    off = distance(*found) / distance(saved, found[0])
    figures: Measurements = {"weights": "bitwise" if off == 0 else off}
    if off > (0 if context.repeats else _LIMITS["fp32"].unsteady_weights):
        return Verdict.failed("the resumed run differs from the uninterrupted one", figures)
    return Verdict.ok(figures)


def train(engine: Engine, model: nn.Module, context: CheckContext) -> Trained:
    """Does what the reference does: gradients of the first batch, then one step with each batch."""
    torch.manual_seed(0)
    engine.forward_backward(context.batches[0], MICRO_BATCHES)
    gradients = gradients_of(model)
    engine.zero_grad()
    losses = []
    for seed, batch in enumerate(context.batches):
        torch.manual_seed(seed)
        losses.append(float(engine.step(batch, MICRO_BATCHES)))
    engine.wait()
    return Trained(losses, gradients, values_of(model.named_parameters()))


def _judge(
    ours: Trained, theirs: Trained, start: Tensors, tied: set[str], limits: _Limits, *, repeats: bool
) -> tuple[Measurements, list[str]]:
    """The measured differences, and a message for each that exceeds its tolerance."""
    whole = max_magnitude(theirs.gradients)
    alike = {name: value for name, value in theirs.gradients.items() if name not in tied}
    gradients = (
        max_difference({name: value for name, value in ours.gradients.items() if name not in tied}, alike) / whole
    )
    shared = max_difference(
        {name: value for name, value in ours.gradients.items() if name in tied},
        {name: value for name, value in theirs.gradients.items() if name in tied},
    ) / whole  # fmt: skip
    first = abs(ours.losses[0] - theirs.losses[0])
    losses = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    weights = distance(ours.weights, theirs.weights) / distance(start, theirs.weights)
    figures: Measurements = {"gradients": "bitwise" if gradients == 0 else gradients}
    if tied:
        figures["tied"] = shared
    figures |= {"loss": "bitwise" if losses == 0 else losses, "weights": weights}
    found = [
        ("gradients", gradients, 0.0 if repeats else limits.unsteady_gradients),
        ("gradients of tied tensors", shared, _TIED_TOLERANCE if repeats else limits.unsteady_gradients),
        ("the first loss", first, 0.0 if repeats else limits.losses),
        ("losses", losses, limits.losses),
        ("weights", weights, limits.weights if repeats else limits.unsteady_weights),
    ]
    return figures, exceeded(found)
