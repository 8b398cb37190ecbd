"""Updates on the device: a subgroup's state comes in, is updated, and goes back, each on a lane of its own.

    state in  |  in 0  |  in 1  |  in 2  |  in 3  |
    update             | up 0 | | up 1 | | up 2 |
    state out                 |  out 0  |  out 1  |

So the link is busy in both directions at once. Nothing is allocated on the way: subgroups pass through berths, and
those whose state stays on the device have berths of their own. A gradient that lies on the device is used where it is.

Note [GradientChecks before updates]
Whether a gradient is finite is found out on the device as well, on a lane of its own, and told to the host. Where an
eager update must not be made with one that is not, it waits for the host's answer, while others are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ferryman.model.spans import Span
from ferryman.model.units import (
    GRADIENT,
    Item,
    Subgroup,
    Unit,
    master_dtype,
    master_itemsize,
    overlap,
    trained_offsets,
    weight_itemsize,
)
from ferryman.plan.staging import Staging, hold_bytes, most_tensors
from ferryman.runtime.marks import Mark
from ferryman.runtime.pinned import PinnedMemory
from ferryman.runtime.streams import Streams
from ferryman.server import kernels
from ferryman.server.kernels import Piece, Scratch
from ferryman.server.rules import TIMING_NUMBERS, Rule
from ferryman.server.state import Order, Spans
from ferryman.server.store import RamStore


@dataclass
class Berth:
    memory: torch.Tensor  # bytes on the device
    free: Mark | None = None  # after which it can be used for another subgroup
    # Of a subgroup's own: it has the subgroup's state, and the host may not; or will have, when its lanes come to it.
    current: bool = False
    expected: bool = False


class _Areas(NamedTuple):
    """Where one subgroup is updated: parts of a berth, in bytes, or for weights that stay on the device their slot."""

    weights: torch.Tensor
    slot: torch.Tensor | None
    rest: list[torch.Tensor]  # as in `Spans`
    gradient: torch.Tensor

    def weights_at(self, at: int, offset: int, nbytes: int) -> torch.Tensor:
        """Given as in a `Span`."""
        return self.weights[at : at + nbytes] if self.slot is None else self.slot[offset : offset + nbytes]

    def weights_of(self, run: Span) -> torch.Tensor:
        return self.weights_at(run.at, run.offset, run.host.nbytes)


class Look(NamedTuple):
    """Sums of squares that are on their way to the host."""

    items: list[Item]
    sums: torch.Tensor  # pinned, in double
    landed: Mark


class Done(NamedTuple):
    """What an update on the device leaves to wait for."""

    used: Mark  # the gradient is not needed any more; weights that are held on the device are the new ones
    ended: Mark  # the host has it all
    bytes_in: int
    bytes_out: int
    came: list[Mark]  # copies in


class DeviceUpdates:
    """The device's part of the optimizer. `held` gives the memory of a unit whose weights stay on the device."""

    def __init__(
        self,
        store: RamStore,
        staging: Staging,
        streams: Streams,
        device: torch.device,
        held: Callable[[Unit], torch.Tensor | None],
    ) -> None:
        self._store = store
        self._staging = staging
        self._device = device
        self._held = held
        self._in, self._update, self._out = streams.state_in, streams.update, streams.state_out
        self._look = streams.look
        self._berths: list[Berth] = []
        self._own: dict[Subgroup, Berth] = {}  # of subgroups whose state stays on the device
        self._turn = 0
        self._scratch, self._look_scratch = Scratch(0, device), Scratch(0, device)
        self._sums = torch.empty(0, dtype=torch.float64, device=device)  # of the subgroup that is looked at
        self._sums_memory = PinnedMemory(0, device)
        self._sums_on_host: dict[Subgroup, torch.Tensor] = {}
        self.holds: dict[Subgroup, Berth] = {}  # for gradients that wait for the norm of all

    def make_room_for(self, units: Sequence[Unit], staging: Staging, *, held: bool) -> None:
        """Between steps, when no lane has work: all memory that updates of these units will need."""
        self.bring_home()
        self._staging = staging
        self.release()
        self._scratch, self._look_scratch = (Scratch(staging.subgroup, self._device) for _ in range(2))
        self._berths = [self._berth(staging.berth_bytes(units)) for _ in range(staging.berths)]
        self._own = {s: self._berth(self._size_of(s)) for s in staging.resident(units)}
        self.holds = {s: self._berth(hold_bytes(s)) for s in staging.holding(units, held=held)}
        self._sums = torch.empty(most_tensors(units), dtype=torch.float64, device=self._device)
        counts = {s: len(_shared(s, s.unit.trained)) for s in staging.subgroups(units)}
        self._sums_memory = PinnedMemory(sum(counts.values()) * self._sums.itemsize, self._device)
        parts = self._sums_memory.bytes.view(torch.float64).split(list(counts.values())) if counts else ()
        self._sums_on_host = dict(zip(counts, parts, strict=True))

    def look(
        self,
        subgroup: Subgroup,
        gradient: torch.Tensor,
        items: Collection[Item],
        after: Iterable[Mark],
        hold: Berth | None,
    ) -> Look:
        """Sums of squares of a gradient on the device, by tensor; into a hold, if there is one, it is copied."""
        shared = _shared(subgroup, items)
        on_device = self._sums[: len(shared)]
        on_host = self._sums_on_host[subgroup][: len(shared)]
        kept = None if hold is None else hold.memory[: gradient.nbytes].view(gradient.dtype)

        def work() -> None:
            on_device.zero_()
            for number, (_, at) in enumerate(shared.values()):
                kernels.add_squares_in_torch(gradient[at], on_device[number], self._look_scratch)
            on_host.copy_(on_device, non_blocking=True)
            if kept is not None:
                kept.copy_(gradient)

        mark = self._look.submit(work, after=after, label=f"look at {subgroup.unit.name}")
        return Look(list(shared), on_host, mark)

    def update(
        self,
        subgroup: Subgroup,
        orders: Sequence[Order],
        gradient: torch.Tensor,
        factor: float,
        after: Collection[Mark],
        begins: Callable[[], None],
    ) -> Done:
        """One step of a subgroup. The gradient is flat, on the device or on the host; all comes after the marks.

        `begins` is called when there is no way back.
        """
        own = self._own.get(subgroup)
        berth = own or self._next_berth()
        spans = self._spans(subgroup)
        areas = self._areas(berth, subgroup, spans)
        came: list[tuple[torch.Tensor, torch.Tensor]] = []  # to, from
        if own is None or not own.expected:
            came += zip(areas.rest, spans.rest, strict=True)
            if areas.slot is None:
                came += [(areas.weights_of(run), run.host) for run in spans.weights]
        if gradient.device != self._device:
            came.append((areas.gradient[: gradient.nbytes], gradient.view(torch.uint8)))
            gradient = areas.gradient[: gradient.nbytes].view(gradient.dtype)
        before = [*after, *([berth.free] if berth.free is not None else [])]
        arrived = [self._in.copy(came, after=before, label=f"state in {subgroup.unit.name}")] if came else []
        pieces = self._pieces(subgroup, orders, areas, gradient, factor)

        def work() -> None:
            begins()
            berth.current = own is not None
            for rule, mine in pieces:
                kernels.update_in_torch(rule, mine, self._scratch)

        used = self._update.submit(
            work, after=[*before, *arrived], label=f"update {subgroup.unit.name}", nbytes=gradient.nbytes, timed=True
        )
        went = [(run.host, areas.weights_of(run)) for run in spans.weights]
        if own is None:
            went += zip(spans.rest, areas.rest, strict=True)
        berth.expected = own is not None
        berth.free = self._out.copy(went, after=[used], label=f"state out {subgroup.unit.name}")
        sizes = [sum(target.nbytes for target, _ in copies) for copies in (came, went)]
        return Done(used, berth.free, sizes[0], sizes[1], arrived)

    def bring_home(self) -> None:
        """What stays on the device is copied to the host, where it can be read; it is fetched anew when it is used.

        When no lane has work. The host has the weights already, unless a failure has kept them from it.
        """
        marks = []
        for subgroup, berth in self._own.items():
            if berth.current:
                spans = self._spans(subgroup)
                areas = self._areas(berth, subgroup, spans)
                pairs = list(zip(spans.rest, areas.rest, strict=True))
                if berth.free is not None and berth.free.failed():
                    pairs += [(run.host, areas.weights_of(run)) for run in spans.weights]
                marks.append(self._out.copy(pairs, label=f"state out {subgroup.unit.name}"))
            berth.current = berth.expected = False
        for mark in marks:
            mark.wait()

    def wait(self) -> None:
        """Blocks until all updates are done."""
        self._update.wait()
        self._out.wait()

    def recover(self) -> None:
        """After a failure, when no lane has work any more: updates that were made stay made, on the host too."""
        self.bring_home()
        for berth in (*self._berths, *self._own.values(), *self.holds.values()):
            berth.free = None

    def release(self) -> None:
        """Gives the device's memory back."""
        self._sums_on_host.clear()
        self._sums_memory.close()
        self._sums = torch.empty(0, dtype=torch.float64, device=self._device)
        self._scratch, self._look_scratch = Scratch(0, self._device), Scratch(0, self._device)
        self._berths.clear()
        self._own.clear()
        self.holds.clear()

    def rehearse(self, rule: Rule, count: int) -> tuple[Callable[[], Mark], ...] | None:
        """A copy in, an update and a copy out of `count` elements that mean nothing, to see how long they take.

        None: there is no berth for as many.
        """
        length = count * (len(rule.states) + 1) * GRADIENT.itemsize
        berths = [berth.memory for berth in (*self._berths, *self._own.values()) if berth.memory.nbytes >= length]
        if not berths:
            return None
        host, berth = PinnedMemory(length, self._device), berths[0]
        berth[:length].zero_()
        torch.accelerator.synchronize(self._device)
        parts = berth[:length].view(GRADIENT).view(-1, count)
        piece = Piece(parts[0], parts[0], None, list(parts[1:]), TIMING_NUMBERS)

        def go_in() -> Mark:
            return self._in.copy([(berth[:length], host.bytes)], label="rehearse in")

        def go_out() -> Mark:
            return self._out.copy([(host.bytes, berth[:length])], label="rehearse out")

        def update() -> Mark:
            return self._update.submit(
                lambda: kernels.update_in_torch(rule, [piece], self._scratch), label="rehearse", timed=True
            )

        return go_in, update, go_out

    def _spans(self, subgroup: Subgroup) -> Spans:
        return self._store.state(subgroup.unit).spans(subgroup, self._store.weights(subgroup.unit))

    def _next_berth(self) -> Berth:
        self._turn = (self._turn + 1) % len(self._berths)
        return self._berths[self._turn]

    def _berth(self, nbytes: int) -> Berth:
        return Berth(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def _size_of(self, subgroup: Subgroup) -> int:
        return self._staging.element_bytes(subgroup.unit) * subgroup.size

    def _areas(self, berth: Berth, subgroup: Subgroup, spans: Spans) -> _Areas:
        end = subgroup.size * weight_itemsize(subgroup.unit)
        weights, rest = berth.memory[:end], []
        for part in spans.rest:
            rest.append(berth.memory[end : end + part.nbytes])
            end += part.nbytes
        gradient = berth.memory[end : end + subgroup.size * GRADIENT.itemsize]
        return _Areas(weights, self._held(subgroup.unit), rest, gradient)

    def _pieces(
        self,
        subgroup: Subgroup,
        orders: Sequence[Order],
        areas: _Areas,
        gradient: torch.Tensor,
        factor: float,
    ) -> list[tuple[Rule, list[Piece]]]:
        """As the host's, but in the berth, or where weights are held."""
        ruled: dict[str, tuple[Rule, list[Piece]]] = {}
        width, lacking = weight_itemsize(subgroup.unit), master_itemsize(subgroup.unit)
        states = [area.view(GRADIENT) for area in areas.rest[1 if lacking else 0 :]]
        shared = _shared(subgroup, [order.item for order in orders])
        for order in orders:
            if order.item not in shared:
                continue
            assert order.rule is not None, "what is left to torch is left to the host"
            (own, theirs), size = shared[order.item], order.item.dtype.itemsize
            at, offset = theirs.start * width, order.item.offset + own.start * size
            nbytes = (own.stop - own.start) * size
            master = None
            if (dtype := master_dtype(order.item.dtype)) is not None:
                begin = theirs.start * lacking
                master = areas.rest[0][begin : begin + (own.stop - own.start) * dtype.itemsize].view(dtype)
            piece = Piece(
                gradient[theirs],
                areas.weights_at(at, offset, nbytes).view(order.item.dtype),
                master,
                [state[theirs] for state in states[: len(order.rule.states)]],
                (factor, *order.numbers[1:]),
            )
            ruled.setdefault(order.rule.name, (order.rule, []))[1].append(piece)
        return list(ruled.values())


def _shared(subgroup: Subgroup, items: Collection[Item]) -> dict[Item, tuple[slice, slice]]:
    """Tensors that have a part in the subgroup: which of theirs, and where in it."""
    offsets = trained_offsets(subgroup.unit)
    found = {item: overlap(item, offsets[item], subgroup.start, subgroup.size) for item in items}
    return {item: both for item, both in found.items() if both is not None}
