"""Where the user's code keeps values in Python: a walk from the model and the loss to all that they can reach.

Attributes of modules and of plain objects, lists, dicts and sets, variables of closures, globals that functions use,
random number generators and tensors that are neither parameters nor buffers of a unit. A survey can tell which of them
have changed since it looked last, and put them back. What lies beyond (a C library's state, a file, an iterator's
position) it cannot see; the cross-check of the first step (`crosscheck.py`) compares results for that reason.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from ferryman.exactness.snapshot import (
    ARRAYS,
    generator_state,
    is_closed,
    is_same,
    put_elements,
    put_into_dict,
    same_elements,
    same_state,
    set_generator_state,
    slot_names,
)

MISSING: Any = type("Missing", (), {"__repr__": lambda _: "nothing"})()  # stands for an attribute that is not there

_DEPTH = 10
_MOST = 200_000  # objects; a walk that meets more ends there
_LARGE = 2**16  # elements of a container that is looked at by its length alone
_CLONED = 2**24  # bytes; the elements of larger tensors are not remembered

_INTERNAL = frozenset({"_parameters", "_modules", "_buffers", "forward"})
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Packages whose objects hold nothing that belongs to a step, and whose code keeps nothing; see also `is_closed`.
_FOREIGN = frozenset({"torch", "torch_virtual", "numpy", "ferryman", "builtins", "rich"})
_FOREIGN_CODE = _FOREIGN | frozenset(sys.stdlib_module_names)


class Variable:
    """One thing that the user's code may change: what `get` returns, and what that holds."""

    def __init__(self, name: str, owner: Any, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.name = name
        self.get = get
        self.put = put
        self.owner = owner  # keeps its identity from being used again

    @property
    def key(self) -> Hashable:
        return id(self.owner), self.name

    def __repr__(self) -> str:
        return f"<Variable {self.name}>"


class Elements(Variable):
    """The elements of a tensor that is edited in place; if known, `place` is the attribute that holds it."""

    def __init__(self, name: str, tensor: torch.Tensor, place: Variable | None) -> None:
        super().__init__(name, tensor, lambda: tensor if place is None else place.get(), lambda _: None)
        self.tensor = tensor
        self.place = place


class Array(Variable):
    """The elements of an array that is no tensor, and is edited in place."""


class Generator(Variable):
    """The state of a random number generator. `is_global`: every micro-batch seeds it for itself."""

    def __init__(self, name: str, generator: Any, *, is_global: bool) -> None:
        super().__init__(name, generator, lambda: generator, lambda _: None)
        self.generator = generator
        self.is_global = is_global


class _Holder:
    """Something that holds values, looked at as a whole."""

    def __init__(self, name: str) -> None:
        self.name = name

    def look(self) -> Any:
        raise NotImplementedError

    def changed(self, before: Any) -> list[Variable]:
        raise NotImplementedError

    def put_back(self, before: Any) -> None:
        raise NotImplementedError


class _Namespace(_Holder):
    """The attributes of an object, or some globals."""

    def __init__(self, name: str, owner: Any, mapping: dict[str, Any], only: frozenset[str] | None = None) -> None:
        super().__init__(name)
        self.owner = owner
        self._mapping = mapping
        self._only = only

    def look(self) -> dict[str, Any]:
        if self._only is None:
            return self._mapping.copy()
        return {name: self._mapping[name] for name in self._only if name in self._mapping}

    def changed(self, before: dict[str, Any]) -> list[Variable]:
        now = self._mapping if self._only is None else self.look()
        try:
            if now == before:  # identical objects are equal at once; this is most of the time
                return []
        except Exception:  # tensors and arrays do not compare to one truth, and a class may compare as it likes
            pass
        names = [*before, *(name for name in now if name not in before)]
        return [
            self.variable(name)
            for name in names
            if name not in _INTERNAL and not is_same([now.get(name, MISSING)], [before.get(name, MISSING)])
        ]

    def put_back(self, before: dict[str, Any]) -> None:
        for variable in self.changed(before):
            variable.put(before.get(variable.name.rpartition(".")[2], MISSING))

    def variable(self, name: str) -> Variable:
        mapping = self._mapping

        def put(value: Any) -> None:
            if value is MISSING:
                mapping.pop(name, None)
            else:
                mapping[name] = value

        return Variable(f"{self.name}.{name}", self.owner, lambda: mapping.get(name, MISSING), put)


class _Attributes(_Holder):
    """Attributes that lie in no dict that can be edited: those of a class, or those in slots."""

    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name)
        self._owner = owner

    def look(self) -> dict[str, Any]:
        raise NotImplementedError

    def changed(self, before: dict[str, Any]) -> list[Variable]:
        now = self.look()
        return [
            Variable(
                f"{self.name}.{name}",
                self._owner,
                functools.partial(self._get, name),
                functools.partial(self._put, name),
            )
            for name in sorted({*before, *now})
            if not is_same([now.get(name, MISSING)], [before.get(name, MISSING)])
        ]

    def put_back(self, before: dict[str, Any]) -> None:
        for variable in self.changed(before):
            variable.put(before.get(variable.name.rpartition(".")[2], MISSING))

    def _get(self, name: str) -> Any:
        return self.look().get(name, MISSING)

    def _put(self, name: str, value: Any) -> None:
        if value is not MISSING:
            self._set(name, value)
        elif name in self.look():
            delattr(self._owner, name)

    def _set(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)


class _ClassAttributes(_Attributes):
    def look(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._owner).items() if not _is_code(value)}


class _Slots(_Attributes):
    def look(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in slot_names(self._owner) if hasattr(self._owner, name)}

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)  # which a frozen dataclass allows


class _ArrayElements(_Holder):
    """The elements of an array of numpy or of the standard library."""

    def __init__(self, name: str, array: Any, *, thorough: bool) -> None:
        super().__init__(name)
        self._array = array
        nbytes = array.nbytes if isinstance(array, np.ndarray) else memoryview(array).nbytes
        self._keeps = thorough and nbytes <= _CLONED

    def look(self) -> Any:
        return copy.copy(self._array) if self._keeps else None

    def changed(self, before: Any) -> list[Variable]:
        if before is None or same_elements(self._array, before):
            return []
        return [Array(self.name, self._array, lambda: self._array, lambda _: None)]

    def put_back(self, before: Any) -> None:
        if before is not None and not same_elements(self._array, before):
            put_elements(self._array, before)


class _Container(_Holder):
    def __init__(self, name: str, container: Any) -> None:
        super().__init__(name)
        self.container = container

    def look(self) -> Any:
        if len(self.container) > _LARGE:
            return len(self.container)
        return dict(self.container) if isinstance(self.container, dict) else list(self.container)

    def changed(self, before: Any) -> list[Variable]:
        now = self.look()
        if type(now) is not type(before):
            same = False
        elif isinstance(now, dict):
            same = is_same(now.keys(), list(before)) and is_same(now.values(), list(before.values()))
        else:
            same = now == before if isinstance(now, int) else is_same(now, before)
        container = self.container
        return [] if same else [Variable(self.name, container, lambda: container, lambda _: None)]

    def put_back(self, before: Any) -> None:
        if isinstance(before, int):  # it was too large to remember; what was added is taken away again
            while isinstance(self.container, list | deque) and len(self.container) > before:
                self.container.pop()
        elif not self.changed(before):
            pass
        elif isinstance(before, dict):
            put_into_dict(self.container, list(before.items()))
        else:
            self.container.clear()
            (self.container.update if isinstance(self.container, set) else self.container.extend)(before)


def cell_contents(cell: types.CellType) -> Any:
    """The value of a variable that functions share with the function around them."""
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return MISSING


class _Cell(_Holder):
    def __init__(self, name: str, cell: types.CellType) -> None:
        super().__init__(name)
        self.cell = cell

    def look(self) -> Any:
        return cell_contents(self.cell)

    def changed(self, before: Any) -> list[Variable]:
        if is_same([self.look()], [before]):
            return []
        return [Variable(self.name, self.cell, self.look, self.put_back)]

    def put_back(self, before: Any) -> None:
        if before is not MISSING:
            self.cell.cell_contents = before
        elif self.look() is not MISSING:
            del self.cell.cell_contents


class _GeneratorState(_Holder):
    def __init__(self, name: str, generator: Any, *, is_global: bool = False) -> None:
        super().__init__(name)
        self._variable = Generator(name, generator, is_global=is_global)

    def look(self) -> Any:
        return generator_state(self._variable.generator)

    def changed(self, before: Any) -> list[Variable]:
        return [] if same_state(self.look(), before) else [self._variable]

    def put_back(self, before: Any) -> None:
        set_generator_state(self._variable.generator, before)


class _TensorElements(_Holder):
    """A tensor that is not the engine's; edits show in its version, and past that in its elements."""

    class Seen(NamedTuple):
        version: int
        elements: torch.Tensor | None

    def __init__(self, name: str, tensor: torch.Tensor, place: Variable | None, *, thorough: bool) -> None:
        super().__init__(name)
        self._variable = Elements(name, tensor, place)
        self._keeps = thorough and tensor.nbytes <= _CLONED

    def look(self) -> _TensorElements.Seen:
        tensor = self._variable.tensor
        # On the host: on the device it would count against the budget.
        return self.Seen(tensor._version, tensor.detach().to("cpu", copy=True) if self._keeps else None)

    def changed(self, before: _TensorElements.Seen) -> list[Variable]:
        tensor = self._variable.tensor
        edited = tensor._version != before.version
        if not edited and before.elements is not None:
            edited = not torch.equal(tensor.detach().cpu(), before.elements)
        return [self._variable] if edited else []

    def put_back(self, before: _TensorElements.Seen) -> None:
        if not self.changed(before):
            return
        if before.elements is None:
            raise ValueError(
                f"{self.name} is edited in place by the model or the loss, and is too large to be put back after the "
                "trial of the first step. Make it a buffer outside the blocks, or replace it instead of editing it"
            )
        self._variable.tensor.data.copy_(before.elements)


class Survey:
    """All that was found from some roots, each of which is a value and its name; without the buffers of modules
    `inside` units.

    `thorough`: it also remembers the elements of tensors and the states of the global generators, so that it can undo
    what a trial does; else it looks at what is cheap to look at.
    """

    def __init__(self, roots: Iterable[tuple[Any, str]], inside: Collection[nn.Module] = (), *, thorough: bool) -> None:
        self._thorough = thorough
        self._inside = inside
        self._holders: list[_Holder] = []
        self.owners: set[int] = set()  # the identities of all that was found
        self.thread_locals: list[threading.local] = []
        self._kept: list[Any] = []  # alive, so that no identity is used twice
        if thorough:
            self._holders += [
                _GeneratorState("the global generator of random", random._inst, is_global=True),
                _GeneratorState("the global generator of numpy", np.random.mtrand._rand, is_global=True),
            ]
            self.owners.update({id(random._inst), id(np.random.mtrand._rand)})
        self._queue: deque[tuple[Any, str, int, Variable | None]] = deque(
            (value, name, 0, None) for value, name in roots
        )
        while self._queue and len(self.owners) < _MOST:
            self._visit(*self._queue.popleft())
        # From here on nothing is kept alive but what holds values.
        self._queue.clear()
        self._kept.clear()

    def look(self) -> list[Any]:
        return [holder.look() for holder in self._holders]

    def changed(self, before: list[Any]) -> list[Variable]:
        found: list[Variable] = []
        for holder, seen in zip(self._holders, before, strict=True):
            found += holder.changed(seen)
        return found

    def put_back(self, before: list[Any]) -> None:
        for holder, seen in zip(self._holders, before, strict=True):
            holder.put_back(seen)

    def _add(self, value: Any, name: str, depth: int, place: Variable | None = None) -> None:
        self._queue.append((value, name, depth, place))

    def _visit(self, value: Any, name: str, depth: int, place: Variable | None) -> None:
        if value is None or isinstance(value, int | float | str | bytes | torch.dtype) or id(value) in self.owners:
            return
        if isinstance(value, nn.Parameter) or value is torch.default_generator or depth > _DEPTH:
            return
        self._own(value)
        if isinstance(value, nn.Module):
            self._visit_module(value, name, depth)
        elif isinstance(value, torch.Tensor):
            if not value.requires_grad and value.is_leaf and type(value) is torch.Tensor:
                self._holders.append(_TensorElements(name, value, place, thorough=self._thorough))
        elif isinstance(value, ARRAYS):
            self._holders.append(_ArrayElements(name, value, thorough=self._thorough))
        elif isinstance(value, threading.local):
            self.thread_locals.append(value)
            for attribute, member in value.__dict__.items():
                self._add(member, f"{name}.{attribute}", depth + 1)
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
            self._holders.append(_GeneratorState(name, value))
        elif isinstance(value, type):
            self._visit_class(value, depth)
        else:
            self._visit_object(value, name, depth)

    def _own(self, value: Any) -> None:
        self.owners.add(id(value))
        self._kept.append(value)

    def _visit_module(self, module: nn.Module, name: str, depth: int) -> None:
        attributes, buffers = (
            _Namespace(name, module, module.__dict__),
            _Namespace(name, module._buffers, cast("dict[str, Any]", module._buffers)),
        )
        self._own(module._buffers)
        self._holders.append(attributes)
        for attribute, member in module.__dict__.items():
            if attribute in HOOKS:
                self._holders.append(_Container(f"{name}.{attribute}", member))
                self._own(member)
                for hook in member.values():
                    self._add(hook, f"a hook of {name}", depth + 1)
            elif attribute == "forward":
                self._add(getattr(member, "own", member), f"{name}.forward", depth + 1)
            elif attribute not in _INTERNAL and not (attribute.startswith("_") and attribute in _MODULE_ATTRIBUTES):
                self._add(member, f"{name}.{attribute}", depth + 1, attributes.variable(attribute))
        if module not in self._inside:
            self._holders.append(buffers)
            for attribute, buffer in module._buffers.items():
                self._add(buffer, f"{name}.{attribute}", depth + 1, buffers.variable(attribute))
        for attribute, child in module._modules.items():
            self._add(child, f"{name}.{attribute}", 0)
        self._add(type(module), type(module).__name__, depth + 1)

    def _visit_class(self, kind: type, depth: int) -> None:
        if kind.__module__.partition(".")[0] in _FOREIGN_CODE:
            return
        self._holders.append(_ClassAttributes(kind.__name__, kind))
        for attribute, member in list(vars(kind).items()):
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, types.FunctionType):
                self._add(function, f"{kind.__name__}.{attribute}", depth + 1)
            elif (
                isinstance(member, (dict, list, set, deque, torch.Tensor, *ARRAYS))
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
                holder = _Cell(f"{variable!r} of {function.__qualname__}", cell)
                self._holders.append(holder)
                self._add(holder.look(), variable, depth + 1)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add(default, f"a default of {function.__qualname__}", depth + 1)
        if "site-packages" in function.__code__.co_filename:
            return  # a library's own globals
        names = frozenset(n for n in _global_names(function.__code__) if n in function.__globals__)
        plain = frozenset(n for n in names if not _is_code(function.__globals__[n]))
        if plain:
            self._own(function.__globals__)
            self._holders.append(_Namespace("global", function.__globals__, function.__globals__, plain))
        for used in names:
            self._add(function.__globals__[used], f"global {used}", depth + 1)

    def _visit_container(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, dict | list | set | deque):
            self._holders.append(_Container(name, value))
        if len(value) > _LARGE:
            return
        members = value.items() if isinstance(value, dict) else enumerate(value)
        for key, member in members:
            self._add(member, f"{name}[{key!r}]" if isinstance(key, int | str) else name, depth + 1)
        if hasattr(value, "__dict__") and value.__dict__:
            self._visit_object(value, name, depth)

    def _visit_object(self, value: Any, name: str, depth: int) -> None:
        kind = type(value)
        foreign = kind.__module__.partition(".")[0] in _FOREIGN and not isinstance(value, dict)
        if isinstance(value, types.ModuleType) or is_closed(value) or foreign:
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            namespace = _Namespace(name, value, attributes)
            self._holders.append(namespace)
            for attribute, member in attributes.items():
                self._add(member, f"{name}.{attribute}", depth + 1, namespace.variable(attribute))
        if slots := slot_names(value):
            self._holders.append(_Slots(name, value))
            for attribute in slots:
                self._add(getattr(value, attribute, None), f"{name}.{attribute}", depth + 1)
        self._add(kind, kind.__name__, depth + 1)


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _is_code(value: Any) -> bool:
    return isinstance(
        value, types.FunctionType | types.BuiltinFunctionType | types.ModuleType | type | staticmethod | classmethod
    ) or hasattr(type(value), "__get__")


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
