"""The user's torch optimizers, as the server sees them: usually one; or several, each with some of the parameters.

Their parameter groups are read in every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ferryman.model.members import Parameters
from ferryman.model.units import SMALL, Item
from ferryman.options import Optimizers
from ferryman.server.moments import FORMATS
from ferryman.server.own_step import OwnSettings, OwnStep
from ferryman.server.probe import Probe
from ferryman.server.rules import Group, Numbers, Rule
from ferryman.server.served_state import State
from ferryman.server.torch_optimizer import TorchOptimizer


class GroupKey(NamedTuple):
    """Names a parameter group."""

    optimizer: int
    number: int  # in the optimizer


class OptimizerView:
    """The group and the update rule of each parameter."""

    def __init__(self, optimizer: Optimizers, model: nn.Module, state: str = "fp32") -> None:
        several: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        if not several:
            raise ValueError("the list of optimizers is empty; without an optimizer, use Engine(model)")
        self._members = [TorchOptimizer(one, state) for one in several]
        self._parameters = Parameters(model)
        self._keys: dict[int, GroupKey] = {}  # by parameter, as of the last `check_groups`
        self._state = state
        self.check_groups()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [member.optimizer for member in self._members]

    @property
    def name(self) -> str:
        """The class of the optimizer; of several, all of them."""
        return ", ".join(member.name for member in self._members)

    @property
    def groups(self) -> dict[GroupKey, dict[str, Any]]:
        """All parameter groups, one optimizer after the other."""
        return {
            GroupKey(place, number): group
            for place, member in enumerate(self._members)
            for number, group in enumerate(member.groups)
        }

    def check_groups(self) -> None:
        """Reads the group of each parameter, and refuses changes that the engine cannot follow."""
        found: dict[int, GroupKey] = {}
        groups = self.groups
        for key, group in groups.items():
            for parameter in group["params"]:
                if id(parameter) in found:
                    raise ValueError(
                        f"the optimizer has a parameter twice, of shape {tuple(parameter.shape)}, in its groups "
                        f"{self._describe(found[id(parameter)])} and {self._describe(key)}; it would be updated twice "
                        "a step"
                    )
                found[id(parameter)] = key
        for member in self._members:
            member.check()
        named = self._parameters.named()
        missing = [name for name, p in named if p.requires_grad and id(p) not in found]
        if missing:
            raise ValueError(
                f"the optimizer does not have {missing[0]!r}"
                f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}, which trains. Add it "
                "(optimizer.add_param_group; Engine(model, [muon, adamw]) takes several optimizers), or freeze it "
                "(requires_grad_(False)). If it has come into the model since the engine was made (a new head, "
                "load_state_dict(assign=True)), close the engine and make a new one"
            )
        moved = [one for one, key in self._keys.items() if found.get(one, key) != key]
        if moved:
            name = next((n for n, p in named if id(p) == moved[0]), "a parameter")
            raise ValueError(f"{name!r} has moved to another group of the optimizer since the engine was made")
        mine = {id(p) for _, p in named}
        strange = [one for one in found if one not in mine and one not in self._keys]
        if strange:
            key = found[strange[0]]
            shape = next(tuple(p.shape) for p in groups[key]["params"] if id(p) == strange[0])
            raise ValueError(
                f"the optimizer has a parameter of shape {shape}, in group {self._describe(key)}, that is not in the "
                "model; make it from this model's parameters: torch.optim.AdamW(model.parameters())"
            )
        self._keys.update(found)

    def _describe(self, key: GroupKey) -> str:
        """The number of a group, for an error."""
        return str(key.number) + (f" of {self._members[key.optimizer].name}" if len(self._members) > 1 else "")

    # Formats.

    @property
    def is_compact(self) -> bool:
        """Whether moments are kept in less than float32."""
        return self._state != "fp32"

    @property
    def format(self) -> torch.dtype:
        """The format in which the states of large tensors are kept."""
        return FORMATS[self._state]

    def state_dtype(self, item: Item) -> torch.dtype:
        """The format in which the states of a tensor are kept."""
        return FORMATS["fp32"] if item.tensor.numel() < SMALL else self.format

    # Groups.

    def group_key(self, item: Item) -> GroupKey:
        return self._keys[id(item.tensor)]

    def group(self, item: Item) -> Group:
        key = self.group_key(item)
        group: Mapping[str, Any] = self._members[key.optimizer].groups[key.number]
        return group

    def defaults(self, key: GroupKey) -> Mapping[str, Any]:
        """The options of the group's optimizer that a group without its own has."""
        return self._members[key.optimizer].optimizer.defaults

    def rule(self, item: Item) -> Rule | None:
        """The rule that updates a tensor; None: the optimizer's own step does."""
        return self.rule_of(self.group_key(item))

    def rule_of(self, key: GroupKey) -> Rule | None:
        """The rule of a group."""
        return self._members[key.optimizer].rule(key.number)

    def numbers(self, key: GroupKey, step: int) -> Numbers:
        """The rule's numbers for a step of a group's tensors. They are read once after each `check_groups`."""
        return self._members[key.optimizer].numbers(key.number, step)

    def settings(self, key: GroupKey) -> OwnSettings:
        """What the optimizer's own step reads. It is read once after each `check_groups`."""
        return self._members[key.optimizer].settings(key.number)

    def own_step(self, item: Item, values: torch.Tensor, state: State | None) -> OwnStep:
        """The optimizer's own step for a tensor with these values in float32. Without a state it begins anew."""
        key = self.group_key(item)
        return self._members[key.optimizer].own_step(key.number, item.tensor, values, state)

    def probe(self, key: GroupKey) -> Probe:
        """What is known of the own step that updates a group."""
        return self._members[key.optimizer].probe

    @property
    def needs_all_gradients(self) -> bool:
        """Whether updates must wait until it is known that no tensor lacks a gradient."""
        return any(member.needs_all_gradients for member in self._members)

    def needs_gradient(self, item: Item) -> bool:
        """Whether the optimizer would change a tensor without a gradient, so that it must have one in every step."""
        is_own = self.rule(item) is None and item.tensor.numel() > 0
        return is_own and self._member(item.tensor).needs_all_gradients

    def own_state_bytes(self, item: Item) -> int:
        """Bytes of the state that the optimizer's own step keeps for a tensor; 0 if a rule updates it."""
        key = self.group_key(item)
        return 0 if self.rule_of(key) is not None else self.probe(key).nbytes(key.number, item.tensor)

    def try_options(self, key: GroupKey, options: Mapping[str, Any]) -> None:
        """Raises if a group could not take these options: a ValueError, or any error that a wrong type causes."""
        self._members[key.optimizer].try_options(key.number, options)

    def end_step(self) -> None:
        """Called when a step's updates were requested: sets options that the optimizers' own steps change."""
        for member in self._members:
            member.end_step()

    # While an engine has the optimizers.

    def watch(self, show: Callable[[], None]) -> None:
        """From now on an engine uses the optimizers. `show` fills `state` of all of them, by `give_state`."""

        def show_all() -> None:
            show()
            for member in self._members:
                member.has_shown_states()

        for member in self._members:
            member.watch(show_all)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Context of a step: refuses `optimizer.zero_grad()` in the user's code, which would not find the gradients."""
        for member in self._members:
            member.forbid_zero_grad()
        try:
            yield
        finally:
            for member in self._members:
                member.allow_zero_grad()

    @property
    def shows_states(self) -> bool:
        """Whether the user has read `state` of an optimizer, or replaced it as `load_state_dict` does."""
        return any(member.shows_states for member in self._members)

    def shows_state(self, item: Item) -> bool:
        """Whether the optimizer that updates a tensor shows its state."""
        return self._member(item.tensor).shows_states

    def hide_states(self) -> None:
        """Called when the server has taken over the state."""
        for member in self._members:
            member.hide_states()

    def take_state(self, parameter: torch.Tensor) -> State | None:
        """Removes a parameter's entry from `optimizer.state` and returns it; None if there is none."""
        return self._member(parameter).take_state(parameter)

    def give_state(self, parameter: torch.Tensor, state: State) -> None:
        self._member(parameter).give_state(parameter, state)

    def _member(self, parameter: torch.Tensor) -> TorchOptimizer:
        return self._members[self._keys[id(parameter)].optimizer]

    def release(self) -> None:
        for member in self._members:
            member.release()

    def stepped(self) -> None:
        """Counts a step for torch's schedulers, which would warn of a wrong order otherwise."""
        for member in self._members:
            member.stepped()
