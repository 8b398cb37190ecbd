"""Gradients of residents, which the user's code must neither read nor clear in a step, nor ask autograd for where units
use them.

Residents are real tensors on the device, and their gradients are taken away as soon as a backward has made them. So a
loss that clears one (`model.norm.weight.grad = None`) would clear nothing. While they are watched, residents are of a
class whose `__torch_function__` refuses that, as placeholders do for all other parameters. Inside a unit autograd's
graph does not show them, so `torch.autograd.grad` would give None, or only what comes from outside the unit. Watching
takes time at every use of a resident, so the relay watches only where it must.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ferryman.model.placeholder import GRADIENT_ACCESS, Placeholder, gradient_is_elsewhere


@contextlib.contextmanager
def watching_gradients(
    watched: Mapping[torch.Tensor, tuple[str, str | None]], may_have_gradients: Callable[[], bool]
) -> Iterator[None]:
    """Within, the gradients of these parameters are refused where plain PyTorch may have some. With each is its name,
    and that of a unit that uses it."""
    by_id = {id(tensor): names for tensor, names in watched.items()}

    class _Watched(nn.Parameter):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if function in GRADIENT_ACCESS and may_have_gradients():
                raise gradient_is_elsewhere(by_id[id(args[0])][0])
            if function is torch.autograd.grad:
                if Placeholder in types:
                    return NotImplemented  # which says what is wrong
                _refuse_those_in_units(kwargs["inputs"] if kwargs and "inputs" in kwargs else args[1], by_id)
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

    _Watched.__name__, _Watched.__qualname__, _Watched.__module__ = "Parameter", "Parameter", nn.Parameter.__module__
    plain = [tensor for tensor in watched if type(tensor) is nn.Parameter]
    try:
        for tensor in plain:
            tensor.__class__ = _Watched
        yield
    finally:
        for tensor in plain:
            tensor.__class__ = nn.Parameter


def _refuse_those_in_units(inputs: Any, by_id: Mapping[int, tuple[str, str | None]]) -> None:
    for wanted in torch.utils._pytree.tree_leaves(inputs):
        name, unit = by_id.get(id(wanted), ("", None))
        if unit is not None:
            raise ValueError(
                f"torch.autograd.grad is asked for the gradient of {name!r}, which the unit {unit!r} uses. What a unit "
                "does inside is not in autograd's graph. Name the units such that it is not in one of them "
                "(units=['blocks.*'], for example)"
            )


def take_gradient(
    parameter: torch.Tensor, original: torch.Tensor
) -> tuple[torch.Tensor | None, Mapping[int, Any] | None]:
    """Takes the gradient away from the device's parameter, and returns it with the user's hooks on it, which are on the
    host's `original`. Both may be watched, and the engine itself may use them."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient, parameter.grad = parameter.grad, None
        return gradient, original._backward_hooks
