"""State that a unit's code can reach but a walk from the model does not find: context variables, and objects that local
hooks, and functions among a call's arguments, refer to.

A hook on a module inside a unit may append to a list that only the loss refers to (`features = []`), or to a collector
in a context variable, as transformers does for `output_attentions=True`. Tensors that a unit leaves there are outputs
of its call, like tensors in attributes.
"""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ferryman.exactness.snapshot import FUNCTIONS, Snapshot, is_same
from ferryman.exactness.variables import MISSING, Cell, Variable

_DEPTH = 4  # of functions that refer to others


def set_context(values: Iterable[tuple[contextvars.ContextVar[Any], Any]]) -> None:
    """Sets variables in the current context. Other variables do not change."""
    for variable, value in values:
        if variable.get(MISSING) is not value:
            variable.set(value)


def context_variables(begun_with: contextvars.Context) -> Variable:
    """The context variables that a micro-batch has set since it began, as one variable whose value is a tuple of pairs.
    Values of context variables that were set earlier are found by a walk, like those of the model."""

    def get() -> tuple[Any, ...]:
        now = contextvars.copy_context()
        if not now:
            return ()  # the common case
        return tuple([(key, value) for key, value in now.items() if begun_with.get(key, MISSING) is not value])

    return Variable("context variables", contextvars.ContextVar, get, set_context)


def context_roots() -> list[tuple[Any, str]]:
    """The values of all context variables of the current context, with their names."""
    return [(value, f"context variable {key.name!r}") for key, value in contextvars.copy_context().items()]


def beyond(modules: Iterable[nn.Module], known: Collection[int]) -> list[Variable]:
    """Objects that forward hooks of these modules refer to. `known`: ids of the owners of variables that a walk has
    already found; they are skipped."""
    found: list[Variable] = []
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks:
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                found += [variable for variable in _referred_to_by(hook) if id(variable.owner) not in known]
    return found


def tensors_in(variables: Iterable[Variable]) -> dict[int, torch.Tensor]:
    """The tensors that these variables hold, by id."""
    return {id(tensor): tensor for tensor in Snapshot([variable.get() for variable in variables]).tensors}


def behind(functions: Iterable[Any], known: Iterable[Variable]) -> list[Variable]:
    """What these functions refer to: variables of closures, defaults, arguments of partials, the owners of methods.
    `known`: variables that are skipped."""
    owners = {id(variable.owner) for variable in known}
    found = {variable.key: variable for function in functions for variable in _referred_to_by(function)}
    return [variable for variable in found.values() if id(variable.owner) not in owners]


def _referred_to_by(hook: Any, depth: int = 0) -> Iterator[Variable]:
    if isinstance(hook, functools.partial):
        yield _parts_of(hook)
        held: list[Any] = [hook.func, *hook.args, *hook.keywords.values()]
    elif isinstance(hook, types.MethodType):
        yield _constant(hook.__self__)
        held = [hook.__func__]
    elif isinstance(hook, types.FunctionType):
        cells = [Cell("a variable of a function", cell).variable for cell in hook.__closure__ or ()]
        yield from cells
        if hook.__defaults__ or hook.__kwdefaults__:
            yield _defaults_of(hook)
        defaults = (*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values())
        held = [*(cell.get() for cell in cells), *defaults]
    elif not isinstance(hook, types.BuiltinFunctionType):
        yield _constant(hook)
        return
    else:
        return
    if depth < _DEPTH:  # a function may refer to itself
        for function in held:
            if isinstance(function, FUNCTIONS):
                yield from _referred_to_by(function, depth + 1)


def _constant(value: Any) -> Variable:
    """A variable whose object stays the same, but whose contents may change."""
    return Variable("what a function refers to", value, lambda: value, lambda _: None)


def _parts_of(partial: functools.partial[Any]) -> Variable:
    """The arguments that a partial holds. It can be given others in place, as when it is unpickled."""

    def put(parts: tuple[Any, ...]) -> None:
        args, keywords = parts
        if not (is_same(partial.args, args) and is_same(partial.keywords.values(), list(keywords.values()))):
            partial.__setstate__((partial.func, args, keywords, vars(partial)))  # type: ignore[attr-defined]

    return Variable("the arguments of a partial", partial, lambda: (partial.args, dict(partial.keywords)), put)


def _defaults_of(function: types.FunctionType) -> Variable:
    def put(defaults: tuple[Any, ...]) -> None:
        function.__defaults__, function.__kwdefaults__ = defaults

    return Variable(
        "the defaults of a function",
        function,
        lambda: (function.__defaults__, None if function.__kwdefaults__ is None else dict(function.__kwdefaults__)),
        put,
    )
