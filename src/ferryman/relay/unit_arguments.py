"""Refuses calls of units that cannot be run a second time with the same arguments, calls in torch.func transformations,
and results that would be computed after the unit has left the device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from ferryman.model.units import Forward, Unit


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


def refuse_cached_parametrizations(unit: Unit) -> None:
    """Refuses calls where torch caches parametrized weights: the cache would keep them after the unit has left the
    device, and all micro-batches would share it."""
    if parametrize._cache_enabled:
        raise ValueError(
            f"the unit {unit.name!r} is called in torch.nn.utils.parametrize.cached(), which keeps parametrized "
            "weights with their graph, and which all micro-batches would share. Use it inside the unit's forward, or "
            "not at all"
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
    return None


def refuse_result(unit: Unit, result: Any) -> None:
    """Refuses results whose contents would be computed after the unit has left the device."""
    if isinstance(result, torch.Tensor):
        return
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Iterator):
            raise ValueError(
                f"the unit {unit.name!r} returns a {type(leaf).__name__}, an iterator whose values would be computed "
                "when the unit is no longer on the device. Return a list: list(...)"
            )


def _argument_name(forward: Forward, key: int | str) -> str:
    """The name of an argument, given its position or name. For errors only: reading a signature is slow."""
    if isinstance(key, str):
        return key
    names = list(inspect.signature(forward).parameters)
    return names[key] if key < len(names) else f"argument {key}"
