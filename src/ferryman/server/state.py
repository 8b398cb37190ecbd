"""What an optimizer keeps of a unit: the float32 master of its weights, moments, and how often each was stepped."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ferryman.distributed.ranks import Share
from ferryman.model.spans import Span
from ferryman.model.units import (
    GRADIENT,
    GRAIN,
    Item,
    Subgroup,
    Unit,
    master_dtype,
    master_itemsize,
    overlap,
    trained_elements,
    trained_offsets,
    weight_itemsize,
)
from ferryman.runtime.pinned import PinnedMemory
from ferryman.server import kernels
from ferryman.server.kernels import Piece
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.rules import Group, Numbers, Rule

_CHUNK = 1 << 20  # elements


@dataclass(frozen=True)
class Order:
    """What is to be done to one tensor: decided when an update is asked for, whatever its group says later."""

    item: Item
    rule: Rule | None  # None: torch's own
    numbers: Numbers
    group: Group


def bounds(unit: Unit, optimizer_view: OptimizerView, share: Share) -> list[int]:
    """Where each rank's part of a unit's trained elements begins; and, at the end, where the last one ends."""
    total = trained_elements(unit)
    if not is_whole(unit, optimizer_view):
        return share.bounds(total, GRAIN)
    owner = zlib.crc32(unit.name.encode()) % share.size  # one has it all
    return [0] * (owner + 1) + [total] * (share.size - owner)


def part(unit: Unit, optimizer_view: OptimizerView, share: Share) -> tuple[int, int]:
    """This rank's."""
    every = bounds(unit, optimizer_view, share)
    return every[share.rank], every[share.rank + 1]


def part_elements(unit: Unit, optimizer_view: OptimizerView, share: Share) -> int:
    low, high = part(unit, optimizer_view, share)
    return high - low


def state_itemsize(unit: Unit, optimizer_view: OptimizerView) -> int:
    """Bytes that a rule keeps of each element."""
    return arrays(unit, optimizer_view) * GRADIENT.itemsize


def arrays(unit: Unit, optimizer_view: OptimizerView) -> int:
    """How many numbers are kept of each element; what torch itself keeps is torch's."""
    ruled = [rule for item in unit.trained if (rule := optimizer_view.rule(item)) is not None]
    return max((len(rule.states) for rule in ruled), default=0)


def is_whole(unit: Unit, optimizer_view: OptimizerView) -> bool:
    """Whether tensors must be updated as wholes, on the host: torch's own optimizers count steps by tensor."""
    return any(optimizer_view.rule(item) is None for item in unit.trained)


class Spans(NamedTuple):
    """All that an update of a subgroup reads and writes on the host, but for gradients."""

    weights: Sequence[Span]
    rest: Sequence[torch.Tensor]  # bytes: what the weights lack in float32 (if they do), and each array of state

    def tensors(self) -> list[torch.Tensor]:
        return [*(run.host for run in self.weights), *self.rest]


class _Part(NamedTuple):
    """Of a tensor, what is this rank's."""

    elements: slice
    at: int  # where it begins in this rank's memories

    @property
    def size(self) -> int:
        return int(self.elements.stop - self.elements.start)


class UnitState:
    """The optimizer's memory of one unit, as far as it is this rank's."""

    def __init__(self, unit: Unit, optimizer_view: OptimizerView, device: torch.device, share: Share) -> None:
        self._optimizer_view = optimizer_view
        self._offsets = trained_offsets(unit)
        self.low, high = part(unit, optimizer_view, share)
        self._masters = PinnedMemory((high - self.low) * master_itemsize(unit), device)
        count = arrays(unit, optimizer_view)
        self._states = [PinnedMemory((high - self.low) * GRADIENT.itemsize, device) for _ in range(count)]
        self._parts: dict[Item, _Part] = {}
        for item, begin in self._offsets.items():
            shared = overlap(item, begin, self.low, high - self.low)
            self._parts[item] = _Part(slice(0, 0), 0) if shared is None else _Part(shared[0], shared[1].start)
        self._steps = dict.fromkeys(unit.trained, 0)
        self._in_vain: set[Item] = set()  # of the last orders, those for tensors without a gradient
        self._versions: dict[Item, int] = {}
        self._torch: dict[Item, torch.optim.Optimizer] = {}  # of tensors that are left to torch
        self._theirs: dict[Item, dict[str, Any]] = {}  # what torch's optimizer had of a tensor when it was taken
        self._master: dict[Item, torch.Tensor | None] = {}
        for item, mine in self._parts.items():
            dtype, at = master_dtype(item.dtype), mine.at * master_itemsize(unit)
            end = at if dtype is None else at + mine.size * dtype.itemsize
            self._master[item] = None if dtype is None else self._masters.bytes[at:end].view(dtype)
            self._start(item)
        self.take_states()

    def take_states(self, *, shown: bool = False) -> None:
        """What torch's optimizer has of the tensors: from a checkpoint, or from training without an engine.

        `shown`: what the server has was there, or another state in its place, so tensors without an entry start anew.
        """
        for item in self._steps:
            theirs = self._optimizer_view.take_state(item.tensor)
            if not theirs:
                if shown:
                    self._start(item)
                continue
            rule = self._optimizer_view.rule(item)
            if rule is None and theirs is self.kept_by_torch(item):
                continue  # it is what torch goes on with
            self._theirs[item] = theirs
            self._torch.pop(item, None)  # it is made anew, with this
            if rule is None:
                continue
            if all(isinstance(theirs.get(name), torch.Tensor) for name in rule.states):
                for name, state in zip(rule.states, self._states_of(item, rule), strict=True):
                    value = theirs[name].reshape(-1)[self._parts[item].elements]
                    if value.data_ptr() != state.data_ptr():  # else it was shown, and edited in place if at all
                        state.copy_(value)
                self._steps[item] = int(theirs.get("step", 1))
            elif shown:
                self._start(item)

    def _start(self, item: Item) -> None:
        """As an optimizer has it before its first step."""
        self._steps[item] = 0
        self._torch.pop(item, None)
        self._theirs.pop(item, None)
        if (rule := self._optimizer_view.rule(item)) is not None:
            for state in self._states_of(item, rule):
                state.fill_(rule.start(self._optimizer_view.group(item)))

    def undo(self, orders: Sequence[Order]) -> None:
        """These were not carried out."""
        for order in orders:
            self._steps[order.item] -= 1

    def give_back_states(self) -> None:
        """To torch's optimizer, what it had before, of tensors that have not been updated since."""
        for item, theirs in self._theirs.items():
            if self._steps[item] == int(theirs.get("step", 1)):
                self._optimizer_view.give_state(item.tensor, theirs)

    def give_states(self, *, in_place: bool = False) -> None:
        """To torch's optimizer: to go on without an engine, in the dtype that it would have made them in; or,
        `in_place`, for the user to read and edit."""
        for item, steps in self._steps.items():
            rule, theirs = self._optimizer_view.rule(item), self._theirs.get(item)
            if rule is None:
                theirs = self.kept_by_torch(item)
            elif steps:
                shape, dtype = item.tensor.shape, GRADIENT if in_place else item.tensor.dtype
                states = zip(rule.states, self._states_of(item, rule), strict=True)
                theirs = {name: state.view(shape).to(dtype) for name, state in states}
                theirs["step"] = torch.tensor(float(steps))
            if theirs:
                self._optimizer_view.give_state(item.tensor, theirs)

    def kept(self, item: Item) -> dict[str, torch.Tensor]:
        """What there is of a tensor beside its weights, in place: what these lack in float32, and the rule's state."""
        master, rule = self._master[item], self._optimizer_view.rule(item)
        found = {} if master is None else {"master": master}
        if rule is not None:
            found.update(zip(rule.states, self._states_of(item, rule), strict=True))
        return found

    def kept_by_torch(self, item: Item) -> dict[str, Any] | None:
        """The state of a tensor that is left to torch, which goes on with it; some optimizers keep none."""
        if item in self._torch:
            return next(iter(self._torch[item].state.values()), {})
        return self._theirs.get(item) if self._optimizer_view.rule(item) is None else None

    def steps(self, item: Item) -> int:
        return self._steps[item]

    def restore(self, item: Item, steps: int, theirs: dict[str, Any] | None) -> None:
        """What `kept` shows has been written; this is the rest."""
        self._steps[item] = steps
        self._torch.pop(item, None)
        self._theirs.pop(item, None)
        if theirs is not None:
            self._theirs[item] = theirs

    def part(self, item: Item) -> slice:
        """Which of a tensor's elements are this rank's."""
        return self._parts[item].elements

    def owns(self, item: Item) -> bool:
        """Whether any of it is this rank's, or it is nobody's, being empty."""
        return self._parts[item].size > 0 or not item.tensor.numel()

    def take(self, item: Item, values: torch.Tensor, into: torch.Tensor, start: int = 0) -> None:
        """Stores a tensor's weights, or those from the element `start` on, given in any dtype: the working copy and its
        master; this rank's part of both."""
        mine, master, flat = self.part(item), self._master[item], values.detach().reshape(-1)
        low, high = max(mine.start, start), min(mine.stop, start + flat.numel())
        for begin in range(low, high, _CHUNK):  # what is needed in between is small
            end = min(begin + _CHUNK, high)
            rest = None if master is None else master[begin - mine.start : end - mine.start]
            kernels.split(flat[begin - start : end - start].to(torch.float32), into.view(-1)[begin:end], rest)

    def taken(self, item: Item) -> None:
        self._versions[item] = item.tensor._version

    @property
    def edited(self) -> list[Item]:
        """Tensors whose weights the user has changed in place since they were taken."""
        return [item for item, version in self._versions.items() if item.tensor._version != version]

    def follow_edits(self) -> None:
        """What edited weights lack in float32 is nothing."""
        for item in self.edited:
            if self._master[item] is not None:
                self.take(item, item.tensor, item.tensor.data)
            self.taken(item)

    def in_float32(self, item: Item) -> torch.Tensor:
        """This rank's part, flat."""
        # Through `.data`: what is written there does not count as an edit of the user's.
        return kernels.join(item.tensor.data.view(-1)[self._parts[item].elements], self._master[item])

    def order(self, items: Collection[Item]) -> list[Order]:
        """One step for these tensors: counts it, and reads the groups as they are now."""
        orders = []
        self._in_vain = set()
        for item in items:
            self._steps[item] += 1
            rule, group = self._optimizer_view.rule(item), self._optimizer_view.group(item)
            options = {name: value for name, value in group.items() if name != "params"}
            numbers = rule.numbers(group, self._steps[item]) if rule is not None else ()
            orders.append(Order(item, rule, numbers, options))
        return orders

    def spans(self, subgroup: Subgroup, weights: torch.Tensor) -> Spans:
        """`weights` is the unit's memory; the subgroup is this rank's."""
        lacking = master_itemsize(subgroup.unit)
        low, high = subgroup.start - self.low, subgroup.stop - self.low
        rest = [self._masters.bytes[low * lacking : high * lacking]] if lacking else []
        rest += [memory.bytes[low * 4 : high * 4] for memory in self._states]
        return Spans(self.runs(subgroup, weights), rest)

    def runs(self, subgroup: Subgroup, weights: torch.Tensor) -> list[Span]:
        """Of any rank's subgroup."""
        width, runs = weight_itemsize(subgroup.unit), list[Span]()
        before: Item | None = None  # in the unit
        for item in subgroup.unit.items:
            neighbour, before = before, item
            shared = (
                overlap(item, self._offsets[item], subgroup.start, subgroup.size) if item in self._offsets else None
            )
            if shared is None:
                continue
            own, theirs = shared
            offset, at = item.offset + own.start * item.dtype.itemsize, theirs.start * width
            end = item.offset + own.stop * item.dtype.itemsize
            last = runs[-1] if runs else None
            if last is not None and neighbour in self._offsets and offset - last.offset == at - last.at:
                runs[-1] = Span(weights[last.offset : end], last.offset, last.at)
            else:
                runs.append(Span(weights[offset:end], offset, at))
        return runs

    def update(
        self,
        orders: Sequence[Order],
        gradients: torch.Tensor,
        start: int,
        factor: float,
        threads: int | None,
        only: Collection[Item] | None = None,
    ) -> None:
        """Carries out the part of the orders whose gradients are given: flat, from the element `start` on.

        `only`: those tensors have one; the others were asked for in vain.
        """
        with torch._C.DisableTorchFunctionSubclass():  # others' reads of the weights wait for this (see reads.py)
            self._update(orders, gradients, start, factor, threads, only)

    def _update(
        self,
        orders: Sequence[Order],
        gradients: torch.Tensor,
        start: int,
        factor: float,
        threads: int | None,
        only: Collection[Item] | None,
    ) -> None:
        ruled: dict[str, tuple[Rule, list[Piece]]] = {}
        for order in orders:
            shared = overlap(order.item, self._offsets[order.item], start, gradients.numel())
            if only is not None and order.item not in only:
                if order.item not in self._in_vain:
                    self._in_vain.add(order.item)
                    self._steps[order.item] -= 1
                continue
            if shared is None:
                continue
            at, gradient = shared[0], gradients[shared[1]]
            if order.rule is None:
                self._update_by_torch(order, gradient, factor)
                continue
            master, before = self._master[order.item], self._parts[order.item].elements.start
            own = slice(at.start - before, at.stop - before)
            piece = Piece(
                gradient,
                order.item.tensor.data.view(-1)[at],
                None if master is None else master[own],
                [state[own] for state in self._states_of(order.item, order.rule)],
                (factor, *order.numbers[1:]),
            )
            ruled.setdefault(order.rule.name, (order.rule, []))[1].append(piece)
        for rule, pieces in ruled.values():
            kernels.update(rule, pieces, threads=threads)

    @property
    def memories(self) -> list[PinnedMemory]:
        return [self._masters, *self._states]

    def close(self) -> None:
        for memory in self.memories:
            memory.close()

    def _states_of(self, item: Item, rule: Rule) -> list[torch.Tensor]:
        mine = self._parts[item]
        memories = self._states[: len(rule.states)]
        return [memory.bytes.view(GRADIENT)[mine.at : mine.at + mine.size] for memory in memories]

    def _update_by_torch(self, order: Order, gradient: torch.Tensor, factor: float) -> None:
        item, optimizer = order.item, self._torch.get(order.item)
        values = self.in_float32(item).view(item.tensor.shape)
        if optimizer is None:
            kind: Any = type(self._optimizer_view.optimizer)
            parameter = nn.Parameter(values)
            optimizer = self._torch[item] = kind([parameter], **_for_constructor(order.group, kind))
            if item in self._theirs:
                optimizer.state[parameter] = self._theirs[item]
        (group,) = optimizer.param_groups
        group.update(order.group)
        (parameter,) = group["params"]
        parameter.data = values
        parameter.grad = gradient.to(torch.float32).view(values.shape) * factor
        optimizer.step()
        parameter.grad = None
        if item.dtype != torch.float32:
            self.take(item, values, item.tensor.data)


def fill(values: torch.Tensor, weights: torch.Tensor, start: int) -> None:
    """Stores a tensor's weights as `UnitState.take` does, those of other ranks too, without a master."""
    flat = values.detach().reshape(-1)
    into = weights.view(-1)[start : start + flat.numel()]
    dtype = master_dtype(into.dtype)
    for begin in range(0, flat.numel(), _CHUNK):
        at = slice(begin, begin + _CHUNK)
        master = None if dtype is None else torch.empty(into[at].numel(), dtype=dtype)
        kernels.split(flat[at].to(torch.float32), into[at], master)


def _for_constructor(group: Group, kind: type) -> dict[str, Any]:
    """Only what the class takes: groups also hold what schedulers and the class itself put there."""
    known = inspect.signature(kind).parameters
    return {name: value for name, value in group.items() if name in known}
