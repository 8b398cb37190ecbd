"""Variables of the user's Python state, and their holders: attributes, containers, closures, arrays, generators.

A *variable* is one value that may change. A *holder* contains variables, and its state is captured as a whole. It tells
which of its variables have changed since then, and restores them.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
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

MISSING: Any = type("Missing", (), {"__repr__": lambda _: "nothing"})()  # represents an attribute that does not exist

LARGE = 2**16  # elements; of larger containers only the length is checked
_MOST_CLONED = 2**24  # bytes; the elements of larger tensors and arrays are not copied

INTERNAL = frozenset({"_parameters", "_modules", "_buffers", "forward"})  # module attributes that the engine manages


class Variable:
    """A value that the user's code may change: the object that `get` returns, and its contents."""

    def __init__(self, name: str, owner: Any, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.name = name
        self.get = get
        self.put = put
        self.owner = owner  # the reference also prevents reuse of its id

    @property
    def key(self) -> Hashable:
        return id(self.owner), self.name

    def __repr__(self) -> str:
        return f"<Variable {self.name}>"


class Elements(Variable):
    """The elements of a tensor that is edited in place. `place`: the attribute that refers to the tensor, if known."""

    def __init__(self, name: str, tensor: torch.Tensor, place: Variable | None) -> None:
        super().__init__(name, tensor, lambda: tensor if place is None else place.get(), lambda _: None)
        self.tensor = tensor
        self.place = place


class Array(Variable):
    """The elements of an array, not a tensor, that is edited in place."""


class Generator(Variable):
    """The state of a random number generator. `is_global`: each micro-batch seeds it anew."""

    def __init__(self, name: str, generator: Any, *, is_global: bool) -> None:
        super().__init__(name, generator, lambda: generator, lambda _: None)
        self.generator = generator
        self.is_global = is_global


class CloneBudget:
    """The number of bytes of elements that a survey may copy, spent in the order in which tensors are found.

    Edits of tensors beyond the budget are detected by their versions, but cannot be undone.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes

    def take(self, nbytes: int) -> bool:
        """Spends the budget for a tensor or array of this size. Returns whether its elements may be copied."""
        if nbytes > min(self._left, _MOST_CLONED):
            return False
        self._left -= nbytes
        return True


class Holder:
    """An object that contains variables, whose state is captured as a whole."""

    def __init__(self, name: str) -> None:
        self.name = name

    def capture(self) -> Any:
        raise NotImplementedError

    def changed(self, before: Any) -> list[Variable]:
        raise NotImplementedError

    def put_back(self, before: Any) -> None:
        raise NotImplementedError

    def referred(self) -> Iterable[Any]:
        """The objects that its variables refer to now."""
        return ()

    def key_of(self, referred: Any) -> Hashable:
        """The key of the variable that refers to this object, one of `referred`."""
        raise NotImplementedError


class Named(Holder):
    """A holder that contains variables by name."""

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
            if now == before:  # the common case, and fast: identical objects are equal
                return []
        except Exception:  # tensors and arrays have no single truth value, and classes may override ==
            pass
        names = [*before, *(name for name in now if name not in before)]
        return [
            self.variable(name)
            for name in names
            if name not in INTERNAL and not is_same([now.get(name, MISSING)], [before.get(name, MISSING)])
        ]

    def referred(self) -> Iterable[Any]:
        if self._only is not None:
            return self.capture().values()
        return [*self._mapping.values(), *self._mapping.get("_modules", {}).values()]

    def key_of(self, referred: Any) -> Hashable:
        return self.variable(next((name for name, value in self._mapping.items() if value is referred), "_modules")).key

    def variable(self, name: str) -> Variable:
        mapping = self._mapping

        def put(value: Any) -> None:
            if value is MISSING:
                mapping.pop(name, None)
            else:
                mapping[name] = value

        return Variable(f"{self.name}.{name}", self.owner, lambda: mapping.get(name, MISSING), put)


class Attributes(Named):
    """Attributes that are not in an editable dict: those of a class, or those in `__slots__`."""

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

    def referred(self) -> Iterable[Any]:
        return self.capture().values()

    def key_of(self, referred: Any) -> Hashable:
        name = next(name for name, value in self.capture().items() if value is referred)
        return id(self._owner), f"{self.name}.{name}"


class ClassAttributes(Attributes):
    def capture(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._owner).items() if not is_code(value)}


class Slots(Attributes):
    def capture(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in slot_names(self._owner) if hasattr(self._owner, name)}

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)  # works for frozen dataclasses too


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
        if not before and not self.container:  # the common case: a module without hooks
            return []
        now = self.capture()
        if type(now) is not type(before):
            same = False
        elif isinstance(now, dict):
            same = is_same(now.keys(), list(before)) and is_same(now.values(), list(before.values()))
        else:
            same = now == before if isinstance(now, int) else is_same(now, before)
        return [] if same else [self.variable]

    @property
    def variable(self) -> Variable:
        container = self.container
        return Variable(self.name, container, lambda: container, lambda _: None)

    def referred(self) -> Iterable[Any]:
        if not self.container or len(self.container) > LARGE:
            return ()
        return self.container.values() if isinstance(self.container, dict) else self.container

    def key_of(self, referred: Any) -> Hashable:
        return self.variable.key

    def put_back(self, before: Any) -> None:
        if isinstance(before, int):  # it was too large to copy; remove the elements that were added
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
    """A variable that a closure shares with the enclosing function."""

    def __init__(self, name: str, cell: types.CellType) -> None:
        super().__init__(name)
        self.cell = cell

    @property
    def variable(self) -> Variable:
        return Variable(self.name, self.cell, self.capture, self.put_back)

    def capture(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # the variable is not set yet
            return MISSING

    def changed(self, before: Any) -> list[Variable]:
        return [] if is_same([self.capture()], [before]) else [self.variable]

    def referred(self) -> Iterable[Any]:
        return (self.capture(),)

    def key_of(self, referred: Any) -> Hashable:
        return self.variable.key

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
    """A tensor that does not belong to the engine. Edits are detected by its version and, if copied, by its elements.

    `thorough`: keep the tensor alive. Otherwise its memory is freed as soon as the user's code drops it.
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
        self._keeps = tensor.layout is torch.strided and budget.take(tensor.nbytes)

    def capture(self) -> TensorElements.Seen | None:
        if (tensor := self._tensor()) is None:
            return None
        # Copy to the host: a copy on the device would count against the budget.
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
    """Whether the tensor's elements are in its memory. While a micro-batch is parked, the stash may have emptied the
    storages of tensors that it has made, such as a gradient."""
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def cannot_put_back(name: str) -> ValueError:
    return ValueError(
        f"{name} is edited in place by the model or the loss, and is too large to be restored after the trial of the "
        "first step. Make it a buffer outside the blocks, replace it instead of editing it, or edit or train it after "
        "engine.step()"
    )


def is_code(value: Any) -> bool:
    return isinstance(
        value, types.FunctionType | types.BuiltinFunctionType | types.ModuleType | type | staticmethod | classmethod
    ) or hasattr(type(value), "__get__")
