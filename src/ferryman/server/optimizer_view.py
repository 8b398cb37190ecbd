"""The user's torch optimizer, as the server sees it.

Its parameter groups are read in every step. The server keeps its state, and fills `optimizer.state` when it is read.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizer_module
from torch.utils.hooks import RemovableHandle

from ferryman.model.members import Parameters
from ferryman.model.units import SMALL, Item
from ferryman.server import rules
from ferryman.server.moments import FORMATS
from ferryman.server.own_step import OwnSettings, OwnStep
from ferryman.server.probe import Probe
from ferryman.server.rules import Group, Numbers, Rule
from ferryman.server.served_state import ServedState, State


class OptimizerView:
    """The group and the update rule of each parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, state: str = "fp32") -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"the optimizer must be a torch.optim.Optimizer; this is a {type(optimizer).__name__}")
        self.optimizer = optimizer
        self._parameters = Parameters(model)
        self._groups: dict[int, int] = {}  # by parameter, as of the last `check_groups`
        self._numbers: dict[tuple[int, int], Numbers] = {}  # by group and step
        self._settings: dict[int, OwnSettings] = {}  # by group
        self._hook: RemovableHandle | None = None
        self._served: ServedState | None = None  # while an engine uses the optimizer
        self._state = state
        self._rules: list[Rule | None] = []
        self._probe: Probe | None = None  # of the groups that are updated by the optimizer's own step
        self.check_groups()

    def check_groups(self) -> None:
        """Reads the group of each parameter, and refuses changes that the engine cannot follow."""
        optimizer = self.optimizer
        self._numbers.clear()
        self._settings.clear()
        self._refuse_hooks()
        found: dict[int, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) in found:
                    raise ValueError(
                        f"the optimizer has a parameter twice, of shape {tuple(parameter.shape)}, in its groups "
                        f"{found[id(parameter)]} and {number}; it would be updated twice a step"
                    )
                found[id(parameter)] = number
        if len(optimizer.param_groups) < len(self._rules):
            raise ValueError(
                f"the optimizer had {len(self._rules)} parameter groups and has {len(optimizer.param_groups)} now; "
                "change their values (lr, weight_decay), but do not remove groups"
            )
        self._find_rules()
        for number, group in enumerate(optimizer.param_groups):
            if _rule_of(optimizer, group) is not self._rules[number]:
                raise ValueError(
                    f"group {number} of the optimizer has other options now, which need other state "
                    "(momentum, amsgrad, maximize); set them before the engine is made"
                )
        named = self._parameters.named()
        missing = [name for name, p in named if p.requires_grad and id(p) not in found]
        if missing:
            raise ValueError(
                f"the optimizer does not have {missing[0]!r}"
                f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}, which trains. Add it "
                "(optimizer.add_param_group), or freeze it (requires_grad_(False)). If it has come into the model "
                "since the engine was made (a new head, load_state_dict(assign=True)), close the engine and make a new "
                "one"
            )
        moved = [key for key, number in self._groups.items() if found.get(key, number) != number]
        if moved:
            name = next((n for n, p in named if id(p) == moved[0]), "a parameter")
            raise ValueError(f"{name!r} has moved to another group of the optimizer since the engine was made")
        mine = {id(p) for _, p in named}
        strange = [key for key in found if key not in mine and key not in self._groups]
        if strange:
            shape = next(tuple(p.shape) for g in optimizer.param_groups for p in g["params"] if id(p) == strange[0])
            raise ValueError(
                f"the optimizer has a parameter of shape {shape}, in group {found[strange[0]]}, that is not in the "
                "model; make it from this model's parameters: torch.optim.AdamW(model.parameters())"
            )
        self._groups.update(found)

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

    def _find_rules(self) -> None:
        """Finds the rules of new groups, if the format of the state allows them. Tries the optimizer's own step."""
        groups = self.optimizer.param_groups
        found = [_rule_of(self.optimizer, group) for group in groups[len(self._rules) :]]
        if not found:
            return
        own = {number: groups[number] for number, rule in enumerate([*self._rules, *found]) if rule is None}
        if own:
            self._probe = Probe(self.optimizer, own)
        for group, rule in zip(groups[len(self._rules) :], found, strict=True):
            if self.is_compact and (rule is None or not rule.fades):
                self._refuse_compact(group, rule)
        self._rules += found

    def _refuse_compact(self, group: Group, rule: Rule | None) -> None:
        name = type(self.optimizer).__name__
        if group.get("amsgrad"):
            name, why = f"{name}(amsgrad=True)", "a maximum that is rounded again and again only grows"
        elif rule is not None:
            why = "its sum only grows, and what is added would be lost in rounding"
        else:
            why = "with these options the optimizer's own step makes the updates, and keeps its state as it is"
        raise ValueError(
            f"state={self._state!r} is not possible with {name}: {why}. Use state='fp32'; or AdamW, Adam, "
            "ferryman.Lion or SGD, without amsgrad and maximize"
        )

    def _refuse_hooks(self) -> None:
        """Updates run piece by piece beside the next step: there is no moment before or after all of them."""
        own = self._hook.id if self._hook is not None else None
        hooks: list[tuple[str, Mapping[int, Any]]] = [
            ("register_step_pre_hook", self.optimizer._optimizer_step_pre_hooks),
            ("register_step_post_hook", self.optimizer._optimizer_step_post_hooks),
            ("register_optimizer_step_pre_hook", optimizer_module._global_optimizer_pre_hooks),
            ("register_optimizer_step_post_hook", optimizer_module._global_optimizer_post_hooks),
        ]
        for way, registered in hooks:
            if any(key != own for key in registered):
                raise ValueError(
                    f"the optimizer has a step hook ({way}), which would never run: the engine updates the weights "
                    "itself, piece by piece. Remove the hook, and call its code in the training loop: what it does to "
                    "gradients between engine.forward_backward() and engine.update(), the rest after engine.step()"
                )

    def group_number(self, item: Item) -> int:
        return self._groups[id(item.tensor)]

    def group(self, item: Item) -> Group:
        group: Mapping[str, Any] = self.optimizer.param_groups[self.group_number(item)]
        return group

    def rule(self, item: Item) -> Rule | None:
        """The rule that updates a tensor; None: the optimizer's own step does."""
        return self._rules[self.group_number(item)]

    def rule_of(self, number: int) -> Rule | None:
        """The rule of a group."""
        return self._rules[number]

    def numbers(self, number: int, step: int) -> Numbers:
        """The rule's numbers for a step of a group's tensors. They are read once after each `check_groups`."""
        if (number, step) not in self._numbers:
            rule = self._rules[number]
            assert rule is not None, "an own step reads its settings"
            self._numbers[number, step] = rule.numbers(self.optimizer.param_groups[number], step)
        return self._numbers[number, step]

    def settings(self, number: int) -> OwnSettings:
        """What the optimizer's own step reads. It is read once after each `check_groups`."""
        if number not in self._settings:
            self._settings[number] = OwnSettings.of(self.optimizer, self.optimizer.param_groups[number])
        return self._settings[number]

    def try_options(self, number: int, options: Mapping[str, Any]) -> None:
        """Raises if a group could not take these options: a ValueError, or any error that a wrong type causes."""
        group = {**self.optimizer.param_groups[number], **options}
        rule = _rule_of(self.optimizer, group)
        if rule is not self._rules[number]:
            raise ValueError("they need other state (momentum, amsgrad, maximize)")
        if rule is None:
            self.probe.try_options(group)
        else:
            rule.numbers(group, 1)

    @property
    def probe(self) -> Probe:
        """What is known of the optimizer's own step, if any group has no rule."""
        assert self._probe is not None, "each group has a rule"
        return self._probe

    def own_state_bytes(self, item: Item) -> int:
        """Bytes of the state that the optimizer's own step keeps for a tensor; 0 if a rule updates it."""
        return 0 if self.rule(item) is not None else self.probe.nbytes(self.group_number(item), item.tensor)

    def own_step(self, item: Item, values: torch.Tensor, state: State | None) -> OwnStep:
        """The optimizer's own step for a tensor with these values in float32. Without a state it begins anew."""
        group = self.group(item)
        start = self.probe.start(group, values) if state is None else state
        return OwnStep(self.optimizer, group, item.tensor, values, start)

    def end_step(self) -> None:
        """Called when a step's updates were requested: sets options that the optimizer's own step changes."""
        for number, group in enumerate(self.optimizer.param_groups):
            if self._rules[number] is None:
                group.update(self.probe.changed_options(group))

    def watch(self, show: Callable[[], None]) -> None:
        """From now on an engine uses the optimizer. `show` fills `optimizer.state`, by `give_state`."""
        self._hook = self.optimizer.register_step_pre_hook(_refuse_step)
        self._served = ServedState(show)
        self.hide_states()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Context of a step: refuses `optimizer.zero_grad()` in the user's code, which would not find the gradients."""
        self.optimizer.zero_grad = _refuse_zero_grad  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.optimizer.zero_grad

    @property
    def shows_states(self) -> bool:
        """Whether the user has read `optimizer.state`, or replaced it as `load_state_dict` does."""
        return self._served is not None and (self._served.is_shown or self.optimizer.state is not self._served)

    def hide_states(self) -> None:
        """Called when the server has taken over the state. Entries that it does not know (frozen tensors) stay."""
        assert self._served is not None
        if self.optimizer.state is not self._served:
            left = dict(self.optimizer.state)
            dict.clear(self._served)
            dict.update(self._served, left)
            self.optimizer.state = self._served
        self._served.is_shown = False

    # These bypass `ServedState`, which would fill itself first.

    def take_state(self, parameter: torch.Tensor) -> State | None:
        """Removes a parameter's entry from `optimizer.state` and returns it; None if there is none."""
        found: State | None = dict.pop(self.optimizer.state, parameter, None)
        return found

    def give_state(self, parameter: torch.Tensor, state: State) -> None:
        dict.__setitem__(self.optimizer.state, parameter, state)

    def release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        if self._served is not None and self.optimizer.state is self._served:
            self._served.is_shown = True  # it must not be filled any more
            self.optimizer.state = defaultdict(dict, self._served)
        self._served = None

    def stepped(self) -> None:
        """Counts a step for torch's schedulers, which would warn of a wrong order otherwise."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]


def _refuse_zero_grad(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "optimizer.zero_grad() is called while the model or the loss runs, where it would clear nothing: gradients are "
        "accumulated by the engine. Use torch.autograd.grad(value, inputs) instead of backward() and zero_grad() in a "
        "loss; clear gradients between steps with engine.zero_grad()"
    )


def _refuse_step(*_: Any) -> None:
    raise ValueError(
        "optimizer.step() was called while an engine has the optimizer, and would update the weights a second time. "
        "Call engine.step() or engine.update() instead"
    )


def _rule_of(optimizer: torch.optim.Optimizer, group: Group) -> Rule | None:
    """The rule that does what the optimizer does in this group; None: only its own step does."""
    kind = type(optimizer)
    for option in ("capturable", "differentiable"):
        if group.get(option):
            raise ValueError(f"{kind.__name__}({option}=True) is not supported: updates run outside of graphs")
    plain = not (group.get("amsgrad") or group.get("maximize"))
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        return rules.ADAM if plain else None
    if kind is torch.optim.SGD:
        return (rules.MOMENTUM if group["momentum"] else rules.DESCENT) if plain else None
    if kind is torch.optim.Adagrad:
        return rules.ADAGRAD if plain else None
    if kind.__name__ == "Lion" and {"lr", "betas", "weight_decay"} <= set(group):
        known = ("params", "lr", "betas", "weight_decay", "initial_lr")
        if strange := [name for name, value in group.items() if name not in known and value]:
            raise ValueError(f"{kind.__module__}.Lion({strange[0]}=...) is not supported; use ferryman.Lion")
        return rules.LION
    return None
