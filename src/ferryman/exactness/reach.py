"""State that a unit's code can reach but a walk from the model does not find: context variables, and objects that local
hooks refer to.

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

from ferryman.exactness.snapshot import Snapshot
from ferryman.exactness.variables import MISSING, Cell, Variable


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
        return tuple((key, value) for key, value in now.items() if begun_with.get(key, MISSING) is not value)

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


def _referred_to_by(hook: Any) -> Iterator[Variable]:
    if isinstance(hook, functools.partial):
        for value in (*hook.args, *hook.keywords.values()):
            yield _constant(value)
        yield from _referred_to_by(hook.func)
    elif isinstance(hook, types.MethodType):
        yield _constant(hook.__self__)
        yield from _referred_to_by(hook.__func__)
    elif isinstance(hook, types.FunctionType):
        for cell in hook.__closure__ or ():
            yield Cell("a variable of a hook", cell).variable
    elif not isinstance(hook, types.BuiltinFunctionType):
        yield _constant(hook)


def _constant(value: Any) -> Variable:
    """A variable whose object stays the same, but whose contents may change."""
    return Variable("what a hook refers to", value, lambda: value, lambda _: None)
