"""Long lists to which a step's code only appends.

The relay takes a snapshot of the variables that a unit can reach at every call. A list that grows by one element per
call would be copied as a whole each time, and steps would slow down as it grows. So the elements that a list has when
a step begins are remembered once per step, as its *prefix*. Snapshots of the list refer to the prefix and copy only the
elements after it.

A prefix consists of values that cannot change (numbers, strings, tuples of them) and of tensors without a graph. Before
the first weight changes, and in a trial at every snapshot, all its elements are checked: none may have been replaced,
moved or edited. In a step, snapshots look only at the length of the list and at the ends of the prefix; where these
differ (a window that drops its oldest element), they copy the whole list again.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch

# Values that hold nothing that can change.
ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, range, slice)

_LONG = 32  # elements; shorter lists are copied


class Prefix:
    """The first elements of a list, as they were when the step began."""

    def __init__(self, owner: list[Any], edited: Collection[int], *, careful: bool) -> None:
        self.owner = owner
        self._careful = careful
        self.elements = list(itertools.takewhile(lambda value: _is_settled(value, edited), owner))
        self._tensors = [value for value in self.elements if isinstance(value, torch.Tensor)]
        self._versions = [tensor._version for tensor in self._tensors]
        self._is_broken = False

    def __len__(self) -> int:
        return len(self.elements)

    def begins(self) -> bool:
        """Whether the list still begins with these elements. If not `careful`, only the length of the list and the ends
        of the prefix are looked at."""
        mine, now = self.elements, self.owner
        if not self._is_broken:
            at_ends = len(now) >= len(mine) and now[0] is mine[0] and now[len(mine) - 1] is mine[-1]
            self._is_broken = not at_ends or (self._careful and not self._is_intact())
        return not self._is_broken

    def was_edited(self) -> bool:
        """Whether an element was replaced or edited in a way that `begins` has not noticed."""
        if self.begins():
            self._is_broken = not self._is_intact()
            return self._is_broken
        return False

    def _is_intact(self) -> bool:
        same = all(map(operator.is_, self.owner, self.elements))
        return same and [tensor._version for tensor in self._tensors] == self._versions


class Prefixes:
    """The prefixes of one step."""

    def __init__(self) -> None:
        self._learns = self._careful = False
        self._by_list: dict[int, Prefix] = {}
        self._edited: list[list[Any]] = []  # lists whose elements were seen to be replaced or edited

    @contextlib.contextmanager
    def learning(self, *, careful: bool) -> Iterator[None]:
        """A step begins. Within, lists that `meet` is told of get a prefix."""
        self._by_list.clear()
        self._learns, self._careful = True, careful
        try:
            yield
        finally:
            self._learns = False

    def meet(self, value: list[Any], edited: Collection[int]) -> Prefix | None:
        """The prefix that a snapshot of this list may refer to. `edited`: tensors that may be edited, by identity."""
        if self._learns and len(value) >= _LONG and id(value) not in self._by_list:
            prefix = Prefix(value, edited, careful=self._careful)
            if len(prefix) >= _LONG and not any(value is other for other in self._edited):
                self._by_list[id(value)] = prefix
        found = self._by_list.get(id(value))
        return found if found is not None and found.begins() else None

    def check(self) -> bool:
        """Whether no list has had elements of its prefix replaced or edited; those that have get none from now on."""
        edited = [prefix.owner for prefix in self._by_list.values() if prefix.was_edited()]
        self._edited += edited
        return not edited

    def clear(self) -> None:
        self._by_list.clear()


def _is_settled(value: Any, edited: Collection[int]) -> bool:
    if type(value) is torch.Tensor:
        return not value.requires_grad and id(value) not in edited
    return isinstance(value, ATOMS) or (type(value) is tuple and all(isinstance(member, ATOMS) for member in value))
