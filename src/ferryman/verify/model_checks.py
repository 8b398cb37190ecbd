"""Checks of the user's own model: recomputation, interleaving, cutting, and parity with plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ferryman.engine import Engine
from ferryman.exactness.survey import Survey
from ferryman.exactness.user_state import VariablePolicy
from ferryman.plan.batch import parts_of, samples_in
from ferryman.verify.context import CheckContext, distance, exceeded, max_difference, max_magnitude
from ferryman.verify.reference import Tensors, Trained, accumulate, adamw, gradients_of, seed_all, values_of
from ferryman.verify.result import Check, Measurements, Verdict
from ferryman.verify.user_model import ModelAndBatch, UserModel, micro_batches

_STEPS = 3
_MAX_GRAD_NORM = 1.0
_MAX_NAMES = 3  # that a row shows of each kind of variable

# Tolerances. Gradients of several calls are summed in another order than in plain PyTorch, and kernels may sum in
# another order for another number of samples.
_LOSS_TOLERANCE = 1e-5  # relative to the loss
_GRADIENT_TOLERANCE = 1e-5  # relative to the largest gradient
_WEIGHT_TOLERANCE = 1e-3  # relative to the distance that training has moved the weights
_BUFFER_TOLERANCE = 1e-4  # relative to the largest element
_MAX_PAIRS = 4  # of samples, whose common loss is compared with the mean of their losses
_CUT_TOLERANCE = 1e-4  # relative to the loss
_NARROW_CUT_TOLERANCE = 2e-2  # the same where parameters are narrower than float32


def checks(context: CheckContext, user: UserModel) -> Iterator[Check]:
    """The checks, in order: where the engine refuses the model in one check, later ones are skipped."""
    model = _ModelChecks(context, user)
    compared = "outputs of units that are recomputed in the backward against those of the forward: same checksums"
    yield Check("model", "second runs", compared, model.second_runs)
    compared = "losses, gradients and state of interleaved micro-batches against one micro-batch after the other"
    yield Check("model", "taking turns", compared, model.taking_turns)
    compared = "the loss of two samples together against the mean of their own losses, in evaluation mode"
    yield Check("model", "cutting", compared, model.cutting)
    compared = f"losses, gradients, weights and buffers of {_STEPS} steps against plain PyTorch"
    yield Check("model", "parity", compared, model.parity)


class _ModelChecks:
    """Each public method is a check."""

    def __init__(self, context: CheckContext, user: UserModel) -> None:
        self._context = context
        self._user = user
        self._refused = ""  # the first check in which the engine refused the model

    def second_runs(self) -> Verdict:
        """Runs one micro-batch, so that only recomputation can go wrong, not interleaving."""
        made = self._user.make()
        try:
            count = micro_batches(made.batch)
            with self._engine(made) as engine:
                first = parts_of(made.batch, count)[0].content
                engine.forward_backward(first if isinstance(first, torch.Tensor) else [first], 1)
                return Verdict.ok({"units": len(engine.units)})
        except ValueError as error:
            return self._refuse("second runs", error)

    def taking_turns(self) -> Verdict:
        if self._refused:
            return self._skip()
        made = self._user.make()
        if (count := micro_batches(made.batch)) == 1:
            return Verdict.skipped(
                "the batch gives only one micro-batch; return a batch of several samples, or a list of micro-batches"
            )
        try:
            with self._engine(made) as engine:
                engine.forward_backward(made.batch, count)
                figures = {"micro-batches": count, **_variables(engine)}
                if differences := engine._preparation.first_steps.differences:
                    return Verdict.failed(f"{differences[0]} They run one after the other, which is slower", figures)
                return Verdict.ok(figures)
        except ValueError as error:
            return self._refuse("taking turns", error)

    def cutting(self) -> Verdict:
        if self._refused == "second runs":
            return self._skip()
        made = self._user.make()
        if isinstance(made.batch, list) or (samples_in(made.batch) or 1) == 1:
            return Verdict.skipped("the engine does not cut this batch")
        made.model.eval()
        with self._engine(made):
            return _cut(made)

    def parity(self) -> Verdict:
        """Trains with plain PyTorch first: if that fails, there is nothing to compare with."""
        if self._refused:
            return self._skip()
        made, plain = self._user.make(), self._user.make()
        wide = all(p.dtype == torch.float32 for p in made.model.parameters() if p.is_floating_point())
        plain.model.load_state_dict(made.model.state_dict())
        if not wide:
            for parameter in plain.model.parameters():
                parameter.data = parameter.data.float() if parameter.is_floating_point() else parameter.data
        start = values_of(plain.model.named_parameters())
        # Both runs share globals and class attributes, so these are restored in between.
        kinds = {type(module) for module in plain.model.modules()}
        roots = [(plain.loss, "the loss"), *((kind, kind.__name__) for kind in kinds)]
        own = {id(part) for part in (*plain.model.modules(), *plain.model.parameters())}
        survey = Survey(roots, own=own, thorough=True)
        before = survey.capture()
        try:
            theirs = _train_plainly(plain._replace(batch=made.batch), self._context.device)
        except torch.OutOfMemoryError:
            return Verdict.skipped("the model does not fit on the device with plain PyTorch")
        finally:
            survey.put_back(before)
            del plain  # frees its device memory
        try:
            options: dict[str, Any] = {"max_grad_norm": _MAX_GRAD_NORM, "precision": None if wide else "fp32"}
            optimizer = adamw([p for p in made.model.parameters() if p.requires_grad])
            with Engine(made.model, optimizer, device=self._context.device, loss=made.loss, **options) as engine:
                ours = _train(engine, made)
        except ValueError as error:
            return self._refuse("parity", error)
        return _judge(ours, theirs, start)

    def _engine(self, made: ModelAndBatch) -> Engine:
        return Engine(made.model, device=self._context.device, loss=made.loss)

    def _refuse(self, row: str, error: ValueError) -> Verdict:
        self._refused = self._refused or row
        return Verdict.failed(str(error), {})

    def _skip(self) -> Verdict:
        return Verdict.skipped(f"the engine refused the model in {self._refused!r}")


def _variables(engine: Engine) -> Measurements:
    """The variables of the user's code that change in a step, by how the relay treats them."""
    relay = engine._parts.relay
    figures: Measurements = {"variables that change": len(relay.state)}
    for policy in VariablePolicy:
        names = [v.name for v in relay.state.variables if relay.state.policy(v) is policy]
        if names:
            figures[policy.value] = _shortened(names)
    if edited := sorted(item.name for item in relay.buffers.edited):
        figures["buffers of units"] = _shortened(edited)
    return figures


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{len(names)} ({', '.join(names[:_MAX_NAMES])}{more})"


# Cutting.


def _cut(made: ModelAndBatch) -> Verdict:
    """Compares losses of pairs of samples. The model is in evaluation mode and belongs to an engine."""

    def loss_of(part: Any, seed: int = 0) -> float:
        seed_all(seed)
        with torch.no_grad():
            return float(made.loss(made.model, part))

    size = samples_in(made.batch) or 1
    singles = [part.content for part in parts_of(made.batch, size)]
    pairs = [part.content for part in parts_of(made.batch, -(-size // 2))][: min(_MAX_PAIRS, size // 2)]
    most = 0.0
    try:
        if loss_of(pairs[0], 0) != loss_of(pairs[0], 1):
            return Verdict.inconclusive("the loss draws random numbers in evaluation mode, too", {})
        for number, pair in enumerate(pairs):
            together = loss_of(pair)
            alone = (loss_of(singles[2 * number]) + loss_of(singles[2 * number + 1])) / 2
            off = abs(together - alone) / max(abs(together), abs(alone), 1e-6)
            most = max(most, off) if math.isfinite(off) else math.inf
            if not most <= _cut_tolerance(made.model):
                return Verdict.failed(
                    f"the loss of samples {2 * number} and {2 * number + 1} together is {together:.6g}, but the mean "
                    f"of their losses is {alone:.6g}. Cutting a batch into other micro-batches changes its loss: "
                    "choose micro_batches= yourself, as in plain gradient accumulation; or use reduction='sum' with a "
                    "loss that is divided by a count over the whole batch, such as its tokens",
                    {"off": most},
                )
    except Exception as error:
        return Verdict.inconclusive(
            f"the loss of one or two samples cannot be computed without gradients: {type(error).__name__}: {error}", {}
        )
    return Verdict.ok({"pairs": len(pairs), "off": most})


def _cut_tolerance(model: nn.Module) -> float:
    wide = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters() if p.is_floating_point())
    return _CUT_TOLERANCE if wide else _NARROW_CUT_TOLERANCE


# Parity.


def _train(engine: Engine, made: ModelAndBatch) -> Trained:
    losses, gradients, count = [], Tensors(), micro_batches(made.batch)
    for step in range(_STEPS):
        seed_all(step)
        if step:
            losses.append(float(engine.step(made.batch, count)))
            continue
        losses.append(float(engine.forward_backward(made.batch, count)))
        gradients = gradients_of(made.model)
        engine.update()
    return _trained(made.model, losses, gradients)


def _train_plainly(made: ModelAndBatch, device: torch.device) -> Trained:
    model, losses, gradients = made.model.to(device), list[float](), Tensors()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(parameters)
    parts = parts_of(made.batch, micro_batches(made.batch))
    for step in range(_STEPS):
        losses.append(accumulate(model, made.loss, parts, device, seed=step))
        if not step:
            gradients = gradients_of(model)
        nn.utils.clip_grad_norm_(parameters, _MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return _trained(model, losses, gradients)


def _trained(model: nn.Module, losses: list[float], gradients: Tensors) -> Trained:
    return Trained(losses, gradients, values_of(model.named_parameters()), values_of(model.named_buffers()))


def _judge(ours: Trained, theirs: Trained, start: Tensors) -> Verdict:
    losses = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(ours.losses, theirs.losses, strict=True))
    gradients = max_difference(ours.gradients, theirs.gradients) / (max_magnitude(theirs.gradients) or 1.0)
    weights = distance(ours.weights, theirs.weights) / (distance(start, theirs.weights) or 1.0)
    buffers = max((_off(ours.buffers[name], value) for name, value in theirs.buffers.items()), default=0.0)
    found = [
        ("losses", losses, _LOSS_TOLERANCE),
        ("gradients", gradients, _GRADIENT_TOLERANCE),
        ("weights", weights, _WEIGHT_TOLERANCE),
        ("buffers", buffers, _BUFFER_TOLERANCE),
    ]
    figures: Measurements = {name: "bitwise" if off == 0 else off for name, off, _ in found}
    wrong = exceeded(found)
    return Verdict.failed("; ".join(wrong), figures) if wrong else Verdict.ok(figures)


def _off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of two buffers, relative to the largest element or 1. Masks may contain inf."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if torch.equal(ours, theirs):
        return 0.0
    off = float((ours.double() - theirs.double()).abs().max()) / max(float(theirs.double().abs().max()), 1.0)
    return off if math.isfinite(off) else math.inf
