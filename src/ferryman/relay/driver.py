"""The relay: runs micro-batches so that each unit, once on the device, serves all of them.

When every live micro-batch is parked, the driver picks a unit: the earliest unit for which a forward is parked or, if
there is none, the latest unit for which a backward is parked. The unit serves its requests, one micro-batch after the
other, until none is left. Then the next unit is picked. With this rule a step of N units takes 2N-1 fetches for any
number of micro-batches, and the logits of two micro-batches never exist at the same time.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ferryman.exactness.guard import Guard, NotRepeatableError, OutOfRoomError
from ferryman.exactness.reach import beyond, context_variables, tensors_in
from ferryman.exactness.user_locks import UserLocks
from ferryman.exactness.weight_edits import WeightEdits
from ferryman.model.units import Forward, Unit
from ferryman.plan.keep import CallCounts, Keep
from ferryman.plan.plan import Plan
from ferryman.relay.autograd_sums import AutogradSums
from ferryman.relay.call import Call
from ferryman.relay.call_host import CallHost
from ferryman.relay.evaluation import Evaluation, refuse_other_devices
from ferryman.relay.held_weights import HeldWeights
from ferryman.relay.host_stash import HostStash
from ferryman.relay.inputs import Inputs
from ferryman.relay.micro_batch import Direction, MicroBatch, Surroundings, ThreadState
from ferryman.relay.parameter_server import ParameterServer
from ferryman.relay.stash import Stash
from ferryman.relay.step_state import Expectation, LossRun, StepState, Visit
from ferryman.relay.straight import Straight
from ferryman.relay.unit_arguments import refuse_arguments
from ferryman.relay.weight_slots import UnitOnDevice
from ferryman.runtime import shutdown
from ferryman.runtime.marks import Mark
from ferryman.runtime.streams import Streams


class Relay(CallHost):
    """Owns the device memory, and drives steps. The state of a single step is in its `StepState`."""

    def __init__(self, plan: Plan, device: torch.device, server: ParameterServer, streams: Streams) -> None:
        super().__init__(plan, device, server, streams)
        self.inputs = Inputs(device, streams.compute)
        self.evaluation = Evaluation(self.bound_model, self.weights, streams)
        self._device_stash = Stash()
        self._host_stash: HostStash | None = None
        if device.type != "cpu":
            self._host_stash = HostStash(device, streams.compute, streams.stash_in, streams.stash_out)
        self.order: list[Unit] = []  # the visits of the last step
        self.calls = CallCounts(0, 0, None)  # of the last step
        self._total: torch.Tensor | None = None  # the last step's loss, which the copy for the caller may still read
        self._copied: Mark | None = None  # the end of that copy
        self.serve(plan)

    def serve(self, plan: Plan) -> None:
        """Sets the model's units and their order. The residents do not change."""
        units = plan.units
        self.weights.make_room_for(units)
        self.gradients.make_room_for(units)
        self.bound_model.serve(units)
        self._units = list(units)
        self._called_in_backward.clear()
        self._training = {unit for unit in units if any(p.requires_grad for m in unit.modules for p in m.parameters())}
        self.has_unit_buffers = any(item.is_buffer for unit in units for item in unit.items)
        self.inside = {unit: list(dict.fromkeys(m for top in unit.modules for m in top.modules())) for unit in units}
        self._all_inside = [module for inside in self.inside.values() for module in inside]
        # A first guess at the order of visits. The first step replaces it by the real order.
        self.order = [*units, *reversed(units)]
        self.evaluation.expect(units)

    def intercept(self, unit: Unit, module: nn.Module, forward: Forward) -> Forward:
        """The function that replaces a module's forward."""

        def relayed(*args: Any, **kwargs: Any) -> Any:
            if self._step is not None:
                self._step.refuse_other_threads(unit)
                if self.bound_model.has_others(unit):
                    return forward(*args, **kwargs)
                running = self._step.running
                assert running is not None
                refuse_arguments(unit, forward, args, kwargs)
                self._check_call_in_backward(unit, running)
                return Call(self, running, unit, module, forward, args, kwargs).run()
            if self.bound_model.has_others(unit):
                return forward(*args, **kwargs)
            if self.evaluation.runs:
                return self.evaluation.call(unit, lambda: forward(*args, **kwargs))
            refuse_other_devices(unit, args, kwargs)
            self._server.wait_for_updates()
            return forward(*args, **kwargs)  # outside of steps and evaluations: on the host, with the host's weights

        return relayed

    # A step.

    def new_step(
        self,
        loss_runs: Sequence[LossRun],
        seed: int,
        *,
        stash_on_host: bool,
        staying: int,
        keep: Keep,
        for_update: bool,
        skipped: Collection[Unit] = (),
        between_visits: Callable[[], None] = lambda: None,
        guard: Guard | None = None,
        interleaved: bool = True,
    ) -> StepState:
        """Makes a step; `run` runs it. Each of `loss_runs` runs one micro-batch's forward and returns its loss.

        `for_update`: the server updates weights with the gradients; otherwise the gradients are left for the user.
        `staying`: see `stash_for`. `keep`: the calls that keep their graphs. `skipped`: units that will not be called
        in this step. `between_visits` may raise an exception to end the step. `interleaved`: micro-batches take turns;
        otherwise each ends before the next one begins, and units are fetched for each.
        """
        stash = self.stash_for(on_host=stash_on_host, staying=staying)
        straight = not stash.moves and self._can_be_straight(len(loss_runs), keep)
        step = StepState(
            loss_runs,
            seed,
            stash,
            self.expectation(skipped),
            keep=keep,
            for_update=for_update,
            guard=guard,
            between_visits=between_visits,
            interleaved=interleaved,
        )
        if straight:
            step.straight = Straight(self, self.bound_model, step)
        return step

    def _can_be_straight(self, micro_batches: int, keep: Keep) -> bool:
        """Whether weights stay on the device, and nothing has to take turns. See `straight.py`."""
        stays = self.device.type == "cpu" or isinstance(self.weights, HeldWeights)
        return stays and (micro_batches == 1 or (keep.whole and self.gradients.has_one_for_each))

    def run(self, step: StepState) -> torch.Tensor:
        """Runs forward and backward of all micro-batches, and returns the sum of their losses.

        When it returns, the copies of gradients to the host have been submitted, but may not have ended.
        """
        with self._during(step):
            groups, straight = step.groups(), step.straight
            if straight is not None:
                self._run_straight(straight, step)
                groups = []
            for group in groups:
                with self.compute.current():
                    for batch in group:
                        self._resume(batch)
                        step.stash.stow(batch)
                while live := [batch for batch in group if not batch.done]:
                    unit = self._pick(live)
                    step.visited.append(unit)
                    on_device = self.weights.enter(unit, step.upcoming())
                    finished = False
                    try:
                        finished = self._visit(unit, on_device, group)
                    finally:
                        end = self.compute.here()  # kernels of a failed visit may still use the slots
                        self.weights.leave(on_device.slot, end)
                        self.gradients.leave(unit, end)
                    if finished:
                        self.gradients.flush(unit)
                    step.between_visits()
                    shutdown.sleep_at_end()
            total = self._add_up_losses(step)
            if self.device.type != "cpu":
                step.leaves.hand_over(self.device)
            visited, turning = step.visited, step.turning_modules
            # On an accelerator the host's clock does not show how long kernels take.
            saved = step.kept_seconds if self.device.type == "cpu" else step.keep.seconds
            self.calls = CallCounts(step.kept_calls, step.recomputed_calls, saved if step.keep else 0.0)
        if step.runs_backward and not step.skips_units:
            self._turning_modules = turning
            if step.interleaved and straight is None:
                self.order = visited
        if self.device.type == "cpu":
            return total
        # The caller uses its loss on another stream, and drops it at any time: so it gets a copy in memory of that
        # stream. The original is kept until the next step or trial; then `compute` waits for the copy, which the caller
        # may have made on another stream than its current one.
        if self._copied is not None:
            self.compute.follow(self._copied)
        self._total = total
        copy = total.clone()
        self._copied = self.lanes.here()
        return copy

    def _run_straight(self, straight: Straight, step: StepState) -> None:
        """Runs the micro-batches of a straight step."""
        try:
            for batch in step.micro_batches:
                with self.compute.current(), self.compute.occupy("visit every unit (turn)"):
                    self._sample_memory()
                    self._resume(batch)
                    step.drop_graph()
                    straight.send_finished()
            straight.end()
        finally:
            straight.leave()

    def stash_for(self, *, on_host: bool, staying: int = 0) -> Stash:
        """The stash for a step. If the device is the CPU, there is only one: its memory has no budget.

        `staying`: the number of micro-batches whose boundary stays on the device, even if the stash is on the host.
        """
        if not on_host or self._host_stash is None:
            return self._device_stash
        self._host_stash.staying = staying
        return self._host_stash

    def expectation(self, skipped: Collection[Unit] = ()) -> Expectation:
        return Expectation(self.order, skipped)

    @property
    def host_stash(self) -> HostStash:
        assert self._host_stash is not None, "the CPU as a device has no stash on the host"
        return self._host_stash

    def fetch_ahead(self, *, eager: bool) -> None:
        """Between steps: fetches the first units of the next step, and the residents.

        All updates have been submitted: if `eager`, in the order of the backward, otherwise in that of the forward.
        Units that are updated last are fetched last, so that no fetch waits behind one that has to wait for longer.
        """
        if eager:  # more than two would delay the unit that the next step needs first
            self.weights.fetch_ahead(self.order, latest_first=True, most=2)
            self.bound_model.fetch_ahead()
        else:
            self.bound_model.fetch_ahead()
            self.weights.fetch_ahead(self.order, latest_first=False)

    def fetched_ahead(self) -> list[Unit]:
        """The units that were fetched ahead of the next step."""
        return [*self.bound_model.fetched_ahead(), *self.weights.fetched_ahead()]

    def drop_ahead(self) -> None:
        """Between steps: drops what was fetched ahead, since the host's weights may have changed."""
        self.weights.drop_ahead()
        self.bound_model.drop_ahead()

    def recover(self) -> None:
        """Resets the slots after a failure, when all lanes are idle: marks of failed work are dropped."""
        self.weights.forget(everything=True)
        self.bound_model.recover()
        self.gradients.forget_marks()

    def close(self) -> None:
        """Frees the device's memory."""
        if self._host_stash is not None:
            self._host_stash.close()
        self.inputs.close()
        self.weights.close()
        self.gradients.close()
        self.bound_model.close()

    # The driver.

    @contextlib.contextmanager
    def _during(self, step: StepState) -> Iterator[None]:
        """Context of a step: the model is on the device. On exit, all micro-batches have ended."""
        self._step = step
        try:
            self.weights.forget()
            self.gradients.begin(for_update=step.for_update)
            with (
                self.randomness.unchanged(),
                self.bound_model.on_device(watches_gradients=not (step.takes_effect and self.gradients.are_empty)),
                self._user_state(step),
                self._resident_gradients(step),
                Surroundings.driving(),
                contextlib.ExitStack() as stack,
            ):
                thread_locals = [] if step.survey is None else step.survey.thread_locals
                locks = UserLocks(() if step.survey is None else step.survey.locks)
                stack.enter_context(locks.lent())
                interleaved = step.interleaved and len(step.loss_runs) > 1
                if straight := step.straight is not None:
                    stack.enter_context(_put_back_on_failure(thread_locals))
                surroundings = Surroundings(
                    self.device, self.randomness, self.compute, step.seed, thread_locals, locks,
                    interleaved=interleaved, straight=straight,
                )  # fmt: skip
                batches = step.micro_batches
                for number in range(len(step.loss_runs)):
                    before = batches[-1] if batches else None
                    batches.append(MicroBatch(number, self._forward_backward, surroundings, before))
                    stack.callback(batches[-1].abandon)
                yield
                if step.takes_effect and (left := batches[-1].thread_state) is not None:
                    left.apply(thread_locals)
        finally:
            self._step = None
            step.close()

    @contextlib.contextmanager
    def _user_state(self, step: StepState) -> Iterator[None]:
        """Context of a step in which each micro-batch has its own copy of the user's variables."""
        try:
            with self.compute.current():
                step.begin()
                by_bytes = self.escapes.traced or self.checksums.is_on
                residents = list(self.bound_model.resident_tensors.items())
                step.resident_edits = WeightEdits(residents, by_bytes=by_bytes, can_undo=self._edits_host(step))
                self.state.begin(step.seed, exchange=step.interleaved, careful=not step.takes_effect)
            try:
                yield
            except BaseException as error:
                with self.compute.current():  # after the kernels that the step has launched
                    again = step.reason_to_repeat(error)
                    if isinstance(again, OutOfRoomError):
                        traceback.clear_frames(error.__traceback__)  # they keep the step's tensors on the device
                    self.state.end(undo=True)
                    self.buffers.undo()
                    try:
                        step.undo(again or error)
                    except NotRepeatableError:
                        if isinstance(again, OutOfRoomError):
                            raise error from None
                        raise
                if again is not None:
                    raise again from error
                raise
            with self.compute.current():
                self.state.end(bring=functools.partial(step.stash.use, step.micro_batches[-1]))
                step.stash.bring_back()
                self.bound_model.were_edited(self.state.edited_tensors)
                self.bound_model.adopt_assigned_residents()
                step.succeeded()
                if step.takes_effect:
                    self.buffers.commit()
                else:
                    step.undo()
                    self._edits_batch |= step.batch_edits.found
        finally:
            with self.compute.current():
                step.ended()

    @contextlib.contextmanager
    def _resident_gradients(self, step: StepState) -> Iterator[None]:
        """Context of a step in which residents have a gradient slot. On exit, all gradients are flushed."""
        self.compute.follow(*self.gradients.enter(self._residents))
        try:
            yield
            with self.compute.current():
                # With the flush the server may update residents, and units that reentrant checkpointing calls in the
                # backward, which no visit can finish.
                step.check_before_update()
                step.resident_edits.check()
        except BaseException:
            self.gradients.begin(for_update=False)  # the gradients of a failed step must not change weights
            raise
        finally:
            self.gradients.flush_all(self.compute.here())

    def _forward_backward(self, batch: MicroBatch) -> None:
        """Runs one micro-batch in its own thread."""
        step = self.step
        batch.context = context_variables(contextvars.copy_context())
        batch.inherited = tensors_in(beyond(self._all_inside, self.state.owners))
        with step.stash.watch(batch), step.watch_user_code():
            loss = step.loss_runs[batch.number]()
            value = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
            step.losses[batch.number] = value
            if self.escapes.traced:
                self.escapes.check(batch.number, loss)
            if step.for_update:
                self._server.send_loss(value, [self.compute.here()])
            batch.turned = True
            if step.runs_backward:
                self.note_leaves(None, [loss], ())
                loss.backward()

    def _resume(self, batch: MicroBatch) -> None:
        """Lets the micro-batch run until it parks again. The compute lane is current."""
        step = self.step
        step.micro_batch_resumes(batch)
        if self.state:
            self.state.enter(batch.number, functools.partial(step.stash.use, batch))
        step.running = batch
        try:
            batch.resume()
        except Exception as error:
            step.check_refusal(error)
            raise
        finally:
            step.running = None
        step.check_refusal()
        self._sample_memory()
        step.micro_batch_parked(batch)

    def _edits_host(self, step: StepState) -> bool:
        """Whether the step is a trial in which edits of weights would change the host's own weights."""
        return self.device.type == "cpu" and not step.takes_effect

    def _pick(self, live: Sequence[MicroBatch]) -> Unit:
        requests = [batch.request for batch in live if batch.request is not None]
        forwards = [request.unit for request in requests if request.direction is Direction.FORWARD]
        if forwards:
            return min(forwards, key=self._units.index)
        return max((request.unit for request in requests), key=self._units.index)

    def _visit(self, unit: Unit, on_device: UnitOnDevice, batches: Sequence[MicroBatch]) -> bool:
        """Serves all requests for the unit. Returns whether its backward is over and its gradients can be flushed."""
        step = self.step
        try:
            backward = step.has_turned()
            with self.compute.occupy(f"visit {unit.name}", after=on_device.ready) as mark:
                self._sample_memory()
                step.visit = Visit(
                    unit, on_device.of_unit, step.bindings(unit, on_device.of_unit, self.bound_model.outside)
                )
                sums = step.visit.sums = AutogradSums()
                self.buffers.visit(unit, self.bound_model.buffers_of(unit, on_device.tensors))
                edits = WeightEdits(on_device.tensors, by_bytes=self.escapes.traced, can_undo=self._edits_host(step))
                self._serve_requests(unit, [batch for batch in batches if batch.requests(unit)])
                edits.check()
                sums.check()
                direction = "backward" if backward else "turn" if step.has_turned() else "forward"
                mark.label += f" ({direction})"
                if finished := self.is_finished(unit):
                    step.check_before_update()
                    self.gradients.complete(unit)
                edited = self.buffers.leave()
            if edited:
                self.bound_model.write_back([pair for pair in edited if pair[0] in unit.items], self.compute.here())
            return finished
        finally:
            if step.visit is not None and step.visit.sums is not None:
                step.visit.sums.end()
            step.visit = None
            step.drop_graph()

    def _serve_requests(self, unit: Unit, waiting: Sequence[MicroBatch]) -> None:
        stash = self.step.stash
        for batch, following in zip(waiting, [*waiting[1:], None], strict=True):
            stash.restore(batch)
            if following is not None:
                stash.restore(following)  # overlaps with the compute of this one
            while True:
                stash.follow(batch)
                self._resume(batch)
                if not batch.requests(unit):
                    break
                stash.restore(batch)  # a second call may need tensors that have been stowed since the first
            stash.stow(batch)

    def _add_up_losses(self, step: StepState) -> torch.Tensor:
        with self.compute.occupy("add up losses"):
            total = functools.reduce(torch.add, (step.losses[number] for number in range(len(step.loss_runs))))
            self.gradients.complete_all()
        return total


@contextlib.contextmanager
def _put_back_on_failure(thread_locals: Sequence[threading.local]) -> Iterator[None]:
    """Context in which the user's code runs on the caller's thread, whose thread-local variables it may change."""
    before = ThreadState.here(thread_locals)
    try:
        yield
    except BaseException:
        before.put_locals(thread_locals)
        raise
