"""Refuses uses of residents' gradients by the user's code in a step.

Residents are real tensors on the device, and the engine takes their gradients away as soon as a backward has computed
them. So a loss that clears a gradient (`model.norm.weight.grad = None`) would clear nothing. And autograd's graph does
not contain what happens inside a unit, so `torch.autograd.grad` would return None for a resident that only units use,
or an incomplete gradient.

While residents are watched, they have a class whose `__torch_function__` refuses both, as placeholders do for all other
parameters. Watching slows down every use of a resident, so the relay watches only where it must.
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
    """Context in which uses of these parameters' gradients are refused, if plain PyTorch might have gradients there.

    `watched`: the name of each parameter, and of a unit that uses it, if one does.
    """
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
                    return NotImplemented  # the placeholder raises the error
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
                f"torch.autograd.grad was called for {name!r}, which the unit {unit!r} uses, and autograd's graph does "
                "not contain what happens inside a unit. Choose units that do not contain this parameter "
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
