"""Leaf tensors outside the engine's model that may be trained: parameters of a discriminator or teacher, a temperature.

A loss may change them in three ways: a `backward()` adds to their gradients, an optimizer of the user steps, or the
code edits them (a teacher's moving average, often through `.data`). Changes by a trial are undone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ferryman.exactness.snapshot import put_into_dict
from ferryman.exactness.variables import CloneBudget, Elements, Holder, Variable, cannot_put_back, is_here
from ferryman.exactness.weight_edits import sum_bytes


class Gradient(Variable):
    """The gradient of a leaf."""

    def __init__(self, name: str, leaf: torch.Tensor) -> None:
        super().__init__(f"{name}.grad", leaf, lambda: leaf.grad, lambda value: setattr(leaf, "grad", value))


class _Values:
    """The saved state of a tensor: its version and, if requested, the sum of its bytes and its elements."""

    def __init__(self, tensor: torch.Tensor, *, sums: bool, keeps: bool) -> None:
        self.version = tensor._version
        here = is_here(tensor)  # always true when a step begins
        self._sum = sum_bytes(tensor.detach()) if sums and here else None
        # Copy to the host: a copy on the device would count against the budget.
        self.elements = tensor.detach().to("cpu", copy=True) if keeps and here else None

    def has_changed(self, tensor: torch.Tensor) -> bool:
        if tensor._version != self.version:
            return True
        return self._sum is not None and is_here(tensor) and not torch.equal(sum_bytes(tensor.detach()), self._sum)

    def put_back(self, name: str, tensor: torch.Tensor) -> None:
        if not self.has_changed(tensor):
            return
        if self.elements is None:
            raise cannot_put_back(name)
        tensor.data.copy_(self.elements)


class Leaf(Holder):
    """The elements of a leaf, and its gradient.

    `thorough`: also detect edits that bypass the version counter, and keep the leaf alive. `budget`: for copies of
    elements; without one, edits cannot be undone. `of_gradients`: the budget for copies of existing gradients.
    """

    class _Seen(NamedTuple):
        values: _Values
        gradient: torch.Tensor | None
        gradient_values: _Values | None

    def __init__(
        self, name: str, leaf: torch.Tensor, budget: CloneBudget, of_gradients: CloneBudget, *, thorough: bool
    ) -> None:
        super().__init__(name)
        self._thorough = thorough
        self._leaf: Callable[[], torch.Tensor | None] = (lambda: leaf) if thorough else weakref.ref(leaf)
        self._keeps = budget.take(leaf.nbytes)
        self._of_gradients = of_gradients
        self._keeps_gradient: bool | None = None
        self._last: Leaf._Seen | None = None

    def capture(self) -> Leaf._Seen | None:
        if (leaf := self._leaf()) is None:
            return None
        if self._last is None or self.changed(self._last):
            gradient = leaf.grad
            if gradient is not None and self._keeps_gradient is None:
                self._keeps_gradient = self._of_gradients.take(gradient.nbytes)
            self._last = self._Seen(
                _Values(leaf, sums=self._thorough, keeps=self._keeps),
                gradient,
                None if gradient is None else _Values(gradient, sums=False, keeps=bool(self._keeps_gradient)),
            )
        return self._last

    def changed(self, before: Leaf._Seen | None) -> list[Variable]:
        leaf = self._leaf()
        if leaf is None or before is None:
            return []
        found: list[Variable] = []
        if before.values.has_changed(leaf):
            found.append(Elements(self.name, leaf, None))
        gradient = leaf.grad
        if gradient is not before.gradient or (
            gradient is not None and before.gradient_values is not None and before.gradient_values.has_changed(gradient)
        ):
            found.append(Gradient(self.name, leaf))
        return found

    def put_back(self, before: Leaf._Seen | None) -> None:
        leaf = self._leaf()
        if leaf is None or before is None:
            return
        self._last = None  # restoring elements does not change versions
        if leaf.grad is not before.gradient:
            leaf.grad = before.gradient
        if before.gradient is not None and before.gradient_values is not None:
            before.gradient_values.put_back(f"{self.name}.grad", before.gradient)
        before.values.put_back(self.name, leaf)


class OptimizerState(Holder):
    """The state of an optimizer outside the engine: its first step makes the state, and later steps edit tensors."""

    class _Seen(NamedTuple):
        entries: list[tuple[Any, Any]]  # the state of each parameter, a dict; other entries as they are
        values: list[tuple[torch.Tensor, _Values]]

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, budget: CloneBudget, *, thorough: bool) -> None:
        super().__init__(f"{name}.state")
        self._state: dict[Any, Any] = optimizer.state
        self._budget = budget
        self._thorough = thorough
        self._keeps: dict[int, bool] = {}

    def capture(self) -> OptimizerState._Seen:
        entries = [(key, dict(held) if isinstance(held, dict) else held) for key, held in self._state.items()]
        parts = [list(held.values()) if isinstance(held, dict) else [held] for _, held in entries]
        tensors = [value for held in parts for value in held if isinstance(value, torch.Tensor)]
        return self._Seen(entries, [(tensor, self._values(tensor)) for tensor in tensors])

    def _values(self, tensor: torch.Tensor) -> _Values:
        keeps = self._keeps.setdefault(id(tensor), False) or self._budget.take(tensor.nbytes)
        self._keeps[id(tensor)] = keeps
        return _Values(tensor, sums=self._thorough, keeps=keeps)

    def changed(self, before: OptimizerState._Seen) -> list[Variable]:
        if self._is_as(before):
            return []
        state = self._state
        return [Variable(self.name, state, lambda: state, lambda _: None)]

    def _is_as(self, before: OptimizerState._Seen) -> bool:
        now = list(self._state.items())
        return (
            len(now) == len(before.entries)
            and all(
                (key is seen or key == seen) and _has_same(held, was)
                for (key, held), (seen, was) in zip(now, before.entries, strict=True)
            )
            and not any(values.has_changed(tensor) for tensor, values in before.values)
        )

    def put_back(self, before: OptimizerState._Seen) -> None:
        if self._is_as(before):
            return
        entries = []
        for key, was in before.entries:
            held = self._state.get(key)
            if isinstance(held, dict) and isinstance(was, dict):
                put_into_dict(held, list(was.items()))
                entries.append((key, held))  # the same object, to which the optimizer may refer
            else:
                entries.append((key, was))
        put_into_dict(self._state, entries)
        for tensor, values in before.values:
            values.put_back(self.name, tensor)


def _has_same(held: Any, was: Any) -> bool:
    """Whether the state of a parameter, or any other entry, still has the same objects."""
    if isinstance(held, dict) and isinstance(was, dict):
        return held.keys() == was.keys() and all(held[name] is was[name] for name in was)
    return held is was


def is_leaf(value: torch.Tensor) -> bool:
    """Whether a tensor is a leaf that may be trained, or edited like one that is trained."""
    return (
        (isinstance(value, nn.Parameter) or value.requires_grad)
        and value.is_leaf
        and value.layout == torch.strided
        and not value.is_meta
        and not nn.parameter.is_lazy(value)
    )
