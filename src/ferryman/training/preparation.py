"""Prepares a step: cuts the batch, checks the cut, and has all ranks agree on the step."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ferryman.distributed.agreement import exchange_status, is_nothing, status_of, weigh
from ferryman.distributed.ranks import Ranks
from ferryman.exactness.guard import OutOfRoomError, StepAgainError
from ferryman.model.blocks import Blocks
from ferryman.model.members import Parameters, none_added, unchanged
from ferryman.model.placeholder import UsedOutsideError
from ferryman.options import EngineOptions
from ferryman.plan.batch import Part, parts_of
from ferryman.plan.fit import Choice, Trial, out_of_memory_advice
from ferryman.plan.plan import Plan
from ferryman.relay.step_state import LossRun, StepState
from ferryman.runtime import host_memory
from ferryman.runtime.interrupts import Interrupts
from ferryman.training import checks
from ferryman.training.assembly import Assembly
from ferryman.training.batch_check import BatchCheck
from ferryman.training.first_steps import FirstSteps
from ferryman.training.micro_batching import MicroBatching
from ferryman.training.planner import Planner
from ferryman.training.user_code import weighted_loss


class PreparedStep(NamedTuple):
    """A step that all ranks have agreed on."""

    choice: Choice
    parts: list[Part]  # this rank's micro-batches, weighted by the samples of all ranks
    seed: int  # of the random numbers of the first micro-batch


class Preparation:
    """Prepares the steps of one plan."""

    def __init__(
        self,
        options: EngineOptions,
        planner: Planner,
        assembly: Assembly,
        blocks: Blocks,
        batch_check: BatchCheck,
        ranks: Ranks,
    ) -> None:
        self._options = options
        self._planner = planner
        self._model = planner.model
        self._parameters = Parameters(planner.model)
        self._device = planner.device
        self._optimizer_view = planner.optimizer_view
        self._assembly = assembly
        self._blocks = blocks
        self._batch_check = batch_check
        self._ranks = ranks
        self._micro_batching = MicroBatching(planner, assembly.plan, self._try_out, options.split)
        self.first_steps = FirstSteps(assembly.relay, planner.model, options.loss, assembly.plan.units)

    @property
    def needed(self) -> int:
        """Bytes of device memory that the micro-batches of the last step needed; 0 if they were not measured."""
        return self._micro_batching.needed

    def cut(self, batch: Any, micro_batches: int | None) -> tuple[Choice, list[Part]]:
        """Checks the model and cuts the batch. Returns the choice and the micro-batches, of which a rank may have none.

        Raises a PlanTooLargeError if a smaller plan is needed.
        """
        self._check_model()
        if is_nothing(batch) and not self._ranks.alone:
            return Choice(0, stash_on_host=False), []
        memory, roots = self._assembly.memory, self.first_steps.roots
        at_first = memory.allocated
        while True:
            choice = self._micro_batching.choose(batch, micro_batches, begun=self._has_begun)
            before, skipped, ran_out = memory.allocated, self._blocks.skipped, None
            try:
                with memory.capped():
                    self._batch_check.check(batch, micro_batches, choice.micro_batches, self._assembly, roots)
                    parts = parts_of(batch, choice.micro_batches, self._options.reduction, self._options.split)
                    self._check_first(parts, choice, _next_seed())
            except torch.OutOfMemoryError as error:
                ran_out = error
                traceback.clear_frames(error.__traceback__)  # they keep the tensors of the check
            if not self._micro_batching.took(memory.allocated - before):
                if ran_out is not None:
                    raise ran_out
                break
            self._blocks.skipped = skipped
        memory.add_fixed(memory.allocated - at_first)
        return self._with_graphs(choice, parts), parts

    def can_repeat(self, error: StepAgainError) -> bool:
        """Called when a step was undone. Returns whether it will run in another way: after another trial of the user's
        code, with less that stays on the device, or in smaller micro-batches."""
        if isinstance(error, OutOfRoomError):
            self._assembly.memory.trim()
            return self._micro_batching.ran_out()
        self.first_steps.forget()
        return True

    def agree(self, choice: Choice, parts: list[Part]) -> PreparedStep:
        """Exchanges status with all ranks and returns this rank's part of the step. Errors: see `exchange_status`."""
        optimizers = [] if self._optimizer_view is None else self._optimizer_view.optimizers
        reduction, rank = self._options.reduction, self._ranks.rank
        first, used = not self._has_begun, self._assembly.reads.were_used
        mine = status_of(self._ranks, parts, _draw_seed(), optimizers, reduction, first=first, used=used)
        statuses = exchange_status(self._ranks, mine)
        if any(status.used for status in statuses):
            self._assembly.relay.drop_ahead()
        before = sum(status.parts for status in statuses[:rank])
        return PreparedStep(choice, weigh(parts, statuses, rank, reduction), statuses[0].seed + before)

    def new_step(self, prepared: PreparedStep, interrupts: Interrupts, *, for_update: bool) -> StepState:
        """Makes a step, which the relay runs."""
        choice, parts, seed = prepared
        return self._assembly.relay.new_step(
            self.loss_runs(parts),
            seed,
            stash_on_host=choice.stash_on_host,
            staying=choice.staying,
            keep=choice.keep,
            for_update=for_update,
            skipped=[unit for unit in self._assembly.plan.units if self._blocks.are_skipped(unit.modules)],
            between_visits=interrupts.check,
            guard=self.first_steps.begin(parts, seed, skips=bool(self._blocks.skipped)),
            interleaved=self.first_steps.can_interleave(parts),
        )

    def evaluate(self, batch: Any, micro_batches: int | None) -> torch.Tensor:
        """The loss of a batch without gradients. A list, or any batch with `micro_batches`, is evaluated in parts."""
        parts = [Part(batch, 1.0)]
        if micro_batches is not None or isinstance(batch, list):
            parts = parts_of(batch, micro_batches, self._options.reduction, self._options.split)
        try:
            return self._assembly.evaluate(self._options.loss, parts)
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"ferryman: engine.evaluate() was running {'a micro-batch' if len(parts) > 1 else 'the whole batch'} "
                "at once. Evaluate it in smaller parts: engine.evaluate(batch, micro_batches=...)"
            )
            raise

    def loss_runs(self, parts: Sequence[Part]) -> list[LossRun]:
        """Functions that run the user's code for each micro-batch and return its weighted and scaled loss."""
        scale = self._assembly.server.scale.value
        return [self._loss_run(part.content, part.weight * scale) for part in parts]

    def _loss_run(self, content: Any, weight: float) -> LossRun:
        relay, loss = self._assembly.relay, self._options.loss
        return lambda: weighted_loss(
            loss, self._model, content, weight, self._device, relay.inputs.bring, relay.register_batch
        )

    def _try_out(self, contents: list[Any], room: int, choice: Choice) -> Trial:
        loss_runs = [self._loss_run(content, 1 / len(contents)) for content in contents]
        return self._assembly.try_out(loss_runs, room, self.first_steps.roots, choice, self._micro_batching.lasting)

    def keep_resident(self, error: UsedOutsideError) -> tuple[Planner, Plan]:
        """See `Planner.keep_resident`. Raises the error also if the plan can no longer change."""
        try:
            if self._has_begun or not self._ranks.alone:
                raise error
            return self._planner.keep_resident(error)
        except BaseException:
            self._end_skips()
            raise

    def _end_skips(self) -> None:
        """`engine.skip` applies to the step that failed, not to the next one."""
        self._blocks.begin_step()
        self._blocks.skipped = frozenset()

    @property
    def _has_begun(self) -> bool:
        return self._assembly.server.has_stepped or bool(self._assembly.relay.gradients.on_host)

    def _check_model(self) -> None:
        store = self._assembly.store
        store.check_values()
        for unit in self._assembly.all_units:
            unchanged(unit, store.weights(unit), store.trained)
        none_added(self._parameters, self._assembly.all_units)
        checks.can_step(self._model, self._parameters.modules)

    def _with_graphs(self, choice: Choice, parts: list[Part]) -> Choice:
        """Adds to the choice the graphs that are kept without a budget, which a trial may have to measure."""
        try:
            return self._micro_batching.with_graphs(choice, [part.content for part in parts])
        except UsedOutsideError:
            raise
        except BaseException:
            self._end_skips()
            raise

    def _check_first(self, parts: list[Part], choice: Choice, seed: int) -> None:
        """Tries out a new kind of step before it runs; with a single rank, it uses the same random numbers."""
        if not self.first_steps.is_new(parts):
            return
        assembly = self._assembly
        try:
            with assembly.step(), Interrupts():
                self.first_steps.check(parts, self.loss_runs(parts), seed, choice)
        except BaseException as error:
            assembly.lanes.drain()
            if isinstance(error, torch.OutOfMemoryError):
                error.add_note(out_of_memory_advice(assembly.plan, choice))
            assembly.recover()
            if not isinstance(error, UsedOutsideError):  # `keep_resident` may avoid this error
                self._end_skips()
            raise
        # Trials that measure memory begin without a cache, too. Segments of the check may be split so that graphs which
        # last keep more of them than they need.
        assembly.memory.trim()
        host_memory.trim()


def _draw_seed(generator: torch.Generator | None = None) -> int:
    """A seed for the random numbers of a step, by default from torch's own generator."""
    return int(torch.randint(0, 2**62, (), generator=generator, device="cpu").item())


def _next_seed() -> int:
    """The seed that will be drawn next."""
    copy = torch.Generator("cpu")
    copy.set_state(torch.get_rng_state())
    return _draw_seed(copy)
