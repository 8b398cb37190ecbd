"""transformers' Trainer on an engine.

The trainer's own loop runs as it is; what differs is what its steps do. It asks for the loss of one micro-batch after
the other (`training_step`): at the first, the engine runs all of them, layer by layer, and later calls only hand out
the losses. It clips: the engine has done so. It steps the optimizer: the engine has, or does it now, if a callback is
to see gradients in between.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from ferryman.checkpoint.contents import Stateful, random_states, set_random_states
from ferryman.checkpoint.directory import is_checkpoint
from ferryman.engine import Engine
from ferryman.integrations import arguments

# Between a backward and the update that follows it.
_BETWEEN = ("on_substep_end", "on_pre_optimizer_step")
# After an update, when it may still be going on.
_AFTER = ("on_optimizer_step", "on_step_end", "on_log", "on_epoch_end")


class FerrymanTrainer(Trainer):
    """Trains a model that may be larger than the device; takes what `transformers.Trainer` takes.

    `gradient_accumulation_steps` micro-batches of `per_device_train_batch_size` samples are one step of the engine,
    which fetches each block once for all of them. `engine` has options of `ferryman.Engine`, as
    `engine={"memory": "8GiB"}`. The engine, which callbacks may use as `trainer.engine`, has the model while `train`
    runs; afterwards the model is the plain one, on the host. Evaluation streams it through the device at any time.
    Under torchrun each rank has its own samples and its own device, as with any Trainer.
    """

    model: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *rest: Any,
        engine: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        arguments.check(args)
        self._options = arguments.engine_options(engine or {}, args)
        self._held = contextlib.ExitStack()  # the engine, to be closed
        self.engine: Engine | None = None  # while it trains
        self._micro_batches: list[Any] = []  # of the step that is due
        self._losses: dict[int, torch.Tensor] = {}  # of those, by number
        self._handed_out = 0
        self._update_is_due = False
        self._stepping = False
        self._checkpointing = False
        self._random: dict[str, Any] | None = None  # states of generators, from a checkpoint
        super().__init__(model, args, *rest, **others)

    # The model stays on the host, and accelerate leaves it and its batches alone.

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        pass

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no", "device_placement": False}

    # The engine's life.

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._held:
            return super()._inner_training_loop(*args, **kwargs)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        optimizer = self.create_optimizer()
        self.engine = self._held.enter_context(Engine(self.model, optimizer, loss=self._loss, **self._options))
        self.optimizer = _EngineOptimizer(optimizer, self._update)
        self._held.callback(self._let_go, optimizer)
        self.create_scheduler(num_training_steps=max_steps)
        # As for evaluation: of several ranks, accelerate would wrap it to add up gradients, which the engine does.
        self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        self.accelerator._optimizers.append(self.optimizer)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _let_go(self, optimizer: torch.optim.Optimizer) -> None:
        """The engine is about to be closed, and gives the optimizer its state."""
        self.engine, self.optimizer = None, optimizer
        self.callback_handler.optimizer = optimizer
        self.accelerator._optimizers.clear()
        self._micro_batches.clear()
        self._losses.clear()

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        arguments.check_optimizer(args)
        return Trainer.get_optimizer_cls_and_kwargs(args, model)

    # A step.

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batch, items = super().get_batch_samples(*args, **kwargs)
        # Dicts, as collators may return other mappings, in which nobody but the model finds the tensors.
        parts = [dict(part) if isinstance(part, Mapping) else part for part in batch]
        self._micro_batches = [(number, part, items) for number, part in enumerate(parts)]
        self._handed_out = 0
        return batch, items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """The loss of the next micro-batch. At the first, all of them are run."""
        if self._handed_out == 0:
            model.train()
            self._run()
        loss = self._losses[self._handed_out]
        self._handed_out += 1
        return loss.to(self.args.device)

    def _run(self) -> None:
        assert self.engine is not None
        stops = self.control.should_epoch_stop or self.control.should_training_stop  # after the first micro-batch
        self._update_is_due = stops or self._is_heard(_BETWEEN)
        self._stepping = True
        try:
            if self._update_is_due:
                self.engine.zero_grad()
                self.engine.forward_backward(self._micro_batches)
            else:
                self.engine.step(self._micro_batches)
        except ValueError as error:
            if "micro_batches=" in str(error):  # too large for the budget; the trainer has other names for it
                size = self.args.per_device_train_batch_size
                error.add_note(
                    f"per_device_train_batch_size={size} is their size; gradient_accumulation_steps, how many"
                )
            raise
        finally:
            self._stepping = False

    def _loss(self, model: nn.Module, micro_batch: Any) -> torch.Tensor:
        number, inputs, items = micro_batch
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss: Any = self.compute_loss(model, inputs, num_items_in_batch=items)
        if not self._is_scaled(items):
            loss = loss / self.current_gradient_accumulation_steps
        self._losses[number] = loss.detach()
        # The trainer has multiplied by the number of ranks what it divided by all that counts on them, or has divided
        # by what counts here: for a mean of gradients. The engine adds up.
        return loss / self.args.world_size  # type: ignore[no-any-return]

    def _is_scaled(self, items: Any) -> bool:
        """Whether the loss has been divided by all that counts in the step, or only by what its micro-batch has."""
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        return (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None

    def _prepare_input(self, data: Any) -> Any:
        return data if self._stepping else super()._prepare_input(data)  # in a step it is on the engine's device

    def _update(self) -> bool:
        """Returns whether the weights have changed: in float16 steps are passed over."""
        assert self.engine is not None
        if self._update_is_due:
            self.engine.update()
            self._update_is_due = False
        if self._is_heard(_AFTER, but_by="transformers"):
            self.engine.wait()  # they may read parameters
        return math.isfinite(self._get_grad_norm(self.model))

    def _is_heard(self, events: tuple[str, ...], *, but_by: str | None = None) -> bool:
        """Whether callbacks, but those of a package, do something at these events."""
        return any(
            getattr(type(callback), event) is not getattr(TrainerCallback, event)
            for callback in self.callback_handler.callbacks
            if type(callback).__module__.partition(".")[0] != but_by
            for event in events
        )

    def _clip_grad_norm(self, model: nn.Module) -> float:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        """Before clipping, as the trainer logs it."""
        assert self.engine is not None
        norm = self.engine.grad_norm
        assert norm is not None
        return norm

    # Evaluation.

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._streamed():
            return super().evaluation_loop(*args, **kwargs)

    @contextlib.contextmanager
    def _streamed(self) -> Iterator[None]:
        """The model runs on the device, also if no training has given it an engine."""
        if self.engine is not None:
            yield
            return
        with Engine(self.model, **arguments.evaluation_options(self._options)):
            yield

    # Checkpoints: the engine's, with the trainer's own state beside. Those of a plain Trainer are read as ever.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As ever; `resume_from_checkpoint=True` is the newest checkpoint that was written to its end."""
        if resume_from_checkpoint is True:
            found = sort_checkpoints(str(self.args.output_dir))  # the newest last
            whole = [path for path in found if (Path(path) / TRAINER_STATE_NAME).is_file()]
            if not whole:
                raise ValueError(f"resume_from_checkpoint=True: there is no whole checkpoint in {self.args.output_dir}")
            resume_from_checkpoint = whole[-1]
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._checkpointing = not self.args.save_only_model
        try:
            super()._save_checkpoint(*args, **kwargs)
        finally:
            self._checkpointing = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._checkpointing:
            self._save(output_dir)  # on all ranks, of which each writes a part
        else:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self._checkpointing:
            super()._save(output_dir, state_dict)
            return
        assert self.engine is not None
        assert output_dir is not None
        is_plain = (Path(output_dir) / TRAINER_STATE_NAME).is_file() and not is_checkpoint(Path(output_dir))
        if is_plain and self.is_world_process_zero():
            _move_aside(Path(output_dir))
        self.engine.agree(checkpoint=output_dir)  # also, all wait for what was moved
        path = self.engine.save(output_dir, objects=self._objects())
        if not self.is_world_process_zero():
            return
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(path)
        (path / "training_args.json").write_text(self.args.to_json_string())  # type: ignore[no-untyped-call]

    def _objects(self) -> dict[str, Stateful]:
        assert self.lr_scheduler is not None
        return {"scheduler": self.lr_scheduler}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        pass  # as the next: it is in the engine's checkpoint

    def _save_rng_state(self, output_dir: str) -> None:
        pass

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not is_checkpoint(Path(resume_from_checkpoint)):  # else the engine does it, when there is one
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        assert self.engine is not None
        self._random = None
        if checkpoint is None or not is_checkpoint(Path(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self.engine.load(checkpoint, objects=self._objects())
        self._random = random_states(self.engine.device)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Later than the rest: batches that are passed over have drawn from the generators by then."""
        assert self.engine is not None
        if self._random is None:
            super()._load_rng_state(checkpoint)
        else:
            set_random_states(self._random, self.engine.device)

    def _load_best_model(self) -> None:
        """Into the plain model: training is over."""
        self._held.close()
        best = self.state.best_model_checkpoint
        assert best is not None
        if not is_checkpoint(Path(best)):
            super()._load_best_model()
            return
        cpu = torch.device("cpu")
        random = random_states(cpu)
        with Engine(self.model, device=cpu) as engine:
            engine.load(best)  # without an optimizer: the weights alone, in full precision
        set_random_states(random, cpu)


class _EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """What the trainer's loop and its callbacks see as the optimizer: the engine makes its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, update: Callable[[], bool]) -> None:
        super().__init__(optimizer, device_placement=False)
        self._update = update

    def step(self, closure: None = None) -> None:
        self._is_overflow = not self._update()


def _move_aside(checkpoint: Path) -> None:
    """A plain Trainer's, in whose place one of ours goes: it stays, under a name that no trainer takes for its own."""
    suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    names = (checkpoint.with_name(f"plain-{checkpoint.name}{suffix}") for suffix in suffixes)
    aside = next(path for path in names if not path.exists())
    checkpoint.rename(aside)
    warnings.warn(f"{checkpoint} was a plain Trainer's; it is {aside} now", stacklevel=2)
