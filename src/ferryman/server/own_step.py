"""An optimizer's own `step`, made for one tensor at a time.

It updates the tensors of optimizers that have no rule in `rules.py`. Each tensor has a copy of the user's optimizer, in
which it is the only one; `probe.py` finds out whether that makes a difference.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ferryman.server.rules import Group
from ferryman.server.served_state import State

# Attributes that a copy has for itself. Schedulers and the engine replace the methods in the user's optimizer.
_OF_A_COPY = ("state", "param_groups", "step", "zero_grad", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights, and so of state like them

# Entries of a group that are about each of its tensors.
OF_TENSORS = ("params", "param_names")


class OwnSettings(NamedTuple):
    """What a step reads beside tensors and their state, as it is when the step is requested."""

    group: dict[str, Any]  # the options of the group
    attributes: dict[str, Any]  # of the optimizer

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: Group) -> OwnSettings:
        attributes = {name: value for name, value in vars(optimizer).items() if name not in _OF_A_COPY}
        return cls(options_of(group), attributes)


def options_of(group: Group) -> dict[str, Any]:
    """A copy of a group's options."""
    return {name: copied(value) for name, value in group.items() if name not in OF_TENSORS}


def copied(value: Any) -> Any:
    """A copy of all that a step may change in place: tensors and containers."""
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    if type(value) in (list, tuple, set):
        return type(value)(map(copied, value))
    if isinstance(value, dict):
        found = value.copy()
        found.update((key, copied(one)) for key, one in value.items())
        return found
    return value


def copy_of(
    optimizer: torch.optim.Optimizer, attributes: Mapping[str, Any], groups: Sequence[dict[str, Any]]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and with the same attributes, but with these groups and without state.

    No constructor is called: that of a user's class may have any arguments.
    """
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(made).update(attributes)
    vars(made).update(
        state=defaultdict(dict),
        param_groups=list(groups),
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    return made


def stand_in(values: torch.Tensor, tensor: torch.Tensor) -> nn.Parameter:
    """A parameter with these values. It has the attributes that the user has given to the tensor."""
    parameter = nn.Parameter(values)
    vars(parameter).update(vars(tensor))
    return parameter


class OwnStep:
    """The step of one tensor, and the state that the optimizer keeps for it."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: Group, tensor: torch.Tensor, values: torch.Tensor, state: State
    ) -> None:
        """`tensor`: the user's; `values`: in float32, as in later updates."""
        self._parameter = stand_in(values, tensor)
        self.group: dict[str, Any] = {"params": [self._parameter]}
        if "param_names" in group:
            place = next((place for place, one in enumerate(group["params"]) if one is tensor), 0)
            self.group["param_names"] = [group["param_names"][place]]
        self.optimizer = copy_of(optimizer, {}, [self.group])
        if state:
            self.optimizer.state[self._parameter] = state

    @property
    def state(self) -> State:
        found: State = self.optimizer.state[self._parameter]
        return found

    def update(self, settings: OwnSettings, values: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Makes a step, in place. The gradient may be overwritten."""
        vars(self.optimizer).update(settings.attributes)
        self.group.update(copied(settings.group))
        parameter = self._parameter
        parameter.data, parameter.grad = values, gradient
        self.optimizer.step()
        parameter.grad = None
        if parameter.data_ptr() != values.data_ptr():  # the step has given the tensor other memory
            values.copy_(parameter.detach())


def constructed_state(optimizer: torch.optim.Optimizer, group: Group, values: torch.Tensor) -> State:
    """The state that the optimizer's constructor makes for a tensor."""
    kind: Any = type(optimizer)
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in options_of(group).items() if name in known}
    parameter = nn.Parameter(values)
    found: State = kind([parameter], **options).state[parameter]
    return found


def in_dtype(state: State, dtype: torch.dtype) -> State:
    """State for steps of a tensor in this dtype, as `load_state_dict` of torch's optimizers converts it."""
    converted = {
        name: value.to(dtype)
        for name, value in state.items()
        if name != "step" and isinstance(value, torch.Tensor) and value.dtype in _WEIGHTS and value.dtype != dtype
    }
    return {**state, **converted} if converted else state


def has_no_values(state: State) -> bool:
    """Whether the state is that of a parameter on meta, made by the optimizer's constructor."""
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in state.values())
