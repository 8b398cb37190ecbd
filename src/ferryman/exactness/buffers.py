"""Buffers that a unit's own code edits, as running statistics do.

The unit runs twice. Its second run must see its buffers as the first did, and must leave them as they are; and what the
first run has made of them must reach the host, since the slot will hold another unit. Which buffers a unit edits is
found in the first step: until then all of them are treated so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ferryman.exactness.guard import NewStateError
from ferryman.model.binding import adopt_assigned, is_assigned
from ferryman.model.units import Item, Unit

Bound = tuple[Item, torch.Tensor]  # a buffer, and the device's tensor for it
Copies = dict[Item, torch.Tensor]  # buffers, as they were at some time


class Buffers:
    """Those of the unit on visit."""

    def __init__(self) -> None:
        self.edited: set[Item] = set()  # known to be, in a forward
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
            elif not self._learns or not torch.equal(tensor.detach().cpu(), clone):
                needed[item] = clone
                self.edited.add(item)
                self._changed[item] = tensor
                if item not in self._originals:
                    self._originals[item] = clone.cpu()
        self._versions = [tensor._version for _, tensor in self.bound]
        return needed or None

    @contextlib.contextmanager
    def as_they_were(self, before: Copies | None) -> Iterator[None]:
        """Within, they have the values of that time, and may be edited."""
        if before is None:
            yield
            return
        now = {item: tensor.detach().clone() for item, tensor in self.bound if item in before}
        try:
            self._put(before)
            yield
        finally:
            self._put(now)
            self._versions = [tensor._version for _, tensor in self.bound]

    def _put(self, copies: Copies) -> None:
        for item, tensor in self.bound:  # which may be in another slot by now
            if item in copies:
                tensor.data.copy_(copies[item])  # past the version: what autograd saved has these values again
