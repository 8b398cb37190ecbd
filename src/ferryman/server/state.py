"""What an optimizer keeps of a unit: the float32 master of its weights, moments, and how often each was stepped."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ferryman.pinned import PinnedMemory
from ferryman.server import kernels
from ferryman.server.kernels import Piece
from ferryman.server.panel import Panel
from ferryman.server.rules import Group, Numbers, Rule
from ferryman.units import (
    GRADIENT,
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

_CHUNK = 1 << 20  # elements


@dataclass(frozen=True)
class Order:
    """What is to be done to one tensor: decided when an update is asked for, whatever its group says later."""

    item: Item
    rule: Rule | None  # None: torch's own
    numbers: Numbers
    group: Group


def master_bytes(unit: Unit) -> int:
    return trained_elements(unit) * master_itemsize(unit)


def state_bytes(unit: Unit, panel: Panel) -> int:
    return arrays(unit, panel) * trained_elements(unit) * GRADIENT.itemsize


def arrays(unit: Unit, panel: Panel) -> int:
    """How many numbers are kept of each element; what torch itself keeps is torch's."""
    ruled = [rule for item in unit.trained if (rule := panel.rule(item)) is not None]
    return max((len(rule.states) for rule in ruled), default=0)


def is_whole(unit: Unit, panel: Panel) -> bool:
    """Whether tensors must be updated as wholes, on the host: torch's own optimizers count steps by tensor."""
    return any(panel.rule(item) is None for item in unit.trained)


class Run(NamedTuple):
    """Weights of neighbouring tensors, or parts of them, that one copy can move."""

    host: torch.Tensor  # bytes
    offset: int  # where they begin in the unit's memory
    at: int  # where they begin in a memory for the weights of the subgroup alone, of one width for all


class Spans(NamedTuple):
    """All that an update of a subgroup reads and writes on the host, but for gradients."""

    weights: Sequence[Run]
    rest: Sequence[torch.Tensor]  # bytes: what the weights lack in float32 (if they do), and each array of state

    def tensors(self) -> list[torch.Tensor]:
        return [*(run.host for run in self.weights), *self.rest]


class UnitState:
    """The optimizer's memory of one unit."""

    def __init__(self, unit: Unit, panel: Panel, device: torch.device) -> None:
        self._panel = panel
        self._offsets = trained_offsets(unit)
        self._masters = PinnedMemory(master_bytes(unit), device)
        count = arrays(unit, panel)
        self._states = [PinnedMemory(trained_elements(unit) * GRADIENT.itemsize, device) for _ in range(count)]
        self._steps = dict.fromkeys(unit.trained, 0)
        self._versions: dict[Item, int] = {}
        self._torch: dict[Item, torch.optim.Optimizer] = {}  # of tensors that are left to torch
        self._theirs: dict[Item, dict[str, Any]] = {}  # what torch's optimizer had of a tensor when it was taken
        self._master: dict[Item, torch.Tensor | None] = {}
        for item, begin in self._offsets.items():
            dtype, at = master_dtype(item.dtype), begin * master_itemsize(unit)
            end = at if dtype is None else at + item.tensor.numel() * dtype.itemsize
            self._master[item] = None if dtype is None else self._masters.bytes[at:end].view(dtype)
            if (rule := panel.rule(item)) is not None:
                for state in self._states_of(item, rule):
                    state.fill_(rule.start(panel.group(item)))
        self.take_states()

    def take_states(self) -> None:
        """What torch's optimizer has of the tensors: from a checkpoint, or from training without an engine."""
        for item in self._steps:
            theirs = self._panel.optimizer.state.pop(item.tensor, None)
            if not theirs:
                continue
            self._theirs[item] = theirs
            self._torch.pop(item, None)  # it is made anew, with this
            rule = self._panel.rule(item)
            if rule is not None and all(isinstance(theirs.get(name), torch.Tensor) for name in rule.states):
                for name, state in zip(rule.states, self._states_of(item, rule), strict=True):
                    state.copy_(theirs[name].reshape(-1))
                self._steps[item] = int(theirs.get("step", 1))

    def undo(self, orders: Sequence[Order]) -> None:
        """These were not carried out."""
        for order in orders:
            self._steps[order.item] -= 1

    def give_states(self) -> None:
        """To torch's optimizer: for its state_dict, and to go on without an engine."""
        for item, steps in self._steps.items():
            rule, theirs = self._panel.rule(item), self._theirs.get(item)
            if item in self._torch:
                (theirs,) = self._torch[item].state.values()
            elif rule is not None and steps:
                shape, dtype = item.tensor.shape, item.tensor.dtype
                states = zip(rule.states, self._states_of(item, rule), strict=True)
                theirs = {name: state.view(shape).to(dtype) for name, state in states}
                theirs["step"] = torch.tensor(float(steps))
            if theirs is not None:
                self._panel.optimizer.state[item.tensor] = theirs

    def kept(self, item: Item) -> dict[str, torch.Tensor]:
        """What there is of a tensor beside its weights, in place: what these lack in float32, and the rule's state."""
        master, rule = self._master[item], self._panel.rule(item)
        found = {} if master is None else {"master": master}
        if rule is not None:
            found.update(zip(rule.states, self._states_of(item, rule), strict=True))
        return found

    def kept_by_torch(self, item: Item) -> dict[str, Any] | None:
        """The state of a tensor that is left to torch."""
        if item in self._torch:
            return dict(*self._torch[item].state.values())
        return self._theirs.get(item) if self._panel.rule(item) is None else None

    def steps(self, item: Item) -> int:
        return self._steps[item]

    def restore(self, item: Item, steps: int, theirs: dict[str, Any] | None) -> None:
        """What `kept` shows has been written; this is the rest."""
        self._steps[item] = steps
        self._torch.pop(item, None)
        self._theirs.pop(item, None)
        if theirs is not None:
            self._theirs[item] = theirs

    def take(self, item: Item, values: torch.Tensor, into: torch.Tensor) -> None:
        """Stores a tensor's weights, given in any dtype: the working copy and its master."""
        flat, weights, master = values.detach().reshape(-1), into.view(-1), self._master[item]
        for start in range(0, flat.numel(), _CHUNK):  # what is needed in between is small
            at = slice(start, start + _CHUNK)
            kernels.split(flat[at].to(torch.float32), weights[at], None if master is None else master[at])

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
        # Through `.data`: what is written there does not count as an edit of the user's.
        return kernels.join(item.tensor.data.view(-1), self._master[item]).view(item.tensor.shape)

    def order(self, items: Collection[Item]) -> list[Order]:
        """One step for these tensors: counts it, and reads the groups as they are now."""
        orders = []
        for item in items:
            self._steps[item] += 1
            rule, group = self._panel.rule(item), self._panel.group(item)
            options = {name: value for name, value in group.items() if name != "params"}
            numbers = rule.numbers(group, self._steps[item]) if rule is not None else ()
            orders.append(Order(item, rule, numbers, options))
        return orders

    def spans(self, subgroup: Subgroup, weights: torch.Tensor) -> Spans:
        """`weights` is the unit's memory."""
        width, runs = weight_itemsize(subgroup.unit), list[Run]()
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
                runs[-1] = Run(weights[last.offset : end], last.offset, last.at)
            else:
                runs.append(Run(weights[offset:end], offset, at))
        lacking = master_itemsize(subgroup.unit)
        rest = [self._masters.bytes[subgroup.start * lacking : subgroup.stop * lacking]] if lacking else []
        rest += [memory.bytes[subgroup.start * 4 : subgroup.stop * 4] for memory in self._states]
        return Spans(runs, rest)

    def update(
        self, orders: Sequence[Order], gradients: torch.Tensor, start: int, factor: float, threads: int | None
    ) -> None:
        """Carries out the part of the orders whose gradients are given: flat, from the element `start` on."""
        ruled: dict[str, tuple[Rule, list[Piece]]] = {}
        for order in orders:
            shared = overlap(order.item, self._offsets[order.item], start, gradients.numel())
            if shared is None:
                continue
            at, gradient = shared[0], gradients[shared[1]]
            if order.rule is None:
                self._update_by_torch(order, gradient, factor)
                continue
            master = self._master[order.item]
            piece = Piece(
                gradient,
                order.item.tensor.data.view(-1)[at],
                None if master is None else master[at],
                [state[at] for state in self._states_of(order.item, order.rule)],
                (factor, *order.numbers[1:]),
            )
            ruled.setdefault(order.rule.name, (order.rule, []))[1].append(piece)
        for rule, pieces in ruled.values():
            kernels.update(rule, pieces, threads=threads)

    def close(self) -> None:
        for memory in (self._masters, *self._states):
            memory.close()

    def _states_of(self, item: Item, rule: Rule) -> list[torch.Tensor]:
        begin, count = self._offsets[item], item.tensor.numel()
        return [memory.bytes.view(GRADIENT)[begin : begin + count] for memory in self._states[: len(rule.states)]]

    def _update_by_torch(self, order: Order, gradient: torch.Tensor, factor: float) -> None:
        item, optimizer = order.item, self._torch.get(order.item)
        values = self.in_float32(item)
        if optimizer is None:
            kind: Any = type(self._panel.optimizer)
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


def _for_constructor(group: Group, kind: type) -> dict[str, Any]:
    """Only what the class takes: groups also hold what schedulers and the class itself put there."""
    known = inspect.signature(kind).parameters
    return {name: value for name, value in group.items() if name in known}
