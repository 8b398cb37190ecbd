"""One of the user's torch optimizers: the rules of its groups, its own step, and its state while an engine has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import optimizer as optimizer_module
from torch.utils.hooks import RemovableHandle

from ferryman.server import rules
from ferryman.server.own_step import OwnSettings, OwnStep
from ferryman.server.probe import Probe
from ferryman.server.rules import Group, Numbers, Rule
from ferryman.server.served_state import ServedState, State


class TorchOptimizer:
    """Its groups are known by their numbers. The server keeps its state, and fills `state` when it is read."""

    def __init__(self, optimizer: torch.optim.Optimizer, state: str) -> None:
        """`state`: the format of the moments."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                "the optimizer must be a torch.optim.Optimizer, or a list of several; this is a "
                f"{type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self._state_format = state
        self._numbers: dict[tuple[int, int], Numbers] = {}  # by group and step
        self._settings: dict[int, OwnSettings] = {}  # by group
        self._hook: RemovableHandle | None = None
        self._served: ServedState | None = None  # while an engine uses the optimizer
        self._rules: list[Rule | None] = []
        self._probe: Probe | None = None  # of the groups that are updated by the optimizer's own step

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def check(self) -> None:
        """Reads the groups anew, and refuses changes that the engine cannot follow."""
        self._numbers.clear()
        self._settings.clear()
        self._refuse_hooks()
        if len(self.groups) < len(self._rules):
            raise ValueError(
                f"the optimizer had {len(self._rules)} parameter groups and has {len(self.groups)} now; "
                "change their values (lr, weight_decay), but do not remove groups"
            )
        self._find_rules()
        if self.needs_all_gradients:
            self._refuse_frozen()
        for number, group in enumerate(self.groups):
            if _rule_of(self.optimizer, group) is not self._rules[number]:
                raise ValueError(
                    f"group {number} of the optimizer has other options now, which need other state "
                    "(momentum, amsgrad, maximize); set them before the engine is made"
                )

    @property
    def needs_all_gradients(self) -> bool:
        """Whether the own step would change tensors without a gradient, so that each must have one in every step."""
        return self._probe is not None and self._probe.needs_all_gradients

    def rule(self, number: int) -> Rule | None:
        """The rule of a group; None: the optimizer's own step makes the updates."""
        return self._rules[number]

    def numbers(self, number: int, step: int) -> Numbers:
        """The rule's numbers for a step of a group's tensors. They are read once after each `check`."""
        if (number, step) not in self._numbers:
            rule = self._rules[number]
            assert rule is not None, "an own step reads its settings"
            self._numbers[number, step] = rule.numbers(self.groups[number], step)
        return self._numbers[number, step]

    def settings(self, number: int) -> OwnSettings:
        """What the own step reads. It is read once after each `check`."""
        if number not in self._settings:
            self._settings[number] = OwnSettings.of(self.optimizer, self.groups[number])
        return self._settings[number]

    def own_step(self, number: int, tensor: torch.Tensor, values: torch.Tensor, state: State | None) -> OwnStep:
        """The own step for a tensor with these values in float32. Without a state it begins anew."""
        start = self.probe.start(self.groups[number], values) if state is None else state
        return OwnStep(self.optimizer, self.groups[number], tensor, values, start)

    @property
    def probe(self) -> Probe:
        """What is known of the own step, if any group has no rule."""
        assert self._probe is not None, "each group has a rule"
        return self._probe

    def try_options(self, number: int, options: Mapping[str, Any]) -> None:
        """Raises if a group could not take these options: a ValueError, or any error that a wrong type causes."""
        group = {**self.groups[number], **options}
        rule = _rule_of(self.optimizer, group)
        if rule is not self._rules[number]:
            raise ValueError("they need other state (momentum, amsgrad, maximize)")
        if rule is None:
            self.probe.try_options(group)
        else:
            rule.numbers(group, 1)

    def end_step(self) -> None:
        """Called when a step's updates were requested: sets options that the own step changes."""
        for number, group in enumerate(self.groups):
            if self._rules[number] is None:
                group.update(self.probe.changed_options(group))

    def _find_rules(self) -> None:
        """Finds the rules of new groups, if the format of the state allows them. Tries the own step."""
        found = [_rule_of(self.optimizer, group) for group in self.groups[len(self._rules) :]]
        if not found:
            return
        own = {number: self.groups[number] for number, rule in enumerate([*self._rules, *found]) if rule is None}
        if own:
            knew, self._probe = self.needs_all_gradients, Probe(self.optimizer, own)
            if self._rules and self.needs_all_gradients and not knew:
                raise ValueError(
                    f"in its new groups, {self.name} changes tensors without a gradient, and so needs deferred "
                    "updates; close the engine and make a new one"
                )
        for group, rule in zip(self.groups[len(self._rules) :], found, strict=True):
            if self._state_format != "fp32" and (rule is None or not rule.fades):
                self._refuse_compact(group, rule)
        self._rules += found

    def _refuse_frozen(self) -> None:
        for number, group in enumerate(self.groups):
            frozen = [tensor for tensor in group["params"] if not tensor.requires_grad]
            if self._rules[number] is None and frozen:
                raise ValueError(
                    f"{self.name} also changes tensors that have no gradient, and its group {number} has a frozen one, "
                    f"of shape {tuple(frozen[0].shape)}, which it would change in plain PyTorch: leave it out of the "
                    "optimizer"
                )

    def _refuse_compact(self, group: Group, rule: Rule | None) -> None:
        name = self.name
        if group.get("amsgrad"):
            name, why = f"{name}(amsgrad=True)", "a maximum that is rounded again and again only grows"
        elif rule is not None:
            why = "its sum only grows, and what is added would be lost in rounding"
        else:
            why = "with these options the optimizer's own step makes the updates, and keeps its state as it is"
        raise ValueError(
            f"state={self._state_format!r} is not possible with {name}: {why}. Use state='fp32'; or AdamW, Adam, "
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

    # While an engine has the optimizer.

    def watch(self, show: Callable[[], None]) -> None:
        """From now on an engine uses the optimizer. `show` fills `optimizer.state`, by `give_state`."""
        self._hook = self.optimizer.register_step_pre_hook(_refuse_step)
        self._served = ServedState(show)
        self.hide_states()

    def forbid_zero_grad(self) -> None:
        """From now on refuses `optimizer.zero_grad()`, which would not find the gradients."""
        self.optimizer.zero_grad = _refuse_zero_grad  # type: ignore[method-assign]

    def allow_zero_grad(self) -> None:
        del self.optimizer.zero_grad

    @property
    def shows_states(self) -> bool:
        """Whether the user has read `optimizer.state`, or replaced it as `load_state_dict` does."""
        return self._served is not None and (self._served.is_shown or self.optimizer.state is not self._served)

    def has_shown_states(self) -> None:
        """Called when `show` has filled the states of all optimizers."""
        assert self._served is not None
        self._served.is_shown = True

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
    return rules.LION if kind is rules.Lion else None
