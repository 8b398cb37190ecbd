"""Exchanges gradients and updated weights between ranks.

A single rank takes the same path, and all communication is skipped: its gradients on the host are the sums over all
ranks (`SingleRank`).

With several ranks (`RankExchange`), a subgroup's gradients are gathered by the rank that owns it and added up in the
order of ranks. Collectives are matched by their order, so units are exchanged in an order that all ranks know: from the
last to the first, residents at the end, whatever order a rank's own backward takes. A unit that comes early waits. Each
message ends with one byte for each tensor of the unit, which says whether this rank has a gradient for it: ranks may
differ, and only the gradients that exist are added up.

Updated weights are in memory that the ranks of a node share, and are sent to other nodes. Residents have no shared
memory, so they are sent to every rank. When all ranks have reported that they are done with a unit, it can be fetched.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ferryman.distributed.ranks import Ranks
from ferryman.model.precision import LossScale
from ferryman.model.units import GRADIENT, Item, Subgroup, Unit, landing_dtype, overlap
from ferryman.runtime.arena import Arena
from ferryman.runtime.marks import Mark
from ferryman.runtime.streams import Streams
from ferryman.server.landing_buffers import Buffer, Landing, LandingBuffers
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.state import bounds
from ferryman.server.store import RamStore
from ferryman.server.strategy import Arrival, Strategy
from ferryman.server.update_log import UpdateLog

_CHUNK = 1 << 16  # elements that are added up at a time, so that the float32 sums are small
_ALIGNMENT = 64  # bytes, between the messages of different ranks

LeftForUser = Mapping[Unit, Collection[Item]]  # gradients in float32 on the host, and the tensors that have one


class Exchange(ABC):
    """Takes this rank's gradients when they are on the host, and returns the sums over all ranks."""

    is_local: bool  # whether there is only one rank, whose gradients can be used wherever they are

    def serve(self, strategy: Strategy) -> None:
        """Sets the strategy that receives gradients. No lane may have work."""
        self._strategy = strategy

    @abstractmethod
    def begin(self, units: Sequence[Unit], *, left_for_user: bool) -> None:
        """Called when a step begins, with all units in forward order, residents first.

        `left_for_user`: the gradients are those that `forward_backward` has left on the host, in float32.
        """

    @abstractmethod
    def landing(self, subgroup: Subgroup) -> Landing:
        """Where this rank's gradient of the subgroup lands."""

    @abstractmethod
    def send(self, subgroup: Subgroup, landing: Landing, items: Collection[Item], mark: Mark) -> Iterable[Arrival]:
        """Sends this rank's gradient of a subgroup, which has landed after the mark; `items` are its tensors.

        Returns the gradients that arrive because of it. The strategy must receive each before the next one is taken.
        """

    @abstractmethod
    def send_rest(self, left: LeftForUser) -> Iterable[Arrival]:
        """Called when this rank runs no more backwards: sends everything that has not been sent, as `send` does.

        These are the gradients that were left for the user. For all other units, the other ranks are told that there
        are none.
        """

    @abstractmethod
    def unsent(self, left: LeftForUser) -> LeftForUser:
        """The gradients left for the user that `send_rest` does not send, because there are no other ranks."""

    @abstractmethod
    def owned(self, subgroups: Sequence[Subgroup]) -> Sequence[Subgroup]:
        """The subgroups that this rank updates."""

    @abstractmethod
    def share(self, unit: Unit) -> None:
        """Called when this rank's updates of the unit have been submitted: sends updated weights to all ranks."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks until all ranks have the weights of the last update."""

    @abstractmethod
    def recover(self) -> None:
        """Called after a failure, when no lane has work: drops what has not been sent."""

    @abstractmethod
    def close(self) -> None:
        """Frees memory. No lane may have work."""


class SingleRank(Exchange):
    """A single process: a gradient on the host is the sum over all ranks already."""

    is_local = True

    def begin(self, units: Sequence[Unit], *, left_for_user: bool) -> None:
        pass

    def landing(self, subgroup: Subgroup) -> Landing:
        return self._strategy.landing(subgroup, landing_dtype(subgroup.unit))

    def send(self, subgroup: Subgroup, landing: Landing, items: Collection[Item], mark: Mark) -> Iterable[Arrival]:
        return (Arrival(subgroup, landing.gradient, items, mark, landing.buffer),)

    def send_rest(self, left: LeftForUser) -> Iterable[Arrival]:
        return ()

    def unsent(self, left: LeftForUser) -> LeftForUser:
        return left

    def owned(self, subgroups: Sequence[Subgroup]) -> Sequence[Subgroup]:
        return subgroups

    def share(self, unit: Unit) -> None:
        pass

    def wait(self) -> None:
        pass

    def recover(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(eq=False)
class _Parcel:
    """This rank's gradient of a subgroup."""

    subgroup: Subgroup
    buffer: Buffer
    items: Collection[Item]  # the tensors that have a gradient here
    after: Sequence[Mark]


@dataclass
class _UnitExchange:
    """The exchange of one unit's gradients in one step."""

    unit: Unit
    dtype: torch.dtype
    missing: int  # parcels that have not come yet
    waiting: list[_Parcel] = field(default_factory=list)


class RankExchange(Exchange):
    """Several ranks. `subgroups` returns the subgroups of a unit that all ranks own."""

    is_local = False

    def __init__(
        self,
        ranks: Ranks,
        streams: Streams,
        arena: Arena,
        store: RamStore,
        log: UpdateLog,
        optimizer_view: OptimizerView,
        scale: LossScale,
        subgroups: Callable[[Unit], Sequence[Subgroup]],
    ) -> None:
        self._ranks, self._store, self._log = ranks, store, log
        self._optimizer_view, self._scale, self._subgroups = optimizer_view, scale, subgroups
        self._host_lane, self._gradients_lane, self._weights_lane = streams.host, streams.exchange, streams.share
        self._exchanges: list[_UnitExchange] = []
        self._cuts: weakref.WeakKeyDictionary[Unit, list[int]] = weakref.WeakKeyDictionary()
        self._messages, self._sums = LandingBuffers(arena), LandingBuffers(arena)
        self._gathered = torch.empty(0, dtype=torch.uint8, device="cpu")  # the messages of all ranks

    def begin(self, units: Sequence[Unit], *, left_for_user: bool) -> None:
        order = [*reversed(units[1:]), units[0]]
        exchanges = (
            _UnitExchange(unit, GRADIENT if left_for_user else landing_dtype(unit), len(self._subgroups(unit)))
            for unit in order
        )
        self._exchanges = [exchange for exchange in exchanges if exchange.missing]

    def landing(self, subgroup: Subgroup) -> Landing:
        exchange = self._exchange_of(subgroup.unit)
        nbytes = subgroup.size * exchange.dtype.itemsize
        room = nbytes + len(subgroup.unit.trained)
        # A unit that comes before its turn must not take the buffers of the one whose turn it is.
        is_next = exchange is self._exchanges[0]
        buffer = self._messages.next(room) if is_next else self._messages.one_more(room)
        return Landing(buffer.memory.bytes[:nbytes].view(exchange.dtype), buffer.after, buffer)

    def send(self, subgroup: Subgroup, landing: Landing, items: Collection[Item], mark: Mark) -> Iterable[Arrival]:
        return self._send(subgroup, landing, items, [mark])

    def send_rest(self, left: LeftForUser) -> Iterable[Arrival]:
        for unit in [one.unit for one in self._exchanges if one.missing and not one.waiting]:
            flat = self._store.gradients(unit).view(GRADIENT) if unit in left else None
            for subgroup in self._subgroups(unit):
                landing = self.landing(subgroup)
                before = landing.after
                if flat is not None:
                    source, target = flat[subgroup.start : subgroup.stop], landing.gradient
                    factor = 1.0 if target.dtype == GRADIENT else self._scale.value
                    before = [
                        self._host_lane.submit(
                            functools.partial(_multiply_into, source, factor, target),
                            after=before,
                            label=f"send {unit.name}",
                            reads=[source],
                            writes=[target],
                        )
                    ]
                yield from self._send(subgroup, landing, left.get(unit, ()), before)

    def unsent(self, left: LeftForUser) -> LeftForUser:
        return {}

    def owned(self, subgroups: Sequence[Subgroup]) -> Sequence[Subgroup]:
        return [subgroup for subgroup in subgroups if self._owner(subgroup) == self._ranks.rank]

    def share(self, unit: Unit) -> None:
        if not unit.trained:
            return
        state, weights = self._store.state(unit), self._store.weights(unit)
        to_all = not unit.modules  # residents: each rank has its own copy
        sent = self._subgroups(unit) if to_all or len(self._ranks.leaders) > 1 else ()

        def share() -> None:
            for subgroup in sent:
                for span in state.spans(subgroup, weights):
                    self._ranks.broadcast_weights(span.host, self._owner(subgroup), to_all=to_all)
            self._ranks.barrier()

        mark = self._weights_lane.submit(share, after=self._log.weights_ready(unit), label=f"share {unit.name}")
        self._log.add_rank_updates(unit, mark)

    def wait(self) -> None:
        self._gradients_lane.wait()
        self._weights_lane.wait()

    def recover(self) -> None:
        self._exchanges.clear()
        self._messages.recover()
        self._sums.recover()

    def close(self) -> None:
        self._messages.close()
        self._sums.close()

    def _exchange_of(self, unit: Unit) -> _UnitExchange:
        return next(exchange for exchange in self._exchanges if exchange.unit is unit)

    def _owner(self, subgroup: Subgroup) -> int:
        if subgroup.unit not in self._cuts:
            self._cuts[subgroup.unit] = bounds(subgroup.unit, self._optimizer_view, self._ranks.share)
        cuts = self._cuts[subgroup.unit]
        return next(rank for rank in range(self._ranks.size) if cuts[rank] <= subgroup.start < cuts[rank + 1])

    def _send(
        self, subgroup: Subgroup, landing: Landing, items: Collection[Item], after: Sequence[Mark]
    ) -> Iterable[Arrival]:
        """Submits the exchange of all parcels whose turn it is, and yields the sums that this rank owns."""
        assert landing.buffer is not None, "messages lie in buffers"
        exchange = self._exchange_of(subgroup.unit)
        exchange.missing -= 1
        exchange.waiting.append(_Parcel(subgroup, landing.buffer, items, after))
        while self._exchanges:
            first = self._exchanges[0]
            for parcel in first.waiting:
                yield from self._submit(parcel, first.dtype)
            first.waiting.clear()
            if first.missing:
                return
            self._exchanges.pop(0)
            if self._strategy.is_eager:
                self.share(first.unit)

    def _messages_of_all(self, nbytes: int) -> list[torch.Tensor]:
        """Memory for a message from each rank; used by the gradients' lane alone."""
        each = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._gathered.numel() < self._ranks.size * each:
            self._gathered = torch.empty(self._ranks.size * each, dtype=torch.uint8, device="cpu")
        return [self._gathered[rank * each : rank * each + nbytes] for rank in range(self._ranks.size)]

    def _submit(self, parcel: _Parcel, dtype: torch.dtype) -> Iterable[Arrival]:
        """Submits the exchange of a subgroup: its owner gathers the gradients, and adds them up; yields the sum."""
        subgroup, owner = parcel.subgroup, self._owner(parcel.subgroup)
        nbytes, trained = subgroup.size * dtype.itemsize, subgroup.unit.trained
        message = parcel.buffer.memory.bytes[: nbytes + len(trained)]
        total = self._sums.landing(subgroup.size, dtype) if owner == self._ranks.rank else None
        found: list[Item] = []  # the tensors that have a gradient on some rank

        def exchange() -> None:
            message[nbytes:].copy_(
                torch.tensor([item in parcel.items for item in trained], dtype=torch.uint8, device="cpu")
            )
            parts = None if total is None else self._messages_of_all(len(message))
            self._ranks.gather(message, owner, parts)
            if parts is not None and total is not None:
                gradients = [(part[:nbytes].view(dtype), part[nbytes:]) for part in parts]
                found.extend(_add_up(subgroup, gradients, total.gradient))

        mark = self._gradients_lane.submit(
            exchange,
            after=[*parcel.after, *([] if total is None else total.after)],
            label=f"exchange {subgroup.unit.name}",
            nbytes=message.nbytes,
            reads=[message],
            writes=[message] if total is None else [message, total.gradient],
        )
        self._messages.used(parcel.buffer, mark)
        if total is not None:
            yield Arrival(subgroup, total.gradient, found, mark, total.buffer, items_are_known=False)


def _add_up(subgroup: Subgroup, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], into: torch.Tensor) -> list[Item]:
    """Adds the ranks' gradients, tensor by tensor, in the order of ranks and in float32.

    `parts`: each rank's gradient, and its byte for each tensor. Returns the tensors that have a gradient on some rank.
    """
    offsets, found = subgroup.unit.trained_offsets, []
    flags = [has.tolist() for _, has in parts]
    for number, item in enumerate(subgroup.unit.trained):
        having = [gradient for (gradient, _), has in zip(parts, flags, strict=True) if has[number]]
        if having:
            found.append(item)
        both = overlap(item, offsets[item], subgroup.start, subgroup.size)
        if both is None or not having:
            continue
        where = both[1]
        for begin in range(where.start, where.stop, _CHUNK):
            at = slice(begin, min(begin + _CHUNK, where.stop))
            total = having[0][at].to(GRADIENT, copy=True)
            for gradient in having[1:]:
                total += gradient[at]
            into[at].copy_(total)
    return found


def _multiply_into(source: torch.Tensor, factor: float, into: torch.Tensor) -> None:
    if factor == 1:
        into.copy_(source)
    else:
        torch.mul(source, factor, out=into)
