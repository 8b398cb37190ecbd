"""The reference: plain PyTorch gradient accumulation, with everything on the device."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from ferryman.model.loss import Loss, model_loss
from ferryman.model.precision import PRECISIONS
from ferryman.plan.batch import Part, parts_of
from ferryman.training.user_code import to_device
from ferryman.verify.small_models import Batch

LEARNING_RATE = 1e-3
MICRO_BATCHES = 2

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """The results of training, on the host."""

    losses: list[float]
    gradients: Tensors  # of the first batch, before the first update
    weights: Tensors  # after the last update
    buffers: Tensors = field(default_factory=Tensors)  # compared for the user's own model only


def adamw(model: nn.Module | Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with a large epsilon, so that differences in the last bit of tiny gradients are not amplified."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else list(model)
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1, eps=1e-4)


def values_of(named: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    """Copies of tensors on the host."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}


def gradients_of(model: nn.Module) -> Tensors:
    """Copies of the gradients on the host."""
    return values_of((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)


def seed_all(seed: int) -> None:
    """Seeds the global random generators as the engine does for a micro-batch."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def accumulate(
    model: nn.Module,
    loss: Loss,
    parts: Sequence[Part],
    device: torch.device,
    *,
    seed: int,
    scale: float = 1.0,
    after_backward: Callable[[], None] = lambda: None,
) -> float:
    """Runs forward and backward of all micro-batches, each seeded as the engine does. Returns the loss of the batch.

    `scale` is the loss scale, for precisions that need one. The global random generators advance by as much as in a
    step of the engine.
    """
    seed_all(seed)
    first = int(torch.randint(0, 2**62, (), device="cpu").item())
    python, numpy = random.getstate(), np.random.get_state()
    total = torch.zeros((), device=device, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        for number, part in enumerate(parts):
            seed_all(first + number)
            value = loss(model, to_device(part.content, device)).float() * (part.weight * scale)
            value.backward()
            total += value.detach()
            after_backward()
    random.setstate(python)
    np.random.set_state(numpy)
    return float(total) / scale


class PlainTraining:
    """Trains a copy of the model that is entirely on the device."""

    def __init__(self, model: nn.Module, device: torch.device, limit: float | None = None) -> None:
        self._model = copy.deepcopy(model).to(device)
        self._device = device
        self._limit = limit
        self._optimizer = adamw(self._trained())

    def _trained(self) -> list[nn.Parameter]:
        return list(self._model.parameters())

    def train(self, batches: Sequence[Batch], scale: float = 1.0) -> Trained:
        """`scale` is the loss scale, for precisions that need one."""
        self._backward(batches[0], 0, scale)
        gradients = self._gradients()
        self._forget()
        losses = []
        for seed, batch in enumerate(batches):
            losses.append(self._backward(batch, seed, scale))
            self._update(scale)
            self._forget()
        return Trained(losses, gradients, self._weights())

    def _backward(self, batch: Batch, seed: int, scale: float) -> float:
        return accumulate(
            self._model, model_loss, parts_of(batch, MICRO_BATCHES), self._device, seed=seed, scale=scale,
            after_backward=lambda: self._after_backward(scale),
        )  # fmt: skip

    def _after_backward(self, scale: float) -> None:
        """Called after each micro-batch; here autograd accumulates the gradients."""

    def _gradients(self) -> Tensors:
        return gradients_of(self._model)

    def _update(self, scale: float) -> None:
        if self._limit is not None:
            nn.utils.clip_grad_norm_(self._trained(), self._limit)
        self._optimizer.step()

    def _forget(self) -> None:
        self._optimizer.zero_grad()

    def _weights(self) -> Tensors:
        return values_of(self._model.named_parameters())


class MixedPrecisionTraining(PlainTraining):
    """Computes in a narrow dtype, accumulates gradients in float32 and updates float32 master weights."""

    def __init__(self, model: nn.Module, device: torch.device, precision: str, limit: float | None = None) -> None:
        self._dtype = PRECISIONS[precision]
        self._masters = {name: nn.Parameter(p.detach().to(device)) for name, p in model.named_parameters()}
        self._sums: Tensors = {}
        super().__init__(model, device, limit)
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(self._dtype)
        self._copy()

    def _trained(self) -> list[nn.Parameter]:
        return list(self._masters.values())

    def _after_backward(self, scale: float) -> None:
        for name, parameter in self._model.named_parameters():
            assert parameter.grad is not None
            gradient, parameter.grad = parameter.grad.float() / scale, None
            self._sums[name] = self._sums[name] + gradient if name in self._sums else gradient

    def _gradients(self) -> Tensors:
        return values_of(self._sums.items())

    def _update(self, scale: float) -> None:
        for name, master in self._masters.items():
            master.grad = (self._sums[name] * scale).to(self._dtype).float() / scale  # as they cross the link
        super()._update(scale)
        self._copy()

    def _forget(self) -> None:
        super()._forget()
        self._sums.clear()

    def _weights(self) -> Tensors:
        return values_of(self._masters.items())

    def _copy(self) -> None:
        for name, parameter in self._model.named_parameters():
            master = self._masters[name].detach()
            parameter.data.copy_(_nearest(master) if self._dtype == torch.bfloat16 else master)


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """Rounds to bfloat16 as the server does: to nearest, ties away from zero."""
    return ((values.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
