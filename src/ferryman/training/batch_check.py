"""Checks whether a batch may be cut, before the engine cuts it to stay within a budget.

Cutting a batch preserves its loss only if the loss is the mean (with reduction="sum", the sum) of the samples' losses.
That does not hold for a loss across the batch (contrastive), for data whose first dimension is not the samples
(time-major), or for a mean over tokens if samples have different numbers of tokens. So the loss of two samples together
is compared with the mean or sum of their separate losses.

Note [How losses are compared]
The model runs without gradients, with its units streamed as in an evaluation, and in training mode; if it draws random
numbers there (dropout), in evaluation mode. A loss that cannot run without gradients, such as one with a gradient
penalty, runs as in a trial, and its gradients are discarded. If a loss fails both ways, or draws random numbers even in
evaluation mode, it cannot be compared, and the batch is not cut. Rounding depends on the number of samples. To measure
that, each sample also runs twice in one batch, which changes nothing but rounding.

Note [Which samples]
A mean over tokens is detected only if samples have different numbers of tokens. So the two samples are those that
differ the most in the number of ignored labels (-100), in the sum of a mask, or in the length of a run of one value
(padding) at the start or end of their rows. Each shape of batch is checked once. It is checked again when samples first
differ in such a number.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ferryman.model.loss import Loss
from ferryman.plan.batch import Shape, per_sample, pick, samples_in, shape_of
from ferryman.plan.fit import Choice, TooLargeError
from ferryman.relay.observer import Roots
from ferryman.runtime.rng import Randomness
from ferryman.runtime.sizes import show_bytes
from ferryman.training.assembly import Assembly
from ferryman.training.user_code import to_device, undisturbed, weighted_loss

IGNORED = -100  # the label that torch's losses ignore

# Losses may differ by rounding: by a relative tolerance, plus the measured noise up to a relative bound.
_EXACT, _NOISE_EXACT = 2e-5, 1e-4
_COARSE, _NOISE_COARSE = 1e-3, 1e-2  # if the device computes in less than float32
_NOISE_FACTOR = 8  # the tolerance is this many times the measured noise
_EPSILONS = 4  # the relative tolerance is at least this many epsilons of the loss's dtype


@contextlib.contextmanager
def _undone(roots: Roots) -> Iterator[None]:
    """Context in which the user's code runs; its variables are restored on exit."""
    survey = roots.survey(thorough=True)
    before = survey.capture()
    try:
        yield
    finally:
        survey.put_back(before)


class _RandomError(Exception):
    """The loss draws random numbers, so it has no definite value."""


class _Losses(NamedTuple):
    """The losses of two samples, together and separately."""

    whole: float
    parts: tuple[float, float]
    noise: float  # by how much rounding changes them
    resolution: float  # epsilon of the loss's dtype


class BatchCheck:
    """Checks batches, and remembers which shapes were checked. `loss` and `reduction` are the engine's settings."""

    def __init__(self, model: nn.Module, loss: Loss, reduction: str, device: torch.device, budget: int | None) -> None:
        self._model = model
        self._loss = loss
        self._reduction = reduction
        self._device = device
        self._budget = budget
        self._checked: dict[Shape, set[_Number]] = {}  # shapes, and the numbers in which their samples differed

    def check(self, batch: Any, asked: int | None, chosen: int, assembly: Assembly, roots: Roots) -> None:
        """Raises a ValueError if cutting the batch would change its loss, or if this cannot be checked. A number of
        micro-batches that the user `asked` for is not checked, only one that the engine has `chosen`."""
        if self._budget is None or asked is not None or chosen <= 1 or isinstance(batch, list):
            return
        about = f"memory={show_bytes(self._budget)} makes {chosen} micro-batches of this batch"
        shape, numbers = shape_of(batch), _differing(batch)
        known = [seen for other, seen in self._checked.items() if shape.within(other)]
        unseen = numbers.keys() - set[_Number]().union(*known)
        while unseen or not known:
            low, high = 0, (samples_in(batch) or 1) - 1
            if unseen:
                counts = numbers[max(unseen, key=lambda number: _spread(numbers[number]))]
                low, high = int(counts.argmin()), int(counts.argmax())
            with _undone(roots):
                self._compare(batch, low, high, about, assembly, roots, self._budget - assembly.plan.fixed)
            seen = {
                number for number, counts in numbers.items() if abs(int(counts[low] - counts[high])) >= _MIN_DIFFERENCE
            }
            known.append(seen)
            unseen -= seen
        self._checked[shape] = set[_Number]().union(*known)

    def _compare(
        self, batch: Any, first: int, second: int, about: str, assembly: Assembly, roots: Roots, room: int
    ) -> None:
        try:
            found = self._losses(batch, first, second, assembly, roots, room)
        except Exception as error:
            raise ValueError(
                f"{about}, and that this does not change the loss could not be checked: {_reason(error)}. {_WAYS_OUT}"
            ) from error
        whole, expected = found.whole, sum(found.parts) / (2 if self._reduction == "mean" else 1)
        same = abs(whole - expected) <= self._tolerance(found, assembly)
        if math.isfinite(whole) and not same:  # if it is not finite, the step raises an error
            raise ValueError(
                f"{about}, but the loss of a batch is not the {self._reduction} of its samples' losses: for samples "
                f"{first} and {second} it is {whole:.6g} together, and the {self._reduction} of their own is "
                f"{expected:.6g}. {_REASONS[self._reduction]} {_WAYS_OUT}"
            )

    def _tolerance(self, found: _Losses, assembly: Assembly) -> float:
        dtypes = {item.dtype for unit in assembly.all_units for item in unit.items if item.dtype.is_floating_point}
        exact = (
            dtypes <= {torch.float32, torch.float64}
            and torch.get_float32_matmul_precision() == "highest"
            and not any(torch.is_autocast_enabled(kind) for kind in ("cpu", self._device.type))
        )
        part, bound = (_EXACT, _NOISE_EXACT) if exact else (_COARSE, _NOISE_COARSE)
        scale = max(map(abs, (found.whole, *found.parts)))
        return max(part, _EPSILONS * found.resolution) * scale + min(_NOISE_FACTOR * found.noise, bound * (scale + 0.1))

    def _losses(self, batch: Any, first: int, second: int, assembly: Assembly, roots: Roots, room: int) -> _Losses:
        """See Note [How losses are compared]."""
        chosen = [[first, second], [first], [second], [first, first], [second, second]]
        contents = [pick(batch, samples) for samples in chosen]
        randomness = assembly.relay.randomness

        def without_gradients(content: Any) -> torch.Tensor:
            with assembly.step(), assembly.relay.evaluation.running(), torch.no_grad(), _drawing_nothing(randomness):
                return self._loss(self._model, to_device(content, self._device)).cpu()

        def with_gradients(content: Any) -> torch.Tensor:
            values = list[torch.Tensor]()

            def seen(model: nn.Module, micro_batch: Any) -> torch.Tensor:
                with _drawing_nothing(randomness):
                    loss = self._loss(model, micro_batch)
                values.append(loss.detach().cpu())
                return loss

            relay = assembly.relay
            run = functools.partial(
                weighted_loss, seen, self._model, content, 1.0, self._device, relay.inputs.bring, relay.register_batch
            )
            assembly.try_out([run], room, roots, Choice(1, stash_on_host=True))
            return values[-1]

        assembly.server.wait_for_updates()
        problems = list[Exception]()
        for way in (without_gradients, with_gradients):
            for trains in (True, False):
                with undisturbed(self._model, randomness):
                    if not trains:
                        self._model.eval()
                    try:
                        losses = list(map(way, contents))
                    except Exception as error:
                        problems.append(error)
                        continue
                problems.clear()  # their tracebacks keep tensors on the device
                whole, one, two, one_twice, two_twice = map(float, losses)
                times = 1 if self._reduction == "mean" else 2
                noise = max(abs(one_twice - times * one), abs(two_twice - times * two))
                return _Losses(whole, (one, two), noise, torch.finfo(losses[0].dtype).eps)
        raise next((error for error in problems if not isinstance(error, _RandomError)), problems[0])


@contextlib.contextmanager
def _drawing_nothing(randomness: Randomness) -> Iterator[None]:
    """Context that raises a _RandomError on exit if random numbers were drawn."""
    before = randomness.state()
    yield
    if not randomness.state().same_as(before):
        raise _RandomError


_REASONS = {
    "mean": "This happens with losses across the batch (contrastive ones), with data whose first dimension is not that "
    "of samples (time-major), and with a mean over tokens if samples have different numbers of tokens.",
    "sum": 'With reduction="sum" the loss must be divided by a count over the whole batch, such as its tokens, and not '
    "by the count of a micro-batch.",
}
_WAYS_OUT = (
    "Instead, set micro_batches= yourself, as in plain gradient accumulation; pass a list of ready-made micro-batches, "
    "or your own function that cuts a batch, Engine(split=...) (time-major data, graphs); use "
    'reduction="sum" with a loss that is divided by a count over the whole batch, such as its tokens; or set a budget '
    "(memory=) that is large enough for the whole batch"
)


def _reason(error: Exception) -> str:
    if isinstance(error, _RandomError):
        return "its loss draws random numbers even in evaluation mode"
    if isinstance(error, TooLargeError):
        return "it does not run without gradients, and with them two samples do not fit into the budget"
    first = str(error).splitlines()[0] if str(error) else ""
    return f"the loss of two samples raised {type(error).__name__}: {first}"


_MIN_DIFFERENCE = 2  # smaller differences between samples are ignored


class _Number(NamedTuple):
    """A count that each sample has in one tensor of the batch."""

    leaf: int  # the index of the tensor
    what: str  # what is counted


def _differing(batch: Any) -> dict[_Number, torch.Tensor]:
    """The numbers in which samples differ. See Note [Which samples]."""
    found = {
        _Number(place, what): counts for place, leaf in enumerate(per_sample(batch)) for what, counts in _counts(leaf)
    }
    return {number: counts for number, counts in found.items() if _spread(counts) >= _MIN_DIFFERENCE}


def _spread(counts: torch.Tensor) -> int:
    return int(counts.max() - counts.min())


def _counts(leaf: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if leaf.is_floating_point() or leaf.is_complex() or leaf.dim() < 2 or not leaf.numel():
        return
    rows = leaf.flatten(1)
    yield "ignored", (rows == IGNORED).sum(1)
    if bool(((rows == 0) | (rows == 1)).all()):
        yield "mask", rows.sum(1)
    yield "begin", (rows == rows[:, :1]).cumprod(1).sum(1)
    yield "end", (rows == rows[:, -1:]).flip(1).cumprod(1).sum(1)
