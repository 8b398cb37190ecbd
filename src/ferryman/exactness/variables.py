"""What can change in the user's Python state, and what holds it: attributes, containers, closures, arrays, generators.

A *variable* is one thing that may change. A *holder* is something that holds values and is looked at as a whole: it
tells which of its variables have changed since it was looked at last, and puts them back.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import torch

from ferryman.exactness.snapshot import (
    generator_state,
    is_same,
    put_elements,
    put_into_dict,
    same_elements,
    same_state,
    set_generator_state,
    slot_names,
)

MISSING: Any = type("Missing", (), {"__repr__": lambda _: "nothing"})()  # stands for an attribute that is not there

LARGE = 2**16  # elements of a container that is looked at by its length alone
_MOST_CLONED = 2**24  # bytes; the elements of larger tensors and arrays are not remembered

INTERNAL = frozenset({"_parameters", "_modules", "_buffers", "forward"})  # attributes of modules that are the engine's


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


class CloneBudget:
    """How many bytes of elements one survey may remember; it is spent in the order in which tensors are found. Edits of
    the others show in their versions, and cannot be put back."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes

    def take(self, nbytes: int) -> bool:
        """Whether the elements of a tensor or array of this size are remembered."""
        if nbytes > min(self._left, _MOST_CLONED):
            return False
        self._left -= nbytes
        return True


class Holder:
    """Something that holds values, looked at as a whole."""

    def __init__(self, name: str) -> None:
        self.name = name

    def capture(self) -> Any:
        raise NotImplementedError

    def changed(self, before: Any) -> list[Variable]:
        raise NotImplementedError

    def put_back(self, before: Any) -> None:
        raise NotImplementedError


class Named(Holder):
    """Something that holds values by name."""

    def put_back(self, before: dict[str, Any]) -> None:
        for variable in self.changed(before):
            variable.put(before.get(variable.name.rpartition(".")[2], MISSING))


class Namespace(Named):
    """The attributes of an object, or some globals."""

    def __init__(self, name: str, owner: Any, mapping: dict[str, Any], only: frozenset[str] | None = None) -> None:
        super().__init__(name)
        self.owner = owner
        self._mapping = mapping
        self._only = only

    def capture(self) -> dict[str, Any]:
        if self._only is None:
            return self._mapping.copy()
        return {name: self._mapping[name] for name in self._only if name in self._mapping}

    def changed(self, before: dict[str, Any]) -> list[Variable]:
        now = self._mapping if self._only is None else self.capture()
        try:
            if now == before:  # identical objects are equal at once; this is most of the time
                return []
        except Exception:  # tensors and arrays do not compare to one truth, and a class may compare as it likes
            pass
        names = [*before, *(name for name in now if name not in before)]
        return [
            self.variable(name)
            for name in names
            if name not in INTERNAL and not is_same([now.get(name, MISSING)], [before.get(name, MISSING)])
        ]

    def variable(self, name: str) -> Variable:
        mapping = self._mapping

        def put(value: Any) -> None:
            if value is MISSING:
                mapping.pop(name, None)
            else:
                mapping[name] = value

        return Variable(f"{self.name}.{name}", self.owner, lambda: mapping.get(name, MISSING), put)


class Attributes(Named):
    """Attributes that lie in no dict that can be edited: those of a class, or those in slots."""

    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name)
        self._owner = owner

    def capture(self) -> dict[str, Any]:
        raise NotImplementedError

    def changed(self, before: dict[str, Any]) -> list[Variable]:
        now = self.capture()
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

    def _get(self, name: str) -> Any:
        return self.capture().get(name, MISSING)

    def _put(self, name: str, value: Any) -> None:
        if value is not MISSING:
            self._set(name, value)
        elif name in self.capture():
            delattr(self._owner, name)

    def _set(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)


class ClassAttributes(Attributes):
    def capture(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._owner).items() if not is_code(value)}


class Slots(Attributes):
    def capture(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in slot_names(self._owner) if hasattr(self._owner, name)}

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)  # which a frozen dataclass allows


class ArrayElements(Holder):
    """The elements of an array of numpy or of the standard library."""

    def __init__(self, name: str, array: Any, budget: CloneBudget) -> None:
        super().__init__(name)
        self._array = array
        self._keeps = budget.take(array.nbytes if isinstance(array, np.ndarray) else memoryview(array).nbytes)

    def capture(self) -> Any:
        return copy.copy(self._array) if self._keeps else None

    def changed(self, before: Any) -> list[Variable]:
        if before is None or same_elements(self._array, before):
            return []
        return [Array(self.name, self._array, lambda: self._array, lambda _: None)]

    def put_back(self, before: Any) -> None:
        if before is not None and not same_elements(self._array, before):
            put_elements(self._array, before)


class Container(Holder):
    def __init__(self, name: str, container: Any) -> None:
        super().__init__(name)
        self.container = container

    def capture(self) -> Any:
        if len(self.container) > LARGE:
            return len(self.container)
        return dict(self.container) if isinstance(self.container, dict) else list(self.container)

    def changed(self, before: Any) -> list[Variable]:
        if not before and not self.container:  # most of them are a module's hooks, of which there are none
            return []
        now = self.capture()
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


class Cell(Holder):
    """A variable that functions share with the function around them."""

    def __init__(self, name: str, cell: types.CellType) -> None:
        super().__init__(name)
        self.cell = cell

    @property
    def variable(self) -> Variable:
        return Variable(self.name, self.cell, self.capture, self.put_back)

    def capture(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # not set yet
            return MISSING

    def changed(self, before: Any) -> list[Variable]:
        return [] if is_same([self.capture()], [before]) else [self.variable]

    def put_back(self, before: Any) -> None:
        if before is not MISSING:
            self.cell.cell_contents = before
        elif self.capture() is not MISSING:
            del self.cell.cell_contents


class GeneratorState(Holder):
    def __init__(self, name: str, generator: Any, *, is_global: bool = False) -> None:
        super().__init__(name)
        self._variable = Generator(name, generator, is_global=is_global)

    def capture(self) -> Any:
        return generator_state(self._variable.generator)

    def changed(self, before: Any) -> list[Variable]:
        return [] if same_state(self.capture(), before) else [self._variable]

    def put_back(self, before: Any) -> None:
        set_generator_state(self._variable.generator, before)


class TensorElements(Holder):
    """A tensor that is not the engine's; edits show in its version, and past that in its elements.

    `thorough`: the tensor is kept alive; else its memory is free as soon as the user's code lets go of it.
    """

    class Seen(NamedTuple):
        version: int
        elements: torch.Tensor | None

    def __init__(
        self, name: str, tensor: torch.Tensor, place: Variable | None, budget: CloneBudget, *, thorough: bool
    ) -> None:
        super().__init__(name)
        self._place = place
        self._tensor: Callable[[], torch.Tensor | None] = (lambda: tensor) if thorough else weakref.ref(tensor)
        self._keeps = budget.take(tensor.nbytes)

    def capture(self) -> TensorElements.Seen | None:
        if (tensor := self._tensor()) is None:
            return None
        # On the host: on the device it would count against the budget.
        return self.Seen(tensor._version, tensor.detach().to("cpu", copy=True) if self._keeps else None)

    def changed(self, before: TensorElements.Seen | None) -> list[Variable]:
        tensor = self._tensor()
        if tensor is None or before is None:
            return []
        edited = tensor._version != before.version
        if not edited and before.elements is not None:
            edited = not torch.equal(tensor.detach().cpu(), before.elements)
        return [Elements(self.name, tensor, self._place)] if edited else []

    def put_back(self, before: TensorElements.Seen | None) -> None:
        if before is None or not self.changed(before):
            return
        if before.elements is None:
            raise cannot_put_back(self.name)
        tensor = self._tensor()
        assert tensor is not None
        tensor.data.copy_(before.elements)


def is_here(tensor: torch.Tensor) -> bool:
    """Whether its elements are in its memory: while a micro-batch is parked, the stash may have taken those away that
    it has made, such as a gradient."""
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def cannot_put_back(name: str) -> ValueError:
    return ValueError(
        f"{name} is edited in place by the model or the loss, and is too large to be put back after the trial of the "
        "first step. Make it a buffer outside the blocks, replace it instead of editing it, or edit or train it after "
        "engine.step()"
    )


def is_code(value: Any) -> bool:
    return isinstance(
        value, types.FunctionType | types.BuiltinFunctionType | types.ModuleType | type | staticmethod | classmethod
    ) or hasattr(type(value), "__get__")
