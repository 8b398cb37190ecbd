"""The relay: runs micro-batches so that each unit, once on the device, serves all of them.

When every live micro-batch is parked, the driver picks a unit: among parked forwards the earliest; if there are none,
among parked backwards the latest. The unit serves every wish for it, micro-batch by micro-batch, until there is none
left, and makes room for the next. That one rule gives 2N-1 fetches a step at any number of micro-batches, and a turn in
which the logits of two micro-batches never exist together.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ferryman.cost.plan import Need, Plan
from ferryman.lanes import DeviceLane, Lanes
from ferryman.marks import Mark
from ferryman.relay.absent import Absent
from ferryman.relay.calls import Call, Forward, refuse_mutable
from ferryman.relay.fit import Stretch, TooLargeError, Trial
from ferryman.relay.gradient_slots import GradientSlots
from ferryman.relay.held import HeldWeights
from ferryman.relay.randomness import Randomness
from ferryman.relay.rendezvous import Direction, MicroBatch, Surroundings
from ferryman.relay.slots import WeightSlots, bind
from ferryman.relay.stash import DeviceStash, HostStash, Stash
from ferryman.server.server import Server
from ferryman.units import Item, Unit

# A trial may go this far beyond its room, to know what is needed if that is only a little too much.
_BEYOND = 1.1


class Relay:
    """Owns what is on the device: slots, residents, and what the last step has taught."""

    def __init__(self, plan: Plan, device: torch.device, server: Server, lanes: Lanes) -> None:
        self.randomness = Randomness(device)
        self.kinds = sorted({"cpu", device.type})  # of devices that autocast may be on for
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self._device = device
        self._units: list[Unit] = []
        self._residents = plan.residents
        self._server = server
        self._lanes = lanes
        self._compute, h2d, d2h = lanes.device("compute"), lanes.device("h2d"), lanes.device("d2h")
        self._d2h = d2h
        kind = HeldWeights if plan.held else WeightSlots
        self._weights = kind(device, plan.weight_slots, server, h2d, self._collect)
        self._gradients = GradientSlots(device, plan.gradient_slots, server, h2d, d2h)
        self._resident_weights = WeightSlots(device, 1, server, h2d, self._collect_resident)
        self._resident_gradients = GradientSlots(device, 1, server, h2d, d2h)
        self._resident_weights.make_room_for([self._residents])
        self._resident_gradients.make_room_for([self._residents])
        self._on_device = DeviceStash()
        self._on_host = None
        if device.type != "cpu":
            # On lanes of its own: those of units wait for the host at times, and compute must not wait with them.
            self._on_host = HostStash(device, self._compute, lanes.device("stash in"), lanes.device("stash out"))
        self.stash: Stash = self._on_device
        self._absent: dict[Unit, list[tuple[Item, Absent]]] = {}
        # Of the step that runs.
        self._running: MicroBatch | None = None
        self._batches: list[MicroBatch] = []
        self.for_good = False  # gradients cross for an update
        self._is_last = False  # the call that goes backward is the unit's last
        self._buffers: list[tuple[Item, torch.Tensor]] = []  # of the unit on visit
        self._visited: Unit | None = None  # whose gradients are being added up
        self._sums: dict[Item, torch.Tensor] = {}  # where gradients of the unit on visit are added up
        self._resident_sums: dict[Item, torch.Tensor] = {}
        self._open: dict[Unit, int] = {}  # calls whose backward is still to come
        self._latest: Call | None = None  # the last to go forward
        self._turning: set[nn.Module] = set()
        # Of the last step, for the next.
        self._order: list[Unit] = []  # of visits
        self._turns: set[nn.Module] = set()  # whose backward followed their forward at once
        # Of evaluations, outside steps.
        self._evaluated: list[Unit] | None = None
        self._evaluation_order: list[Unit] = []
        # Of a trial.
        self._stretches: list[Stretch] | None = None
        self._floor = self._ceiling = 0  # of the device's memory: at its start, and as far as it may go
        self.serve(plan)

    @property
    def fetches(self) -> int:
        """Units fetched so far."""
        return self._weights.fetches

    def serve(self, plan: Plan) -> None:
        """Its units are there from now on, in the order of the model; the residents are those there were."""
        units = plan.units
        self._weights.make_room_for(units)
        self._gradients.make_room_for(units)
        self._server.serve(plan.in_forward_order, self._weights, plan.staging, held=plan.held)
        self._units = list(units)
        # A unit may have been renamed, so what is said of its tensors is made anew.
        self._absent = {
            unit: [(item, Absent(item.tensor, item.name, unit, self._device)) for item in unit.items] for unit in units
        }
        # The first guess at the visits to come; after a step it is known.
        self._order = [*units, *reversed(units)]
        self._evaluation_order = list(units)
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # memory that is new to lanes may still be in use elsewhere

    def intercept(self, unit: Unit, module: nn.Module, forward: Forward) -> Forward:
        """What stands for a module's forward."""

        def relayed(*args: Any, **kwargs: Any) -> Any:
            if self._running is not None:
                refuse_mutable(unit, forward, args, kwargs)
                return Call(self, self._running, unit, module, forward, (args, kwargs)).run()
            if self._evaluated is not None:
                return self._evaluate(unit, lambda: forward(*args, **kwargs))
            self._server.settle()
            return forward(*args, **kwargs)  # by itself, outside a step: on the host, with the host's weights

        return relayed

    def run(
        self,
        works: Sequence[Callable[[], torch.Tensor]],
        seed: int,
        *,
        stash_on_host: bool,
        for_good: bool = False,
        without: Collection[Unit] = (),
        between: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches, each of which returns its loss; returns the sum.

        `for_good`: the server updates weights with the gradients, else they are kept. `without`: units that will not
        be asked for this time. `between` is called between visits and may raise. The gradients are on their way to the
        host when it returns.
        """
        self.for_good = for_good
        for slots in (self._gradients, self._resident_gradients):
            slots.begin(for_good=for_good)
        self.stash = self._on_host if stash_on_host and self._on_host is not None else self._on_device
        losses: dict[int, torch.Tensor] = {}

        def work(batch: MicroBatch) -> None:
            with self.stash.watch(batch):
                loss = works[batch.number]()
                losses[batch.number] = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
                if for_good:
                    self._send_loss(losses[batch.number])
                batch.turned = True
                loss.backward()

        surroundings = Surroundings(self._device, self.randomness, self._compute, seed)
        visited: list[Unit] = []
        order = [unit for unit in self._order if unit not in without]
        with self._bound(), self._adding_up(), contextlib.ExitStack() as stack:
            batches = self._batches = [MicroBatch(number, work, surroundings) for number in range(len(works))]
            for batch in batches:
                stack.callback(batch.abandon)
            self._turning.clear()
            for batch in batches:
                self._resume(batch)
                self.stash.stow(batch)
            while live := [batch for batch in batches if not batch.done]:
                unit = self._pick(live)
                visited.append(unit)
                self._visit(unit, batches, _after(order, visited))
                between()
            with self._compute.occupy("add up losses"):
                total = functools.reduce(torch.add, (losses[number] for number in range(len(works))))
                for unit in self._gradients.held():
                    self._gradients.complete(unit)
                self._resident_gradients.complete(self._residents)
        if not without:
            self._order, self._turns = visited, set(self._turning)
        if self._device.type != "cpu":
            total.record_stream(torch.accelerator.current_stream(self._device))  # where the caller will use it
        return total

    def try_out(self, works: Sequence[Callable[[], torch.Tensor]], room: int) -> Trial:
        """A step that leaves nothing behind, but what it has needed on the device; the stash is on the host.

        It is given up, with a TooLargeError, when it has needed more than `room`.
        """
        assert self._on_host is not None, "the host itself has no budget"
        known = self._order
        for _ in range(2):  # the second knows where the turn is, and keeps its graph
            self._on_host.reset_peak()
            self._stretches = []
            before = torch.accelerator.memory_allocated(self._device)
            self._floor, self._ceiling = before, before + int(room * _BEYOND)
            try:
                with self._gradients.discarding(), self._resident_gradients.discarding():
                    self.run(works, seed=0, stash_on_host=True)
                    self._lanes.wait()
                stretches = [Stretch(where, peak - before) for where, peak in self._stretches]
            finally:
                self._stretches = None
            if self._order == known:
                break
            known = self._order
        return Trial(stretches, self._on_host.peak // len(works))

    def finish(self) -> None:
        """Blocks until all gradients are on the host."""
        self._gradients.wait()
        self._resident_gradients.wait()

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """These tensors were made for the micro-batch that runs."""
        assert self._running is not None
        self.stash.know(self._running, tensors)

    def recover(self) -> None:
        """After a failure, when no lane has work any more: what failed is not waited for."""
        self._weights.forget(everything=True)
        self._resident_weights.forget()
        self._gradients.forget_marks()
        self._resident_gradients.forget_marks()

    @property
    def kept(self) -> dict[Unit, list[Item]]:
        """Units whose gradients are on the host in float32, and which of their tensors have some."""
        return {**self._gradients.kept, **self._resident_gradients.kept}

    def has_gradient(self, item: Item) -> bool:
        return self._gradients.has(item) or self._resident_gradients.has(item)

    def take_gradient(self, unit: Unit, item: Item) -> None:
        """The user has put a gradient into the store's memory."""
        (self._resident_gradients if unit is self._residents else self._gradients).take(unit, item, self._lanes.here())

    def clear_gradients_of(self, items: Sequence[Item]) -> None:
        self._gradients.clear_of(items)
        self._resident_gradients.clear_of(items)

    def clear_gradients(self) -> None:
        self._gradients.clear()
        self._resident_gradients.clear()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within, without gradients and outside a step, units come to the device as the model calls them.

        On the caller's own stream: what the model returns or caches is used there.
        """
        self._evaluated = []
        try:
            with self._bound():
                self._compute.here().precede_caller()
                try:
                    yield
                finally:
                    self._compute.follow(self._lanes.here())
        finally:
            self._evaluation_order, self._evaluated = self._evaluated, None

    def _evaluate(self, unit: Unit, work: Callable[[], Any]) -> Any:
        assert self._evaluated is not None
        self._evaluated.append(unit)
        slot, ready = self._weights.enter(unit, _after(self._evaluation_order, self._evaluated))
        for mark in ready:
            mark.precede_caller()
        bind(self._weights.tensors(unit, slot))
        try:
            return work()
        finally:
            bind(self._absent[unit])
            self._weights.leave(slot, self._lanes.here())

    def close(self) -> None:
        """Gives the device's memory back."""
        if self._on_host is not None:
            self._on_host.close()
        for slots in (self._weights, self._gradients, self._resident_weights, self._resident_gradients):
            slots.close()

    # What calls tell.

    def turns_at(self, module: nn.Module) -> bool:
        return module in self._turns

    def buffer_versions(self) -> list[int]:
        """Of the unit on visit: a buffer that it edits would be edited again by its second run."""
        return [tensor._version for _, tensor in self._buffers]

    def edited_buffer(self, before: list[int]) -> str | None:
        """The name of a buffer that was edited since."""
        changed = [item.name for (item, t), version in zip(self._buffers, before, strict=True) if t._version != version]
        return changed[0] if changed else None

    def went_forward(self, call: Call) -> None:
        self._open[call.unit] = self._open.get(call.unit, 0) + 1
        if self._latest is not None:
            self._latest.drop_graph()  # another call came between: one graph at most is kept
        self._latest = call

    def goes_backward(self, call: Call) -> None:
        if self._latest is call:
            self._turning.add(call.module)
        self._is_last = self._open[call.unit] == 1 and self._all_turned()
        if not self._sums and call.unit.trained:
            self._visited = call.unit
            self._sums, ready = self._gradients.enter(call.unit)
            self._compute.follow(*ready)

    def went_backward(self, call: Call) -> None:
        self._open[call.unit] -= 1

    def _all_turned(self) -> bool:
        """Whether no micro-batch will go forward any more."""
        return all(batch.turned or batch.done for batch in self._batches)

    # The driver.

    def _resume(self, batch: MicroBatch) -> None:
        self._running = batch
        if self._stretches is not None:
            where = "the start" if batch.wish is None else batch.wish.unit.name
            torch.accelerator.reset_peak_memory_stats(self._device)
        try:
            batch.resume()
        finally:
            self._running = None
        self._look_at_memory()
        if self._stretches is not None:
            peak = torch.accelerator.max_memory_allocated(self._device)
            if peak > self._ceiling:
                raise TooLargeError(Need(peak - self._floor, where, is_all=False))
            self._stretches.append(Stretch(where, peak))

    def _pick(self, live: Sequence[MicroBatch]) -> Unit:
        wishes = [batch.wish for batch in live if batch.wish is not None]
        forwards = [wish.unit for wish in wishes if wish.direction is Direction.FORWARD]
        if forwards:
            return min(forwards, key=self._units.index)
        return max((wish.unit for wish in wishes), key=self._units.index)

    def _visit(self, unit: Unit, batches: Sequence[MicroBatch], upcoming: Sequence[Unit]) -> None:
        slot, ready = self._weights.enter(unit, upcoming)
        finished = False
        try:
            backward = self._all_turned()
            with self._compute.occupy(f"visit {unit.name}", after=ready) as mark:
                self._look_at_memory()
                tensors = self._weights.tensors(unit, slot)
                self._buffers = [pair for pair in tensors if not isinstance(pair[1], nn.Parameter)]
                bind(tensors)
                guests = [batch for batch in batches if batch.wish is not None and batch.wish.unit is unit]
                for batch, after in zip(guests, [*guests[1:], None], strict=True):
                    self.stash.restore(batch)
                    if after is not None:
                        self.stash.restore(after)  # beside the compute of this one
                    self.stash.follow(batch)
                    while batch.wish is not None and batch.wish.unit is unit:
                        self._resume(batch)
                    self.stash.stow(batch)
                direction = "backward" if backward else "turn" if self._all_turned() else "forward"
                mark.label += f" ({direction})"
                if finished := not self._open.get(unit) and (not self.for_good or self._all_turned()):
                    self._gradients.complete(unit)
        finally:
            bind(self._absent[unit])
            self._sums = {}
            if self._latest is not None:
                self._latest.drop_graph()
                self._latest = None
            end = self._compute.here()  # also of a visit that failed: what it launched still uses the slots
            self._weights.leave(slot, end)
            self._gradients.leave(unit, end, finished=finished)

    @contextlib.contextmanager
    def _bound(self) -> Iterator[None]:
        """For a step: residents on the device, all units absent; afterwards the model has the host's tensors again."""
        self._weights.forget()
        self._resident_weights.forget()
        self._compute.follow(self._lanes.here())
        slot, ready = self._resident_weights.enter(self._residents, ())
        self._compute.follow(*ready)
        present = self._resident_weights.tensors(self._residents, slot)
        versions = [tensor._version for _, tensor in present]
        try:
            bind(present)
            for unit in self._units:
                bind(self._absent[unit])
            yield
        finally:
            for unit in (*self._units, self._residents):
                bind([(item, item.tensor) for item in unit.items])
            end = self._compute.here()
            end.precede_caller()
            edited = [pair for pair, version in zip(present, versions, strict=True) if pair[1]._version != version]
            self._write_back(edited, end)
            self._resident_weights.leave(slot, end)
            self._open.clear()
            self._latest = None
            self.stash.forget()

    @contextlib.contextmanager
    def _adding_up(self) -> Iterator[None]:
        """For a step: residents have a slot for their gradients; afterwards all gradients are on their way."""
        self._resident_sums, ready = self._resident_gradients.enter(self._residents)
        self._compute.follow(*ready)
        try:
            yield
        except BaseException:
            for slots in (self._gradients, self._resident_gradients):
                slots.begin(for_good=False)  # what a step that failed has added up changes no weight
            raise
        finally:
            self._resident_sums = {}
            for slots in (self._gradients, self._resident_gradients):
                slots.flush_all(self._compute.here())

    def _send_loss(self, loss: torch.Tensor) -> None:
        """To the server, which refuses to update with gradients of a loss that is not finite."""
        target, source = self._server.looks.receive_loss(), loss.float().view(1)
        if isinstance(self._d2h, DeviceLane):
            source.record_stream(self._d2h.stream)
        mark = self._d2h.copy([(target, source)], after=[self._compute.here()], label="loss")
        self._server.looks.expect_loss(target, mark)

    def _write_back(self, edited: Sequence[tuple[Item, torch.Tensor]], end: Mark) -> None:
        """What the user's code has changed in residents, such as a count in a buffer, goes to the host."""
        for item, tensor in edited:
            if tensor.device.type == "cpu":
                continue  # it is the host's own
            after = [end, self._lanes.here()]  # evaluations run on the caller's own stream
            copies = [(item.tensor.data, tensor.detach())]
            self._d2h.copy(copies, after=after, label=f"write back {item.name}").wait()

    def _look_at_memory(self) -> None:
        if self._lanes.trace is not None:
            self._lanes.trace.look_at_memory()

    def _collect(self, item: Item, parameter: torch.Tensor) -> None:
        assert self._visited is not None
        self._look_at_memory()  # the call's graph is there
        self._gradients.add(self._visited, item, self._sums[item], _take(parameter), last=self._is_last)

    def _collect_resident(self, item: Item, parameter: torch.Tensor) -> None:
        self._resident_gradients.add(self._residents, item, self._resident_sums[item], _take(parameter), last=False)


def _after(order: Sequence[Unit], visited: Sequence[Unit]) -> Sequence[Unit]:
    """What was visited last time after the point where this time stands."""
    at = len(visited)
    if at > len(order) or order[at - 1] is not visited[-1]:
        # Another way than last time: go on from the next visit to this unit, if there is one.
        later = [i for i in range(at - 1, len(order)) if order[i] is visited[-1]]
        at = later[0] + 1 if later else len(order)
    return order[at:]


def _take(parameter: torch.Tensor) -> torch.Tensor:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None, "autograd calls this when it has put a gradient there"
    return gradient
