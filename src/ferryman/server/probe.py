"""Tries an optimizer's own `step` on tiny tensors: does it treat each tensor by itself, and what does it keep?

Note [What the probe compares]
Copies of the user's optimizer make some steps with tiny tensors: one copy with all of them together, as in plain
PyTorch, and one for each tensor alone, as in an engine. Weights, state and options must be the same. Gradients of very
different sizes show a norm over all tensors, learning rates that differ show options that one group reads of another,
and missing gradients show tensors that change without one. Nothing may change that is not in `optimizer.state` or in
the groups: it would not be saved, and each copy would have its own. Options that a step changes, such as a count of
steps, must depend on options alone: then a step of a tiny tensor tells what they become.

Sides of tiny tensors are different primes. So a side of a tensor in the state tells which side of the parameter it is,
and the size of any parameter's state is known before there is one.
"""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ferryman.server.own_step import OwnSettings, OwnStep, constructed_state, copied, copy_of, options_of, stand_in
from ferryman.server.rules import Group
from ferryman.server.served_state import State

_SIDES = (13, 11, 7, 5, 3)
_STEPS = 12
_RATE = 1e-2  # in place of learning rates: a schedule may begin at zero

# What torch itself notes in an optimizer while it steps.
_NOTES_OF_TORCH = {
    "_opt_called",
    "_step_count",
    "_warned_capturable_if_run_uncaptured",
    "_need_device_dtype_check_for_fused",
}


class _Try(NamedTuple):
    """Sizes of gradients of the first and the second tensor of each kind; whether the second has none now and then."""

    first: float
    second: float
    lacks_some: bool = False


_TRIES = (_Try(1, 1), _Try(1e-3, 1e3), _Try(1e4, 1e4), _Try(1, 1, lacks_some=True))


class _Kind(NamedTuple):
    """Parameters that one tiny tensor stands for."""

    group: int
    shape: tuple[int, ...]  # of the tiny tensor
    marks: tuple[tuple[str, bool], ...]  # what the user has noted in the parameters, such as `use_muon`


class _CannotError(Exception):
    """Why an optimizer cannot update tensors one by one."""


class Probe:
    """What an optimizer's own step does. Raises a ValueError if the engine cannot use it."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Mapping[int, Group]) -> None:
        """`groups`: those that are updated by the optimizer's own step, by their numbers."""
        self._optimizer, self._groups = optimizer, groups
        self.is_of_torch = str(type(optimizer).step.__module__).startswith("torch.")
        self.needs_all_gradients = False  # whether the step also changes tensors that have no gradient
        self._starts_in_constructor = False  # whether the constructor makes the state with which steps begin
        self._alike = _alike_groups(groups)
        tensors = {self._kind(number, tensor): tensor for number in groups for tensor in _tensors(groups[number])}
        self._tiny = [(kind, tensor) for kind, tensor in tensors.items() for _ in range(2)]
        self._states: dict[_Kind, list[State]] = {}  # all forms that the state of a tiny tensor takes, in this order
        generators = torch.get_rng_state(), random.getstate()
        try:
            self._try()
            if not torch.equal(torch.get_rng_state(), generators[0]) or random.getstate() != generators[1]:
                raise _CannotError(
                    "its step draws random numbers, and the order of tensors would decide who gets which"
                )
        except _CannotError as error:
            raise ValueError(
                f"{type(optimizer).__name__} cannot be used: {error}. The engine updates each tensor by itself, beside "
                "other work. Without that: Engine(model), and after engine.forward_backward(...) call optimizer.step() "
                "and engine.zero_grad()"
            ) from error.__cause__
        finally:
            torch.set_rng_state(generators[0])
            random.setstate(generators[1])

    def states_like(self, number: int, tensor: torch.Tensor) -> list[State]:
        """The forms that the state of a parameter in this group takes, with tensors on meta; none, if not known."""
        kind = self._kind(number, tensor)
        return [_scaled(state, _sides(kind.shape, tensor.shape)) for state in self._states.get(kind, [])]

    def nbytes(self, number: int, tensor: torch.Tensor) -> int:
        """Bytes of the state of a parameter in this group."""
        return max(map(_nbytes, self.states_like(number, tensor)), default=0)

    def start(self, group: Group, values: torch.Tensor) -> State:
        """The state before the first step of a tensor with these values."""
        return constructed_state(self._optimizer, group, values) if self._starts_in_constructor else {}

    def changed_options(self, group: Group) -> dict[str, Any]:
        """What the options become that a step changes. See Note [What the probe compares]."""
        return self._changed(OwnSettings.of(self._optimizer, group), group)

    def try_options(self, group: Group) -> None:
        """Raises any error if a step cannot be made with these options."""
        self._step_with(OwnSettings.of(self._optimizer, group), group)

    def _changed(self, settings: OwnSettings, group: Group) -> dict[str, Any]:
        """What a step changes of the options of a group; steps of torch's own optimizers change nothing."""
        after = {} if self.is_of_torch else self._step_with(settings, group)
        return {key: one for key, one in after.items() if not _same(one, settings.group.get(key), exact=True)}

    def _step_with(self, settings: OwnSettings, group: Group) -> dict[str, Any]:
        """The options of a group after a step of a tiny tensor."""
        like = next(iter(_tensors(group)), None)
        generator = torch.Generator("cpu").manual_seed(0)
        values = _random(() if like is None else _tiny_shape(like), generator)
        own = OwnStep(self._optimizer, group, values if like is None else like, values, self.start(group, values))
        trains = like is not None and any(tensor.requires_grad for tensor in group["params"])
        own.update(settings, values, _random(values.shape, generator) if trains else None)
        return options_of(own.group)

    def _kind(self, number: int, tensor: torch.Tensor) -> _Kind:
        marks = sorted((name, value) for name, value in vars(tensor).items() if isinstance(value, bool))
        return _Kind(self._alike.get(number, number), _tiny_shape(tensor), tuple(marks))

    # The comparison.

    def _try(self) -> None:
        needed = inspect.signature(type(self._optimizer).step).parameters.get("closure")
        if needed is not None and needed.default is inspect.Parameter.empty:
            raise _CannotError(_CLOSURE)
        for name, value in vars(self._optimizer).items():
            if isinstance(value, torch.optim.Optimizer):
                raise _CannotError(f"it is wrapped around another optimizer, {name!r}; give the engine that one")
        elsewhere = [item for item in vars(self._optimizer).items() if item[0] not in ("state", "param_groups")]
        elsewhere += [item for group in self._groups.values() for item in group.items() if item[0] != "params"]
        if found := [name for name, value in elsewhere if _has_parameters(value)]:
            raise _CannotError(f"it has parameters in {found[0]!r}, beside those in its groups")
        if not self._tiny:
            return
        self._find_start()
        did_anything = False
        for place, sizes in enumerate(_TRIES):
            try:
                did_anything |= self._compare(sizes)
            except _CannotError:
                raise
            except Exception as error:  # a decomposition that does not converge with such gradients says nothing
                if place == 0 or sizes.lacks_some:
                    raise _CannotError(f"its step fails with {error!r}") from error
        if not did_anything:
            raise _CannotError("its step leaves all tensors as they are")

    def _find_start(self) -> None:
        """Finds out how the state of a tensor begins."""
        try:
            self._make_step()
        except Exception as error:
            try:
                self._starts_in_constructor = True
                self._make_step()
            except Exception:
                self._starts_in_constructor = False
                try:
                    self._make_step(with_closure=True)
                except Exception:
                    raise _CannotError(f"its step fails with {error!r}") from error
                raise _CannotError(_CLOSURE) from error

    def _make_step(self, *, with_closure: bool = False) -> None:
        together = self._together()

        def closure() -> torch.Tensor:
            for parameter in _parameters(together):
                parameter.grad = torch.ones_like(parameter)
            return torch.ones((), dtype=torch.float32, device="cpu")

        closure()
        together.step(closure) if with_closure else together.step()  # type: ignore[arg-type]

    def _together(self) -> torch.optim.Optimizer:
        """A copy of the optimizer with all tiny tensors."""
        attributes = OwnSettings.of(self._optimizer, {}).attributes
        made = copy_of(self._optimizer, copied(attributes), [])
        generator = torch.Generator("cpu").manual_seed(0)
        for place, number in enumerate(dict.fromkeys(kind.group for kind, _ in self._tiny)):
            group = options_of(self._groups[number])
            if group.get("lr") is not None:
                rate = _RATE * 0.5**place
                group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], torch.Tensor) else rate
            mine = [(kind, tensor) for kind, tensor in self._tiny if kind.group == number]
            group["params"] = [stand_in(_random(kind.shape, generator), tensor) for kind, tensor in mine]
            if "param_names" in self._groups[number]:
                group["param_names"] = [str(place) for place in range(len(mine))]
            made.param_groups.append(group)
            for parameter in group["params"]:
                made.state[parameter].update(self.start(group, parameter.detach()))
        return made

    def _compare(self, sizes: _Try) -> bool:
        """Makes steps of all tiny tensors together, and of each alone. Returns whether these did anything."""
        together, generator = self._together(), torch.Generator("cpu").manual_seed(1)
        parameters = _parameters(together)
        groups = [group for group in together.param_groups for _ in group["params"]]
        first, values = _values(parameters), _values(parameters)
        alone = [
            OwnStep(self._optimizer, group, tensor, mine, self.start(group, mine))
            for (_, tensor), group, mine in zip(self._tiny, groups, values, strict=True)
        ]
        attributes = copied(_attributes(together))
        for step in range(_STEPS):
            settings = [OwnSettings.of(together, group) for group in groups]
            before = [copied((parameter.data, together.state[parameter])) for parameter in parameters]
            skipped = {place for place in range(len(alone)) if sizes.lacks_some and step % 3 == 2 and place % 2}
            for place, parameter in enumerate(parameters):
                gradient = _random(parameter.shape, generator).mul_(sizes.second if place % 2 else sizes.first)
                parameter.grad = None if place in skipped else gradient
                if place not in skipped:
                    alone[place].update(settings[place], values[place], gradient.clone())
            together.step()
            self._check_rest(together, attributes)
            for place, parameter in enumerate(parameters):
                if place in skipped:
                    now = parameter.data, together.state[parameter]
                    self.needs_all_gradients |= not _same(now, before[place], exact=True)
                    alone[place].update(settings[place], values[place], None)
                same = _same((parameter.detach(), together.state[parameter]), (values[place], alone[place].state))
                if place in skipped and same:
                    continue
                options = options_of(groups[place])
                told = {**settings[place].group, **self._changed(settings[place], groups[place])}
                if not (same and _same(options_of(alone[place].group), options) and _same(told, options)):
                    raise _CannotError("its step depends on several tensors at once, such as on a norm over all")
                forms = self._states.setdefault(self._tiny[place][0], [])
                if not any(_form(alone[place].state) == _form(form) for form in forms):
                    forms.append(copied(alone[place].state))
        return any(one.state for one in alone) or not _same(values, first)

    def _check_rest(self, together: torch.optim.Optimizer, before: Mapping[str, Any]) -> None:
        """Refuses a step that keeps something where an engine would not find it."""
        after = _attributes(together)
        if changed := [name for name in after if not _same(after[name], before.get(name), exact=True)]:
            raise _CannotError(
                f"its step changes {changed[0]!r}, which is neither in its state nor in its groups, so it would not be "
                "saved: keep it in self.state[p] or in the group"
            )
        known = {id(parameter) for parameter in _parameters(together)}
        if any(id(key) not in known for key in together.state):
            raise _CannotError("its state has entries that belong to no tensor: keep them in the groups")


_CLOSURE = "its step needs a closure, which computes the gradients again while a step is made"


def _tensors(group: Group) -> Iterator[torch.Tensor]:
    return (tensor for tensor in group["params"] if tensor.numel())


def _tiny_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    sides = itertools.chain(_SIDES, itertools.repeat(2))
    return tuple(1 if side == 1 else next(sides) for side in tensor.shape)


def _alike_groups(groups: Mapping[int, Group]) -> dict[int, int]:
    """For each group the one that stands for it: one of the first two with the same options, whatever their rates."""
    first: dict[str, list[int]] = {}
    for number, group in groups.items():
        options = {name: value for name, value in options_of(group).items() if name not in ("lr", "initial_lr")}
        first.setdefault(repr(options), []).append(number)
    return {number: same[min(place, 1)] for same in first.values() for place, number in enumerate(same)}


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _values(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = OwnSettings.of(optimizer, {}).attributes
    return {name: value for name, value in found.items() if name not in _NOTES_OF_TORCH}


def _has_parameters(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_parameters, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple | set):
        return any(map(_has_parameters, value))
    return isinstance(value, nn.Parameter)


def _random(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _same(one: Any, other: Any, *, exact: bool = False) -> bool:
    """Whether two values are the same; if not `exact`, up to the last bits of tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or not one.numel():
            return bool(one.shape == other.shape and one.dtype == other.dtype)
        if exact or not one.is_floating_point():
            return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        size = 1e-6 * float(other.detach().abs().max().nan_to_num())
        return torch.allclose(one, other, rtol=1e-5, atol=size, equal_nan=True)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key], exact=exact) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(*both, exact=exact) for both in zip(one, other, strict=True))
    try:
        return bool(one is other or one == other or (one != one and other != other))
    except (TypeError, ValueError, RuntimeError):  # values that do not compare
        return False


def _form(value: Any) -> Any:
    """What stays the same of a state while its values change."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((key, _form(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return type(value), *map(_form, value)
    return type(value)


def _sides(tiny: Sequence[int], shape: Sequence[int]) -> dict[int, int]:
    """What sides of tensors in the state of a tiny tensor are for a parameter: products of neighboring sides."""
    found = {}
    for start in range(len(tiny)):
        for stop in range(start + 1, len(tiny) + 1):
            found[math.prod(tiny[start:stop])] = math.prod(shape[start:stop])
    return {**found, 1: 1}


def _scaled(value: Any, sides: Mapping[int, int]) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty([sides.get(side, side) for side in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, Mapping):
        return {key: _scaled(one, sides) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_scaled(one, sides) for one in value)
    return value


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(map(_nbytes, value))
