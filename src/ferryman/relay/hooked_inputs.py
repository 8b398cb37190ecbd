"""Inputs of a call on which the unit's own code has hooks (`Tensor.register_hook`) or keeps gradients (`retain_grad`).

In the unit, an input is a leaf, whose gradient is only what comes from the unit. In plain PyTorch, hooks see the whole
gradient of the tensor. So they are moved to the tensor outside.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HookedInputError(RuntimeError):
    """The unit's code has hooks on an input that is a leaf. The unit runs again, with inputs that are not leaves."""


def are_hooked(inner: Sequence[torch.Tensor]) -> bool:
    return any(tensor._backward_hooks or tensor.retains_grad for tensor in inner)


def move_hooks(inner: Sequence[torch.Tensor], outer: Sequence[torch.Tensor]) -> None:
    """After the first run: `inner` are its inputs, which are not leaves if the unit's code needs a graph."""
    for inside, outside in zip(inner, outer, strict=True):
        if not inside.is_leaf and (hooks := inside._backward_hooks):
            for hook in hooks.values():
                outside.register_hook(hook)
            hooks.clear()
        if inside.retains_grad:
            outside.retain_grad()


def drop_hooks(unit: str, inner: Sequence[torch.Tensor], *, moved: bool) -> None:
    """After the second run: drops the hooks that it has registered again."""
    for tensor in inner:
        if hooks := tensor._backward_hooks:
            if not moved:
                raise ValueError(
                    f"the unit {unit!r} registers a hook (Tensor.register_hook) on one of its inputs, which it did not "
                    "in its first run. The hook would see only the gradient that comes from the unit: "
                    "register it where the tensor is made"
                )
            hooks.clear()
