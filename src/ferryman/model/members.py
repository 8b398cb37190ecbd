"""Checks that the model's tensors are still those for which the engine was made."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ferryman.model.units import Item, Unit


class Parameters:
    """The named parameters of a model. The walk through the model, which takes long, is repeated only when a module or
    a parameter has come, gone or been replaced."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named: list[tuple[str, nn.Parameter]] = []
        self.modules: list[nn.Module] = []  # of the model, at the last call of `named`
        self._members: list[Any] = []  # of these modules, at the last walk

    def named(self) -> list[tuple[str, nn.Parameter]]:
        now = _members_of(self.modules)
        if not self.modules or len(now) != len(self._members) or not all(map(operator.is_, now, self._members)):
            self._named = list(self._model.named_parameters())
            self.modules = list(self._model.modules())
            self._members = _members_of(self.modules)
        return self._named


def _members_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Each module's parameters and children. Their dictionaries are included, so that a member that has moved from one
    to the next is noticed."""
    found = []
    for module in modules:
        for members in (module._parameters, module._modules):
            found += [members, *members.values()]
    return found


def no_hooks(name: str, parameter: torch.Tensor) -> None:
    """Refuses hooks that would run when a gradient has been accumulated, or gradients of several parameters: the engine
    accumulates gradients itself, and has one backward per call."""
    if not parameter.requires_grad:
        return
    for hook in (parameter._backward_hooks or {}).values():
        if getattr(hook, "__globals__", None) is vars(torch.autograd.graph):
            raise ValueError(
                f"{name!r} has a hook on the gradients of several tensors (register_multi_grad_hook), which the engine "
                "never has together in the backward. Remove the hook, and do its work between "
                f"engine.forward_backward(batch) and engine.update(), with engine.gradient({name!r})"
            )
    if parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"{name!r} has a hook (register_post_accumulate_grad_hook), which the engine cannot call in the backward: "
            "it accumulates gradients itself. Remove the hook, and do its work between backward and update: "
            f"engine.forward_backward(batch), then engine.gradient({name!r}), which may be edited, then engine.update()"
        )


def in_own_memory(unit: Unit, flat: torch.Tensor) -> None:
    """Raises a ValueError if a tensor was replaced. `flat` is the unit's memory."""
    begin = flat.data_ptr()
    for item in unit.items:
        tensor = item.tensor
        if not all(place.current() is tensor for place in item.places) or (
            tensor.data_ptr() != begin + item.offset and item.nbytes
        ):
            raise ValueError(
                f"the memory of {item.name!r} was replaced while the engine used the model (by .to(), .data =, "
                "load_state_dict(assign=True) or a parametrization), so the engine would use the old memory. Change "
                "weights in place (copy_, load_state_dict), or close the engine and make a new one"
            )


def unchanged(unit: Unit, flat: torch.Tensor, trained: dict[Item, bool]) -> None:
    """Raises a ValueError if a tensor was replaced, frozen or unfrozen. `flat` is the unit's memory."""
    in_own_memory(unit, flat)
    for item in unit.items:
        tensor = item.tensor
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            no_hooks(item.name, tensor)
        if tensor.requires_grad != trained[item]:
            raise ValueError(
                f"{item.name!r} has been {'unfrozen' if item.trains else 'frozen'} since the engine was made, with "
                "optimizer state for the parameters that were trained then; close the engine and make a new one"
            )


def none_added(parameters: Parameters, units: Iterable[Unit]) -> None:
    """Raises a ValueError if a parameter of the model trains, but is in none of its units."""
    known = {id(item.tensor) for unit in units for item in unit.items}
    for name, parameter in parameters.named():
        if parameter.requires_grad and id(parameter) not in known:
            raise ValueError(
                f"{name!r} was added to the model after the engine was made, so the engine would not train it. Add a "
                "block with engine.insert(); for other changes, close the engine, change the model, and make a new "
                "engine"
            )
