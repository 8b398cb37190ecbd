"""What is made from a plan, and stands in the user's model while it lives: store, lanes, server and relay.

An engine has one at a time. Another plan that cuts units otherwise takes another assembly; blocks that come and go, and
who updates what, do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ferryman.distributed.ranks import Ranks, Share
from ferryman.model.blocks import Blocks
from ferryman.model.patching import ModelPatch
from ferryman.model.precision import Scale
from ferryman.model.reads import Reads
from ferryman.model.units import Unit, rename
from ferryman.options import EngineOptions
from ferryman.plan.fit import Trial
from ferryman.plan.plan import Plan
from ferryman.relay.driver import Relay
from ferryman.relay.observer import Roots
from ferryman.runtime import host_memory
from ferryman.runtime.lanes import Lanes
from ferryman.runtime.streams import Streams
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.server import Server
from ferryman.server.store import RamStore, account
from ferryman.training import memory_trial as trial
from ferryman.training.gradients import Gradients
from ferryman.training.user_code import caches_off, evaluation, undisturbed


class Assembly:
    """The parts, wired to the model."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        plan: Plan,
        optimizer_view: OptimizerView | None,
        blocks: Blocks,
        options: EngineOptions,
        scale: Scale,
        ranks: Ranks,
    ) -> None:
        self.plan = plan
        self._model = model
        self._device = device
        self._optimizer_view = optimizer_view
        self._blocks = blocks
        self._stepping = False
        self._check_host(ranks)
        self.store = RamStore(self.all_units, device, optimizer_view, ranks)
        host_memory.trim()
        self.lanes = Lanes(device, trace=options.trace)
        streams = Streams(self.lanes)
        self.server = Server(self.store, optimizer_view, streams, device, options, scale, plan.staging, ranks)
        try:
            self.relay = Relay(plan, device, self.server, streams)
            self._serve_updates(plan)
        except BaseException as error:  # out of memory, on the device
            ranks.fail(error)
            self.lanes.close()
            self.store.close(together=ranks.alone)
            raise
        self.gradients = Gradients(self.relay, self.store, self.server.settle, wide=optimizer_view is not None)
        self.reads = Reads(self.server.settle, lambda: [item.tensor for unit in self.all_units for item in unit.items])
        self._patch = ModelPatch()
        self._take_over(plan.units)
        for block in blocks:
            self._take_over_block(block)
        self._patch.replace(model, self._outside_steps(model.forward))
        self._patch.watch(model.modules(), self.reads)
        if optimizer_view is not None:
            optimizer_view.watch(self._show_states)

    @property
    def all_units(self) -> tuple[Unit, ...]:
        return (*self.plan.units, self.plan.residents)

    def watch_reads(self) -> None:
        """Updates may be under way: whoever reads a weight that they change waits for them."""
        if self._optimizer_view is not None:
            self.reads.begin([item.tensor for unit in self.all_units for item in unit.trained])

    def serve(self, plan: Plan) -> None:
        """The model's blocks have changed, or who updates what."""
        self.lanes.wait()  # a unit that was expected, and not used, may still be on its way
        self.reads.settle()
        self.plan = plan
        rename(self._model, self.all_units)
        self.relay.serve(plan)
        self._serve_updates(plan)

    def add(self, block: nn.Module, units: Sequence[Unit], plan: Plan) -> None:
        """The block is in the model, its units are in the plan."""
        self.lanes.wait()
        for unit in units:
            self.store.add(unit)
        self.serve(plan)
        self._take_over(units)
        self._take_over_block(block)

    def remove(self, block: nn.Module, units: Iterable[Unit], plan: Plan) -> None:
        """Both are gone."""
        self.serve(plan)
        for unit in units:
            self.server.forget_unit(unit)
            self.store.remove(unit)
        self._patch.give_back(block.modules())

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Within, the model runs for a step."""
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

    def try_out(self, works: Sequence[Callable[[], torch.Tensor]], room: int, roots: Roots) -> Trial:
        """See `trial.measure`. After a trial that failed, as it was too large, others may follow."""
        try:
            with undisturbed(self._model, self.relay.randomness), self.step():
                return trial.measure(self.relay, works, room, roots, self.plan.units)
        except BaseException:
            self.lanes.drain()
            self.relay.recover()
            raise

    def recover(self) -> None:
        """The lanes are drained after a failure: what was submitted after it was not done, and is not waited for."""
        self.server.recover()
        self.relay.recover()

    def settle(self) -> None:
        """When no lane has work and the host has everything, as the user has edited it."""
        self.reads.settle()
        self.server.copy_state_to_host()
        self.store.follow_edits()

    def close(self, *, together: bool = True) -> None:
        """Gives the model back as it came, with its weights as they are now.

        Not `together`: other ranks are not here.
        """
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

    def _serve_updates(self, plan: Plan) -> None:
        """The server learns which units there are, and where their weights are on the device."""
        self.server.serve(plan.in_forward_order, self.relay.weights, plan.staging, held=plan.held)
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # memory that is new to lanes may still be in use elsewhere

    def _check_host(self, ranks: Ranks) -> None:
        """Ranks of a node take from the same memory: all of them look before the first one takes any."""
        shares = [Share(rank, ranks.size) for rank in ranks.node]
        needed = account(self.all_units, self._optimizer_view, landing=self.plan.staging.deferred, shares=shares)
        mine = sum(i.tensor.nbytes for unit in self.all_units for i in unit.items if not i.tensor.is_meta)
        everyone = ranks.tell("looking at the host's memory", mine)
        already = sum(everyone[rank] for rank in ranks.node)
        ranks.jointly("looking at the host's memory", lambda: host_memory.check(needed, already))

    def _show_states(self) -> None:
        """To whoever looks at `optimizer.state`."""
        assert self._optimizer_view is not None
        self.reads.settle()
        self.server.copy_state_to_host()
        self.store.show_states()
        for kept in dict.values(self._optimizer_view.optimizer.state):
            for value in kept.values():
                if isinstance(value, torch.Tensor):
                    self.reads.remember(value)  # it goes on changing with every update, as in plain PyTorch

    def _take_over(self, units: Iterable[Unit]) -> None:
        for unit in units:
            for module in unit.modules:
                self._patch.replace(module, self.relay.intercept(unit, module, module.forward))

    def _take_over_block(self, block: nn.Module) -> None:
        self._patch.replace(block, self._blocks.skippable(block, block.forward))
        self._patch.watch(block.modules(), self.reads)

    def _outside_steps(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        streamed = evaluation(forward, self._device, self.relay.evaluation.running)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._stepping:
                return forward(*args, **kwargs)
            self.store.check_values()
            self.reads.settle()
            return streamed(*args, **kwargs)

        return run
