"""Surveys of the user's Python state: a walk from the model and the loss to all objects that they can reach.

A survey finds attributes of modules and of plain objects, lists, dicts and sets, variables of closures, globals that
functions use, random number generators, and optimizers and tensors that do not belong to the engine. It can tell which
of them have changed since their state was captured, and restore them. It cannot see other state, such as that of a C
library, a file, or the position of an iterator. For that reason, the cross-check of the first step (`crosscheck.py`)
compares results.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import types
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ferryman.exactness.leaves import Leaf, OptimizerState, is_leaf
from ferryman.exactness.prefixes import ATOMS
from ferryman.exactness.snapshot import ARRAYS, FUNCTIONS, generator_state, is_closed, slot_names
from ferryman.exactness.user_locks import LOCKS
from ferryman.exactness.variables import (
    INTERNAL,
    LARGE,
    ArrayElements,
    Cell,
    ClassAttributes,
    CloneBudget,
    Container,
    GeneratorState,
    Holder,
    Namespace,
    Slots,
    TensorElements,
    Variable,
    is_code,
)
from ferryman.model.placeholder import Placeholder

_PLAIN = frozenset(ATOMS)  # types of values that refer to nothing
_COMMON = (None, True, False, *range(256))  # objects of which there is only one, and which are never freed
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_MAX_DEPTH = 10  # references, counted from the nearest module on the path
_MAX_OBJECTS = 200_000  # a walk stops when it has found this many

# Packages whose objects and code keep no state that belongs to a step; see also `is_closed`.
_FOREIGN = frozenset({"torch", "torch_virtual", "numpy", "ferryman", "builtins", "rich"})
# Exceptions: types of these packages whose objects a loss may use and change in a step.
_OPEN = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, torch.distributions.Distribution)
_FOREIGN_CODE = _FOREIGN | frozenset(sys.stdlib_module_names)


class Survey:
    """All state that can be reached from `roots`, which are values with their names.

    `inside`: modules of units, whose buffers are skipped. `own`: ids of the engine's parameters, and of modules that
    have them; these are skipped.

    `thorough`: also copy the elements of tensors and the states of the global generators, so that a trial can be
    undone. Otherwise only cheap checks are made, and elements are copied only for the ids in `edited`. `clones`: the
    maximum number of bytes of copied elements. Leaves, of which there may be many, and their existing gradients have
    budgets of the same size each.
    """

    def __init__(
        self,
        roots: Iterable[tuple[Any, str]],
        inside: Collection[nn.Module] = (),
        own: Collection[int] = (),
        edited: Collection[int] = (),
        *,
        thorough: bool,
        clones: int = 2**28,
    ) -> None:
        self._thorough = thorough
        self._budget, self._of_leaves, self._of_gradients = (CloneBudget(clones) for _ in range(3))
        self._inside, self._engines, self._edited = inside, own, edited
        self._holders: list[Holder] = []
        self.owners: set[int] = set()  # the ids of all objects found
        self.thread_locals: list[threading.local] = []
        self.locks: list[tuple[str, Any]] = []  # with their names
        self._kept: list[Any] = []  # references that keep objects alive, so that no id is reused
        if thorough:
            self._holders += [
                GeneratorState("the global generator of random", random._inst, is_global=True),
                GeneratorState("the global generator of numpy", np.random.mtrand._rand, is_global=True),
            ]
            self.owners.update({id(random._inst), id(np.random.mtrand._rand)})
        self._queue: deque[tuple[Any, str, int, Variable | None]] = deque(
            (value, name, 0, None) for value, name in roots
        )
        while self._queue and len(self.owners) < _MAX_OBJECTS:
            self._visit(*self._queue.popleft())
        # From here on, only the holders keep objects alive, and functions, whose ids others would soon have.
        self._queue.clear()
        self._functions = [value for value in self._kept if isinstance(value, FUNCTIONS)]
        self._kept.clear()
        self._met = {*map(id, _COMMON), *self.owners}  # ids
        self._met |= {id(value) for holder in self._holders for value in self._not_met(holder)}

    def capture(self) -> list[Any]:
        return [holder.capture() for holder in self._holders]

    def changed(self, before: list[Any]) -> list[Variable]:
        found: list[Variable] = []
        for holder, seen in zip(self._holders, before, strict=True):
            found += holder.changed(seen)
        return found

    def meets_new_objects(self, known: Collection[Any]) -> bool:
        """Whether something that was found refers to an object that did not exist, or was not referred to, at the time
        of the survey. `known`: keys of variables whose values are expected to be new."""
        return any(
            holder.key_of(value) not in known
            for holder in self._holders
            if not self._met.issuperset(map(id, holder.referred()))  # fast: every step does this for every module
            for value in self._not_met(holder)
        )

    def _not_met(self, holder: Holder) -> Iterator[Any]:
        for value in holder.referred():
            if type(value) not in _PLAIN and id(value) not in self._met and not isinstance(value, torch.Tensor):
                yield value

    def names(self) -> set[str]:
        return {holder.name for holder in self._holders}

    def containers(self) -> dict[str, Container]:
        """By name; without those whose names others have, too."""
        found = [holder for holder in self._holders if isinstance(holder, Container)]
        often = Counter(holder.name for holder in found)
        return {holder.name: holder for holder in found if often[holder.name] == 1}

    def put_back(self, before: list[Any]) -> None:
        """Restores the captured state as far as possible. Raises a ValueError if something could not be restored."""
        failure: ValueError | None = None
        for holder, seen in zip(self._holders, before, strict=True):
            try:
                holder.put_back(seen)
            except ValueError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _add(self, value: Any, name: str, depth: int, place: Variable | None = None) -> None:
        self._queue.append((value, name, depth, place))

    def _visit(self, value: Any, name: str, depth: int, place: Variable | None) -> None:
        if value is None or isinstance(value, int | float | str | bytes | torch.dtype) or id(value) in self.owners:
            return
        if value is torch.default_generator or depth > _MAX_DEPTH:
            return
        if isinstance(value, torch.Tensor) and (isinstance(value, Placeholder) or id(value) in self._engines):
            return
        self._own(value)
        if isinstance(value, nn.Module):
            self._visit_module(value, name, depth)
        elif isinstance(value, torch.Tensor):
            self._visit_tensor(value, name, place)
        elif isinstance(value, ARRAYS):
            self._holders.append(ArrayElements(name, value, self._of(value, self._budget)))
        elif isinstance(value, threading.local):
            self.thread_locals.append(value)
            for attribute, member in value.__dict__.items():
                self._add(member, f"{name}.{attribute}", depth + 1)
        elif isinstance(value, LOCKS):
            self.locks.append((name, value))
        elif isinstance(value, types.MethodType):
            self._add(value.__self__, name, depth)
            self._add(value.__func__, name, depth)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, name, depth)
        elif isinstance(value, functools.partial):
            for number, part in enumerate((value.func, *value.args, *value.keywords.values())):
                self._add(part, f"{name}'s part {number}", depth + 1)
        elif isinstance(value, dict | list | set | deque | tuple | frozenset):
            self._visit_container(value, name, depth)
        elif generator_state(value) is not None:
            self._holders.append(GeneratorState(name, value))
        elif isinstance(value, torch.optim.Optimizer):
            self._visit_optimizer(value, name, depth)
        elif isinstance(value, type):
            self._visit_class(value, depth)
        else:
            self._visit_object(value, name, depth)

    def _own(self, value: Any) -> None:
        self.owners.add(id(value))
        self._kept.append(value)

    def _visit_tensor(self, tensor: torch.Tensor, name: str, place: Variable | None) -> None:
        if is_leaf(tensor):
            budgets = self._of(tensor, self._of_leaves), self._of_gradients
            self._holders.append(Leaf(name, tensor, *budgets, thorough=self._thorough))
        elif not tensor.requires_grad and tensor.is_leaf and type(tensor) is torch.Tensor:
            budget = self._of(tensor, self._budget)
            self._holders.append(TensorElements(name, tensor, place, budget, thorough=self._thorough))

    def _visit_optimizer(self, optimizer: torch.optim.Optimizer, name: str, depth: int) -> None:
        self._add(optimizer.param_groups, f"{name}.param_groups", depth + 1)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not all(id(parameter) in self._engines for parameter in parameters):
            self._own(optimizer.state)
            budget = self._of(optimizer.state, self._of_leaves)
            self._holders.append(OptimizerState(name, optimizer, budget, thorough=self._thorough))
            for held in optimizer.state.values():
                for key, value in held.items() if isinstance(held, dict) else ():
                    if not isinstance(value, torch.Tensor):  # lists and dicts of tensors, as some optimizers have
                        self._add(value, f"{name}.state[...][{key!r}]", depth + 1)
            own = frozenset(n for n in vars(optimizer) if n not in _optimizer_attributes())  # of a subclass
            self._holders.append(Namespace(name, optimizer, vars(optimizer), own))
            for attribute in own:
                self._add(vars(optimizer)[attribute], f"{name}.{attribute}", depth + 1)

    def _of(self, value: Any, budget: CloneBudget) -> CloneBudget:
        """The budget if elements of this value may be copied; otherwise an empty budget."""
        return budget if self._thorough or id(value) in self._edited else CloneBudget(0)

    def _visit_module(self, module: nn.Module, name: str, depth: int) -> None:
        attributes, buffers = (
            Namespace(name, module, module.__dict__),
            Namespace(name, module._buffers, cast("dict[str, Any]", module._buffers)),
        )
        self._own(module._buffers)
        self._holders.append(attributes)
        for attribute, member in module.__dict__.items():
            if attribute in HOOKS:
                self._holders.append(Container(f"{name}.{attribute}", member))
                self._own(member)
                for hook in member.values():
                    self._add(hook, f"a hook of {name}", depth + 1)
            elif attribute == "forward":
                self._add(getattr(member, "own", member), f"{name}.forward", depth + 1)
            elif attribute not in INTERNAL and not (attribute.startswith("_") and attribute in _MODULE_ATTRIBUTES):
                self._add(member, f"{name}.{attribute}", depth + 1, attributes.variable(attribute))
        if module not in self._inside:
            self._holders.append(buffers)
            for attribute, buffer in module._buffers.items():
                self._add(buffer, f"{name}.{attribute}", depth + 1, buffers.variable(attribute))
        if id(module) not in self._engines:
            for attribute, parameter in module._parameters.items():
                self._add(parameter, f"{name}.{attribute}", depth + 1)
        for attribute, child in module._modules.items():
            self._add(child, f"{name}.{attribute}", 0)
        self._add(type(module), type(module).__name__, depth + 1)

    def _visit_class(self, kind: type, depth: int) -> None:
        if kind.__module__.partition(".")[0] in _FOREIGN_CODE:
            return
        self._holders.append(ClassAttributes(kind.__name__, kind))
        for attribute, member in list(vars(kind).items()):
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(member, functools.cached_property):
                function = member.func
                self._add(getattr(member, "lock", None), f"{kind.__name__}.{attribute}", depth + 1)  # before 3.12
            if isinstance(function, types.FunctionType):
                self._add(function, f"{kind.__name__}.{attribute}", depth + 1)
            elif (
                isinstance(member, (dict, list, set, deque, threading.local, torch.Tensor, *ARRAYS, *LOCKS))
                or generator_state(member) is not None
            ):
                self._add(member, f"{kind.__name__}.{attribute}", depth + 1)
        for base in kind.__bases__:
            self._add(base, base.__name__, depth + 1)

    def _visit_function(self, function: types.FunctionType, name: str, depth: int) -> None:
        if function.__module__ and function.__module__.partition(".")[0] in _FOREIGN_CODE:
            return
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self.owners:
                self._own(cell)
                holder = Cell(f"{variable!r} of {function.__qualname__}", cell)
                self._holders.append(holder)
                self._add(holder.capture(), variable, depth + 1)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add(default, f"a default of {function.__qualname__}", depth + 1)
        if "site-packages" in function.__code__.co_filename:
            return  # skip a library's own globals
        names = frozenset(n for n in _global_names(function.__code__) if n in function.__globals__)
        plain = frozenset(n for n in names if not is_code(function.__globals__[n]))
        if plain:
            self._own(function.__globals__)
            self._holders.append(Namespace("global", function.__globals__, function.__globals__, plain))
        for used in names:
            self._add(function.__globals__[used], f"global {used}", depth + 1)

    def _visit_container(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, dict | list | set | deque):
            self._holders.append(Container(name, value))
        if len(value) > LARGE:
            return
        members = value.items() if isinstance(value, dict) else enumerate(value)
        for key, member in members:
            self._add(member, f"{name}[{key!r}]" if isinstance(key, int | str) else name, depth + 1)
        if hasattr(value, "__dict__") and value.__dict__:
            self._visit_object(value, name, depth)

    def _visit_object(self, value: Any, name: str, depth: int) -> None:
        kind = type(value)
        foreign = kind.__module__.partition(".")[0] in _FOREIGN and not isinstance(value, (dict, *_OPEN))
        if isinstance(value, types.ModuleType) or is_closed(value) or foreign:
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            namespace = Namespace(name, value, attributes)
            self._holders.append(namespace)
            for attribute, member in attributes.items():
                self._add(member, f"{name}.{attribute}", depth + 1, namespace.variable(attribute))
        if slots := slot_names(value):
            self._holders.append(Slots(name, value))
            for attribute in slots:
                self._add(getattr(value, attribute, None), f"{name}.{attribute}", depth + 1)
        self._add(kind, kind.__name__, depth + 1)


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


@functools.cache
def _optimizer_attributes() -> frozenset[str]:
    """Not a constant: the first optimizer of a process imports torch._dynamo, which takes seconds."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1, dtype=torch.float32, device="cpu")], lr=0.1)))


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
