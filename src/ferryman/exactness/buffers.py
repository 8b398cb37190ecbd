"""Buffers that a unit's own code edits, such as running statistics.

The unit runs twice. Its second run must see the values that the first run saw, and must not change the buffers. Changes
by the first run and by the backward must be copied to the host, because another unit will use the slot. The first step
finds out which buffers a unit edits. Until then, all of its buffers are treated as edited.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch

from ferryman.exactness.guard import NewStateError
from ferryman.model.binding import adopt_assigned, bind, is_assigned
from ferryman.model.units import Item, Unit

Bound = tuple[Item, torch.Tensor]  # a buffer, and the device's tensor for it
Copies = dict[Item, torch.Tensor]  # copies of buffers at some point of a step


class Buffers:
    """The buffers of the unit that is visited."""

    def __init__(self) -> None:
        self.edited: set[Item] = set()  # buffers that are known to be edited
        self._edited_in_backward: set[Item] = set()  # edited by hooks and autograd functions
        self._learns = self._ignores = False
        self._unit: Unit | None = None  # the unit that is visited
        self.bound: Sequence[Bound] = ()
        self._versions: list[int] = []
        self._changed: dict[Item, torch.Tensor] = {}  # edited in this visit
        self._originals: dict[Item, torch.Tensor] = {}  # the host's values before the step

    def visit(self, unit: Unit, bound: Sequence[Bound]) -> None:
        """Begins a visit to the unit with these buffers."""
        self._unit, self.bound = unit, bound
        self._versions = [tensor._version for _, tensor in bound]
        self._changed = {}

    def leave(self) -> list[Bound]:
        """Ends the visit. Returns the buffers that it has changed."""
        changed, self.bound, self._changed = list(self._changed.items()), (), {}
        return changed

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Context in which all buffers may be edited, and edits are recorded. On exit, the host's buffers are reset."""
        self._learns = True
        try:
            yield
        finally:
            self._learns = False
            self.undo()

    def commit(self) -> None:
        """Drops the original values after a step that succeeded."""
        self._originals.clear()

    def undo(self) -> None:
        """Resets the host's buffers to their values before the step."""
        for item, original in self._originals.items():
            item.tensor.data.copy_(original)
        self._originals.clear()

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """Context in which edits of buffers are neither recorded nor refused."""
        self._ignores = True
        try:
            yield
        finally:
            self._ignores = False

    def adopt(self) -> None:
        """Called after the unit's code: copies tensors that it has assigned to buffers into the device's tensors."""
        for item, tensor in self.bound:
            if self._ignores or not is_assigned(item, tensor):
                continue
            if not self._learns and item not in self.edited:
                self.edited.add(item)
                raise NewStateError([item.name])
            self._refuse_graph(item)
            adopt_assigned(item, tensor)

    def _refuse_graph(self, item: Item) -> None:
        """Refuses a tensor with a graph that the visited unit assigns to a resident buffer, which other code can use.
        Only its values are copied."""
        assert self._unit is not None, "a unit's code runs only during a visit to the unit"
        assigned = (place.current() for place in item.places)
        if item not in self._unit.items and any(t is not None and t.requires_grad for t in assigned):
            raise ValueError(
                f"the unit {self._unit.name!r} assigns a tensor with a graph to its buffer {item.name!r}, which is "
                "used outside the unit, too: its gradient would be lost. Keep the tensor in a plain attribute instead "
                "of a buffer, or detach it"
            )

    def copy(self) -> Copies | None:
        """Copies of the buffers that a run may edit, with their current values."""
        if self._learns:  # copy all buffers to the host: on the device they would count against the budget
            copies = {item: t.detach().to("cpu", copy=True) for item, t in self.bound}
        else:
            copies = {item: t.detach().clone() for item, t in self.bound if item in self.edited}
        return copies or None

    def ran(self, unit: Unit, before: Copies | None) -> Copies | None:
        """Called after the first run of a call. Returns the copies from `before` that its second run will need."""
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
                or item in self._edited_in_backward  # a backward of another micro-batch may precede the second run
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
        """Copies of these buffers with their current values."""
        return {item: tensor.detach().clone() for item, tensor in self.bound if item in (items or ())}

    def put(self, copies: Copies | None) -> None:
        """Sets buffers to these values."""
        for item, tensor in self.bound if copies else ():  # its slot may differ from that of the copied one
            if copies and item in copies:
                tensor.data.copy_(copies[item])  # no new version: autograd saved the tensor with these values
        self._versions = [tensor._version for _, tensor in self.bound]

    def in_backward(self, unit: Unit, now: Copies) -> contextlib.AbstractContextManager[None]:
        """Context of a unit's backward. Edits of buffers by hooks and custom autograd functions stay.

        `now`: the values, before the second run, of buffers that this run has edited. The graph may need the values
        that the second run has left in the buffers, so during the backward the module is bound to the tensors in `now`.
        """
        return self._bound_in_backward(unit, now) if self.bound else contextlib.nullcontext()

    @contextlib.contextmanager
    def _bound_in_backward(self, unit: Unit, now: Copies) -> Iterator[None]:
        if self._ignores:
            bind(self.bound)  # the second run may have assigned others
            yield
            return
        seen = [(item, tensor, tensor._version) for item, tensor in self.bound]
        current = {item: now.get(item, tensor) for item, tensor in self.bound}
        before = {item: tensor.detach().to("cpu", copy=True) for item, tensor in current.items() if self._learns}
        versions = {item: tensor._version for item, tensor in current.items()}
        bind(list(current.items()))
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
        """Whether a backward has changed this buffer. `current`: the tensor that the module had for it."""
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
