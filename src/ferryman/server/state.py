"""Optimizer state of a unit: the float32 masters of its weights, the moments, and the step count of each tensor."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ferryman.distributed.ranks import Share
from ferryman.model.spans import Span
from ferryman.model.units import (
    BLOCK,
    GRAIN,
    SMALL,
    Item,
    Subgroup,
    Unit,
    master_dtype,
    overlap,
)
from ferryman.runtime.pinned import PinnedMemory
from ferryman.server import kernels, moments
from ferryman.server.kernels import PieceTarget, Table
from ferryman.server.optimizer_view import GroupKey, OptimizerView
from ferryman.server.own_step import OwnSettings, OwnStep, has_no_values, in_dtype
from ferryman.server.rules import STATE, Numbers, Rule
from ferryman.server.state_codec import blocks_of, decoded, encode
from ferryman.server.state_layout import StateLayout

_CHUNK = 1 << 20  # elements
_ALIGNMENT = 64  # bytes, of each array: a cache line


@dataclass(frozen=True)
class UpdateArgs:
    """How some tensors are updated. Read when the update is requested: later changes of their group do not matter."""

    items: tuple[Item, ...]  # of one group, and with the same number of steps
    rule: Rule | None  # None: the optimizer's own step makes the update
    numbers: Numbers  # of the rule
    settings: OwnSettings | None  # of the own step
    step: int  # counted from 1


SCALES = ".scales"  # what follows a state's name, for the scales of its blocks


def bounds(unit: Unit, optimizer_view: OptimizerView, share: Share) -> list[int]:
    """The elements at which each rank's part of a unit's trained elements begins, and the end of the last part."""
    total = unit.trained_elements
    if not is_whole(unit, optimizer_view):
        return share.bounds(total, BLOCK if optimizer_view.is_compact else GRAIN)
    owner = zlib.crc32(unit.name.encode()) % share.size  # one rank owns all of it
    return [0] * (owner + 1) + [total] * (share.size - owner)


def part(unit: Unit, optimizer_view: OptimizerView, share: Share) -> tuple[int, int]:
    """The elements of a unit that this rank owns: the first one, and the end."""
    cuts = bounds(unit, optimizer_view, share)
    return cuts[share.rank], cuts[share.rank + 1]


def part_elements(unit: Unit, optimizer_view: OptimizerView, share: Share) -> int:
    low, high = part(unit, optimizer_view, share)
    return high - low


def state_bytes(unit: Unit, optimizer_view: OptimizerView, share: Share) -> int:
    """Bytes of a rank's part of the optimizer state."""
    low, high = part(unit, optimizer_view, share)
    own = sum(map(optimizer_view.own_state_bytes, unit.trained)) if high > low else 0  # a rank has all of them, or none
    return StateLayout(unit, optimizer_view).nbytes(low, high) + own


def state_itemsize(unit: Unit, optimizer_view: OptimizerView) -> float:
    """Bytes of optimizer state per element of the unit's large tensors, each of which a rule updates."""
    return _most_states(unit, optimizer_view) * moments.itemsize(optimizer_view.format)


def small_state(unit: Unit, optimizer_view: OptimizerView) -> int:
    """How many bytes more the state of the unit's small tensors has, because it is in float32."""
    few = sum(-(-n // GRAIN) * GRAIN for item in unit.trained if (n := item.tensor.numel()) < SMALL)
    more = STATE.itemsize - moments.itemsize(optimizer_view.format)
    return math.ceil(_most_states(unit, optimizer_view) * few * more)


def _most_states(unit: Unit, optimizer_view: OptimizerView) -> int:
    ruled = [rule for item in unit.trained if (rule := optimizer_view.rule(item)) is not None]
    return max((len(rule.states) for rule in ruled), default=0)


def is_whole(unit: Unit, optimizer_view: OptimizerView) -> bool:
    """Whether tensors must not be cut, and be updated on the host: the optimizer's own step takes whole tensors."""
    return any(optimizer_view.rule(item) is None for item in unit.trained)


class SubgroupMemory(NamedTuple):
    """All host memory that an update of a subgroup reads and writes, except for the gradient."""

    weights: Sequence[Span]
    rest: Sequence[torch.Tensor]  # bytes: the masters' rest, if weights are not float32, and each array of the state

    def tensors(self) -> list[torch.Tensor]:
        return [*(span.host for span in self.weights), *self.rest]


class _Part(NamedTuple):
    """The part of a tensor that this rank owns."""

    elements: slice
    at: int  # the element at which it begins in this rank's memory

    @property
    def size(self) -> int:
        return int(self.elements.stop - self.elements.start)


class _KnownTable(NamedTuple):
    """A table for the update of a range, made when it was updated last."""

    items: Sequence[Item]
    size: int  # of the gradients
    dtype: torch.dtype
    table: Table | None  # None: the range has nothing of these tensors


class UnitState:
    """The optimizer state of one unit: the part that this rank owns."""

    def __init__(self, unit: Unit, optimizer_view: OptimizerView, device: torch.device, share: Share) -> None:
        self._optimizer_view = optimizer_view
        self._offsets = unit.trained_offsets
        self.low, high = part(unit, optimizer_view, share)
        self._layout = StateLayout(unit, optimizer_view)
        sizes = [(high - self.low) * unit.master_itemsize, *self._layout.sizes(self.low, high)]
        ends = list(itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        self._memory = PinnedMemory(ends[-1], device)  # one registration for all
        starts = [0, *ends[:-1]]
        parts = [_apart(self._memory.bytes[at : at + size]) for at, size in zip(starts, sizes, strict=True)]
        self._masters, self._states = parts[0], parts[1:]  # of states, and then of their scales
        self._parts: dict[Item, _Part] = {}
        for item, begin in self._offsets.items():
            shared = overlap(item, begin, self.low, high - self.low)
            self._parts[item] = _Part(slice(0, 0), 0) if shared is None else _Part(shared[0], shared[1].start)
        self._steps = dict.fromkeys(unit.trained, 0)
        self._not_updated: set[Item] = set()  # tensors of the last `request` that turned out to have no gradient
        self._versions: dict[Item, int] = {}
        self._own: dict[Item, OwnStep] = {}  # of tensors that no rule updates
        self._theirs: dict[Item, dict[str, Any]] = {}  # what the optimizer had of a tensor when it was taken
        # By the begin of each range, and the place in what is requested. They stay valid, because the engine refuses
        # parameters whose memory was exchanged.
        self._tables: dict[tuple[int, int], _KnownTable] = {}
        self._subgroups: dict[Subgroup, SubgroupMemory] = {}
        self._master: dict[Item, torch.Tensor | None] = {}
        for item, mine in self._parts.items():
            dtype, at = master_dtype(item.dtype), mine.at * unit.master_itemsize
            end = at if dtype is None else at + mine.size * dtype.itemsize
            self._master[item] = None if dtype is None else self._masters[at:end].view(dtype)
            self._start(item)
        self.take_states()

    def take_states(self, *, shown: bool = False) -> None:
        """Takes over the state that torch's optimizer has: from a checkpoint, or from training without an engine.

        `shown`: the server's state was put there before, so a tensor without an entry was removed by the user, and
        starts from nothing.
        """
        for item in self._steps:
            if shown and not self._optimizer_view.shows_state(item):
                continue  # another optimizer's state was put there, this one's was not
            theirs = self._optimizer_view.take_state(item.tensor)
            if not theirs or has_no_values(theirs):
                if shown:
                    self._start(item)
                continue
            rule = self._optimizer_view.rule(item)
            if rule is None and theirs is self.own_state(item):
                continue  # the state that the optimizer's own step uses already
            self._theirs[item] = theirs if rule is not None else in_dtype(theirs, STATE)
            self._own.pop(item, None)  # another one is made, with this state
            if rule is None:
                continue
            if all(isinstance(theirs.get(name), torch.Tensor) for name in rule.states):
                for number, name in enumerate(rule.states):
                    value = theirs[name].reshape(-1)[self._parts[item].elements]
                    self._put_state(item, rule, number, value)
                self._steps[item] = int(theirs.get("step", 1))
            elif shown:
                self._start(item)

    def _start(self, item: Item) -> None:
        """Sets a tensor's state to what it is before the first step."""
        self._steps[item] = 0
        self._own.pop(item, None)
        self._theirs.pop(item, None)
        if (rule := self._optimizer_view.rule(item)) is not None:
            for state in (*self._states_of(item, rule), *self._scales_of(item, rule)):
                state.fill_(rule.start(self._optimizer_view.group(item)))

    def undo(self, requested: Sequence[UpdateArgs]) -> None:
        """Called when requested updates were not made: their steps do not count."""
        for args in requested:
            for item in args.items:
                self._steps[item] -= 1

    def give_back_states(self) -> None:
        """Gives torch's optimizer the state that it had before, for tensors that have not been updated since."""
        for item, theirs in self._theirs.items():
            if self._steps[item] == int(theirs.get("step", 1)):
                self._optimizer_view.give_state(item.tensor, theirs)

    def give_states(self, *, in_place: bool = False) -> None:
        """Gives torch's optimizer the state, to train without an engine: in the dtype that it would have used itself.

        `in_place`: for the user to read and edit, in float32: the server's own memory, or if that is compact, a copy.
        """
        for item, steps in self._steps.items():
            rule, theirs = self._optimizer_view.rule(item), self._theirs.get(item)
            if rule is None:
                theirs = self.own_state(item)
                if theirs is not None and not in_place:
                    theirs = in_dtype(theirs, item.tensor.dtype)
            elif steps:
                shape, dtype = item.tensor.shape, STATE if in_place else item.tensor.dtype
                states = [self.state_in_float32(item, rule, number) for number in range(len(rule.states))]
                theirs = {name: state.view(shape).to(dtype) for name, state in zip(rule.states, states, strict=True)}
                theirs["step"] = torch.tensor(float(steps), device="cpu")
            if theirs:
                self._optimizer_view.give_state(item.tensor, theirs)

    def tensors_of(self, item: Item) -> dict[str, torch.Tensor]:
        """The memory of a tensor beside its weights: "master", if these are not float32, and the rule's state, with its
        scales, if it is in eight bits."""
        master, rule = self._master[item], self._optimizer_view.rule(item)
        found = {} if master is None else {"master": master}
        if rule is not None:
            found.update(zip(rule.states, self._states_of(item, rule), strict=True))
            scales = self._scales_of(item, rule)
            found.update((name + SCALES, scale) for name, scale in zip(rule.states, scales, strict=False))
        return found

    def state_in_float32(self, item: Item, rule: Rule, number: int) -> torch.Tensor:
        """A state of this rank's part: the memory itself, or if that is compact, a copy."""
        codes, scales = self._states_of(item, rule)[number], self._scales_of(item, rule)
        return decoded(codes, scales[number] if scales else None, rule.states[number] == rule.root)

    def put_state(self, item: Item, name: str, values: torch.Tensor) -> None:
        """Stores a state of this rank's part, given in any dtype."""
        rule = self._optimizer_view.rule(item)
        assert rule is not None, "own steps keep their state themselves"
        self._put_state(item, rule, rule.states.index(name), values)

    def _put_state(self, item: Item, rule: Rule, number: int, values: torch.Tensor) -> None:
        """Stores a state of this rank's part, given in any dtype. What is there already stays as it is, to the bit."""
        codes, scales = self._states_of(item, rule)[number], self._scales_of(item, rule)
        if values.data_ptr() == codes.data_ptr():
            return  # this memory itself, shown to the user
        root = rule.states[number] == rule.root
        if codes.dtype != STATE and torch.equal(self.state_in_float32(item, rule, number), values.to(STATE)):
            return
        encode(values, codes, scales[number] if scales else None, root)

    def own_state(self, item: Item) -> dict[str, Any] | None:
        """The state of a tensor that the optimizer's own step updates, not a copy; some optimizers keep none."""
        if item in self._own:
            return self._own[item].state
        return self._theirs.get(item) if self._optimizer_view.rule(item) is None else None

    def steps(self, item: Item) -> int:
        return self._steps[item]

    def restore(self, item: Item, steps: int, theirs: dict[str, Any] | None) -> None:
        """Sets the step count and the state of the optimizer's own step. `tensors_of` was filled before."""
        self._steps[item] = steps
        self._own.pop(item, None)
        self._theirs.pop(item, None)
        if theirs is not None:
            self._theirs[item] = theirs

    def part(self, item: Item) -> slice:
        """The elements of a tensor that this rank owns."""
        return self._parts[item].elements

    def owns(self, item: Item) -> bool:
        """Whether this rank owns any of the tensor. A tensor without elements counts as owned by all."""
        return self._parts[item].size > 0 or not item.tensor.numel()

    def take(self, item: Item, values: torch.Tensor, into: torch.Tensor, start: int = 0) -> None:
        """Stores a tensor's weights, given in any dtype: this rank's part of the working copy and of its master.

        `values` are the weights from the element `start` on, to the end or as many as there are.
        """
        mine, master, flat = self.part(item), self._master[item], values.detach().reshape(-1)
        low, high = max(mine.start, start), min(mine.stop, start + flat.numel())
        for begin in range(low, high, _CHUNK):  # in chunks, so that the float32 copy is small
            end = min(begin + _CHUNK, high)
            rest = None if master is None else master[begin - mine.start : end - mine.start]
            kernels.narrow(flat[begin - start : end - start].to(torch.float32), into.view(-1)[begin:end], rest)

    def taken(self, item: Item) -> None:
        """Called when the tensor's weights have been stored: only later edits count."""
        self._versions[item] = item.tensor._version

    @property
    def edited(self) -> list[Item]:
        """Tensors whose weights the user has changed in place since they were stored."""
        return [item for item, version in self._versions.items() if item.tensor._version != version]

    def follow_edits(self) -> None:
        """Weights that the user edited have no lower bits beyond their dtype: their masters are set accordingly."""
        for item in self.edited:
            if self._master[item] is not None:
                self.take(item, item.tensor, item.tensor.data)
            self.taken(item)

    def in_float32(self, item: Item) -> torch.Tensor:
        """The weights of this rank's part, flat and in float32."""
        # Through `.data`, which has a version of its own: writing there does not count as an edit by the user.
        return kernels.widen(item.tensor.data.view(-1)[self._parts[item].elements], self._master[item])

    def request(self, items: Collection[Item]) -> list[UpdateArgs]:
        """Arguments for one step of these tensors: counts the step, and reads the groups as they are now."""
        view, self._not_updated = self._optimizer_view, set()
        together: dict[tuple[GroupKey, int], list[Item]] = {}  # by group and step
        for item in items:
            self._steps[item] = step = self._steps[item] + 1
            together.setdefault((view.group_key(item), step), []).append(item)
        requested = []
        for (key, step), found in together.items():
            if (rule := view.rule_of(key)) is None:
                requested.append(UpdateArgs(tuple(found), None, (), view.settings(key), step))
            else:
                requested.append(UpdateArgs(tuple(found), rule, view.numbers(key, step), None, step))
        return requested

    def memory_of(self, subgroup: Subgroup, weights: torch.Tensor) -> SubgroupMemory:
        """The host memory of a subgroup that this rank owns; `weights` is the unit's flat memory."""
        if (known := self._subgroups.get(subgroup)) is not None:
            return known
        lacking = subgroup.unit.master_itemsize
        low, high = subgroup.start - self.low, subgroup.stop - self.low
        rest = [self._masters[low * lacking : high * lacking]] if lacking else []
        layout = self._layout
        places = [layout.codes_at] * layout.count + [layout.scales_at] * (len(self._states) - layout.count)
        for array, place in zip(self._states, places, strict=True):
            origin = place(self.low)
            rest.append(array[place(subgroup.start) - origin : place(subgroup.stop) - origin])
        memory = self._subgroups[subgroup] = SubgroupMemory(self.spans(subgroup, weights), rest)
        return memory

    def state_in(
        self, arrays: Sequence[torch.Tensor], subgroup: Subgroup, item: Item, own: slice, rule: Rule
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """States and scales of the elements `own` of a tensor, in copies of the arrays of a subgroup's state."""
        layout, begin, count = self._layout, self._offsets[item], own.stop - own.start
        dtype = layout.dtypes[item]
        at = layout.codes_at(begin + own.start) - layout.codes_at(subgroup.start)
        states = [array[at : at + count * dtype.itemsize].view(dtype) for array in arrays[: len(rule.states)]]
        if dtype != torch.uint8:
            return states, []
        at = layout.scales_at(begin + own.start) - layout.scales_at(subgroup.start)
        scales = arrays[layout.count : layout.count + len(rule.states)]
        nbytes = -(-count // BLOCK) * moments.SCALE.itemsize
        return states, [array[at : at + nbytes].view(moments.SCALE) for array in scales]

    def spans(self, subgroup: Subgroup, weights: torch.Tensor) -> list[Span]:
        """The weights of a subgroup, in as few spans as possible; any rank may own it."""
        width, spans = subgroup.unit.weight_itemsize, list[Span]()
        before: Item | None = None  # in the unit
        for item in subgroup.unit.items:
            neighbor, before = before, item
            shared = (
                overlap(item, self._offsets[item], subgroup.start, subgroup.size) if item in self._offsets else None
            )
            if shared is None:
                continue
            own, theirs = shared
            offset, at = item.offset + own.start * item.dtype.itemsize, theirs.start * width
            end = item.offset + own.stop * item.dtype.itemsize
            last = spans[-1] if spans else None
            if last is not None and neighbor in self._offsets and offset - last.offset == at - last.at:
                spans[-1] = Span(weights[last.offset : end], last.offset, last.at)
            else:
                spans.append(Span(weights[offset:end], offset, at))
        return spans

    def update(
        self,
        requested: Sequence[UpdateArgs],
        gradients: torch.Tensor,
        start: int,
        factor: float,
        threads: int | None,
        only: Collection[Item] | None = None,
    ) -> None:
        """Updates the elements whose gradients are given: flat, from the element `start` of the unit on.

        `only`: the tensors that have a gradient. The steps of the others do not count.
        """
        with torch._C.DisableTorchFunctionSubclass():  # others' reads of the weights wait for this (see reads.py)
            for place, args in enumerate(requested):
                items = args.items if only is None else self._updated(args.items, only)
                if args.settings is not None:
                    for item in items:
                        if (both := overlap(item, self._offsets[item], start, gradients.numel())) is not None:
                            self._make_own_step(item, args.settings, gradients[both[1]], factor)
                    continue
                assert args.rule is not None, "there are settings if there is no rule"
                if (table := self._table(place, items, args.rule, start, gradients)) is not None:
                    numbers, keys = (factor, *args.numbers[1:]), moments.noise_keys(args.step)
                    kernels.update(args.rule, table.pieces(gradients, numbers, keys), threads=threads)

    def _updated(self, items: Sequence[Item], only: Collection[Item]) -> tuple[Item, ...]:
        """Those of the items that have a gradient. The steps of the others do not count."""
        for item in items:
            if item not in only and item not in self._not_updated:
                self._not_updated.add(item)
                self._steps[item] -= 1
        return tuple(item for item in items if item in only)

    def _table(
        self, place: int, items: Sequence[Item], rule: Rule, start: int, gradients: torch.Tensor
    ) -> Table | None:
        """The arguments of an update: of what the tensors share with the gradients, which begin at element `start`."""
        known, size, dtype = self._tables.get((place, start)), gradients.numel(), gradients.dtype
        if known is None or (known.items, known.size, known.dtype) != (items, size, dtype):
            shared = [(item, overlap(item, self._offsets[item], start, size)) for item in items]
            parts = [self._part_of(item, rule, *both) for item, both in shared if both is not None]
            table = Table(rule, parts, gradients) if parts else None
            known = self._tables[place, start] = _KnownTable(items, size, dtype, table)
        return known.table

    def _part_of(self, item: Item, rule: Rule, at: slice, gradient: slice) -> PieceTarget:
        master, before = self._master[item], self._parts[item].elements.start
        own = slice(at.start - before, at.stop - before)
        return PieceTarget(
            gradient,
            item.tensor.data.view(-1)[at],
            None if master is None else master[own],
            [state[own] for state in self._states_of(item, rule)],
            [scales[blocks_of(own)] for scales in self._scales_of(item, rule)],
            at.start,
        )

    def close(self) -> None:
        self._tables.clear()
        self._subgroups.clear()
        self._memory.close()

    def _states_of(self, item: Item, rule: Rule) -> list[torch.Tensor]:
        mine, dtype = self._parts[item], self._layout.dtypes[item]
        at = self._layout.codes_at(self.low + mine.at) - self._layout.codes_at(self.low)
        states = self._states[: len(rule.states)]
        return [state[at : at + mine.size * dtype.itemsize].view(dtype) for state in states]

    def _scales_of(self, item: Item, rule: Rule) -> list[torch.Tensor]:
        """The scales of each state's blocks; none, if these are not in eight bits."""
        mine, layout = self._parts[item], self._layout
        if layout.dtypes[item] != torch.uint8:
            return []
        at = layout.scales_at(self.low + mine.at) - layout.scales_at(self.low)
        nbytes = -(-mine.size // BLOCK) * moments.SCALE.itemsize
        scales = self._states[layout.count : layout.count + len(rule.states)]
        return [scale[at : at + nbytes].view(moments.SCALE) for scale in scales]

    def _make_own_step(self, item: Item, settings: OwnSettings, gradient: torch.Tensor, factor: float) -> None:
        """Lets the user's optimizer make the step, in float32, with the state that it keeps for the tensor."""
        values = self.in_float32(item).view(item.tensor.shape)
        if item not in self._own:
            self._own[item] = self._optimizer_view.own_step(item, values, self._theirs.get(item))
        self._own[item].update(settings, values, gradient.to(torch.float32).view(values.shape) * factor)
        if item.dtype != torch.float32:
            self.take(item, values, item.tensor.data)


def _apart(part: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor with a storage of its own: torch.save of a view would write the whole storage."""
    return torch.from_numpy(part.numpy()) if part.numel() else torch.empty(0, dtype=part.dtype, device="cpu")


def put_weights(values: torch.Tensor, weights: torch.Tensor, start: int) -> None:
    """Stores a tensor's weights as `UnitState.take` does, but also those that other ranks own, and no master."""
    flat = values.detach().reshape(-1)
    into = weights.view(-1)[start : start + flat.numel()]
    dtype = master_dtype(into.dtype)
    for begin in range(0, flat.numel(), _CHUNK):
        at = slice(begin, begin + _CHUNK)
        master = None if dtype is None else torch.empty(into[at].numel(), dtype=dtype, device="cpu")
        kernels.narrow(flat[at].to(torch.float32), into[at], master)
