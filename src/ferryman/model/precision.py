"""Precision: the dtype of weights in compute and transfers, and the loss scale of float16."""

from __future__ import annotations

import re

import torch
from torch import nn

from ferryman.model.units import DtypeOf, own_dtype

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(model: nn.Module, precision: str | None) -> DtypeOf:
    """Returns a function that maps a tensor to its dtype in this precision; without a precision, to its own dtype.

    Buffers keep their dtypes. Modules that a transformers model requires to be in float32 stay in float32.
    """
    if precision is None:
        return own_dtype
    wide = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if precision == "fp16":
        wide += list(getattr(model, "_keep_in_fp32_modules", None) or ())
    kept = re.compile("|".join(rf"(^|\.){name}($|\.)" for name in wide)) if wide else None

    def of(name: str, tensor: torch.Tensor) -> torch.dtype:
        if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
            return tensor.dtype
        return torch.float32 if kept is not None and kept.search(name) else PRECISIONS[precision]

    return of


# As in torch.amp.GradScaler.
_INITIAL_SCALE = 2.0**16
_GROWTH_INTERVAL = 2000  # steps without overflow after which the factor is doubled

_MIN_SCALE = 2.0**-24  # no finite loss needs a smaller factor


class LossScale:
    """The factor by which losses are multiplied, so that float16 gradients do not underflow.

    If it `is_dynamic`, it is adjusted as in torch.amp.GradScaler.
    """

    def __init__(self, value: float = 1.0, *, is_dynamic: bool = False) -> None:
        self.value = value
        self.is_dynamic = is_dynamic
        self._good_steps = 0  # steps without overflow since the last change

    def update(self, *, finite: bool) -> None:
        """Halves the factor if a step's gradients were not finite; doubles it after many steps in which they were."""
        if not self.is_dynamic:
            return
        if not finite:
            self.value *= 0.5
            self._good_steps = 0
            if self.value < _MIN_SCALE:
                raise ValueError(
                    f"the loss scale has fallen to {self.value}, and float16 gradients are still not finite: the loss "
                    "itself is inf or NaN, or far too large. Check the data and the learning rate, or use bf16"
                )
            return
        self._good_steps += 1
        if self._good_steps == _GROWTH_INTERVAL:
            self.value *= 2.0
            self._good_steps = 0

    def state(self) -> dict[str, float] | None:
        """The state for a checkpoint; None if the factor does not change."""
        return {"value": self.value, "good_steps": self._good_steps} if self.is_dynamic else None

    def restore(self, state: dict[str, float] | None) -> None:
        """Restores the state from a checkpoint; the state of another precision is ignored."""
        if self.is_dynamic and state is not None:
            self.value, self._good_steps = state["value"], int(state["good_steps"])


def loss_scale_for(dtypes: set[torch.dtype]) -> LossScale:
    return LossScale(_INITIAL_SCALE, is_dynamic=True) if torch.float16 in dtypes else LossScale()
