"""Refuses uses of parameters' gradients, and of hooks on them, by the user's code in a step.

Residents are real tensors on the device, and the engine takes their gradients away as soon as a backward has computed
them. So a loss that clears a gradient (`model.norm.weight.grad = None`) would clear nothing. And autograd's graph does
not contain what happens inside a unit, so `torch.autograd.grad` would return None for a resident that only units use,
or an incomplete gradient.

While residents are watched, they have a class whose `__torch_function__` refuses both, as placeholders do for all other
parameters. In trials, so have a unit's own parameters, while the unit's code runs. Watching slows down every use of a
parameter, so the relay watches only where it must.

Hooks that the user's code registers on parameters during a step would be there once for each run of the code. On the
device's parameters they are refused. On the host's they are allowed, and trials remove theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
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


@contextlib.contextmanager
def hooks_unchanged(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context in which hooks may be registered on these parameters, or removed. On exit, that is undone."""
    before = [(parameter, dict(parameter._backward_hooks or {})) for parameter in parameters]
    try:
        yield
    finally:
        for parameter, hooks in before:
            now: dict[int, Any] = parameter._backward_hooks or {}
            if now.keys() != hooks.keys():
                now.clear()
                now.update(hooks)


def is_hooked(parameter: torch.Tensor) -> bool:
    """Whether the user's code has registered a hook on the device's parameter, next to the engine's own hook."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(parameter._backward_hooks) or len(parameter._post_accumulate_grad_hooks or ()) > 1


def drop_hooks(parameter: torch.Tensor) -> None:
    """Drops the hooks that the user's code has registered on the device's parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        if parameter._backward_hooks:
            parameter._backward_hooks.clear()
        hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
        for number in list(hooks)[1:]:
            del hooks[number]
