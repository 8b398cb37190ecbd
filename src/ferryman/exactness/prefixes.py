"""Long lists to which a step's code only appends.

The relay takes a snapshot of the variables that a unit can reach at every call. A list that grows by one element per
call would be copied as a whole each time, and steps would slow down as it grows. So the elements that a list has at the
start of a step are saved once, as its *prefix*. Snapshots of the list refer to the prefix and copy only the elements
after it.

A prefix consists of immutable values (numbers, strings, tuples of them) and of tensors without a graph. Its elements
are checked before the first weight changes, and in a trial at every snapshot: none may have been replaced, moved or
edited. In a step, snapshots check only the length of the list and both ends of the prefix. If these differ (a window
that drops its oldest element), snapshots copy the whole list again.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch

# Types of immutable values.
ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, range, slice)

_LONG = 32  # elements; shorter lists are copied


class Prefix:
    """The first elements of a list at the start of a step."""

    def __init__(self, owner: list[Any], edited: Collection[int], *, careful: bool) -> None:
        self.owner = owner
        self._careful = careful
        self.elements = list(itertools.takewhile(lambda value: _is_immutable(value, edited), owner))
        self.tensors = [value for value in self.elements if isinstance(value, torch.Tensor)]
        self._versions = [tensor._version for tensor in self.tensors]
        self._is_broken = False

    def __len__(self) -> int:
        return len(self.elements)

    def begins(self) -> bool:
        """Whether the list still begins with these elements. If not `careful`, only the length of the list and the ends
        of the prefix are checked."""
        mine, now = self.elements, self.owner
        if not self._is_broken:
            at_ends = len(now) >= len(mine) and now[0] is mine[0] and now[len(mine) - 1] is mine[-1]
            self._is_broken = not at_ends or (self._careful and not self._is_intact())
        return not self._is_broken

    def was_edited(self) -> bool:
        """Whether an element was replaced or edited in a way that `begins` has not detected."""
        if self.begins():
            self._is_broken = not self._is_intact()
            return self._is_broken
        return False

    def _is_intact(self) -> bool:
        same = all(map(operator.is_, self.owner, self.elements))
        return same and [tensor._version for tensor in self.tensors] == self._versions


class Prefixes:
    """The prefixes of one step."""

    def __init__(self) -> None:
        self._learns = self._careful = False
        self._by_list: dict[int, Prefix] = {}
        self._tensors: set[int] = set()  # ids of the tensors in prefixes
        self._edited: list[list[Any]] = []  # lists whose elements were replaced or edited

    @contextlib.contextmanager
    def learning(self, *, careful: bool) -> Iterator[None]:
        """Context at the start of a step, in which lists passed to `meet` get a prefix."""
        self.clear()
        self._learns, self._careful = True, careful
        try:
            yield
        finally:
            self._learns = False

    def meet(self, value: list[Any], edited: Collection[int]) -> Prefix | None:
        """The prefix that a snapshot of this list may refer to, if any. `edited`: ids of tensors that may be edited."""
        if self._learns and len(value) >= _LONG and id(value) not in self._by_list:
            prefix = Prefix(value, edited, careful=self._careful)
            if len(prefix) >= _LONG and not any(value is other for other in self._edited):
                self._by_list[id(value)] = prefix
                self._tensors.update(map(id, prefix.tensors))
        found = self._by_list.get(id(value))
        return found if found is not None and found.begins() else None

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in a prefix, and so existed before the step; also if the prefix is no longer used."""
        return id(tensor) in self._tensors

    def check(self) -> bool:
        """Whether all prefixes are unchanged. A list whose prefix was edited gets no prefix in later steps."""
        edited = [prefix.owner for prefix in self._by_list.values() if prefix.was_edited()]
        self._edited += edited
        return not edited

    def clear(self) -> None:
        self._by_list.clear()
        self._tensors.clear()


def _is_immutable(value: Any, edited: Collection[int]) -> bool:
    """Whether the value cannot change, or is a tensor that is not expected to be edited."""
    if type(value) is torch.Tensor:
        return not value.requires_grad and id(value) not in edited
    return isinstance(value, ATOMS) or (type(value) is tuple and all(isinstance(member, ATOMS) for member in value))
