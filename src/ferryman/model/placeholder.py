"""A placeholder: takes the place of a tensor in a module while its unit is not on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferryman.model.units import Unit


class UsedOutsideError(ValueError):
    """A parameter is used while its unit is not on the device."""

    def __init__(self, message: str, parameter: str, unit: str) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.unit = unit


class Placeholder(torch.Tensor):
    """A tensor with the right shape, dtype and device, but without values: using them raises an error with its name."""

    _name: str
    _unit: str
    _may_have_gradient: Callable[[], bool]
    _is_param = True  # makes isinstance(..., Parameter) true, as for the tensor itself

    @staticmethod
    def __new__(
        cls,
        tensor: torch.Tensor,
        name: str,
        unit: Unit,
        device: torch.device,
        may_have_gradient: Callable[[], bool],
    ) -> Placeholder:
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
        )
        made._name, made._unit, made._may_have_gradient = name, unit.name, may_have_gradient
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.autograd.grad:
            absent = next(leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
            raise ValueError(
                f"torch.autograd.grad was called for {absent._name!r}, which is on the device only while "
                f"its unit {absent._unit!r} runs. Keep it there: resident=[{absent._name!r}]"
            )
        if function in GRADIENT_ACCESS and args[0]._may_have_gradient():
            raise gradient_is_elsewhere(args[0]._name)
        if function in _REGISTER_HOOKS:
            raise hooked_in_step(args[0]._name)
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        flat = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        absent = next(leaf for leaf in flat if isinstance(leaf, cls))
        raise UsedOutsideError(
            f"the parameter {absent._name!r} is used outside the forward of its unit {absent._unit!r}, when it is not "
            f"on the device (by {function}). Keep it there: resident=[{absent._name!r}]. If the loss uses all "
            "parameters, as a regularizer does, resident=['*'] keeps all of them there; weight_decay= of the optimizer "
            "needs none of them",
            absent._name,
            absent._unit,
        )


_gradient: Any = torch.Tensor.grad
GRADIENT_ACCESS = (_gradient.__get__, _gradient.__set__, _gradient.__delete__)

_REGISTER_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


def hooked_in_step(name: str) -> ValueError:
    return ValueError(
        f"{name!r} gets a hook on its gradient (register_hook, register_post_accumulate_grad_hook) while the model or "
        "the loss runs. The engine runs parts of them more than once, and the hook would be there each time. Call "
        "register_hook between steps: the engine then runs the hook as plain PyTorch does"
    )


def gradient_is_elsewhere(name: str) -> ValueError:
    return ValueError(
        f"the gradient of {name!r} is read or cleared while the model or the loss runs (model.zero_grad() does so). "
        "The engine accumulates gradients elsewhere, so `.grad` does not have what earlier backwards have added to it: "
        "a backward inside the loss, or that of an earlier micro-batch. Instead of backward() and zero_grad() in a "
        "loss, use torch.autograd.grad(value, inputs), which does not change `.grad`; read or clear gradients after "
        "engine.forward_backward()"
    )
