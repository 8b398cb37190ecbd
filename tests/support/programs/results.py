"""What a run of a random program gives, and how two of them are compared."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

TOLERANCE = 1e-4  # of a tensor's largest magnitude
LEAST = 0.05  # or of this, if the tensor's is smaller


@dataclasses.dataclass
class Result:
    losses: list[float] = dataclasses.field(default_factory=list)  # of each step
    read: list[Any] = dataclasses.field(default_factory=list)  # after each step
    state: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # parameters and buffers
    left: dict[str, Any] = dataclasses.field(default_factory=dict)  # on the modules: other attributes
    logs: list[Any] = dataclasses.field(default_factory=list)  # of each feature
    drawn: list[float] = dataclasses.field(default_factory=list)  # from the global generators afterwards


def state_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in net.state_dict().items()}


_OWN = frozenset(nn.Module().__dict__)  # parameters, buffers, submodules, hooks and so on


def attributes(net: nn.Module) -> dict[str, Any]:
    """Of all modules, without parameters, buffers and what every module has."""
    return {
        f"{name}.{attribute}" if name else attribute: value
        for name, module in net.named_modules()
        for attribute, value in module.__dict__.items()
        if attribute not in _OWN
    }


def left_on(net: nn.Module) -> dict[str, Any]:
    """What the forward and the loss have left on the modules."""
    return {name: frozen(value) for name, value in attributes(net).items()}


def frozen(value: Any) -> Any:
    """A copy as plain data that can be compared: tensors on the host, containers, the states of generators."""
    if isinstance(value, torch.Tensor):
        return (value.to_dense() if value.layout is torch.sparse_coo else value).detach().cpu().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return frozen(value.bit_generator.state)
    if isinstance(value, Mapping):
        return {key: frozen(member) for key, member in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [frozen(member) for member in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value) or isinstance(value, nn.Module):
        return type(value).__name__
    return {"type": type(value).__name__, **frozen(vars(value))}


def differences(ours: Result, theirs: Result, tolerance: float = TOLERANCE) -> list[str]:
    """One line each, with the name of what differs."""
    return [
        line
        for field in dataclasses.fields(Result)
        for line in _compare(field.name, getattr(ours, field.name), getattr(theirs, field.name), tolerance)
    ]


def _compare(name: str, ours: Any, theirs: Any, tolerance: float) -> Iterator[str]:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        yield from _compare_tensors(name, ours, theirs, tolerance)
    elif type(ours) is not type(theirs):
        yield f"{name}: {_show(ours)} instead of {_show(theirs)}"
    elif isinstance(theirs, dict):
        for key in dict.fromkeys([*theirs, *ours]):
            if (key in ours) != (key in theirs):
                yield f"{name}[{key!r}]: {'unexpected' if key in ours else 'missing'}"
            else:
                yield from _compare(f"{name}[{key!r}]", ours[key], theirs[key], tolerance)
    elif isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            yield f"{name}: {len(ours)} entries instead of {len(theirs)}"
        for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            yield from _compare(f"{name}[{number}]", a, b, tolerance)
    elif isinstance(theirs, float):
        yield from _compare_tensors(name, torch.tensor(ours), torch.tensor(theirs), tolerance)
    elif ours != theirs:
        yield f"{name}: {_show(ours)} instead of {_show(theirs)}"


def _compare_tensors(name: str, ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> Iterator[str]:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        yield f"{name}: {ours.dtype} {tuple(ours.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}"
    elif not theirs.is_floating_point():
        if not torch.equal(ours, theirs):
            yield f"{name}: {_show(ours)} instead of {_show(theirs)}"
    elif theirs.numel():
        off, most = (ours - theirs).abs().max().item(), max(theirs.abs().max().item(), LEAST)
        if not off <= tolerance * most:
            yield f"{name}: off by {off:.1e} where the largest is {most:.1e}"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
