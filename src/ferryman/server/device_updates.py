"""Updates on the device: a subgroup's state comes in, is updated, and goes back, each on a lane of its own.

    state in  |  in 0  |  in 1  |  in 2  |  in 3  |
    update             | up 0 | | up 1 | | up 2 |
    state out                 |  out 0  |  out 1  |

So the link is busy in both directions at once. Nothing is allocated during a step: subgroups pass through berths, and
subgroups whose state stays on the device have berths of their own. A gradient on the device is used where it is.

Note [Checks before updates]
Gradients on the device are checked there too: their sums of squares are computed on a lane of their own and copied to
the host. An eager update must not use a gradient that is not finite, so it waits for the host to check the sums. In the
meantime the squares of other gradients are summed. Sums are in float64. On a device that does not have it, the gradient
is copied to the host, and the sums are computed there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from ferryman.model.units import (
    BLOCK,
    GRADIENT,
    Item,
    Subgroup,
    Unit,
    master_dtype,
    overlap,
)
from ferryman.plan.staging import Staging, gradient_berth_bytes, most_tensors
from ferryman.runtime.arena import Allocation, Arena
from ferryman.runtime.device_memory import carve
from ferryman.runtime.marks import Mark
from ferryman.runtime.pinned import PinnedMemory
from ferryman.runtime.streams import Streams
from ferryman.server import kernels
from ferryman.server.berths import Berth, BerthAreas
from ferryman.server.kernels import Piece, Scratch
from ferryman.server.landing_buffers import LandingBuffers
from ferryman.server.moments import SCALE, noise_keys
from ferryman.server.rules import TIMING_NUMBERS, Rule
from ferryman.server.state import SubgroupMemory
from ferryman.server.stats import DeviceUpdate
from ferryman.server.store import RamStore
from ferryman.server.update_log import UpdateLog
from ferryman.server.update_step import SubgroupUpdate


class SquaredSums(NamedTuple):
    """Sums of squares of a gradient's tensors, on their way to the host."""

    items: list[Item]
    sums: torch.Tensor  # pinned, in double
    landed: Mark
    read: Mark  # the gradient has been read


class DeviceUpdates:
    """The device's part of the optimizer."""

    def __init__(
        self,
        store: RamStore,
        staging: Staging,
        streams: Streams,
        device: torch.device,
        arena: Arena,
        log: UpdateLog,
    ) -> None:
        self._store = store
        self._staging = staging
        self._device = device
        self._arena = arena
        self._log = log
        self._in, self._update, self._out = streams.state_in, streams.update, streams.state_out
        self._sums_lane, self._checks_lane = streams.norms, streams.checks
        self._has_float64 = kernels.has_float64(device)
        self._landing = LandingBuffers(arena)  # for gradients whose squares the host sums
        self._berths: list[Berth] = []  # subgroups pass through these
        self._own_berths: dict[Subgroup, Berth] = {}  # of subgroups whose state stays on the device
        self._latest_berth = 0
        self._scratch, self._sums_scratch = Scratch(0, device), Scratch(0, device)
        self._sums = torch.empty(
            0, device=device, dtype=torch.float32
        )  # of the subgroup whose squares are summed, and one number more
        self._sums_memory: Allocation | None = None
        self._sums_on_host: dict[Subgroup, torch.Tensor] = {}
        self.gradient_berths: dict[Subgroup, Berth] = {}  # where gradients wait for the global norm

    def make_room_for(self, units: Sequence[Unit], staging: Staging, *, held: bool) -> None:
        """Allocates all memory that updates of these units will need. Called between steps, when no lane has work."""
        self.copy_state_to_host()
        self._staging = staging
        self.release()
        self._scratch, self._sums_scratch = (Scratch(staging.scratch, self._device) for _ in range(2))
        self._berths = self._make_berths([staging.berth_bytes(units)] * staging.berths)
        own, waiting = staging.resident(units), staging.with_gradient_berths(units, held=held)
        self._own_berths = dict(zip(own, self._make_berths(map(self._size_of, own)), strict=True))
        self.gradient_berths = dict(zip(waiting, self._make_berths(map(gradient_berth_bytes, waiting)), strict=True))
        if self._has_float64:
            self._sums = torch.empty(most_tensors(units) + 1, dtype=torch.float64, device=self._device)
        counts = {s: len(_parts_in(s, s.unit.trained)) for s in staging.subgroups(units)}
        self._sums_memory = self._arena.take(sum(counts.values()) * torch.float64.itemsize)
        parts = self._sums_memory.bytes.view(torch.float64).split(list(counts.values())) if counts else ()
        self._sums_on_host = dict(zip(counts, parts, strict=True))

    def sum_squares(
        self,
        subgroup: Subgroup,
        gradient: torch.Tensor,
        items: Collection[Item],
        after: Iterable[Mark],
        copy_to: Berth | None = None,
    ) -> SquaredSums:
        """Sums of squares of a gradient on the device, by tensor. The gradient is also copied to a berth, if given."""
        parts = _parts_in(subgroup, items)
        on_host = self._sums_on_host[subgroup][: len(parts)]
        copied = None if copy_to is None else copy_to.memory[: gradient.nbytes].view(gradient.dtype)
        landing = None if self._has_float64 else self._landing.landing(gradient.numel(), gradient.dtype)

        def work() -> None:
            if landing is None:
                on_device, number = self._sums[: len(parts)].zero_(), self._sums[-1]
                for total, (_, at) in zip(on_device, parts.values(), strict=True):
                    kernels.add_squares_in_torch(gradient[at], total, number, self._sums_scratch)
                on_host.copy_(on_device, non_blocking=True)
            else:
                landing.gradient.copy_(gradient, non_blocking=True)
            if copied is not None:
                copied.copy_(gradient)

        label, before = f"check {subgroup.unit.name}", [*after, *(() if landing is None else landing.after)]
        mark = self._sums_lane.submit(work, after=before, label=label)
        if landing is None:
            return SquaredSums(list(parts), on_host, mark, mark)
        assert landing.buffer is not None, "it landed in a buffer"
        landed = landing.gradient

        def sum_on_host() -> None:
            for number, (_, at) in enumerate(parts.values()):
                on_host[number] = kernels.sum_of_squares(landed[at])

        summed = self._checks_lane.submit(sum_on_host, after=[mark], label=label, reads=[landed], writes=[on_host])
        self._landing.used(landing.buffer, summed)
        return SquaredSums(list(parts), on_host, summed, mark)

    def update(self, requested: SubgroupUpdate) -> Mark:
        """Makes an update, whose gradient is on the device or on the host. Returns the mark after which the gradient
        may be overwritten."""
        subgroup, gradient = requested.subgroup, requested.gradient
        unit, begun = subgroup.unit, self._log.step.requested.begun
        own = self._own_berths.get(subgroup)
        berth = own or self._next_berth()
        memory, areas = self._areas(berth, subgroup)
        copies_in: list[tuple[torch.Tensor, torch.Tensor]] = []  # target and source
        if own is None or not own.will_have_state:
            copies_in += zip(areas.rest, memory.rest, strict=True)
            if areas.held is None:
                copies_in += [(areas.weights_of(span), span.host) for span in memory.weights]
        if gradient.device != self._device:
            copies_in.append((areas.gradient[: gradient.nbytes], gradient.view(torch.uint8)))
            gradient = areas.gradient[: gradient.nbytes].view(gradient.dtype)
        before = [*requested.after, *self._log.before_update(subgroup)]
        if berth.free is not None:
            before.append(berth.free)
        state_in = [self._in.copy(copies_in, after=before, label=f"state in {unit.name}")] if copies_in else []
        pieces = self._pieces(requested, areas, gradient)

        def update() -> None:
            begun.add(unit)
            berth.has_state = own is not None
            for rule, mine in pieces:
                kernels.update_in_torch(rule, mine, self._scratch)

        used = self._update.submit(
            update, after=[*before, *state_in], label=f"update {unit.name}", nbytes=gradient.nbytes, timed=True
        )
        copies_out = areas.weights_out(memory)
        if own is None:
            copies_out += areas.rest_out(memory)
        berth.will_have_state = own is not None
        berth.free = self._out.copy(copies_out, after=[used], label=f"state out {unit.name}")
        bytes_in, bytes_out = (sum(target.nbytes for target, _ in copies) for copies in (copies_in, copies_out))
        self._log.add_device_update(subgroup, DeviceUpdate(used, berth.free, bytes_in, bytes_out, state_in))
        return used

    def copy_state_to_host(self) -> None:
        """Copies state that stays on the device to the host, where it can be read; the next update copies it back.

        No lane may have work. The host has the weights already, unless a failure prevented that.
        """
        marks = []
        for subgroup, berth in self._own_berths.items():
            if berth.has_state:
                memory, areas = self._areas(berth, subgroup)
                copies = areas.rest_out(memory)
                if berth.free is not None and berth.free.failed():
                    copies += areas.weights_out(memory)
                marks.append(self._out.copy(copies, label=f"state out {subgroup.unit.name}"))
            berth.has_state = berth.will_have_state = False
        for mark in marks:
            mark.wait()

    def wait(self) -> None:
        """Blocks until all updates are done."""
        self._update.wait()
        self._out.wait()

    def recover(self) -> None:
        """Called after a failure, when no lane has work. Copies the updates that were made to the host."""
        self.copy_state_to_host()
        self._landing.recover()
        for berth in (*self._berths, *self._own_berths.values(), *self.gradient_berths.values()):
            berth.free = None

    def release(self) -> None:
        """Frees all memory."""
        self._sums_on_host.clear()
        if self._sums_memory is not None:
            self._arena.give(self._sums_memory)
            self._sums_memory = None
        self._sums = torch.empty(0, device=self._device, dtype=torch.float32)
        self._landing.close()
        self._scratch, self._sums_scratch = Scratch(0, self._device), Scratch(0, self._device)
        self._berths.clear()
        self._own_berths.clear()
        self.gradient_berths.clear()

    def probe(self, rule: Rule, count: int, dtype: torch.dtype) -> tuple[tuple[Callable[[], Mark], ...], int] | None:
        """Functions to be timed, which submit a copy in, an update and a copy out of `count` unused elements; and the
        number of bytes that are copied. `dtype`: the format of the state. None if no berth is large enough.
        """
        sizes = [count * GRADIENT.itemsize] + [count * dtype.itemsize] * len(rule.states)
        if dtype == torch.uint8:
            sizes += [count // BLOCK * SCALE.itemsize] * len(rule.states)
        length = sum(sizes)
        berths = [b.memory for b in (*self._berths, *self._own_berths.values()) if b.memory.nbytes >= length]
        if not berths:
            return None
        host, berth = PinnedMemory(length, self._device), berths[0]
        berth[:length].zero_()
        torch.accelerator.synchronize(self._device)
        gradient, *arrays = berth[:length].split(sizes)
        states, scales = arrays[: len(rule.states)], arrays[len(rule.states) :]
        piece = Piece(
            gradient.view(GRADIENT),
            gradient.view(GRADIENT),
            None,
            [state.view(dtype) for state in states],
            TIMING_NUMBERS,
            [scale.view(SCALE) for scale in scales],
        )

        def copy_in() -> Mark:
            return self._in.copy([(berth[:length], host.bytes)], label="calibrate in")

        def copy_out() -> Mark:
            return self._out.copy([(host.bytes, berth[:length])], label="calibrate out")

        def update() -> Mark:
            return self._update.submit(
                lambda: kernels.update_in_torch(rule, [piece], self._scratch), label="calibrate", timed=True
            )

        return (copy_in, update, copy_out), length

    def _next_berth(self) -> Berth:
        self._latest_berth = (self._latest_berth + 1) % len(self._berths)
        return self._berths[self._latest_berth]

    def _make_berths(self, sizes: Iterable[int]) -> list[Berth]:
        return [Berth(memory) for memory in carve(list(sizes), self._device)]

    def _size_of(self, subgroup: Subgroup) -> int:
        """Bytes of a berth for this subgroup. The plan has a bound if tensors of one unit differ in format."""
        if self._staging.small_state is None:
            return self._staging.bytes_for(subgroup.unit, subgroup.size)
        memory = self._store.state(subgroup.unit).memory_of(subgroup, self._store.weights(subgroup.unit))
        of_elements = subgroup.size * (subgroup.unit.weight_itemsize + GRADIENT.itemsize)
        return of_elements + sum(part.nbytes for part in memory.rest)

    def _areas(self, berth: Berth, subgroup: Subgroup) -> tuple[SubgroupMemory, BerthAreas]:
        unit, weights = subgroup.unit, self._log.weights
        memory = self._store.state(unit).memory_of(subgroup, self._store.weights(unit))
        held = None if weights is None else weights.memory(unit)
        return memory, BerthAreas.of(berth, subgroup, memory.rest, held)

    def _pieces(
        self, requested: SubgroupUpdate, areas: BerthAreas, gradient: torch.Tensor
    ) -> list[tuple[Rule, list[Piece]]]:
        """The arguments of the kernels, by rule: as on the host, but in the berth or where weights stay. `gradient`: on
        the device."""
        subgroup = requested.subgroup
        ruled: dict[str, tuple[Rule, list[Piece]]] = {}
        width, lacking = subgroup.unit.weight_itemsize, subgroup.unit.master_itemsize
        state = self._store.state(subgroup.unit)
        of_items = {item: args for args in requested.args for item in args.items}
        for item, (own, theirs) in _parts_in(subgroup, of_items).items():
            args, size = of_items[item], item.dtype.itemsize
            assert args.rule is not None, "own steps are made on the host"
            at, offset = theirs.start * width, item.offset + own.start * size
            nbytes = (own.stop - own.start) * size
            master = None
            if (dtype := master_dtype(item.dtype)) is not None:
                begin = theirs.start * lacking
                master = areas.rest[0][begin : begin + (own.stop - own.start) * dtype.itemsize].view(dtype)
            states, scales = state.state_in(areas.rest[1 if lacking else 0 :], subgroup, item, own, args.rule)
            piece = Piece(
                gradient[theirs],
                areas.weights_at(at, offset, nbytes).view(item.dtype),
                master,
                states,
                (requested.factor, *args.numbers[1:]),
                scales,
                own.start,
                noise_keys(args.step),
            )
            ruled.setdefault(args.rule.name, (args.rule, []))[1].append(piece)
        return list(ruled.values())


def _parts_in(subgroup: Subgroup, items: Collection[Item]) -> dict[Item, tuple[slice, slice]]:
    """The tensors that have a part in the subgroup: which of their elements, and where these are in the subgroup."""
    offsets = subgroup.unit.trained_offsets
    found = {item: overlap(item, offsets[item], subgroup.start, subgroup.size) for item in items}
    return {item: both for item, both in found.items() if both is not None}
