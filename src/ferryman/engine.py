"""The engine: the public API, which wires the parts together. Start reading here.

- `Engine.forward_backward` cuts a batch into micro-batches (`plan/batch.py`) and passes them to the relay
  (`relay/driver.py`), which runs the user's code. The relay moves units (`model/units.py`) between the server's store
  (`server/store.py`) and slots on the device (`relay/weight_slots.py`), on lanes (`runtime/lanes.py`).
- `Engine.step` also lets the server (`server/server.py`) update the weights as the user's optimizer would.
- The plan (`plan/plan.py`) and the size of micro-batches (`training/micro_batching.py`, `plan/fit.py`) keep device
  memory within the budget.
- A new kind of step is tried out before it runs (`training/first_steps.py`, `training/crosscheck.py`). A batch is cut
  only if that does not change its loss (`training/batch_check.py`). Reads of weights wait for pending updates
  (`model/reads.py`).
- An assembly (`training/assembly.py`) creates the parts that a plan needs and installs them in the user's model. Blocks
  can be inserted, removed and skipped between steps (`model/blocks.py`). Checkpoints are in `checkpoint/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ferryman.checkpoint import loading, pretrained, saving
from ferryman.checkpoint.contents import Contents, Objects
from ferryman.checkpoint.loaded import Loaded
from ferryman.distributed.agreement import add_up, compare, errors_on_all_ranks
from ferryman.distributed.ranks import Ranks, Share
from ferryman.exactness.guard import NotRepeatableError, StepAgainError, repeating
from ferryman.model.blocks import Blocks, Position
from ferryman.model.placeholder import UsedOutsideError
from ferryman.model.precision import dtype_of
from ferryman.model.units import Unit
from ferryman.options import EngineArguments, EngineOptions, Optimizers, describe, takes_options
from ferryman.plan.fit import Choice, out_of_memory_advice
from ferryman.plan.plan import Plan, PlanTooLargeError
from ferryman.runtime.caller import Caller, one_call_at_a_time
from ferryman.runtime.device_memory import DeviceMemory
from ferryman.runtime.interrupts import Interrupts
from ferryman.runtime.segments import find_segments
from ferryman.server.gradient_checks import NonFiniteError
from ferryman.server.kernels import default_threads
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.stats import Stats
from ferryman.training import checks
from ferryman.training.assembly import Assembly
from ferryman.training.batch_check import BatchCheck
from ferryman.training.planner import Planner, find_link
from ferryman.training.preparation import Preparation, PreparedStep
from ferryman.training.recorder import Recorder

_MAX_ATTEMPTS = 5  # to run a step that has to be undone and repeated
_Files = loading.Checkpoint | pretrained.Weights


class Engine(contextlib.AbstractContextManager["Engine"]):
    """Trains a model that may be larger than the device.

        engine = ferryman.Engine(model, optimizer, device="cuda", memory="8GiB", max_grad_norm=1.0)
        for batch in loader:
            loss = engine.step(batch, micro_batches=8)
        engine.close()

    `model` is any torch.nn.Module on the CPU, or on "meta" with weights that are loaded afterwards. `optimizer` is an
    optimizer of torch.optim over the model's parameters, or a list of several, each with some of them. Parameter groups
    are read in every step, so learning rates and schedulers work as usual; the update itself runs where the optimizer
    state is. Without an optimizer the engine computes gradients only (`forward_backward`).

    A step equals gradient accumulation in plain PyTorch over the same micro-batches. With `memory`, the engine chooses
    units, slots, the place of the stash and the size of micro-batches so that they stay within the budget.

    Only one thread at a time may call an engine. `close` returns the model to its original state, with the trained
    weights. An engine that is dropped (`del engine`) closes itself, unless its model or its loss refers to it; with
    several ranks, call `close`, so that all ranks end together.

    Settings, each a keyword argument (declared in `options.py`):

    """

    @takes_options(EngineArguments)
    def __init__(self, model: nn.Module, optimizer: Optimizers | None, options: EngineOptions) -> None:
        checks.model(model)
        self._ranks, self._caller = Ranks(), Caller(self)
        self.device = checks.real_device(options.device, self._ranks.place)
        dtypes = dtype_of(model, options.precision)
        checks.arguments(model, optimizer, options, self.device, dtypes)
        self._model = model
        self._optimizer_view = view = None if optimizer is None else OptimizerView(optimizer, model, options.state)
        threads = options.host_threads or self._ranks.threads(default_threads())
        self._options = options = replace(options, device=self.device, host_threads=threads)
        compare(self._ranks, model, [] if view is None else view.optimizers, options.compared())
        segments = find_segments(self.device)  # before memory is counted: it leaves some in the allocator's cache
        link = None if optimizer is None else find_link(model, self.device, options, self._ranks)
        self._memory = DeviceMemory(self.device, options.budget)
        self._recorder = Recorder(options.trace, model, self.device, options.budget, view, dtypes, self.share)
        self._planner = Planner(model, self.device, options, dtypes, view, self.share, segments, link)
        self._blocks = Blocks(model, self.device)
        budget = None if options.split else options.budget
        self._batch_check = BatchCheck(model, options.loss, options.reduction, self.device, budget)
        self._loaded, self._closed = Loaded(model), False
        self.choice: Choice | None = None  # the number of micro-batches and the place of the stash in the last step
        self._parts = self._assemble(self._planner.make())
        self._preparation = self._make_preparation()

    @one_call_at_a_time
    def step(self, batch: Any, micro_batches: int | None = None) -> torch.Tensor:
        """Runs forward, backward and update. Returns the loss.

        Gradients from earlier calls of `forward_backward` are included. The call returns when all gradients have been
        checked; the update itself continues in the background, and reads of weights wait for it.
        """
        optimizer_view = self._need_optimizer()
        with self._own_reads():
            self._parts.server.take_user_changes(optimizer_view)
            loss = self._run(batch, micro_batches, for_update=True)
            self._finish(optimizer_view)
        return loss

    @one_call_at_a_time
    def forward_backward(self, batch: Any, micro_batches: int | None = None) -> torch.Tensor:
        """Runs forward and backward, and adds gradients to the parameters' `.grad`. Returns the loss of the batch.

        Without `micro_batches`, the batch is cut into as few micro-batches as the memory budget allows, or, if that is
        more than one, some more that keep more activations; without a budget it is not cut.
        """
        with self._own_reads():
            loss = self._run(batch, micro_batches, for_update=False)
            self._parts.show_gradients()
        return loss

    @one_call_at_a_time
    def update(self) -> None:
        """Updates the weights with the gradients in the parameters' `.grad`, and clears them."""
        optimizer_view = self._need_optimizer()
        with self._own_reads():
            self._parts.server.take_user_changes(optimizer_view)
            self._parts.take_gradients()
            self._ranks.all_gather_object("making an update")
            self._parts.server.begin_step(left_for_user=True)
            self._parts.server.send_rest(self._parts.relay.gradients.on_host)
            self._finish(optimizer_view)

    @one_call_at_a_time
    def evaluate(self, batch: Any, micro_batches: int | None = None) -> torch.Tensor:
        """Returns the loss of a batch without gradients, as in a step: with `chunked_loss`, without logits.
        With `micro_batches`, the batch is cut, for batches that are too large for the device as a whole."""
        self._check_open()
        return self._preparation.evaluate(batch, micro_batches)

    @one_call_at_a_time
    def zero_grad(self) -> None:
        """Drops all gradients."""
        self._drop_gradients()

    def wait(self) -> None:
        """Blocks until the last update is done. This is needed only before reading weights through an alias of their
        memory (a numpy view, an earlier `detach()`). All other reads wait automatically."""
        self._parts.reads.wait()

    @one_call_at_a_time
    def set_updates(self, updates: str) -> None:
        """Changes the setting `updates` from the next step on."""
        self._need_optimizer()
        self._ranks.agree({"updates=": updates})
        needed = int(max(count for (count,) in self._ranks.all_gather([self._preparation.needed])))
        options = replace(self._options, updates=updates)
        planner = replace(self._planner, options=options)
        self._parts.serve(planner.follow_updates(self._parts.plan, needed))
        self._options, self._planner = options, planner
        self._preparation = self._make_preparation()

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the gradients before clipping; None before the first step.

        After `forward_backward`, it is the norm of the current gradients on this rank only; after an update, the norm
        over all ranks that the update used.
        """
        return self._parts.server.grad_norm

    def gradient(self, name: str) -> torch.Tensor | None:
        """A parameter's gradient between `forward_backward` and `update`: in float32, on the host; it may be edited."""
        return self._parts.gradient(name)

    @property
    def loss_scale(self) -> float:
        """The factor by which losses are multiplied in float16; 1 in other precisions."""
        return self._parts.server.scale.value

    @property
    def plan(self) -> Plan:
        """The current plan, with the predicted and the achieved rate of updates."""
        predicted, achieved = self._parts.server.update_rates
        return replace(self._parts.plan, predicted_rate=predicted, achieved_rate=achieved)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The parts of the model that move between host and device."""
        return self._parts.plan.units

    @property
    def steps(self) -> int:
        """The number of steps, including those before a loaded checkpoint."""
        return self._parts.server.steps

    @property
    def fetches(self) -> int:
        """How many times weights of a unit have been copied to the device."""
        return self._parts.relay.weights.fetches

    def stats(self) -> Stats | None:
        """Waits for the updates of the last step; returns statistics about it, or None before the first step."""
        return self._parts.stats

    @property
    def host_account(self) -> dict[str, int]:
        """Bytes of host memory that the server uses, by purpose. With several ranks, this is the rank's own part, and
        the weights, which all ranks of a node share."""
        return self._parts.host_account([self.share])

    @property
    def share(self) -> Share:
        """This rank's number, `rank`, and the number of ranks, `size`."""
        return self._ranks.share

    @one_call_at_a_time
    def agree(self, **facts: Any) -> None:
        """Raises a ValueError on all ranks if a value, such as `steps=len(loader)`, differs between them."""
        self._check_open()
        self._ranks.agree({name: str(value) for name, value in facts.items()})

    @one_call_at_a_time
    def total(self, number: float | torch.Tensor) -> float:
        """Sums a number over all ranks, such as the tokens of a step. The sum of ints is an int."""
        self._check_open()
        return add_up(self._ranks, number)

    @one_call_at_a_time
    def save(self, directory: str | Path, *, objects: Objects | None = None, keep: int | None = None) -> Path:
        """Writes a checkpoint, with weights that transformers can load and all training state. Returns its path.

        `objects` are saved with it, by name: anything with `state_dict` and `load_state_dict`, such as a scheduler or
        the position in the data, or with `save_pretrained`, such as a tokenizer. Without `keep`, `directory` is the
        checkpoint and replaces an earlier one atomically; with `keep`, it holds a series of checkpoints, and all but
        the newest `keep` are deleted.
        """
        return saving.save_in(self._contents(), Path(directory), objects or {}, keep)

    @one_call_at_a_time
    def load(self, directory: str | Path, *, objects: Objects | None = None) -> Path:
        """Loads a checkpoint, or the newest of a series, and returns its path.

        The model, its trained parameters and the optimizer must match the checkpoint; device, memory, precision and all
        other settings may differ.
        """
        path = loading.find(Path(directory))
        self._load(path, lambda contents: loading.Checkpoint(path, contents, objects or {}))
        self._loaded.came_from(path)
        return path

    @one_call_at_a_time
    def load_weights(self, directory: str | Path) -> None:
        """Loads weights from safetensors files, also into a model on meta. The optimizer state does not change."""
        path = Path(directory)
        self._load(path, lambda contents: pretrained.Weights(contents, path))

    @one_call_at_a_time
    def skip(self, blocks: Position | Iterable[Position]) -> None:
        """Skips these blocks in the next step: they return their input, are not fetched and get no gradients."""
        self._check_open()
        self._blocks.skip(blocks)

    @one_call_at_a_time
    def insert(self, position: Position, block: nn.Module) -> None:
        """Inserts a block into the model, before the block that is currently at this position.

        The number of blocks in the model's config (`num_hidden_layers`) and the blocks' own indices (`layer_idx`) are
        adjusted if they exist.
        """
        self._check_open()
        checks.block(block, self._model, self._planner.dtype_of)
        checks.one_by_one(self._blocks.list_at(position), self.units)
        self._blocks.insert(position, block)
        try:
            added, plan = self._planner.insert(self._parts.plan, block)
        except BaseException:
            self._blocks.remove(block)
            raise
        self._parts.add(block, added, plan)
        self._preparation = self._make_preparation()

    @one_call_at_a_time
    def remove(self, position: Position) -> nn.Module:
        """Removes a block from the model and returns it, with its current weights."""
        self._check_open()
        block = self._blocks.at(position)
        checks.one_by_one(self._blocks.list_at(position), self.units)
        gone, plan = self._planner.remove(self._parts.plan, block, position)
        self._blocks.remove(block)
        self._parts.remove(block, gone, plan)
        self._preparation = self._make_preparation()
        return block

    @one_call_at_a_time
    def close(self) -> None:
        """Returns the model to its original state, with the trained weights. All ranks must call this."""
        self._end(together=True)

    def __exit__(self, *raised: Any) -> None:
        error = raised[1]
        # An error while closing must not hide the exception that is being raised.
        if error is None:
            self.close()
        elif self._caller.origin.is_here:
            self._ranks.fail(error)
            with contextlib.suppress(Exception):
                self._end(together=False)

    def _assemble(self, plan: Plan) -> Assembly:
        with self._memory.counted():
            return Assembly(
                self._model, self.device, plan, self._optimizer_view, self._blocks, self._options,
                self._planner.scale(), self._ranks, self._caller, self._memory,
            )  # fmt: skip

    def _make_preparation(self) -> Preparation:
        """Creates the preparation of steps for the current plan; called whenever the plan changes."""
        return Preparation(self._options, self._planner, self._parts, self._blocks, self._batch_check, self._ranks)

    def _drop_gradients(self) -> None:
        self._recorder.abandon()
        self._parts.drop_gradients()

    def _need_optimizer(self) -> OptimizerView:
        self._check_open()
        if self._optimizer_view is None:
            raise ValueError("the engine has no optimizer; pass one of torch.optim: ferryman.Engine(model, optimizer)")
        return self._optimizer_view

    def _check_open(self, *, loading: bool = False) -> None:
        checks.usable(closed=self._closed, rank_has_failed=self._ranks.has_failed)
        if not loading:
            self._loaded.check()

    @contextlib.contextmanager
    def _own_reads(self) -> Iterator[None]:
        """Context in which the engine itself reads weights, without waiting for updates, and uses device memory, which
        counts towards the budget."""
        self._parts.end_reads()
        try:
            with self._memory.counted():
                yield
        finally:
            self._parts.watch_reads()

    def _run(self, batch: Any, micro_batches: int | None, *, for_update: bool) -> torch.Tensor:
        """Runs forward and backward of a batch; returns its loss.

        A step is undone and repeated if a variable of the user's code changes that no check has seen, or if it runs out
        of memory although trials have found room. Then less stays on the device, or micro-batches are smaller.
        """
        generator = torch.get_rng_state()
        refusal: Exception | None = None
        # A step that fails drops all gradients, so it cannot be repeated if there are gradients of earlier calls.
        can_retry = self._ranks.alone and not self._parts.relay.gradients.on_host
        for _ in range(_MAX_ATTEMPTS if can_retry else 1):
            try:
                with repeating(refusal):
                    prepared = self._prepare(batch, micro_batches)
                relay, server = self._parts.relay, self._parts.server
                with self._running(prepared.choice, for_update=for_update) as interrupts:
                    scale, total = server.scale.value, torch.zeros((), device=self.device, dtype=torch.float32)
                    if prepared.parts:
                        total = relay.run(self._preparation.new_step(prepared, interrupts, for_update=for_update))
                        self._preparation.first_steps.end()
                    if for_update:  # also on a rank that has no micro-batches
                        server.send_rest(relay.gradients.on_host)
                loss = self._ranks.all_reduce(total if scale == 1 else total / scale)
                return self._recorder.ran(prepared.parts, loss, relay.calls)
            except StepAgainError as error:
                refusal = error.refusal
                if not self._preparation.can_repeat(error):
                    break
            torch.set_rng_state(generator)
        assert refusal is not None
        raise refusal

    def _prepare(self, batch: Any, micro_batches: int | None) -> PreparedStep:
        """Prepares a step that all ranks agree on. If it needs smaller units or more residents, it makes a new plan."""
        while True:
            try:
                with errors_on_all_ranks(self._ranks):
                    self._check_open()
                    choice, parts = self._preparation.cut(batch, micro_batches)
                step = self._preparation.agree(choice, parts)
            except PlanTooLargeError as error:
                plan = self._planner.make_smaller(error.need)
            except UsedOutsideError as error:
                self._planner, plan = self._preparation.keep_resident(error)
            else:
                self.choice = choice._replace(micro_batches=len(parts))
                return step
            self._rebuild(plan)

    def _rebuild(self, plan: Plan) -> None:
        """Replaces the plan and everything made from it, before the first step."""
        steps, scale = self.steps, self._parts.server.scale.state()
        self._parts.close()
        self._parts = self._assemble(plan)
        self._preparation = self._make_preparation()
        contents = self._contents()
        self._ranks.run_on_all("loading again", lambda: self._loaded.load_again(contents))
        self._parts.server.scale.restore(scale)
        self._parts.server.restart(steps)

    @contextlib.contextmanager
    def _running(self, choice: Choice, *, for_update: bool) -> Iterator[Interrupts]:
        """Context for the forward and backward of a step. A failure leaves the engine as it was before the step."""
        self._parts.take_gradients()
        self._blocks.begin_step()
        self._recorder.begin(self._parts.server.steps, self._parts.plan)
        if for_update:
            self._parts.server.begin_step()
        try:
            with self._parts.step(), self._memory.capped(), Interrupts() as interrupts:
                yield interrupts
        except BaseException as error:
            self._ranks.fail(error)
            self._parts.lanes.drain()
            if isinstance(error, StepAgainError):
                self._blocks.skip_again()
            reason = error.refusal if isinstance(error, StepAgainError) else error
            if isinstance(reason, torch.OutOfMemoryError):
                reason.add_note(out_of_memory_advice(self._parts.plan, choice))
            if isinstance(error, NotRepeatableError):
                self._preparation.first_steps.forget()  # the next step must find the same error
            if for_update:
                reason.add_note(f"ferryman: {self._parts.server.describe_changes()}")
            self._recover(forget=for_update or isinstance(error, StepAgainError))
            raise
        finally:
            self._blocks.skipped = frozenset()

    def _finish(self, optimizer_view: OptimizerView) -> None:
        """Starts the update with the gradients of this step, which have arrived or are on their way to the server."""
        with Interrupts():
            relay, server, left = self._parts.relay, self._parts.server, self._parts.relay.gradients.on_host
            eager = not self._parts.plan.staging.deferred
            all_submitted = eager and not left  # the updates of this step
            try:
                if all_submitted:
                    relay.fetch_ahead(eager=eager)
                # Units are updated in the order in which the next step fetches them.
                server.finish(self._parts.plan.in_forward_order, left)
                if not all_submitted:
                    relay.fetch_ahead(eager=eager)
            except BaseException as error:
                if not (isinstance(error, NonFiniteError) and error.agreed):
                    self._ranks.fail(error)
                self._parts.lanes.drain()
                self._recover(forget=True)
                raise
            self._recorder.end()
            self._drop_gradients()
            optimizer_view.stepped()

    def _recover(self, *, forget: bool) -> None:
        """Restores a consistent state after a failure, when all lanes are drained. `forget` drops all gradients."""
        self._parts.recover()
        if forget:
            self._drop_gradients()

    def _contents(self, *, loading: bool = False) -> Contents:
        """Waits until no lane has work, and returns the parts of the engine that are saved and loaded."""
        self._check_open(loading=loading)
        return self._parts.contents(self._ranks)

    def _load(self, path: Path, open_files: Callable[[Contents], _Files]) -> None:
        """Opens files and, if they fit the engine on all ranks, loads them."""
        contents, doing, files = self._contents(loading=True), f"loading {path}", list[_Files]()
        self._ranks.run_on_all(doing, lambda: files.append(open_files(contents)))
        with self._loaded.replacing(path, *files[0].replaces):
            self._recover(forget=True)
            self._ranks.run_on_all(doing, files[0].load)

    def _end(self, *, together: bool) -> None:
        """Closes the engine. `together`: all ranks close theirs, and wait for each other."""
        if together and not (self._closed or self._ranks.has_failed):
            self._ranks.all_gather_object("closing the engine")
        self._closed = True
        together = together and not self._ranks.has_failed
        self._parts.close(together=together)
        if together:
            self._ranks.close()


Engine.__doc__ = f"{Engine.__doc__}{describe(indent=4)}"
