"""The assembly: store, lanes, server and relay, created from a plan and installed in the user's model.

An engine has one assembly at a time. A plan with other units needs a new one. Inserting or removing a block, and
changing the policy of updates, do not.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ferryman.checkpoint.contents import Contents
from ferryman.distributed.ranks import Ranks, Share
from ferryman.model.blocks import Blocks
from ferryman.model.chunked_loss import ChunkedHead
from ferryman.model.compilation import Compilation, compiled_around, uncompiled
from ferryman.model.loss import Loss
from ferryman.model.members import in_own_memory
from ferryman.model.patching import ModelPatch
from ferryman.model.precision import LossScale
from ferryman.model.reads import Reads
from ferryman.model.unit_discovery import hint, rename
from ferryman.model.units import Unit
from ferryman.options import EngineOptions
from ferryman.plan.batch import Part
from ferryman.plan.fit import Choice, Trial
from ferryman.plan.plan import Plan
from ferryman.relay.driver import Relay
from ferryman.relay.observer import Roots
from ferryman.relay.step_state import LossRun
from ferryman.runtime import host_memory
from ferryman.runtime.caller import Caller
from ferryman.runtime.device_memory import DeviceMemory
from ferryman.runtime.lanes import Lanes
from ferryman.runtime.streams import Streams
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.server import Server
from ferryman.server.stats import Stats
from ferryman.server.store import RamStore, account
from ferryman.training import memory_trial
from ferryman.training.gradients import Gradients
from ferryman.training.user_code import caches_off, evaluation, to_device, undisturbed


class Assembly:
    """The parts of an engine that depend on its plan, installed in the model."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        plan: Plan,
        optimizer_view: OptimizerView | None,
        blocks: Blocks,
        options: EngineOptions,
        scale: LossScale,
        ranks: Ranks,
        caller: Caller,
        memory: DeviceMemory,
    ) -> None:
        self.plan = plan
        self.memory = memory
        self._caller = caller
        self._model = model
        self._device = device
        self._optimizer_view = optimizer_view
        self._blocks = blocks
        self._stepping = self._evaluates = False
        self._check_host(ranks)
        self.store = RamStore(self.all_units, device, optimizer_view, ranks)
        host_memory.trim()
        self.lanes = Lanes(device, trace=options.trace, streams=memory.streams)
        streams = Streams(self.lanes)
        self.server = Server(self.store, optimizer_view, streams, device, options, scale, plan.staging, ranks)
        self._compute = streams.compute
        try:
            with self._compute.current():  # so that activations can use what is left over in segments
                self.relay = Relay(plan, device, self.server, streams)
                self._serve_updates(plan)
        except BaseException as error:  # usually out of device memory
            ranks.fail(error)
            self.lanes.close()
            self.store.close(together=ranks.alone)
            raise
        caller.runs_step_here = self.relay.runs_here
        wide = optimizer_view is not None
        self._gradients = Gradients(self.relay, self.store, self.server.wait_for_updates, wide=wide)
        self.reads = Reads(
            self.server.wait_for_updates, lambda: [item.tensor for unit in self.all_units for item in unit.items]
        )
        self._patch = ModelPatch()
        self._compilation = Compilation(everything=options.compile)
        self._when_dropped = caller.when_dropped(self._close_dropped)
        try:
            self._install(plan, chunked_loss=bool(options.chunked_loss))
        except BaseException as error:  # a module that refuses to be patched
            ranks.fail(error)
            self.close(together=ranks.alone)
            raise

    def _install(self, plan: Plan, *, chunked_loss: bool) -> None:
        """Installs the parts in the user's model and optimizer."""
        self._take_over_compiled(self._model, plan.units)
        head = ChunkedHead(self._model, plan.units, lambda: self._stepping) if chunked_loss else None
        if head is not None:
            head.add_loss(self._patch)
        self._take_over(plan.units)
        if head is not None:
            head.defer(self._patch)
        for block in self._blocks:
            self._take_over_block(block)
        self._patch.replace(self._model, self._outside_steps(self._model.forward))
        self._patch.watch(self._model.modules(), self.reads)
        if self._optimizer_view is not None:
            self._optimizer_view.watch(self._show_states)

    @property
    def all_units(self) -> tuple[Unit, ...]:
        return (*self.plan.units, self.plan.residents)

    @property
    def stats(self) -> Stats | None:
        """Waits for the updates of the last step. Statistics about it, and about its forward and backward."""
        stats = self.server.stats
        return None if stats is None else replace(stats, calls=self.relay.calls)

    def watch_reads(self) -> None:
        """From now on, reads of trained weights wait for pending updates, and uses of weights are recorded."""
        updated = [] if self._optimizer_view is None else [item for unit in self.all_units for item in unit.trained]
        ahead = [item for unit in self.relay.fetched_ahead() for item in unit.items if not (updated and item.trains)]
        self.reads.begin([item.tensor for item in updated], [item.tensor for item in ahead])

    def end_reads(self) -> None:
        """From now on, the engine uses the weights, and not the user."""
        self.reads.end()
        if self.reads.were_used:
            self.relay.drop_ahead()

    def serve(self, plan: Plan) -> None:
        """Switches to another plan, after the model's blocks or the policy of updates have changed."""
        self.lanes.wait()  # a unit that was prefetched and not used may still be in flight
        self.reads.wait()
        self.plan = plan
        rename(self._model, self.all_units)
        with self.memory.counted(), self._compute.current():
            self.relay.serve(plan)
            self._serve_updates(plan)

    def add(self, block: nn.Module, units: Sequence[Unit], plan: Plan) -> None:
        """Adds a block that is already in the model. `plan` includes its units."""
        self.lanes.wait()
        for unit in units:
            self.store.add(unit)
        self.serve(plan)
        self._take_over_compiled(block, units)
        self._take_over(units)
        self._take_over_block(block)

    def remove(self, block: nn.Module, units: Iterable[Unit], plan: Plan) -> None:
        """Removes a block that is no longer in the model. `plan` does not include its units."""
        self.serve(plan)
        for unit in units:
            self.server.forget_unit(unit)
            self.store.remove(unit)
        self._patch.give_back(block.modules())

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context in which the model runs for a step."""
        self._stepping = True
        names = {item.tensor: item.name for unit in self.all_units for item in unit.trained}
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(caches_off(self._model))
                stack.enter_context(self.reads.refused(names))
                if self._optimizer_view is not None:
                    stack.enter_context(self._optimizer_view.stepping())
                yield
        finally:
            self._stepping = False

    def evaluate(self, loss: Loss, parts: Sequence[Part]) -> torch.Tensor:
        """The weighted sum of the losses of micro-batches, without gradients. Units are copied to the device as they
        are called."""
        self.store.check_values()
        self.reads.wait()
        self._check_memory()
        memory = self.memory
        with memory.counted(), memory.capped(), self.step(), self.relay.evaluation.running(), torch.no_grad():
            losses = (loss(self._model, to_device(part.content, self._device)) * part.weight for part in parts)
            return functools.reduce(torch.add, losses)

    def try_out(
        self,
        loss_runs: Sequence[LossRun],
        room: int,
        roots: Roots,
        choice: Choice,
        lasting: int = 0,
    ) -> Trial:
        """Measures the memory of micro-batches: see `memory_trial.measure`. After a failure, it can be called again.

        `lasting`: bytes of workspaces, which are not part of the `room`.
        """
        memory = memory_trial.Measured(self.memory, self._device, self.plan.fixed + lasting, room)
        try:
            with undisturbed(self._model, self.relay.randomness), self.step():
                return memory_trial.measure(self.relay, loss_runs, memory, roots, self.plan.units, choice)
        except BaseException:
            self.lanes.drain()
            self.relay.recover()
            raise
        finally:
            self.memory.forget()

    def recover(self) -> None:
        """Restores a consistent state after a failure. The lanes must be drained: they have dropped pending work."""
        self.server.recover()
        self.relay.recover()

    def show_gradients(self) -> None:
        """Waits for all gradients and shows them to the user, as the parameters' `.grad`."""
        self.relay.gradients.wait()
        self._gradients.show(self.all_units)
        for unit, items in self.relay.gradients.on_host.items():
            self.server.leave_for_user(unit, items)

    def take_gradients(self) -> None:
        """Takes the gradients back from the user, who may have cleared, edited or assigned some."""
        self._gradients.take(self.all_units)
        self.server.forget_gradients()  # of units whose gradients the user has cleared

    def gradient(self, name: str) -> torch.Tensor | None:
        """The gradient of a parameter, as the user sees it."""
        parameters = dict(self._model.named_parameters())
        if name in parameters:
            return parameters[name].grad
        raise ValueError(f"the model has no parameter {name!r}{hint(name, parameters)}")

    def drop_gradients(self) -> None:
        self.relay.gradients.clear()
        self.server.forget_gradients()
        for unit in self.all_units:
            for item in unit.items:
                item.tensor.grad = None

    def contents(self, ranks: Ranks) -> Contents:
        """What a checkpoint saves, when all updates are done and all state is on the host."""
        self.lanes.wait()
        self.reads.wait()
        self.server.copy_state_to_host()
        self.store.follow_edits()
        view = self._optimizer_view
        return Contents(self._model, self._device, self.all_units, self.store, view, self.server, ranks)

    def host_account(self, shares: Sequence[Share]) -> dict[str, int]:
        """Bytes of host memory that the server uses for these ranks' shares, by purpose."""
        landing = self.plan.staging.deferred
        return account(self.all_units, self._optimizer_view, landing=landing, shares=shares)

    def close(self, *, together: bool = True) -> None:
        """Restores the user's model, with its current weights.

        `together`: all ranks close at the same time.
        """
        self._when_dropped.detach()
        try:
            try:
                self.server.copy_state_to_host()
                self.store.take_states()
            finally:
                self.lanes.close()
        finally:
            self.reads.close()
            self._patch.end()
            if self._optimizer_view is not None:
                self._optimizer_view.release()
            self.relay.close()
            self.server.close()
            self.store.close(together=together)
            self.memory.trim()  # no other stream could use it

    def _close_dropped(self) -> None:
        """Called in the thread in which the garbage collector runs. Closing may have to wait for that very thread."""
        if not self._caller.origin.is_here:
            return
        if self.lanes.run_here():
            threading.Thread(target=self.close, kwargs={"together": False}, name="ferryman-close").start()
        else:
            self.close(together=False)

    def _serve_updates(self, plan: Plan) -> None:
        """Tells the server which units there are, and where their weights are on the device."""
        self.server.serve(plan.in_forward_order, self.relay.weights, plan.staging, held=plan.held)
        self.memory.measure_fixed()  # waits for the device, too: other streams may still use memory that lanes now get

    def _check_host(self, ranks: Ranks) -> None:
        """Checks that the host has enough memory. All ranks of a node check before the first one allocates."""
        shares = [Share(rank, ranks.size) for rank in ranks.node]
        needed = self.host_account(shares)
        mine = sum(i.tensor.nbytes for unit in self.all_units for i in unit.items if not i.tensor.is_meta)
        everyone = ranks.all_gather_object("checking the host's memory", mine)
        already = sum(everyone[rank] for rank in ranks.node)
        ranks.run_on_all("checking the host's memory", lambda: host_memory.check(needed, already))

    def _show_states(self) -> None:
        """Fills `optimizer.state` before the user reads it."""
        assert self._optimizer_view is not None
        self.reads.wait()
        self.server.copy_state_to_host()
        self.store.show_states()
        states = [state for one in self._optimizer_view.optimizers for state in dict.values(one.state)]
        for state in states:
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.reads.remember(value)  # it changes with every update, as in plain PyTorch

    def _take_over_compiled(self, root: nn.Module, units: Iterable[Unit]) -> None:
        """Notes what the user has compiled. Compiled modules that contain units run uncompiled."""
        self._compilation.include(root)
        for module in compiled_around(root, [module for unit in units for module in unit.modules]):
            self._patch.replace(module, uncompiled(module))

    def _take_over(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if self._compilation.reaches(unit.modules):
                self.relay.compiled.add(unit)
            for module in unit.modules:
                self._patch.replace(module, self.relay.intercept(unit, module, self._compilation.forward(module)))

    def _take_over_block(self, block: nn.Module) -> None:
        self._patch.replace(block, self._blocks.skippable(block, block.forward))
        self._patch.watch(block.modules(), self.reads)

    def _check_memory(self) -> None:
        """Refuses weights in other memory (`parameter.data = average`), which would not be what the device gets."""
        for unit in self.all_units:
            in_own_memory(unit, self.store.weights(unit))

    def _outside_steps(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        streamed = evaluation(forward, self._device, self.relay.evaluation.running)

        def run(*args: Any, **kwargs: Any) -> Any:
            caller = self._caller
            caller.origin.check()
            if self._stepping:
                self.relay.refuse_other_threads()
                caller.check_inside("the model")
            if self._stepping or (self._evaluates and caller.is_inside()):  # a model may call itself
                return forward(*args, **kwargs)
            with caller.enter("a call of the model"):
                self._evaluates = True
                try:
                    self.store.check_values()
                    self.end_reads()
                    self.reads.wait()
                    model = self.relay.bound_model
                    if model.has_others_on_host():  # as in torch.func.functional_call
                        return forward(*args, **kwargs)
                    if self._device.type != "cpu":
                        self._check_memory()
                    result = streamed(*args, **kwargs)
                    model.adopt_assigned_on_host()
                    return result
                finally:
                    self._evaluates = False
                    self.watch_reads()

        return run
