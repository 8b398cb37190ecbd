"""The training loop of `ferryman train`, which is also an example of how to use the library."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ferryman.checkpoint.contents import Files, Stateful
from ferryman.checkpoint.directory import series, step_of
from ferryman.checkpoint.manifest import is_whole
from ferryman.checkpoint.stream import DamagedError
from ferryman.cli.corpus import Corpus, check_batch, open_corpus
from ferryman.cli.defaults import budget, chunked_loss
from ferryman.cli.engine_flags import flag
from ferryman.cli.machine import find_device
from ferryman.cli.model_argument import ModelSpec, parse_model
from ferryman.cli.optimizer import make_optimizer, set_learning_rate
from ferryman.cli.run_directory import RunDirectory
from ferryman.cli.signals import OUTPUT_CLOSED, StopRequest
from ferryman.cli.train_options import LENGTHS, TrainOptions
from ferryman.data.windows import Windows
from ferryman.distributed.ranks import Ranks
from ferryman.engine import Engine
from ferryman.observe.report.page import write_report
from ferryman.observe.trace import Trace, trace_path
from ferryman.plan.batch import portion

EventHandler = Callable[[Mapping[str, Any]], None]  # called with every event; see `display.py`

_TRACED_STEPS = 20  # the trace keeps the lanes of this many steps, the last ones
_MAX_SEED = 2**63 - 1  # the largest that torch accepts
_PROMPT_TOKENS = 32  # that a generated sample continues


class DivergedError(ValueError):
    """The loss is inf or NaN."""


class TrainingRun:
    """One run of `ferryman train`, from its options to its last checkpoint."""

    def __init__(self, options: TrainOptions, run: RunDirectory, on_event: EventHandler, ranks: Ranks) -> None:
        assert options.model is not None
        self._ranks = ranks
        self._leads = self._ranks.rank == 0  # the first rank shows progress and writes the files of the run
        self.options = options
        self.run = run
        self._on_event = on_event
        self._stop = StopRequest()
        self.description = parse_model(options.model)
        # Cheap checks come first: tokenizing text may take long.
        _check_numbers(options)
        self.device = find_device(options.device, self._ranks.place)
        self.budget = _least(self._ranks.all_gather_object("looking for memory", budget(self.device, options.memory)))
        self.corpus = self._open_corpus()
        check_batch(options, self.description, self.corpus, self.device, self._ranks)
        self.steps = 0  # in total; set when it is known how many steps the checkpoint has
        self.last_checkpoint: Path | None = None
        self.has_begun = False  # whether a step has been made
        self._is_accepted = False
        self.trace = Trace(keep_steps=_TRACED_STEPS) if options.trace else None
        self._loss = math.nan
        self._last_finite_step = 0  # the last step whose weights gave a finite loss
        self._tokens = 0  # since the run was started or resumed
        self._step_seconds: float | None = None  # smoothed
        self._agreed: str | None = None  # the reason to stop that all ranks have agreed on
        self._peak: int | None = None  # allocated device memory in the last step, the highest of all ranks
        self._micro_batches: list[int] = []  # of each rank in the last step

    def _open_corpus(self) -> Corpus:
        """The first rank tokenizes text; the other ranks then find the tokens."""
        found: list[Corpus] = []

        def read_data() -> None:
            found.append(open_corpus(self.options, self.description, self.run))

        self._ranks.run_on_first("reading the data", read_data)
        if not found:
            read_data()
        return found[0]

    def train(self) -> None:
        options = self.options
        torch.manual_seed(options.seed)
        resumes = self.run.newest_checkpoint() is not None or options.from_step is not None
        model = _build(self.description, empty=resumes)
        optimizer = make_optimizer(model, options)
        began = time.monotonic()
        chunked = chunked_loss(options.chunked_loss, model)
        settings = {**options.for_engine(), "memory": self.budget, "chunked_loss": chunked}
        with self._stop, Engine(model, optimizer, trace=self.trace, **settings) as engine:
            if resumes:
                self.last_checkpoint = self._load(engine)
            elif self.description.weights is not None:
                engine.load_weights(self.description.weights)
            self.steps = _last_step(options, self.corpus.training, self.corpus.sequence, engine.steps)
            engine.agree(steps=self.steps, seen=self.corpus.training.seen)
            self._emit_start(engine, model)
            is_over = engine.steps >= self.steps
            if engine.steps == 0 and options.eval_every is not None:
                self._evaluate(engine, model)
            self._agree()
            while engine.steps < self.steps and self._asked is None:
                self._step(engine, optimizer)
                if engine.steps < self.steps:
                    self._between(engine, model)
            self._accept(engine.steps)
            if not is_over:
                self._save(engine)  # before the evaluation, which may fail
                self._evaluate(engine, model)
                if self.corpus.validation is None and self.has_begun:
                    self._check_finite(engine, self._loss, "loss")
            if self._asked is None:
                self._ranks.run_on_first("writing a sample", lambda: self._sample(model))
            self._emit_end(engine, self._asked or "done", time.monotonic() - began)

    def _step(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        options = self.options
        start = time.monotonic()
        rate = set_learning_rate(optimizer, options, engine.steps, self.steps)
        mine, micro_batches = portion(options.batch, options.micro_batches, *self._ranks.share)
        batch = self.corpus.training.batch(options.batch, mine)
        self._loss = engine.step(batch, micro_batches if batch else None).item()
        seconds = time.monotonic() - start
        self._agree(engine)
        self._accept(engine.steps - 1)
        self.has_begun = True
        if math.isfinite(self._loss):
            self._last_finite_step = engine.steps - 1
        tokens = options.batch * self.corpus.sequence
        self._tokens += tokens
        self._step_seconds = seconds if self._step_seconds is None else 0.8 * self._step_seconds + 0.2 * seconds
        self._emit_step(engine, rate, seconds, tokens)

    def _accept(self, step: int) -> None:
        """Records the settings in the run's directory, once a step has run with them or the run is already complete.

        Not earlier: settings that are refused, at the latest in the first step, must not change a resumed run.
        """
        if self._leads and not self._is_accepted:
            self.run.begin_metrics(step)
            self.run.write_settings(self.options)
        self._is_accepted = True

    def _agree(self, engine: Engine | None = None) -> None:
        """Exchanges stop requests and the figures of the last step, so that all ranks stop after the same step."""
        peak, pieces = None, 0
        if engine is not None and engine.choice is not None:
            last = None if self.trace is None else self.trace.last_step
            peak, pieces = _peak(engine.device) if last is None else last.peak, engine.choice.micro_batches
        codes, peaks, counts = zip(
            *self._ranks.all_gather([self._stop.code, -1 if peak is None else peak, pieces]), strict=True
        )
        self._agreed = StopRequest.reason(codes)
        self._peak = None if max(peaks) < 0 else int(max(peaks))
        self._micro_batches = [int(count) for count in counts]

    @property
    def _asked(self) -> str | None:
        """The reason to stop, if any. With several ranks it counts once all ranks know it."""
        return self._stop.asked if self._ranks.alone else self._agreed

    def _between(self, engine: Engine, model: nn.Module) -> None:
        if engine.steps % (self.options.save_every or _save_every(self.steps)) == 0:
            self._save(engine)
        if self.options.eval_every is not None and engine.steps % self.options.eval_every == 0:
            self._evaluate(engine, model)

    def _evaluate(self, engine: Engine, model: nn.Module) -> None:
        if self.corpus.validation is None:
            return
        # A batch of the size of a micro-batch fits, since it fits in a step.
        most = -(-self.options.batch // self._ranks.size)
        size = max(1, most // max(self._micro_batches)) if any(self._micro_batches) else 1
        loss = evaluate(engine, model, self.corpus.validation, size, self.options.eval_windows, self._stop, self._ranks)
        if loss is None:
            self._agree(engine)
            return
        bits = loss / math.log(2) if self.corpus.is_bytes else None
        self._emit({"event": "eval", "step": engine.steps, "loss": loss, "bits_per_byte": bits})
        self._check_finite(engine, loss, "validation loss")
        self._last_finite_step = engine.steps

    def _check_finite(self, engine: Engine, loss: float, what: str) -> None:
        """Raises if the loss is inf or NaN: a run with such weights has failed."""
        if math.isfinite(loss):
            return
        saved = [step_of(path) for path in series(self.run.checkpoints)]
        good = [step for step in saved if step <= self._last_finite_step]
        back = (
            f"Resume from an earlier step with: {self.options.command()} --from-step {good[-1]} "
            f"--lr {self.options.lr / 3:.1g}"
            if good
            else "There is no earlier checkpoint; start a new run"
        )
        if engine.steps == 0:
            raise DivergedError(f"the {what} is {loss} before the first step: the initial weights cannot be used")
        raise DivergedError(
            f"the {what} is {loss} after step {engine.steps}: training has diverged. {back} (a lower --lr, more "
            "--warmup or --max-grad-norm 1 may help)"
        )

    def _load(self, engine: Engine) -> Path:
        path = self.run.checkpoint(self.options.from_step)
        try:
            return engine.load(path, objects={"data": self.corpus.training})
        except DamagedError as error:
            others = [other for other in reversed(series(self.run.checkpoints)) if other != path]
            whole = next((other for other in others if is_whole(other)), None)
            if whole is None:
                raise DamagedError(f"{error}. There is no other intact checkpoint; start a new run") from error
            raise DamagedError(
                f"{error}. {whole} is intact; resume with: {self.options.command()} --from-step {step_of(whole)}"
            ) from error

    def _save(self, engine: Engine) -> None:
        start = time.monotonic()
        objects: dict[str, Stateful | Files] = {"data": self.corpus.training}
        if self.corpus.tokenizer is not None:
            objects["tokenizer"] = self.corpus.tokenizer
        self.last_checkpoint = engine.save(self.run.checkpoints, objects=objects, keep=self.options.keep)
        seconds = time.monotonic() - start
        self._emit({"event": "save", "step": engine.steps, "path": str(self.last_checkpoint), "seconds": seconds})

    def _sample(self, model: nn.Module) -> None:
        if self.options.sample == 0:
            return
        source = self.corpus.validation or self.corpus.training
        prompt = next(source.in_order(1, 1))["input_ids"][:, : min(_PROMPT_TOKENS, self.corpus.sequence // 2)]
        room = (self.description.context or math.inf) - prompt.shape[1]
        new = generate(model, prompt, int(min(self.options.sample, room)), seed=self.options.seed)
        texts = [self.corpus.decode(ids) or " ".join(map(str, ids)) for ids in (prompt[0].tolist(), new)]
        self._emit({"event": "sample", "prompt": texts[0], "text": texts[1]})

    # Events.

    def _emit(self, event: Mapping[str, Any]) -> None:
        if not self._leads:
            return
        self.run.add_metrics(event)
        try:
            self._on_event(event)
        except OSError:  # the output is closed, for example the terminal: save and stop
            self._on_event = lambda event: None
            self._stop.asked = self._stop.asked or OUTPUT_CLOSED

    def _emit_start(self, engine: Engine, model: nn.Module) -> None:
        options = self.options
        self._emit(
            {
                "event": "start",
                "model": self.description.name,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "device": str(engine.device),
                "ranks": self._ranks.size,
                "budget": self.budget,
                "step": engine.steps,
                "steps": self.steps,
                "batch": options.batch,
                "sequence": self.corpus.sequence,
                "tokens": self.corpus.tokens,
                "output": str(self.run.directory),
            }
        )
        if self.corpus.note is not None:
            self._emit({"event": "note", "text": self.corpus.note})
        if (why := engine.plan.staging.note) is not None:
            self._emit({"event": "note", "text": why})
        if engine.steps >= self.steps:
            text = f"the run is already complete at step {engine.steps}; train longer with --steps"
            self._emit({"event": "note", "text": text})

    def _emit_step(self, engine: Engine, rate: float, seconds: float, tokens: int) -> None:
        assert self._step_seconds is not None
        last = None if self.trace is None else self.trace.last_step
        self._emit(
            {
                "event": "step",
                "step": engine.steps,
                "steps": self.steps,
                "loss": self._loss,
                "lr": rate,
                "grad_norm": engine.grad_norm,
                "epoch": self.corpus.training.epoch,
                "seconds": seconds,
                "seconds_left": self._step_seconds * (self.steps - engine.steps),
                "tokens_per_second": tokens / seconds,
                "micro_batches": sum(self._micro_batches),
                "device_peak": self._peak,
                "lanes": {} if last is None else {name: round(last.share(name), 4) for name in last.busy},
                "device_share": self._device_share(),
            }
        )

    def _emit_end(self, engine: Engine, reason: str, seconds: float) -> None:
        if self.trace is not None and self._tokens:
            engine.wait()  # the last updates belong to the trace
            self.trace.save(trace_path(self.run.trace, self._ranks.rank))
            self._ranks.all_gather_object("saving traces")
            if self._leads:
                write_report(self.run.trace, self.run.report, overwrite=True)
        self._emit(
            {
                "event": "end",
                "reason": reason,
                "step": engine.steps,
                "steps": self.steps,
                "loss": self._loss,
                "tokens": self._tokens,
                "seconds": seconds,
                "checkpoint": str(self.last_checkpoint),
                "report": str(self.run.report) if self.run.report.exists() else None,
                "resume": self.options.command(),
            }
        )

    def _device_share(self) -> float | None:
        """The share of the parameters that the device updated, in the last step whose updates are complete."""
        note = None if self.trace is None else self.trace.last_note
        return None if note is None else note.values["device_share"]


def evaluate(
    engine: Engine, model: nn.Module, windows: Windows, size: int, most: int, stop: StopRequest, ranks: Ranks
) -> float | None:
    """The mean loss over the first windows, which are distributed over the ranks; None if asked to stop.

    The layers stream through the device here as well.
    """
    total, count = 0.0, 0
    model.eval()
    try:
        for batch in windows.in_order(size, most, ranks.share):
            if stop.asked is not None:
                break
            total += engine.evaluate(batch).item() * len(batch["input_ids"])
            count += len(batch["input_ids"])
    finally:
        model.train()
    codes, totals, counts = zip(*ranks.all_gather([stop.code, total, count]), strict=True)
    return None if any(codes) else sum(totals) / sum(counts)


def generate(model: nn.Module, prompt: torch.Tensor, count: int, *, seed: int) -> list[int]:
    """Samples `count` tokens that continue the prompt."""
    torch.manual_seed(seed)
    model.eval()
    try:
        with torch.no_grad():
            found: torch.Tensor = model.generate(  # type: ignore[operator]
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=count,
                do_sample=True,
                temperature=0.8,
                pad_token_id=0,
            )
    finally:
        model.train()
    return [int(token) for token in found[0, prompt.shape[1] :]]


def _build(description: ModelSpec, *, empty: bool) -> nn.Module:
    """Builds the model on the meta device if its weights will be read from files, else with new weights."""
    return description.on_meta() if empty or description.weights is not None else description.on_host()


def _check_numbers(options: TrainOptions) -> None:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{flag(field.name)} {value}: must be a finite number")
    if not 0 <= options.seed <= _MAX_SEED:
        raise ValueError(f"--seed {options.seed}: must be an integer from 0 to {_MAX_SEED}")
    if options.epochs == 0:
        raise ValueError("--epochs 0: must be greater than 0, such as 0.5 for half of the data")
    given = [name for name in LENGTHS if getattr(options, name) is not None]
    if len(given) > 1:
        raise ValueError(f"--{given[0]} and --{given[1]} both set the length of the training; give only one of them")


def _least(budgets: list[int | None]) -> int | None:
    """The smallest budget of all ranks, which share one plan; None if one of them has none."""
    known = [found for found in budgets if found is not None]
    return min(known) if len(known) == len(budgets) else None


def _last_step(options: TrainOptions, training: Windows, sequence: int, done: int) -> int:
    """The number of the last step. The remaining steps are computed from the position in the data, since --batch may
    have changed when the run was resumed."""
    if options.steps is not None:
        return options.steps
    if options.tokens is not None:
        windows = -(-options.tokens // sequence)
    else:
        windows = math.ceil((1.0 if options.epochs is None else options.epochs) * training.count)
    return max(1, done + max(0, -(-(windows - training.seen) // options.batch)))


def _save_every(steps: int) -> int:
    """The default of --save-every: a tenth of the run, but at least 10 steps and at most 500."""
    return min(500, max(10, steps // 10))


def _peak(device: torch.device) -> int | None:
    return None if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)
