"""Several ranks: gradients come together at the rank that owns them, and updated weights go to everyone.

A subgroup's gradients are gathered by its owner and added up in the order of ranks. Collectives are matched by their
order, so units are exchanged in one that all ranks know: from the last to the first, residents at the end, whatever
order a rank's own backward takes. A unit that comes early waits. With each part goes a byte for each tensor of the unit
that says whether it has a gradient here: ranks may differ, and what one lacks is not added up.

Weights that an owner has updated lie in memory that the ranks of its node share; other nodes are sent them (and of what
stays on the devices, which has no common memory, every rank). Then all ranks say that they are done with the unit, and
from there on it can be fetched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from ferryman.distributed.ranks import Ranks
from ferryman.model.units import GRADIENT, Item, Subgroup, Unit, overlap, trained_offsets
from ferryman.runtime.marks import Mark
from ferryman.runtime.pinned import PinnedMemory
from ferryman.runtime.streams import Streams
from ferryman.server.landing_buffers import Buffer, LandingBuffers
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.state import bounds
from ferryman.server.store import RamStore

_CHUNK = 1 << 16  # elements that are added up at a time
_ALIGNED = 64  # bytes

# A gradient that this rank owns will be there after the mark, of the tensors that will be in the list by then.
Arrived = Callable[[Subgroup, Buffer, torch.Tensor, Mark, list[Item]], None]


@dataclass(eq=False)
class _Parcel:
    """What this rank has of a subgroup's gradient."""

    subgroup: Subgroup
    buffer: Buffer
    items: Collection[Item]  # those that have a gradient here
    after: Sequence[Mark]


@dataclass
class _Turn:
    unit: Unit
    dtype: torch.dtype
    left: int  # parcels that have not come yet
    waiting: list[_Parcel] = field(default_factory=list)


class Exchange:
    """`arrived` is told of sums that this rank owns; `complete` of units of which all has been exchanged."""

    def __init__(
        self,
        ranks: Ranks,
        streams: Streams,
        device: torch.device,
        store: RamStore,
        optimizer_view: OptimizerView,
        arrived: Arrived,
        complete: Callable[[Unit], None],
    ) -> None:
        self._ranks, self._device, self._store, self._optimizer_view = ranks, device, store, optimizer_view
        self._arrived, self._complete = arrived, complete
        self._lane, self._sharing = streams.exchange, streams.share
        self._turns: list[_Turn] = []
        self._expected: dict[Subgroup, Buffer] = {}
        self._cuts: weakref.WeakKeyDictionary[Unit, list[int]] = weakref.WeakKeyDictionary()
        self._messages, self._sums = LandingBuffers(device), LandingBuffers(device)
        self._room = torch.empty(0, dtype=torch.uint8)  # what comes from all ranks

    def begin(
        self,
        units: Sequence[Unit],
        subgroups: Callable[[Unit], Sequence[Subgroup]],
        dtype_of: Callable[[Unit], torch.dtype],
    ) -> None:
        """A step: gradients of these, in this order, cross in these dtypes."""
        turns = (_Turn(unit, dtype_of(unit), len(subgroups(unit))) for unit in units)
        self._turns = [turn for turn in turns if turn.left]

    def receive(self, subgroup: Subgroup) -> tuple[torch.Tensor, list[Mark]]:
        """Where this rank's part lands, and what must be over before."""
        turn = self._turn_of(subgroup.unit)
        nbytes = subgroup.size * turn.dtype.itemsize
        room = nbytes + len(subgroup.unit.trained)
        # One that comes before its turn must not keep those waiting whose turn it is.
        is_next = turn is self._turns[0]
        buffer = self._messages.next(room) if is_next else Buffer(PinnedMemory(room, self._device))
        self._expected[subgroup] = buffer
        return buffer.memory.bytes[:nbytes].view(turn.dtype), [] if buffer.free is None else [buffer.free]

    def send(self, subgroup: Subgroup, items: Collection[Item], after: Sequence[Mark]) -> None:
        """What was received goes to the owner after these marks."""
        turn = self._turn_of(subgroup.unit)
        turn.left -= 1
        turn.waiting.append(_Parcel(subgroup, self._expected.pop(subgroup), items, after))
        while self._turns:
            first = self._turns[0]
            for parcel in first.waiting:
                self._submit(first, parcel)
            first.waiting.clear()
            if first.left:
                return
            self._turns.pop(0)
            self._complete(first.unit)

    def missing(self) -> list[Unit]:
        """Of which nothing has come."""
        return [turn.unit for turn in self._turns if turn.left and not turn.waiting]

    def owner(self, subgroup: Subgroup) -> int:
        if subgroup.unit not in self._cuts:
            self._cuts[subgroup.unit] = bounds(subgroup.unit, self._optimizer_view, self._ranks.share)
        cuts = self._cuts[subgroup.unit]
        return next(rank for rank in range(self._ranks.size) if cuts[rank] <= subgroup.start < cuts[rank + 1])

    def share(self, unit: Unit, subgroups: Sequence[Subgroup], after: Sequence[Mark]) -> Mark:
        """This rank's part of the unit is updated after these marks; the mark after which all of it is."""
        state, weights = self._store.state(unit), self._store.weights(unit)

        to_all = not unit.modules  # each rank has its own copy of what stays on the devices
        passed = subgroups if to_all or len(self._ranks.leaders) > 1 else ()

        def share() -> None:
            for subgroup in passed:
                for run in state.runs(subgroup, weights):
                    self._ranks.pass_on(run.host, self.owner(subgroup), to_all=to_all)
            self._ranks.all_here()

        return self._sharing.submit(share, after=after, label=f"share {unit.name}")

    def wait(self) -> None:
        """Blocks until all weights are those of the last update."""
        self._lane.wait()
        self._sharing.wait()

    def recover(self) -> None:
        """After a failure, when no lane has work any more."""
        self._turns.clear()
        self._expected.clear()
        self._messages.recover()
        self._sums.recover()

    def close(self) -> None:
        self._messages.close()
        self._sums.close()

    def _turn_of(self, unit: Unit) -> _Turn:
        return next(turn for turn in self._turns if turn.unit is unit)

    def _rooms(self, nbytes: int) -> list[torch.Tensor]:
        """For a message of each rank; on the lane."""
        each = -(-nbytes // _ALIGNED) * _ALIGNED
        if self._room.numel() < self._ranks.size * each:
            self._room = torch.empty(self._ranks.size * each, dtype=torch.uint8)
        return [self._room[rank * each : rank * each + nbytes] for rank in range(self._ranks.size)]

    def _submit(self, turn: _Turn, parcel: _Parcel) -> None:
        subgroup, owner = parcel.subgroup, self.owner(parcel.subgroup)
        nbytes, trained = subgroup.size * turn.dtype.itemsize, subgroup.unit.trained
        message = parcel.buffer.memory.bytes[: nbytes + len(trained)]
        mine = owner == self._ranks.rank
        sums = self._sums.next(nbytes) if mine else None
        into = None if sums is None else sums.memory.bytes[:nbytes].view(turn.dtype)
        anywhere: list[Item] = []

        def exchange() -> None:
            message[nbytes:].copy_(torch.tensor([item in parcel.items for item in trained], dtype=torch.uint8))
            parts = self._rooms(len(message)) if mine else None
            self._ranks.gather(message, owner, parts)
            if parts is not None and into is not None:
                gradients = [(part[:nbytes].view(turn.dtype), part[nbytes:]) for part in parts]
                anywhere.extend(_add_up(subgroup, gradients, into))

        mark = self._lane.submit(
            exchange,
            after=[*parcel.after, *([] if sums is None or sums.free is None else [sums.free])],
            label=f"exchange {subgroup.unit.name}",
            nbytes=message.nbytes,
            reads=[message],
            writes=[message] if into is None else [message, into],
        )
        parcel.buffer.free = mark
        if sums is not None and into is not None:
            self._arrived(subgroup, sums, into, mark, anywhere)


def _add_up(subgroup: Subgroup, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], into: torch.Tensor) -> list[Item]:
    """Tensor by tensor, from the first rank that has it to the last, in float32; and which tensors some rank has."""
    offsets, found = trained_offsets(subgroup.unit), []
    flags = [has.tolist() for _, has in parts]
    for number, item in enumerate(subgroup.unit.trained):
        having = [gradient for (gradient, _), has in zip(parts, flags, strict=True) if has[number]]
        if having:
            found.append(item)
        both = overlap(item, offsets[item], subgroup.start, subgroup.size)
        if both is None or not having:
            continue
        where = both[1]
        for begin in range(where.start, where.stop, _CHUNK):  # what is needed in between is small
            at = slice(begin, min(begin + _CHUNK, where.stop))
            total = having[0][at].to(GRADIENT, copy=True)
            for gradient in having[1:]:
                total += gradient[at]
            into[at].copy_(total)
    return found
