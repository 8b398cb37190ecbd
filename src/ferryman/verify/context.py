"""What all checks share: the device, how thorough to be, and reference results of plain PyTorch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from ferryman.verify.accelerator import Accelerator
from ferryman.verify.reference import MixedPrecisionTraining, PlainTraining, Tensors, Trained
from ferryman.verify.small_models import Batch, batch, build, untied

SUBGROUP = 16384  # parameters in a subgroup; a block of the small models has three or four subgroups


class CheckContext:
    def __init__(self, device: torch.device, *, quick: bool) -> None:
        self.accelerator = Accelerator(device)
        self.device = device
        self.quick = quick
        self.batches: Sequence[Batch] = [batch(seed) for seed in range(3 if quick else 4)]
        self._references: dict[tuple[Callable[[], nn.Module], str, float | None], Trained] = {}

    def reference(self, make: Callable[[], nn.Module], precision: str, limit: float | None, scale: float) -> Trained:
        """The results of training a model with plain PyTorch on the same device."""
        key = make, precision, limit
        if key not in self._references:
            self._references[key] = self._plain(make, precision, limit).train(self.batches, scale)
        return self._references[key]

    @functools.cached_property
    def repeats(self) -> bool:
        """Whether plain PyTorch is bitwise reproducible on this device, on two streams. If so, the engine must be."""
        first = self._plain(untied, "fp32", None).train(self.batches)
        again = self._plain(untied, "fp32", None)
        self.accelerator.synchronize()
        with self.accelerator.stream():
            second = again.train(self.batches)
            self.accelerator.synchronize()
        return first.losses == second.losses and max_difference(first.gradients, second.gradients) == 0

    def _plain(self, make: Callable[[], nn.Module], precision: str, limit: float | None) -> PlainTraining:
        model = build(make)
        if precision == "fp32":
            return PlainTraining(model, self.device, limit)
        return MixedPrecisionTraining(model, self.device, precision, limit)


def max_difference(ours: Tensors, theirs: Tensors) -> float:
    """The largest difference of any element; inf if a tensor is missing or a value is not finite."""
    if ours.keys() != theirs.keys():
        return math.inf
    differences = [float((ours[name].double() - value.double()).abs().max()) for name, value in theirs.items()]
    return max((d if math.isfinite(d) else math.inf for d in differences), default=0.0)


def exceeded(found: Iterable[tuple[str, float, float]]) -> list[str]:
    """A message for each difference that exceeds its tolerance. `found`: names, differences and tolerances."""
    return [f"{what} off by {off:.1e}, {limit:g} allowed" for what, off, limit in found if not off <= limit]


def max_magnitude(tensors: Tensors) -> float:
    """The largest absolute value of any element."""
    return max(float(value.abs().max()) for value in tensors.values())


def distance(ours: Tensors, theirs: Tensors) -> float:
    """The norm of the difference; inf if it is not finite."""
    squares = (float((ours[name].double() - value.double()).square().sum()) for name, value in theirs.items())
    found = math.sqrt(sum(squares))
    return found if math.isfinite(found) else math.inf
