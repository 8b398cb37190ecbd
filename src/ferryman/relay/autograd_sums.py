"""Gradients that autograd itself adds to their sums during a visit, without Python.

A hook collects the first gradient of a parameter in a visit. If the sum is of the gradient's kind (float32, nothing to
scale, no hook of the user), it then becomes the parameter's `.grad`, and the engine's hook is removed until the visit
is over: autograd adds each further gradient to it, as the engine would.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ferryman.model.placeholder import gradient_is_elsewhere
from ferryman.model.units import Item


class _Lent(NamedTuple):
    item: Item
    parameter: torch.Tensor
    total: torch.Tensor
    hooks: dict[int, Any]  # the parameter's own dictionary
    removed: dict[int, Any]  # its contents before


class AutogradSums:
    """The sums of one visit that autograd adds to."""

    def __init__(self) -> None:
        self._lent: list[_Lent] = []

    def lend(self, item: Item, parameter: torch.Tensor, total: torch.Tensor) -> None:
        """Called by the hook of a parameter when its gradient is part of `total`."""
        hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
        if len(hooks) != 1 or total.dtype is not parameter.dtype or total.shape != parameter.shape:
            return
        self._lent.append(_Lent(item, parameter, total, hooks, dict(hooks)))
        hooks.clear()  # torch has made a list of them, and calls this one to its end
        parameter.grad = total

    def before_backward(self) -> None:
        """Takes sums back whose gradients are the user's to edit from now on: a hook was registered meanwhile."""
        if not self._lent:
            return
        with torch._C.DisableTorchFunctionSubclass():
            hooked = [lent for lent in self._lent if lent.item.tensor._backward_hooks]
        for lent in hooked:
            self._lent.remove(lent)
            _take_back(lent)

    def check(self) -> None:
        """Raises a ValueError if the unit's code has cleared or replaced the gradient of a parameter."""
        for lent in self._lent:
            if lent.parameter.grad is not lent.total:
                raise gradient_is_elsewhere(lent.item.name)

    def end(self) -> None:
        """Takes all sums back."""
        while self._lent:
            _take_back(self._lent.pop())


def _take_back(lent: _Lent) -> None:
    lent.parameter.grad = None
    lent.hooks.update(lent.removed)
