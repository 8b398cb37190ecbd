"""Checks that the model's tensors are still those for which the engine was made."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ferryman.model.units import Item, Unit


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
    for item in unit.items:
        if any(place.current() is not item.tensor for place in item.places) or (
            item.tensor.data_ptr() != flat.data_ptr() + item.offset and item.nbytes
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
        no_hooks(item.name, item.tensor)
        if item.trains != trained[item]:
            raise ValueError(
                f"{item.name!r} has been {'unfrozen' if item.trains else 'frozen'} since the engine was made, with "
                "optimizer state for the parameters that were trained then; close the engine and make a new one"
            )


def none_added(model: nn.Module, units: Iterable[Unit]) -> None:
    """Raises a ValueError if a parameter of the model trains, but is in none of its units."""
    known = {id(item.tensor) for unit in units for item in unit.items}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise ValueError(
                f"{name!r} was added to the model after the engine was made, so the engine would not train it. Add a "
                "block with engine.insert(); for other changes, close the engine, change the model, and make a new "
                "engine"
            )
