"""Buffers that a unit's own code edits, as running statistics do.

The unit runs twice. Its second run must see its buffers as the first did, and must leave them as they are; and what the
first run and the backward have made of them must reach the host, since the slot will hold another unit. Which buffers a
unit edits is found in the first step: until then all of them are treated so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch

from ferryman.exactness.guard import NewStateError
from ferryman.model.binding import adopt_assigned, bind, is_assigned
from ferryman.model.units import Item, Unit

Bound = tuple[Item, torch.Tensor]  # a buffer, and the device's tensor for it
Copies = dict[Item, torch.Tensor]  # buffers, as they were at some time


class Buffers:
    """Those of the unit on visit."""

    def __init__(self) -> None:
        self.edited: set[Item] = set()  # known to be
        self._edited_in_backward: set[Item] = set()  # those of them that hooks and autograd functions edit
        self._learns = self._ignores = False
        self.bound: Sequence[Bound] = ()
        self._versions: list[int] = []
        self._changed: dict[Item, torch.Tensor] = {}  # in this visit
        self._originals: dict[Item, torch.Tensor] = {}  # the host's, before the step

    def visit(self, bound: Sequence[Bound]) -> None:
        """The unit's buffers are here from now on."""
        self.bound = bound
        self._versions = [tensor._version for _, tensor in bound]
        self._changed = {}

    def leave(self) -> list[Bound]:
        """The visit is over; returns what it has changed."""
        changed, self.bound, self._changed = list(self._changed.items()), (), {}
        return changed

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Within, all buffers may be edited, and it is noted which are; afterwards the host's are as they were."""
        self._learns = True
        try:
            yield
        finally:
            self._learns = False
            self.undo()

    def keep(self) -> None:
        """The step is good."""
        self._originals.clear()

    def undo(self) -> None:
        """Gives the host's buffers the values that they had before the step."""
        for item, original in self._originals.items():
            item.tensor.data.copy_(original)
        self._originals.clear()

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """Within, nothing is remembered of buffers, and nothing refused."""
        self._ignores = True
        try:
            yield
        finally:
            self._ignores = False

    def adopt(self) -> None:
        """The unit's code has run: what it has assigned to its buffers counts."""
        for item, tensor in self.bound:
            if self._ignores or not is_assigned(item, tensor):
                continue
            if not self._learns and item not in self.edited:
                self.edited.add(item)
                raise NewStateError([item.name])
            adopt_assigned(item, tensor)

    def copy(self) -> Copies | None:
        """Of the buffers that a run may edit, as they are now."""
        if self._learns:  # which is all of them: on the device they would count against the budget
            copies = {item: t.detach().to("cpu", copy=True) for item, t in self.bound}
        else:
            copies = {item: t.detach().clone() for item, t in self.bound if item in self.edited}
        return copies or None

    def ran(self, unit: Unit, before: Copies | None) -> Copies | None:
        """The first run of a call is over; returns those of the copies that its second run will need."""
        if self._ignores:
            return None
        originals, needed = before or {}, Copies()
        for (item, tensor), version in zip(self.bound, self._versions, strict=True):
            clone = originals.get(item)
            if clone is None:
                if tensor._version != version:
                    raise ValueError(
                        f"the unit {unit.name!r} edits its buffer {item.name!r} in its forward, which it did not do in "
                        "the first step; running it again in the backward would edit it twice"
                    )
            elif (
                not self._learns
                or item in self._edited_in_backward  # of another micro-batch, before the second run
                or not torch.equal(tensor.detach().cpu(), clone)
            ):
                needed[item] = clone
                self.edited.add(item)
                self._changed[item] = tensor
                if item not in self._originals:
                    self._originals[item] = clone.cpu()
        self._versions = [tensor._version for _, tensor in self.bound]
        return needed or None

    def values(self, items: Collection[Item] | None) -> Copies:
        """Copies of these buffers, as they are now."""
        return {item: tensor.detach().clone() for item, tensor in self.bound if item in (items or ())}

    def put(self, copies: Copies | None) -> None:
        """Gives buffers these values."""
        for item, tensor in self.bound if copies else ():  # which may be in another slot by now
            if copies and item in copies:
                tensor.data.copy_(copies[item])  # past the version: what autograd saved has these values again
        self._versions = [tensor._version for _, tensor in self.bound]

    @contextlib.contextmanager
    def in_backward(self, unit: Unit, now: Copies) -> Iterator[None]:
        """Within, a unit's backward runs. Hooks and custom autograd functions may edit buffers, and that counts.

        `now`: the values of buffers that a second run has just edited. The graph may need what that run has left in
        them, so until the backward is over the module has these tensors for them.
        """
        if self._ignores:
            yield
            return
        seen = [(item, tensor, tensor._version) for item, tensor in self.bound]
        current = {item: now.get(item, tensor) for item, tensor in self.bound}
        before = {item: tensor.detach().to("cpu", copy=True) for item, tensor in current.items() if self._learns}
        versions = {item: tensor._version for item, tensor in current.items()}
        bind(list(now.items()))
        try:
            yield
            for item, tensor, version in seen:
                edited = current[item]._version != versions[item]
                if item in now and tensor._version != version:
                    raise ValueError(
                        f"the unit {unit.name!r} edits its buffer {item.name!r} in its forward, and in its backward "
                        "through a reference that its forward has taken. Use the module's attribute in the backward"
                    )
                if self._is_edited_in_backward(unit, item, current[item], before.get(item), edited=edited):
                    self._changed[item] = tensor
        finally:
            self.put(now)

    def _is_edited_in_backward(
        self, unit: Unit, item: Item, current: torch.Tensor, before: torch.Tensor | None, *, edited: bool
    ) -> bool:
        """Whether a backward has given this buffer, of which the module had the `current` tensor, another value."""
        if is_assigned(item, current):
            adopt_assigned(item, current)
            edited = True
        if before is None:
            if edited and item not in self._edited_in_backward:
                raise ValueError(
                    f"the unit {unit.name!r} edits its buffer {item.name!r} in its backward, which it did not do in "
                    "the first step; its second run would see the new value"
                )
            return item in self._edited_in_backward
        if torch.equal(current.detach().cpu(), before):
            return False
        self.edited.add(item)
        self._edited_in_backward.add(item)
        self._originals.setdefault(item, before)
        return True
