"""Arguments of units that are refused: those that a second run cannot have as the first run had them, and tensors of
transformations that are no backward."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ferryman.model.units import Unit

Forward = Callable[..., Any]


def refuse_transforms(unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
    """Refuses derivatives through a unit that are not computed by a backward."""
    transformed = torch._C._are_functorch_transforms_active()
    level = torch.autograd.forward_ad._current_level
    if transformed or (
        level >= 0 and any(torch.autograd.forward_ad.unpack_dual(t).tangent is not None for t in tensors)
    ):
        what = "torch.func (grad, vmap, jvp and others)" if transformed else "torch.autograd.forward_ad"
        raise ValueError(
            f"the unit {unit.name!r} is called in a transformation of {what}, through which the engine cannot "
            "stream it. Use torch.autograd.grad without create_graph, or keep what is transformed outside the units "
            "(units=[...]) or inside one"
        )


def refuse_arguments(unit: Unit, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses arguments that the second run in the backward cannot have as the first run had them."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in given:
        if value is None or isinstance(value, torch.Tensor | bool | int | float | str):
            continue  # the common case
        for leaf in pytree.tree_leaves(value):
            if (problem := _problem_of(leaf)) is not None:
                name = _argument_name(forward, key)
                raise ValueError(f"the unit {unit.name!r} was given a {type(leaf).__name__} as {name!r}, {problem}")


def _problem_of(value: Any) -> str | None:
    if any("Cache" in base.__name__ for base in type(value).__mro__):
        return (
            "which it would fill a second time when it runs again in the backward. Switch caching off in training "
            "(use_cache=False)"
        )
    if isinstance(value, Iterator):
        return "an iterator that would be at its end when the unit runs again in the backward. Pass a list: list(...)"
    if any(isinstance(held, torch.Tensor) and held.grad_fn is not None for held in _held_by(value)):
        return (
            "which holds a tensor with a graph in its closure, its defaults or its arguments. The engine does not look "
            "there for inputs of the unit: pass the tensor as an argument of its own"
        )
    return None


def _held_by(value: Any) -> list[Any]:
    """The values that a function refers to, globals excluded."""
    if isinstance(value, functools.partial):
        return [*value.args, *value.keywords.values(), *_held_by(value.func)]
    if not isinstance(value, types.FunctionType):
        return []
    held = inspect.getclosurevars(value).nonlocals.values() if value.__closure__ else ()
    return [*held, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]


def _argument_name(forward: Forward, key: int | str) -> str:
    """The name of an argument, given its position or name. For errors only: reading a signature is slow."""
    if isinstance(key, str):
        return key
    names = list(inspect.signature(forward).parameters)
    return names[key] if key < len(names) else f"argument {key}"
