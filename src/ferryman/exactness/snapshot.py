"""Snapshots of Python values: they save the contents of lists, dicts and objects, so that these can be restored later.

The relay runs a unit's code twice and lets micro-batches take turns. So it must be able to restore the values that the
user's code keeps in Python (arguments, attributes, containers). A snapshot refers to the objects themselves and saves
the contents of each. Restoring it changes the same objects in place, because the user's code may refer to them from
anywhere. Immutable containers are made anew if a tensor in them is replaced.

Tensors are kept separately (`Snapshot.tensors`): a snapshot that is kept for long can drop its tensors, and be restored
with others in their place.
"""

from __future__ import annotations

import argparse
import array
import contextvars
import copy
import functools
import math
import operator
import random
import sys
import types
import weakref
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ferryman.exactness.prefixes import ATOMS, Prefix, Prefixes

FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
ARRAYS = (np.ndarray, array.array, bytearray)
# Types whose objects have no values that a step changes, or none that can be set.
_OPAQUE = (
    nn.Module,
    torch.Stream,
    torch.Event,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.CodeType,
    types.GeneratorType,
    torch.storage.UntypedStorage,
    contextvars.ContextVar,
    torch.optim.Optimizer,
    np.ndarray,
    np.generic,
    Enum,
)

_STANDARD = frozenset(sys.stdlib_module_names)
# Types of the standard library whose objects contain values of the user. Objects of its other types may be in use by
# another thread (a queue, a logger, a lock), and do not belong to a step.
_OPEN = (
    dict,
    list,
    set,
    frozenset,
    tuple,
    deque,
    types.SimpleNamespace,
    argparse.Namespace,
    UserDict,
    UserList,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
)

_DEPTH = 12  # the deepest nesting of containers that is searched


def is_closed(value: Any) -> bool:
    """Whether the value is an object of the standard library whose contents are not searched."""
    if isinstance(value, _OPEN):
        return False
    return type(value).__module__.partition(".")[0] in _STANDARD and generator_state(value) is None


class _Node:
    """One object and its saved contents. `kind` says how to restore them."""

    __slots__ = ("attributes", "contents", "kind", "prefix", "value")

    def __init__(self, kind: str, value: Any, contents: Any = None, attributes: Any = None) -> None:
        self.kind = kind
        self.value = value
        self.contents = contents
        self.attributes = attributes
        self.prefix: Prefix | None = None  # for a list: the elements before `contents`


_EMPTY = _Node("leaf", ())
_TENSORS = [_Node("tensor", index) for index in range(32)]  # nodes of tensors are all alike, and none ever changes


class Snapshot:
    """The contents of some values, including nested ones.

    `edited`: tensors and arrays, by id, whose elements are copied too. `prefixes`: the first elements of long lists,
    which are not copied.
    """

    def __init__(
        self, values: Iterable[Any], edited: Mapping[int, Any] | None = None, prefixes: Prefixes | None = None
    ) -> None:
        self.tensors: list[torch.Tensor] = []  # without duplicates, in the order in which they were found
        self.mutables: list[Any] = []  # all objects in the snapshot that can be changed in place
        self.functions: list[Any] = []  # what they refer to is not in the snapshot
        self._indices: dict[int, int] = {}  # indices of tensors, by id
        self._seen: dict[int, _Node] = {}
        self._edited = {} if edited is None else edited
        self._prefixes = prefixes
        self._nodes = [self._take(value, 0) for value in values]
        del self._indices, self._seen  # a step has many snapshots, and each object delays the garbage collector

    def give_up_tensors(self) -> None:
        """Drops the tensors. From now on the snapshot can be restored only with other tensors."""
        self.tensors = []

    def restore(self, tensors: Sequence[torch.Tensor] | None = None) -> list[Any]:
        """Restores all objects, and returns the values. `tensors`: replacements for the tensors of the snapshot."""
        tensors = self.tensors if tensors is None else tensors
        if len(self._nodes) == 1 and self._nodes[0].kind == "tensor":
            return [tensors[self._nodes[0].value]]
        restoring = _Restoring(tensors)
        return [restoring.run(node) for node in self._nodes]

    def same_as(self, other: Snapshot | PlainSnapshot) -> bool:
        """Whether nothing changed between the two snapshots."""
        if isinstance(other, PlainSnapshot):
            return False
        pairs = zip(self._nodes, other._nodes, strict=True)
        return all(_is_same(a, b, self.tensors, other.tensors, set()) for a, b in pairs)

    @property
    def is_list(self) -> bool:
        """Whether this is a snapshot of a single list."""
        return len(self._nodes) == 1 and isinstance(self._nodes[0].value, list)

    @property
    def atom(self) -> Any:
        """The value, if this is a snapshot of a single value without contents; otherwise None."""
        return self._nodes[0].value if self._nodes[0].kind == "leaf" else None

    def members(self) -> list[Any]:
        """The elements of the list, for a snapshot of a single list."""
        (node,) = self._nodes
        return [*(node.prefix.elements if node.prefix is not None else ()), *self._after_prefix()]

    def added_since(self, base: Snapshot | PlainSnapshot) -> list[Any]:
        """The elements that were appended since `base`, an earlier snapshot of the same list."""
        mine, theirs = self._beyond_common(base)
        return mine[len(theirs) :]

    def extends(self, base: Snapshot | PlainSnapshot) -> bool:
        """Whether elements were only appended since `base`, an earlier snapshot of the same list."""
        mine, theirs = self._beyond_common(base)
        return is_same(mine[: len(theirs)], theirs)

    def _beyond_common(self, base: Snapshot | PlainSnapshot) -> tuple[list[Any], list[Any]]:
        """The elements of both lists, without the prefix if they share one."""
        if isinstance(base, Snapshot) and base._nodes[0].prefix is self._nodes[0].prefix:
            return self._after_prefix(), base._after_prefix()
        return self.members(), base.members()

    def _after_prefix(self) -> list[Any]:
        (node,) = self._nodes
        return [self.tensors[m.value] if m.kind == "tensor" else m.value for m in node.contents or ()]

    def _take(self, value: Any, depth: int) -> _Node:
        if isinstance(value, torch.Tensor):  # most values are tensors, and an atom has many types
            return self._take_tensor(value)
        if type(value) is tuple:  # the arguments of every call
            if not value:  # most calls have no keyword arguments
                return _EMPTY
            if depth > _DEPTH:
                return _Node("leaf", value)
        elif isinstance(value, ATOMS):
            return _Node("leaf", value)
        elif isinstance(value, ARRAYS) and id(value) in self._edited:
            self.mutables.append(value)
            return _Node("array", value, copy.copy(value))
        elif depth > _DEPTH or isinstance(value, _OPAQUE) or is_closed(value):
            if isinstance(value, FUNCTIONS):
                self.functions.append(value)
            return _Node("leaf", value)
        if (seen := self._seen.get(id(value))) is not None:
            return seen
        node = self._seen[id(value)] = _Node("leaf", value)
        self._take_contents(node, value, depth)
        return node

    def _take_tensor(self, tensor: torch.Tensor) -> _Node:
        if id(tensor) in self._edited:
            self.mutables.append(tensor)
            return _Node("elements", tensor, tensor.detach().clone())
        index = self._indices.get(id(tensor))
        if index is None:
            index = self._indices[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return _TENSORS[index] if index < len(_TENSORS) else _Node("tensor", index)

    def _take_contents(self, node: _Node, value: Any, depth: int) -> None:
        if isinstance(value, tuple):
            contents = [self._take(member, depth + 1) for member in value]
            for member in contents:
                if member.kind != "leaf":
                    # The tuple is made anew when it is restored: a reference to it would keep its tensors alive.
                    node.kind, node.value, node.contents = "tuple", type(value), contents
                    break
            return
        state = generator_state(value)
        if state is not None:
            node.kind, node.contents = "generator", state
            self.mutables.append(value)
            return
        if isinstance(value, dict):
            node.kind = "dict"
            node.contents = [(key, self._take(member, depth + 1)) for key, member in dict.items(value)]
        elif isinstance(value, list | deque):
            node.kind, node.prefix = "list", self._prefix_of(value)
            copied = value if node.prefix is None else cast("list[Any]", value)[len(node.prefix) :]
            node.contents = [self._take(member, depth + 1) for member in copied]
        elif isinstance(value, set):
            node.kind, node.contents = "set", list(value)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            if node.kind == "leaf":
                node.kind = "object"
            node.attributes = [(name, self._take_attribute(m, depth + 1)) for name, m in list(attributes.items())]
        elif node.kind == "leaf" and (slots := slot_names(value)):
            node.kind = "slots"
            found = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
            node.contents = [(name, self._take_attribute(member, depth + 1)) for name, member in found]
        if node.kind != "leaf":
            self.mutables.append(value)
        if "<locals>" in (kind := type(value)).__qualname__:  # its methods may have closures
            self.functions += [m for m in vars(kind).values() if isinstance(m, types.FunctionType)]

    def _prefix_of(self, value: list[Any] | deque[Any]) -> Prefix | None:
        if self._prefixes is None or not isinstance(value, list):
            return None
        return self._prefixes.meet(value, self._edited)

    def _take_attribute(self, value: Any, depth: int) -> _Node:
        """Saves an attribute. References to parameters, such as those of a trainer, are saved as they are."""
        return _Node("leaf", value) if isinstance(value, nn.Parameter) else self._take(value, depth)


def _is_same(
    a: _Node, b: _Node, mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], seen: set[tuple[int, int]]
) -> bool:
    if a.kind != b.kind or (id(a), id(b)) in seen:
        return a.kind == b.kind
    if a.kind == "tensor":
        return mine[a.value] is theirs[b.value]
    if a.kind == "generator":
        return same_state(a.contents, b.contents)
    if not is_same([a.value], [b.value]):
        return False
    if a.kind == "elements":
        return torch.equal(a.contents, b.contents)
    if a.kind == "array":
        return same_elements(a.contents, b.contents)
    if a.kind == "set":
        return bool(a.contents == b.contents)
    seen.add((id(a), id(b)))
    contents = a.contents, b.contents
    if a.prefix is not b.prefix:  # one of the snapshots has copied the whole list
        if a.prefix is None:
            a, b, mine, theirs = b, a, theirs, mine
        assert a.prefix is not None
        copied, contents = b.contents[: len(a.prefix)], (a.contents, b.contents[len(a.prefix) :])
        if not is_same((theirs[m.value] if m.kind == "tensor" else m.value for m in copied), a.prefix.elements):
            return False
    for ours, others in (contents, (a.attributes, b.attributes)):
        if ours is None:
            continue
        if len(ours) != len(others):
            return False
        for x, y in zip(ours, others, strict=True):
            if isinstance(x, tuple):
                if not _same_key(x[0], y[0]):
                    return False
                x, y = x[1], y[1]
            if not _is_same(x, y, mine, theirs, seen):
                return False
    return True


class PlainSnapshot:
    """A snapshot of a single value without contents (a tensor or an atom), at a tenth of the cost of `Snapshot`."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.tensors: list[torch.Tensor] = [value] if isinstance(value, torch.Tensor) else []

    def restore(self) -> list[Any]:
        return [self._value]

    def same_as(self, other: Snapshot | PlainSnapshot) -> bool:
        return isinstance(other, PlainSnapshot) and is_same([self._value], [other._value])

    def members(self) -> list[Any]:
        return []

    def added_since(self, _: Snapshot | PlainSnapshot) -> list[Any]:
        return []

    def extends(self, _: Snapshot | PlainSnapshot) -> bool:
        return False


def snapshot_of(value: Any, edited: Mapping[int, Any], prefixes: Prefixes | None = None) -> Snapshot | PlainSnapshot:
    """A snapshot of one value. See `Snapshot` for `edited` and `prefixes`."""
    if isinstance(value, ATOMS) or (isinstance(value, torch.Tensor) and id(value) not in edited):
        return PlainSnapshot(value)
    return Snapshot([value], edited, prefixes)


class _Restoring:
    """One walk through a snapshot that restores each object once."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._done: dict[int, Any] = {}

    def run(self, node: _Node) -> Any:
        if node.kind == "leaf":
            return node.value
        if node.kind == "tensor":
            return self._tensors[node.value]
        if id(node) in self._done:
            return self._done[id(node)]
        self._done[id(node)] = node.value  # for objects that refer to themselves
        made = self._done[id(node)] = self._put(node)
        return made

    def _put(self, node: _Node) -> Any:
        value, contents = node.value, node.contents
        if node.kind == "tuple":
            members = [self.run(member) for member in contents]
            return value(*members) if hasattr(value, "_fields") else tuple.__new__(value, members)
        if node.kind == "elements":
            value.data.copy_(contents)  # no new version: autograd saved the tensor with these values
            return value
        if node.kind == "array":
            put_elements(value, contents)
            return value
        if node.kind == "generator":
            set_generator_state(value, contents)
            return value
        if node.kind == "dict":
            put_into_dict(value, [(key, self.run(member)) for key, member in contents])
        elif node.kind == "list":
            self._put_list(value, [self.run(member) for member in contents], node.prefix)
        elif node.kind == "set":
            if value != set(contents):
                value.clear()
                value.update(contents)
        elif node.kind == "slots":
            for name, member in contents:
                object.__setattr__(value, name, self.run(member))
            for name in set(slot_names(value)) - {name for name, _ in contents}:
                if hasattr(value, name):
                    object.__delattr__(value, name)
        if node.attributes is not None:
            # Not with setattr, which a frozen dataclass refuses and which a class may override.
            put_into_dict(vars(value), [(name, self.run(member)) for name, member in node.attributes])
        return value

    def _put_list(self, value: list[Any] | deque[Any], members: list[Any], prefix: Prefix | None) -> None:
        if prefix is not None and isinstance(value, list):
            if prefix.begins():
                if not is_same(value[len(prefix) :], members):
                    value[len(prefix) :] = members
                return
            members = prefix.elements + members
        if not is_same(value, members):
            value.clear()
            value.extend(members)


def put_into_dict(target: dict[Any, Any], items: Sequence[tuple[Any, Any]]) -> None:
    """Makes these the only items of the dict, in this order. Bypasses methods that its class overrides."""
    if len(target) == len(items) and all(
        _same_key(key, k) and value is v for (key, value), (k, v) in zip(dict.items(target), items, strict=True)
    ):
        return
    kind = OrderedDict if isinstance(target, OrderedDict) else dict
    kind.clear(target)
    for key, value in items:
        kind.__setitem__(target, key, value)


def _same_key(a: Any, b: Any) -> bool:
    """Whether two keys of dicts are the same. Tensors, the keys of an optimizer's state, are compared by identity."""
    return a is b or (not isinstance(a, torch.Tensor) and bool(a == b))


def is_same(now: Iterable[Any], before: Sequence[Any]) -> bool:
    """Whether two sequences have the same objects or equal atoms."""
    now = list(now)
    if len(now) != len(before):
        return False
    return all(map(operator.is_, now, before)) or all(
        a is b or (isinstance(a, ATOMS) and type(a) is type(b) and a == b) for a, b in zip(now, before, strict=True)
    )


TOLERANCE = 1e-4  # relative difference between numbers that rounding can explain


def is_near(a: float, b: float) -> bool:
    """Whether two numbers differ by rounding at most. Two numbers that are not finite count as equal."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) == math.isfinite(b)
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1e-2)  # losses may be near zero


def same_elements(a: Any, b: Any) -> bool:
    """Whether two arrays have the same elements."""
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")) if isinstance(a, np.ndarray) else bool(a == b)


def put_elements(target: Any, elements: Any) -> None:
    """Sets the elements of an array in place."""
    if isinstance(target, np.ndarray):
        target[...] = elements
    else:
        target[:] = elements


def slot_names(value: Any) -> list[str]:
    found: list[str] = []
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else list(slots):
            if name.startswith("__") and not name.endswith("__"):
                found.append(f"_{kind.__name__.lstrip('_')}{name}")  # the mangled name
            elif name not in ("__dict__", "__weakref__"):
                found.append(name)
    return found if type(value).__module__ != "builtins" else []


# Random number generators.


def generator_state(value: Any) -> Any:
    """The state of a random number generator; None if the value is not a generator."""
    for kind, get, _ in _GENERATORS:
        if isinstance(value, kind) and not isinstance(value, random.SystemRandom):
            return get(value)
    return None


def set_generator_state(generator: Any, state: Any) -> None:
    for kind, _, put in _GENERATORS:
        if isinstance(generator, kind):
            put(generator, state)
            return


def same_state(a: Any, b: Any) -> bool:
    """Whether two states of one generator are equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    return bool(a == b)


def _set_numpy_generator(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_GENERATORS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], None]], ...] = (
    (random.Random, random.Random.getstate, random.Random.setstate),
    (torch.Generator, torch.Generator.get_state, lambda generator, state: generator.set_state(state) and None),
    (np.random.Generator, lambda generator: generator.bit_generator.state, _set_numpy_generator),
    (
        np.random.RandomState,
        lambda generator: generator.get_state(legacy=False),
        lambda generator, state: generator.set_state(state),
    ),
)
