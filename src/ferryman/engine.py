"""The engine: wires the parts together. Read from here.

- `Engine.forward_backward` cuts a batch into micro-batches (`plan/batch.py`) and gives them to the relay
  (`relay/driver.py`), which runs the user's code. The relay moves units (`model/units.py`) between the server's store
  (`server/store.py`) and slots on the device (`relay/weight_slots.py`), on lanes (`runtime/lanes.py`).
- `Engine.step` also has the server (`server/server.py`) update the weights, as the user's optimizer says
  (`server/optimizer_view.py`).
- A budget of device memory is kept by the plan (`plan/plan.py`) and by the size of micro-batches
  (`training/micro_batching.py`, `plan/fit.py`).
- A step of a new kind is tried before it is made (`training/first_steps.py`, `training/crosscheck.py`). A batch is cut
  only if that does not change its loss (`training/batch_check.py`). Reads of weights wait for updates that are under
  way (`model/reads.py`).
- An assembly (`training/assembly.py`) makes what a plan needs and installs it in the user's model. Blocks come and go
  between steps (`model/blocks.py`). Checkpoints are in `checkpoint/`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ferryman.checkpoint import loading, pretrained, saving
from ferryman.checkpoint.contents import Contents, Objects
from ferryman.checkpoint.loaded import Loaded
from ferryman.distributed.agreement import add_up, compare, exchange_status, is_nothing, most_wanted, weigh
from ferryman.distributed.ranks import Ranks, Share
from ferryman.exactness.guard import NewStateError, NotRepeatableError
from ferryman.model.blocks import Blocks, Position
from ferryman.model.members import unchanged
from ferryman.model.precision import dtype_of
from ferryman.model.units import Unit, hint, units_of_block
from ferryman.observe.trace import Trace
from ferryman.plan.batch import Part, Split, parts_of
from ferryman.plan.fit import Choice, Trial, advice
from ferryman.plan.plan import Need, Plan
from ferryman.runtime.interrupts import Interrupts
from ferryman.runtime.sizes import parse_bytes
from ferryman.server.gradient_checks import NonFiniteError
from ferryman.server.kernels import default_threads
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.settings import Settings
from ferryman.server.stats import Stats
from ferryman.server.store import account
from ferryman.training import checks
from ferryman.training.assembly import Assembly
from ferryman.training.batch_check import BatchCheck
from ferryman.training.first_steps import FirstSteps
from ferryman.training.micro_batching import MicroBatching
from ferryman.training.planner import Planner
from ferryman.training.recorder import Recorder
from ferryman.training.user_code import Loss, model_loss, weighted_loss

_RETRIES = 3  # of a step in which something changes that no check has seen


class Engine(contextlib.AbstractContextManager["Engine"]):
    """Trains a model that may be larger than the device.

    `optimizer` is a torch optimizer over the model's parameters. Its groups are read in every step, so learning rates
    and schedulers work as ever; its rule runs on the host, where its state is. `precision` ("fp32", "bf16", "fp16") is
    that of compute and of the link, with float32 masters on the host; without it, what the model has. `max_grad_norm`
    clips by the global norm. `on_nonfinite` says what happens to a step whose gradients are inf or NaN: "raise" or
    "skip". `deferred` has updates wait for all gradients also where nothing else asks for it. `host_threads` is for
    updates, all CPUs by default. `reduction` combines the losses of micro-batches: "mean", by samples, or "sum", for a
    `loss` divided by what the whole batch counts. `split(batch, count)` cuts what is not cut along dimension 0 into a
    list of at most so many micro-batches; in the mean all weigh the same, or are pairs (weight, micro_batch).

    `memory` is a budget of device memory ("8GiB"): blocks are cut, and slots, the stash's place and the size of
    micro-batches chosen, such that it is kept. `units` names the modules that travel, by name or pattern; without it
    they are found. `resident` names parameters that stay on the device. `stash="host"` keeps what waiting micro-batches
    hold on the host, and device memory constant; on the "device" it is faster and grows with depth and micro-batches;
    "auto" is the device as long as the budget allows. `slots` is how many units' weights the device holds at once;
    `held` has all of them stay there, which is also done where the budget allows. `trace` records what ran when.

    `updates` says who updates the weights: "host"; "stride:K", one subgroup in K on the device; "static:R", where the
    state of a share R stays on the device; or "auto", whoever would be done first. `subgroup` is how many parameters
    are updated at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        device: torch.device | str | None = None,
        memory: int | str | None = None,
        precision: str | None = None,
        max_grad_norm: float | None = None,
        on_nonfinite: str = "raise",
        deferred: bool = False,
        host_threads: int | None = None,
        loss: Loss = model_loss,
        reduction: str = "mean",
        split: Split | None = None,
        units: Sequence[str] | None = None,
        resident: Sequence[str] = (),
        stash: str = "auto",
        slots: int | None = None,
        held: bool | None = None,
        updates: str = "auto",
        subgroup: int | None = None,
        trace: Trace | None = None,
    ) -> None:
        checks.arguments(model, loss, reduction, units=units, resident=resident, stash=stash, slots=slots, split=split)
        self._ranks = Ranks()
        self.device = checks.real_device(device, self._ranks.place)
        self._budget = None if memory is None else parse_bytes(memory, "memory")
        checks.budget(self._budget, self.device)
        checks.free(model)
        checks.update_arguments(optimizer, precision, max_grad_norm, on_nonfinite, deferred, host_threads)
        self._dtype_of = dtype_of(model, precision)
        checks.members(model, self._dtype_of)
        checks.interleave_arguments(optimizer, self.device, slots, held, updates, subgroup)
        self._model, self._loss, self._reduction, self._split = model, loss, reduction, split
        self._stash, self._updates = stash, updates
        self._optimizer_view = None if optimizer is None else OptimizerView(optimizer, model)
        compare(self._ranks, model, optimizer, {
            "device": self.device.type, "memory": self._budget, "precision": precision, "updates": updates,
            "max_grad_norm": max_grad_norm, "on_nonfinite": on_nonfinite, "deferred": deferred, "slots": slots,
            "reduction": reduction, "units": units, "resident": resident, "stash": stash, "held": held,
            "subgroup": subgroup,
        })  # fmt: skip
        self._settings = Settings(
            max_grad_norm, on_nonfinite, deferred, host_threads or self._ranks.threads(default_threads())
        )
        self._recorder = Recorder(
            trace, model, self.device, self._budget, self._optimizer_view, self._dtype_of, self.share
        )
        self._planner = Planner(
            model, self.device, budget=self._budget, slots=slots, units=units, resident=resident, held=held,
            subgroup=subgroup, dtype_of=self._dtype_of, optimizer_view=self._optimizer_view, settings=self._settings,
            share=self._ranks.share,
        )  # fmt: skip
        self._blocks = Blocks(model, self.device)
        self._batch_check = BatchCheck(model, loss, reduction, self.device, None if split else self._budget)
        self.choice: Choice | None = None  # of the last step: how many micro-batches, and where the stash was
        self._closed = False
        self._loaded = Loaded(model)
        self._parts = self._assemble(self._planner.make(updates))
        self._micro_batching, self._first_steps = self._size(), self._watch()

    def forward_backward(self, batch: Any, micro_batches: int | None = None) -> torch.Tensor:
        """The batch's loss, the mean or sum of its micro-batches'; gradients are added to the parameters' `.grad`.

        Without `micro_batches` the batch is cut into as few as the memory budget allows; without a budget, it is one.
        """
        with self._own_reads():
            loss = self._run(batch, micro_batches, for_update=False)
            self._parts.relay.gradients.wait()
            self._parts.gradients.show(self._parts.all_units)
            for unit, items in self._parts.relay.gradients.on_host.items():
                self._parts.server.keep(unit, items)
        return loss

    def step(self, batch: Any, micro_batches: int | None = None) -> torch.Tensor:
        """Forward, backward and update; returns the loss. Gradients that were kept before are part of it.

        Returns when it is certain that the step is good. The update itself goes on beside what follows; whoever reads
        weights waits for it.
        """
        optimizer_view = self._need_optimizer()
        with self._own_reads():
            self._parts.server.follow_user(optimizer_view)
            loss = self._run(batch, micro_batches, for_update=True)
            self._finish(optimizer_view)
        return loss

    def update(self) -> None:
        """Updates the weights with the gradients that `forward_backward` has left; they are cleared."""
        optimizer_view = self._need_optimizer()
        with self._own_reads():
            self._parts.server.follow_user(optimizer_view)
            self._parts.gradients.take(self._parts.all_units)
            self._parts.server.forget_gradients()  # of units whose gradients the user has cleared
            self._ranks.tell("making an update")
            self._parts.server.begin_step(kept=True)
            self._parts.server.send_rest(self._parts.relay.gradients.on_host)
            self._finish(optimizer_view)

    @contextlib.contextmanager
    def _own_reads(self) -> Iterator[None]:
        """Within, the engine uses weights, behind their updates; afterwards whoever reads them waits for these."""
        self._parts.reads.end()
        try:
            yield
        finally:
            self._parts.watch_reads()

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients, before clipping: of those that `forward_backward` has left, as they are now (of
        several ranks, of this one's own), else of the last update; None before the first."""
        return self._parts.server.grad_norm

    @property
    def loss_scale(self) -> float:
        """By which losses are multiplied in float16; 1 in other precisions."""
        return self._parts.server.scale.value

    def gradient(self, name: str) -> torch.Tensor | None:
        """A parameter's gradient in float32, on the host, between `forward_backward` and `update`; may be edited."""
        parameters = dict(self._model.named_parameters())
        if name in parameters:
            return parameters[name].grad
        raise ValueError(f"the model has no parameter {name!r}{hint(name, parameters)}")

    @property
    def host_account(self) -> dict[str, int]:
        """Bytes of host memory that the server takes, by what they are for; of several ranks, what is this one's part,
        and the weights, which those of a node have in common."""
        parts, share = self._parts, self._ranks.share
        return account(parts.all_units, self._optimizer_view, landing=not parts.server.is_eager, shares=[share])

    def stats(self) -> Stats | None:
        """What the updates of the last step were; waits for them. None before the first."""
        return self._parts.server.stats

    @property
    def plan(self) -> Plan:
        """What was decided, with the rate of updates as it is predicted and as it was."""
        predicted, achieved = self._parts.server.update_rates
        return dataclasses.replace(self._parts.plan, predicted_rate=predicted, achieved_rate=achieved)

    def set_updates(self, updates: str) -> None:
        """From the next step on this is who updates the weights; nothing else changes."""
        self._need_optimizer()
        self._ranks.agree({"updates=": updates})
        needed = int(max(count for (count,) in self._ranks.count([self._micro_batching.needed])))
        plan = self._planner.change(self._parts.plan, updates, needed)
        self._updates = updates
        self._parts.serve(plan)
        self._micro_batching, self._first_steps = self._size(), self._watch()

    def wait(self) -> None:
        """Blocks until the weights are those of the last update, for those who read their memory through an alias (a
        numpy view, an earlier `detach()`); all else that reads weights waits by itself."""
        self._parts.reads.settle()

    @property
    def steps(self) -> int:
        """How many have been made, those before a checkpoint that was loaded among them."""
        return self._parts.server.steps

    def save(self, directory: str | Path, *, objects: Objects | None = None, keep: int | None = None) -> Path:
        """Writes a checkpoint: weights that transformers can load, and all that is needed to go on; returns where.

        `objects` are saved beside, by name: anything with `state_dict` and `load_state_dict`, such as a scheduler or
        the position in the data, or with `save_pretrained`, such as a tokenizer. The directory is the checkpoint, and
        takes the place of the last one in one moment; with `keep` it holds a series, of which the newest so many stay.
        """
        return saving.save_in(self._contents(), Path(directory), objects or {}, keep)

    def load(self, directory: str | Path, *, objects: Objects | None = None) -> Path:
        """Goes on from a checkpoint, or from the newest of a series; returns which. The model, what trains and the
        optimizer must be the same; device, memory, precision and all else may be others."""
        path, contents = loading.find(Path(directory)), self._contents(loading=True)
        doing, found = f"loading {path}", list[loading.Checkpoint]()
        self._ranks.jointly(doing, lambda: found.append(loading.Checkpoint(path, contents, objects or {})))
        with self._loaded.replacing(path, "weights", "the optimizer's state"):
            self._recover(forget=True)
            self._ranks.jointly(doing, found[0].load)
        self._loaded.came_from(path)
        return path

    def load_weights(self, directory: str | Path) -> None:
        """Pretrained weights from safetensors files, unit by unit, also into a model on meta. The optimizer's state
        stays as it is."""
        contents, doing, found = self._contents(loading=True), f"loading {directory}", list[pretrained.Weights]()
        self._ranks.jointly(doing, lambda: found.append(pretrained.Weights(contents, Path(directory))))
        with self._loaded.replacing(Path(directory), "weights"):
            self._recover(forget=True)
            self._ranks.jointly(doing, found[0].load)

    def _contents(self, *, loading: bool = False) -> Contents:
        """What checkpoints are of, when no lane has work."""
        self._check_open(loading=loading)
        parts = self._parts
        parts.lanes.wait()
        parts.settle()
        return Contents(
            self._model, self.device, parts.all_units, parts.store, self._optimizer_view, parts.server, self._ranks
        )

    def _run(self, batch: Any, micro_batches: int | None, *, for_update: bool) -> torch.Tensor:
        """Forward and backward of a batch; returns its loss.

        A step in which a variable of the user changes that no check has seen is undone, checked again and made again.
        """
        generator, found = torch.get_rng_state(), ""
        # What was added up before is lost with a step that fails.
        can_retry = self._ranks.alone and not self._parts.relay.gradients.on_host
        for _ in range(_RETRIES if can_retry else 1):
            try:
                choice, parts, seed = self._prepare(batch, micro_batches)
                with self._running(choice, for_update=for_update) as interrupts:
                    scale, total = self._parts.server.scale.value, torch.zeros((), device=self.device)
                    if works := [self._work(part.content, part.weight * scale) for part in parts]:
                        step = self._parts.relay.new_step(
                            works,
                            seed,
                            stash_on_host=choice.stash_on_host,
                            for_update=for_update,
                            skipped=[unit for unit in self.units if self._blocks.are_skipped(unit.modules)],
                            between_visits=interrupts.check,
                            guard=self._first_steps.begin(parts, seed, skips=bool(self._blocks.skipped)),
                        )
                        total = self._parts.relay.run(step)
                        self._first_steps.end()
                    if for_update:  # also of a rank that has no micro-batches
                        self._parts.server.send_rest(self._parts.relay.gradients.on_host)
                return self._recorder.ran(parts, self._ranks.add(total if scale == 1 else total / scale))
            except NewStateError as error:
                found = str(error)
            self._first_steps.forget()
            torch.set_rng_state(generator)
        raise ValueError(
            f"these changed in a step for the first time, when it was too late to follow them: {found}. No weight was "
            "changed, and all gradients were dropped: call the engine again, which will know of them"
        )

    @contextlib.contextmanager
    def _running(self, choice: Choice, *, for_update: bool) -> Iterator[Interrupts]:
        """For the forward and backward of a step. After a failure the engine is as if the step had not begun."""
        self._parts.gradients.take(self._parts.all_units)
        self._parts.server.forget_gradients()
        self._blocks.begin_step()
        self._recorder.begin(self._parts.server.steps, self._parts.plan)
        if for_update:
            self._parts.server.begin_step()
        try:
            with self._parts.step(), Interrupts() as interrupts:
                yield interrupts
        except BaseException as error:
            if not (isinstance(error, NewStateError) and self._ranks.alone):
                self._ranks.fail(error)
            self._parts.lanes.drain()
            if isinstance(error, torch.OutOfMemoryError):
                error.add_note(advice(self._parts.plan, choice))
            if isinstance(error, NotRepeatableError):
                self._first_steps.forget()  # what is wrong now is wrong in the next step, too
            if for_update:
                error.add_note(f"ferryman: {self._parts.server.what_has_changed()}")
            self._recover(forget=for_update or isinstance(error, NewStateError))
            raise
        finally:
            self._blocks.skipped = frozenset()

    def _finish(self, optimizer_view: OptimizerView) -> None:
        """Gradients are there, or on their way: has them used up."""
        with Interrupts():
            try:
                # In the order in which the next step fetches them.
                self._parts.server.finish(self._parts.plan.in_forward_order, self._parts.relay.gradients.on_host)
            except BaseException as error:
                if not (isinstance(error, NonFiniteError) and error.agreed):
                    self._ranks.fail(error)
                self._parts.lanes.drain()
                self._recover(forget=True)
                raise
            self._recorder.end()
            self.zero_grad()
            optimizer_view.stepped()

    def _recover(self, *, forget: bool) -> None:
        """The lanes are drained; what came after a failure was not done, and is not waited for any more."""
        self._parts.server.recover()
        self._parts.relay.recover()
        if forget:
            self.zero_grad()

    def _need_optimizer(self) -> OptimizerView:
        self._check_open()
        if self._optimizer_view is None:
            raise ValueError("the engine has no optimizer: ferryman.Engine(model, optimizer), with one of torch.optim")
        return self._optimizer_view

    def agree(self, **facts: Any) -> None:
        """Of several ranks: refuses on all of them, by name, what is not the same on all, as `steps=len(loader)`."""
        self._check_open()
        self._ranks.agree({name: str(value) for name, value in facts.items()})

    def total(self, number: float | torch.Tensor) -> float:
        """The sum of all ranks' numbers, such as of tokens that count in a step; an int, if all of them are."""
        self._check_open()
        return add_up(self._ranks, number)

    @property
    def share(self) -> Share:
        """Which of the ranks this is, `rank`, and how many there are, `size`."""
        return self._ranks.share

    def skip(self, blocks: Position | Iterable[Position]) -> None:
        """In the next step these blocks hand their input on: they are neither fetched nor do they get gradients."""
        self._check_open()
        self._blocks.skip(blocks)

    def insert(self, position: Position, block: nn.Module) -> None:
        """From now on the block runs at this position of the model; those from there on move up.

        A configuration's `num_hidden_layers` that counted the blocks is raised, and blocks that know their position
        (`layer_idx`) learn the new one.
        """
        self._check_open()
        checks.block(block, self._model, self._dtype_of)
        checks.apart(self._blocks.list_at(position), self.units)
        self._blocks.insert(position, block)
        added = units_of_block(self._model, block, self._parts.plan.limit, self._dtype_of)
        order = {module: i for i, module in enumerate(self._model.modules())}
        units = sorted((*self.units, *added), key=lambda unit: min(order[module] for module in unit.modules))
        plan = dataclasses.replace(self._parts.plan, units=tuple(units))
        try:
            if self._optimizer_view is not None:
                self._optimizer_view.look()
            self._planner.check_fits(plan, "with this block")
        except BaseException:
            self._blocks.remove(block)
            raise
        self._parts.add(block, added, plan)
        self._micro_batching, self._first_steps = self._size(), self._watch()

    def remove(self, position: Position) -> nn.Module:
        """Takes the block out of the model, and returns it with its weights as they are now."""
        self._check_open()
        block = self._blocks.at(position)
        inside = set(block.modules())
        checks.apart(self._blocks.list_at(position), self.units)
        checks.own(block, position, self.units, self._parts.plan.residents)
        gone = [unit for unit in self.units if inside.issuperset(unit.modules)]
        if len(gone) == len(self.units):
            raise ValueError(f"the block {position!r} is the last one that travels; nothing would be left to train")
        self._blocks.remove(block)
        plan = dataclasses.replace(self._parts.plan, units=tuple(unit for unit in self.units if unit not in gone))
        self._parts.remove(block, gone, plan)
        self._micro_batching, self._first_steps = self._size(), self._watch()
        return block

    @property
    def units(self) -> tuple[Unit, ...]:
        return self._parts.plan.units

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        self._recorder.abandon()
        self._parts.relay.gradients.clear()
        self._parts.server.forget_gradients()
        for parameter in self._model.parameters():
            parameter.grad = None

    @property
    def fetches(self) -> int:
        return self._parts.relay.weights.fetches

    def close(self) -> None:
        """Gives the model back as it came, with its weights as they are now; of several ranks, all at once."""
        self._end(together=True)

    def _end(self, *, together: bool) -> None:
        """Not `together`: other ranks are not here."""
        if together and not (self._closed or self._ranks.has_failed):
            self._ranks.tell("closing the engine")
        self._closed = True
        together = together and not self._ranks.has_failed
        self._parts.close(together=together)
        if together:
            self._ranks.close()

    def _assemble(self, plan: Plan) -> Assembly:
        scale, trace = self._planner.scale(), self._recorder.trace
        model, optimizer_view, blocks = self._model, self._optimizer_view, self._blocks
        return Assembly(model, self.device, plan, optimizer_view, blocks, self._settings, scale, self._ranks, trace)

    def _watch(self) -> FirstSteps:
        return FirstSteps(self._parts.relay, self._model, self._loss, self.units)

    def _size(self) -> MicroBatching:
        def try_out(contents: list[Any], room: int) -> Trial:
            works = [self._work(content, 1 / len(contents)) for content in contents]
            return self._parts.try_out(works, room, self._first_steps.roots)

        return MicroBatching(self._planner, self._parts.plan, self._updates, self._stash, try_out, self._split)

    def _work(self, content: Any, weight: float) -> Callable[[], torch.Tensor]:
        return lambda: weighted_loss(self._loss, self._model, content, weight, self.device, self._parts.relay.adopt)

    def _prepare(self, batch: Any, micro_batches: int | None) -> tuple[Choice, list[Part], int]:
        """How the batch is cut, what each micro-batch weighs, and the seed of the first one's random numbers."""
        while True:
            found: Choice | Need | ValueError
            parts = list[Part]()
            try:
                self._check_model()
                found = Choice(0, stash_on_host=False)
                if self._ranks.alone or not is_nothing(batch):
                    found = self._micro_batching.choose(batch, micro_batches, begun=self._has_begun())
                if isinstance(found, Choice) and found.micro_batches:
                    self._batch_check.check(
                        batch, micro_batches, found.micro_batches, self._parts, self._first_steps.roots
                    )
                    parts = parts_of(batch, found.micro_batches, self._reduction, self._split)
                    self._check_first(parts, found, _next_seed())
            except ValueError as failed:
                found = failed
            seed = _draw_seed() if isinstance(found, Choice) else 0
            optimizer = None if self._optimizer_view is None else self._optimizer_view.optimizer
            words = exchange_status(
                self._ranks, found, parts, seed, optimizer, self._reduction, first=not self._has_begun()
            )
            if (needed := most_wanted(words)) is not None:
                self._rebuild(self._micro_batching.smaller(needed))
                continue
            assert isinstance(found, Choice)
            self.choice = found._replace(micro_batches=len(parts))
            before = sum(word.parts for word in words[: self._ranks.rank])
            return found, weigh(parts, words, self._ranks.rank, self._reduction), words[0].seed + before

    def _check_first(self, parts: list[Part], choice: Choice, seed: int) -> None:
        """A step of a new kind is tried before it is made; with one rank, with the random numbers that it will have."""
        if not self._first_steps.is_new(parts):
            return
        try:
            with self._parts.step(), Interrupts():
                scale = self._parts.server.scale.value
                works = [self._work(part.content, part.weight * scale) for part in parts]
                self._first_steps.check(parts, works, seed, stash_on_host=choice.stash_on_host)
        except BaseException as error:
            self._parts.lanes.drain()
            if isinstance(error, torch.OutOfMemoryError):
                error.add_note(advice(self._parts.plan, choice))
            self._recover(forget=False)
            self._blocks.begin_step()  # as every step that fails, it skips no longer
            self._blocks.skipped = frozenset()
            raise

    def _has_begun(self) -> bool:
        return self._parts.server.has_stepped or bool(self._parts.relay.gradients.on_host)

    def _rebuild(self, plan: Plan) -> None:
        steps, scale = self.steps, self._parts.server.scale.state()
        self._parts.close()
        self._parts = self._assemble(plan)
        self._micro_batching, self._first_steps = self._size(), self._watch()
        contents = self._contents()
        self._ranks.jointly("loading again", lambda: self._loaded.load_again(contents))
        self._parts.server.scale.restore(scale)
        self._parts.server.restart(steps)

    # What may be wrong.

    def _check_open(self, *, loading: bool = False) -> None:
        if self._closed:
            raise ValueError("the engine is closed; make a new one to train the model further")
        if self._ranks.has_failed:
            raise ValueError(
                "a rank has failed, and the others are no longer where it was; make a new engine on all ranks, and "
                "load the last checkpoint"
            )
        if not loading:
            self._loaded.check()

    def _check_model(self) -> None:
        self._check_open()
        self._parts.store.check_values()
        for unit in self._parts.all_units:
            unchanged(unit, self._parts.store.weights(unit), self._parts.store.trained)
        checks.can_step(self._model)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A failure of closing must not hide the exception that is on its way.
        if error is None:
            self.close()
            return
        self._ranks.fail(error)
        with contextlib.suppress(Exception):
            self._end(together=False)


def _draw_seed(generator: torch.Generator | None = None) -> int:
    """For the random numbers of a step; from torch's own generator, by default."""
    return int(torch.randint(0, 2**62, (), generator=generator).item())


def _next_seed() -> int:
    """The one that will be drawn next."""
    copy = torch.Generator()
    copy.set_state(torch.get_rng_state())
    return _draw_seed(copy)
