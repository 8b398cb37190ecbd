"""The relay: runs micro-batches so that each unit, once on the device, serves all of them.

When every live micro-batch is parked, the driver picks a unit: among parked forwards the earliest; if there are none,
among parked backwards the latest. The unit serves every wish for it, micro-batch by micro-batch, until there is none
left, and makes room for the next. That one rule gives 2N-1 fetches a step at any number of micro-batches, and a turn in
which the logits of two micro-batches never exist together.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ferryman.exactness.buffers import Bound, Buffers
from ferryman.exactness.escapes import Escapes
from ferryman.exactness.guard import Guard
from ferryman.exactness.reach import beyond, context_variables, tensors_in
from ferryman.exactness.user_state import UserState
from ferryman.exactness.weight_edits import WeightEdits
from ferryman.model.binding import adopt_assigned, bind, is_buffer
from ferryman.model.placeholder import Placeholder
from ferryman.model.units import Item, Unit
from ferryman.plan.plan import Plan
from ferryman.relay.call import Call, Forward, refuse_caches
from ferryman.relay.checksums import Checksums
from ferryman.relay.evaluation import Evaluation, upcoming
from ferryman.relay.gradient_slots import GradientSlots
from ferryman.relay.held_weights import HeldWeights
from ferryman.relay.micro_batch import Direction, MicroBatch, Surroundings
from ferryman.relay.observer import Observer
from ferryman.relay.stash import DeviceStash, HostStash, Stash
from ferryman.relay.weight_slots import WeightSlots
from ferryman.runtime.marks import Mark
from ferryman.runtime.rng import Randomness
from ferryman.runtime.streams import Streams
from ferryman.server.server import Server


class Relay:
    """Owns what is on the device: slots, residents, and what the last step has taught."""

    def __init__(self, plan: Plan, device: torch.device, server: Server, streams: Streams) -> None:
        self.randomness = Randomness(device)
        self.state = UserState()
        self.buffers = Buffers()
        self.checksums = Checksums(device)
        self.escapes = Escapes()
        self.kinds = sorted({"cpu", device.type})  # of devices that autocast may be on for
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.device = device
        self._units: list[Unit] = []
        self._residents = plan.residents
        self._server = server
        self.lanes = streams.lanes
        self.compute, h2d, d2h = streams.compute, streams.h2d, streams.d2h
        self._d2h = d2h
        kind = HeldWeights if plan.held else WeightSlots
        self.weights = kind(device, plan.weight_slots, server, h2d, self._collect)
        self._gradients = GradientSlots(device, plan.gradient_slots, server, h2d, d2h)
        self._resident_weights = WeightSlots(device, 1, server, h2d, self._collect_resident)
        self._resident_gradients = GradientSlots(device, 1, server, h2d, d2h)
        self._resident_weights.make_room_for([self._residents])
        self._resident_gradients.make_room_for([self._residents])
        self._device_stash = DeviceStash()
        self._host_stash: HostStash | None = None
        self.evaluation = Evaluation(self)
        if device.type != "cpu":
            # On lanes of its own: those of units wait for the host at times, and compute must not wait with them.
            self._host_stash = HostStash(device, self.compute, streams.stash_in, streams.stash_out)
        self.stash: Stash = self._device_stash
        self.absent: dict[Unit, list[tuple[Item, Placeholder]]] = {}
        # Of the step that runs.
        self.running: MicroBatch | None = None
        self._batches: list[MicroBatch] = []
        self._losses: dict[int, torch.Tensor] = {}  # of micro-batches that have turned
        self._number = 0  # of runs so far
        self.for_good = False  # gradients cross for an update
        self._observer: Observer | None = None
        self._guard: Guard | None = None
        self._is_last = False  # the call that goes backward is the unit's last
        self._present: list[tuple[Item, torch.Tensor]] = []  # the tensors of the unit on visit
        self._visited: Unit | None = None  # whose gradients are being added up
        self._hooked: set[tuple[MicroBatch, Item]] = set()  # parameters whose hooks have run
        self._sums: dict[Item, torch.Tensor] = {}  # where gradients of the unit on visit are added up
        self._resident_sums: dict[Item, torch.Tensor] = {}
        self.entangled: list[weakref.ref[Call]] = []  # calls that can reach what may refer to them
        self._open: dict[Unit, int] = {}  # calls whose backward is still to come
        self._latest: Call | None = None  # the last to go forward
        self._turning: set[nn.Module] = set()
        # Of the last step, for the next.
        self.order: list[Unit] = []  # of visits
        self._turns: set[nn.Module] = set()  # whose backward followed their forward at once
        self._late: set[Unit] = set()  # units that were called in the backward, by reentrant checkpointing
        self._resident_tensors: dict[Item, torch.Tensor] = {}  # on the device, in a step
        self._resident_edits = WeightEdits((), by_bytes=False)
        self.serve(plan)

    @property
    def host_stash(self) -> HostStash:
        assert self._host_stash is not None, "the host itself has no budget"
        return self._host_stash

    @property
    def fetches(self) -> int:
        """Units fetched so far."""
        return self.weights.fetches

    def serve(self, plan: Plan) -> None:
        """Its units are there from now on, in the order of the model; the residents are those there were."""
        units = plan.units
        self.weights.make_room_for(units)
        self._gradients.make_room_for(units)
        self._server.serve(plan.in_forward_order, self.weights, plan.staging, held=plan.held)
        self._units = list(units)
        # A unit may have been renamed, so what is said of its tensors is made anew.
        self.absent = {
            unit: [(item, Placeholder(item.tensor, item.name, unit, self.device)) for item in unit.items]
            for unit in units
        }
        self._late.clear()
        self._training = {unit for unit in units if any(p.requires_grad for m in unit.modules for p in m.parameters())}
        # The modules of each unit, in an order that stays.
        self.inside = {unit: list(dict.fromkeys(m for top in unit.modules for m in top.modules())) for unit in units}
        within = {unit: set(modules) for unit, modules in self.inside.items()}
        self._resident_buffers = {  # that belong to modules of units
            unit: [i for i in self._residents.items if is_buffer(i) and any(p.module in within[unit] for p in i.places)]
            for unit in units
        }
        # The first guess at the visits to come; after a step it is known.
        self.order = [*units, *reversed(units)]
        self.evaluation.expect(units)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # memory that is new to lanes may still be in use elsewhere

    def intercept(self, unit: Unit, module: nn.Module, forward: Forward) -> Forward:
        """What stands for a module's forward."""

        def relayed(*args: Any, **kwargs: Any) -> Any:
            if self.running is not None:
                refuse_caches(unit, forward, args, kwargs)
                self._check_late(unit)
                return Call(self, self.running, unit, module, forward, args, kwargs).run()
            if self.evaluation.runs:
                return self.evaluation.call(unit, lambda: forward(*args, **kwargs))
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
        in_turn: bool = False,
        forward_only: bool = False,
        observer: Observer | None = None,
        guard: Guard | None = None,
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches, each of which returns its loss; returns the sum.

        `for_good`: the server updates weights with the gradients, else they are kept. `without`: units that will not
        be asked for this time. `between` is called between visits and may raise. The gradients are on their way to the
        host when it returns.

        For trials: `in_turn` runs one micro-batch after the other, `forward_only` ends each with its loss, and an
        `observer` is told what happens.
        """
        self.for_good = for_good
        self._observer, self._guard = observer, guard
        for slots in (self._gradients, self._resident_gradients):
            slots.begin(for_good=for_good)
        self.stash = self._host_stash if stash_on_host and self._host_stash is not None else self._device_stash
        losses = self._losses = dict[int, torch.Tensor]()

        def work(batch: MicroBatch) -> None:
            batch.context = context_variables(contextvars.copy_context())
            modules = (module for inside in self.inside.values() for module in inside)
            batch.inherited = tensors_in(beyond(modules, self.state.owners))
            with self.stash.watch(batch):
                loss = works[batch.number]()
                losses[batch.number] = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
                if self.escapes.traced:
                    self.escapes.check(batch.number, loss)
                if for_good:
                    self._server.send_loss(losses[batch.number], [self.compute.here()])
                batch.turned = True
                if not forward_only:
                    loss.backward()

        visited: list[Unit] = []
        order = [unit for unit in self.order if unit not in without]
        with (
            self.bound(),
            self._apart(losses, seed, exchange=not in_turn),
            self._adding_up(),
            contextlib.ExitStack() as stack,
        ):
            survey = observer.survey if observer is not None else None if guard is None else guard.survey
            thread_locals = [] if survey is None else survey.thread_locals
            surroundings = Surroundings(self.device, self.randomness, self.compute, seed, thread_locals)
            batches = self._batches = []
            for number in range(len(works)):
                batches.append(MicroBatch(number, work, surroundings, batches[-1] if batches else None))
                stack.callback(batches[-1].abandon)
            self._turning.clear()
            for group in [[batch] for batch in batches] if in_turn else [batches]:
                for batch in group:
                    self._resume(batch)
                    self.stash.stow(batch)
                while live := [batch for batch in group if not batch.done]:
                    unit = self._pick(live)
                    visited.append(unit)
                    self._visit(unit, group, [] if in_turn else upcoming(order, visited))
                    between()
            if observer is None and (left := batches[-1].thread_state) is not None:
                left.leave_behind(thread_locals)
            with self.compute.occupy("add up losses"):
                total = functools.reduce(torch.add, (losses[number] for number in range(len(works))))
                for unit in self._gradients.held():
                    self._gradients.complete(unit)
                self._resident_gradients.complete(self._residents)
        if not without and not forward_only:
            self._turns = set(self._turning)
            if not in_turn:
                self.order = visited
        if self.device.type != "cpu":
            total.record_stream(torch.accelerator.current_stream(self.device))  # where the caller will use it
        return total

    @contextlib.contextmanager
    def trying(self, *, check: bool) -> Iterator[None]:
        """Within, a run leaves nothing behind on host or device, but what it has taught. `check`: the second runs of
        calls are compared with the first, and it is noted which buffers are edited."""
        trace, self.lanes.trace, fetches = self.lanes.trace, None, self.weights.fetches
        self.checksums.begin(on=True)  # also where nobody looks at them: they take memory
        buffers = self.buffers.learning() if check else self.buffers.ignoring()
        try:
            with self._gradients.discarding(), self._resident_gradients.discarding(), buffers:
                yield
                self.lanes.wait()
        finally:
            # The device's copies of buffers may have been edited.
            self.weights.forget(everything=any(is_buffer(item) for unit in self._units for item in unit.items))
            self.lanes.trace = trace
            if check:
                self.weights.fetches = fetches
            else:
                self.checksums.begin(on=False)

    def edited_buffers(self) -> dict[str, Any]:
        """Buffers of units that the units edit, as they are on the host."""
        return {item.name: item.tensor.detach().to(torch.float64, copy=True) for item in self.buffers.edited}

    def finish(self) -> None:
        """Blocks until all gradients are on the host."""
        self._gradients.wait()
        self._resident_gradients.wait()

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """These tensors were made for the micro-batch that runs."""
        assert self.running is not None
        self.stash.know(self.running, tensors)

    def adopt_residents(self) -> None:
        """Resident buffers may have been assigned."""
        for item, tensor in self._resident_tensors.items():
            if is_buffer(item):
                adopt_assigned(item, tensor)

    def recover(self) -> None:
        """After a failure, when no lane has work any more: what failed is not waited for."""
        self.weights.forget(everything=True)
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
        (self._resident_gradients if unit is self._residents else self._gradients).take(unit, item, self.lanes.here())

    def clear_gradients_of(self, items: Sequence[Item]) -> None:
        self._gradients.clear_of(items)
        self._resident_gradients.clear_of(items)

    def clear_gradients(self) -> None:
        self._gradients.clear()
        self._resident_gradients.clear()

    def close(self) -> None:
        """Gives the device's memory back."""
        if self._host_stash is not None:
            self._host_stash.close()
        for slots in (self.weights, self._gradients, self._resident_weights, self._resident_gradients):
            slots.close()

    # What calls ask and tell.

    def turns_at(self, module: nn.Module) -> bool:
        return module in self._turns

    def trains(self, unit: Unit) -> bool:
        """Whether any parameter that its modules use trains, also one that is resident."""
        return unit in self._training

    def opened(self, unit: Unit) -> Callable[[], None]:
        """A call's backward may come from now on; what is returned is called when it cannot come any more."""
        self._open[unit] = self._open.get(unit, 0) + 1
        number = self._number

        def released() -> None:
            if self._number == number:  # else its step is over
                self._open[unit] -= 1

        return released

    @contextlib.contextmanager
    def present(self, unit: Unit, *, adopt: bool) -> Iterator[None]:
        """Within, the modules of the unit on visit have the device's tensors; to `adopt`, buffers that they assign
        count."""
        bind(self._present)
        try:
            yield
            if adopt:
                self.buffers.adopt()
        finally:
            bind(self.absent[unit])
            for item in self._resident_buffers[unit]:
                bind([(item, self._resident_tensors[item])])

    def went_forward(self, call: Call) -> None:
        if self._latest is not None:
            self._latest.drop_graph()  # another call came between: one graph at most is kept
        self._latest = call

    def goes_backward(self, call: Call, *, accumulate: bool) -> None:
        if self._latest is call:
            self._turning.add(call.module)
        if not accumulate:
            return
        self._is_last = self._open[call.unit] == 1 and self._all_turned() and call.unit not in self._late
        if not self._sums and call.unit.trained:
            self._visited = call.unit
            self._sums, ready = self._gradients.enter(call.unit)
            self.compute.follow(*ready)

    def _check_late(self, unit: Unit) -> None:
        """A unit that is called in the backward, by checkpointing with use_reentrant=True, may have gradients still to
        come when all of its calls are over; so they must not cross for good before the end."""
        assert self.running is not None
        if self.running.turned and unit not in self._late:
            if self.for_good:
                raise ValueError(
                    f"the unit {unit.name!r} is called in the backward, by torch.utils.checkpoint, and was not in the "
                    "first step. The engine runs units again by itself: switch checkpointing off"
                )
            self._late.add(unit)

    def _all_turned(self) -> bool:
        """Whether no micro-batch will go forward any more."""
        return all(batch.turned or batch.done for batch in self._batches)

    # The driver.

    def _resume(self, batch: MicroBatch) -> None:
        observer = self._observer
        if observer is not None:
            observer.resumes(batch)
        if self.state:
            with self.compute.current():
                self.state.enter(batch.number)
        self.running = batch
        try:
            batch.resume()
        finally:
            self.running = None
        self._look_at_memory()
        if observer is not None:
            with self.compute.current():
                observer.parked(batch)

    def _pick(self, live: Sequence[MicroBatch]) -> Unit:
        wishes = [batch.wish for batch in live if batch.wish is not None]
        forwards = [wish.unit for wish in wishes if wish.direction is Direction.FORWARD]
        if forwards:
            return min(forwards, key=self._units.index)
        return max((wish.unit for wish in wishes), key=self._units.index)

    def _visit(self, unit: Unit, batches: Sequence[MicroBatch], upcoming: Sequence[Unit]) -> None:
        slot, ready = self.weights.enter(unit, upcoming)
        finished = False
        try:
            backward = self._all_turned()
            with self.compute.occupy(f"visit {unit.name}", after=ready) as mark:
                self._look_at_memory()
                self._present = self.weights.tensors(unit, slot)
                self.buffers.visit(self._buffers_of(unit))
                edits = WeightEdits(self._present, by_bytes=self.escapes.traced)
                guests = [batch for batch in batches if batch.wish is not None and batch.wish.unit is unit]
                for batch, after in zip(guests, [*guests[1:], None], strict=True):
                    self.stash.restore(batch)
                    if after is not None:
                        self.stash.restore(after)  # beside the compute of this one
                    while batch.wish is not None and batch.wish.unit is unit:
                        self.stash.restore(batch)  # of a second call, others may have left since the first
                        self.stash.follow(batch)
                        self._resume(batch)
                    self.stash.stow(batch)
                edits.check()
                direction = "backward" if backward else "turn" if self._all_turned() else "forward"
                mark.label += f" ({direction})"
                if finished := self._is_finished(unit):
                    self._gradients.complete(unit)
                edited = self.buffers.leave()
            if edited:
                self.write_back([pair for pair in edited if pair[0] in unit.items], self.compute.here())
        finally:
            self._present = []
            self._sums = {}
            if self._latest is not None:
                self._latest.drop_graph()
                self._latest = None
            end = self.compute.here()  # also of a visit that failed: what it launched still uses the slots
            self.weights.leave(slot, end)
            self._gradients.leave(unit, end, finished=finished)

    def _is_finished(self, unit: Unit) -> bool:
        """Whether the unit's backward is over, so that its gradients can cross."""
        if self._open.get(unit) or (self.for_good and (not self._all_turned() or unit in self._late)):
            return False
        if self._guard is not None and self._all_turned():
            self._guard.check(self._losses)  # the first weights are about to change, or gradients to be kept
            self._resident_edits.check()
        return True

    def _buffers_of(self, unit: Unit) -> list[Bound]:
        own = [(item, tensor) for item, tensor in self._present if is_buffer(item)]
        return own + [(item, self._resident_tensors[item]) for item in self._resident_buffers[unit]]

    @contextlib.contextmanager
    def _apart(self, losses: dict[int, torch.Tensor], seed: int, *, exchange: bool) -> Iterator[None]:
        """For a step: each micro-batch has its own of the user's variables."""
        observer = self._observer
        self._hooked.clear()
        try:
            if observer is not None:
                with self.compute.current():
                    observer.begin()
            if self._guard is not None:
                self._guard.begin()
            with self.compute.current():
                by_bytes = self.escapes.traced or self.checksums.is_on
                self._resident_edits = WeightEdits(list(self._resident_tensors.items()), by_bytes=by_bytes)
                self.state.begin(seed, exchange=exchange)
            try:
                yield
            except BaseException:
                self.state.end(undo=True)
                self.buffers.undo()
                raise
            with self.compute.current():
                self._resident_edits.check()
                self.state.end()
                self.stash.bring_back()
                self.adopt_residents()
                if observer is None:
                    self.buffers.keep()
                else:
                    observer.end(losses, self._batches[-1].thread_state)
        finally:
            if observer is not None:
                with self.compute.current():
                    observer.undo()

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """For a step: residents on the device, all units absent; afterwards the model has the host's tensors again."""
        self.weights.forget()
        self._resident_weights.forget()
        self.compute.follow(self.lanes.here())
        slot, ready = self._resident_weights.enter(self._residents, ())
        self.compute.follow(*ready)
        present = self._resident_weights.tensors(self._residents, slot)
        self._resident_tensors = dict(present)
        versions = [tensor._version for _, tensor in present]
        try:
            bind(present)
            for unit in self._units:
                bind(self.absent[unit])
            yield
        finally:
            for unit in (*self._units, self._residents):
                bind([(item, item.tensor) for item in unit.items])
            end = self.compute.here()
            end.precede_caller()
            edited = [pair for pair, version in zip(present, versions, strict=True) if pair[1]._version != version]
            self.write_back([pair for pair in edited if is_buffer(pair[0])], end)
            self._resident_tensors = {}  # whose hooks refer to the relay
            self._resident_edits = WeightEdits((), by_bytes=False)
            self._resident_weights.leave(slot, end)
            self._number += 1
            self._open.clear()
            for batch in self._batches:
                batch.thread_state, batch.inherited = None, {}
            self._batches = []
            while self.entangled:
                if (call := self.entangled.pop()()) is not None:
                    call.untangle()
            self._latest = self._observer = self._guard = None
            self.stash.forget()

    @contextlib.contextmanager
    def _adding_up(self) -> Iterator[None]:
        """For a step: residents have a slot for their gradients; afterwards all gradients are on their way."""
        self._resident_sums, ready = self._resident_gradients.enter(self._residents)
        self.compute.follow(*ready)
        try:
            yield
        except BaseException:
            for slots in (self._gradients, self._resident_gradients):
                slots.begin(for_good=False)  # what a step that failed has added up changes no weight
            raise
        finally:
            self._resident_sums = {}
            for slots in (self._gradients, self._resident_gradients):
                slots.flush_all(self.compute.here())

    def write_back(self, edited: Sequence[tuple[Item, torch.Tensor]], end: Mark) -> None:
        """What the user's code has changed in residents, such as a count in a buffer, goes to the host."""
        for item, tensor in edited:
            if tensor.device.type == "cpu":
                continue  # it is the host's own
            after = [end, self.lanes.here()]  # evaluations run on the caller's own stream
            copies = [(item.tensor.data, tensor.detach())]
            self._d2h.copy(copies, after=after, label=f"write back {item.name}").wait()

    def _look_at_memory(self) -> None:
        if self.lanes.trace is not None:
            self.lanes.trace.look_at_memory()

    def _collect(self, item: Item, parameter: torch.Tensor) -> None:
        assert self._visited is not None
        self._look_at_memory()  # the call's graph is there
        gradient = self._take(item, parameter)
        self._gradients.add(self._visited, item, self._sums[item], gradient, last=self._is_last)

    def _collect_resident(self, item: Item, parameter: torch.Tensor) -> None:
        gradient = self._take(item, parameter)
        self._resident_gradients.add(self._residents, item, self._resident_sums[item], gradient, last=False)

    def _take(self, item: Item, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient of one call, after the hooks that the user has put on the parameter."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "autograd calls this when it has put a gradient there"
        assert self.running is not None
        if hooks := item.tensor._backward_hooks:
            if (self.running, item) in self._hooked:
                raise ValueError(
                    f"{item.name!r} has a hook on its gradient (register_hook) and is used by several calls in one "
                    "backward. Plain PyTorch would run the hook once, on their sum, which is never there as a whole. "
                    "Edit the gradient between engine.forward_backward() and engine.update()"
                )
            self._hooked.add((self.running, item))
            for hook in list(hooks.values()):
                if (changed := hook(gradient)) is not None:
                    gradient = changed
        if self._observer is not None:
            self._observer.gradient(self.running, item, gradient)
        return gradient
