"""A transformers Trainer that trains with an engine.

The loop of Trainer is unchanged; only its steps differ. It calls `training_step` for each micro-batch: the first call
runs all of them in the engine, layer by layer, and later calls only return their losses. The engine clips gradients and
updates the weights, so `optimizer.step()` does nothing, unless a callback reads gradients before the update: then the
engine updates in `optimizer.step()`.
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

# Callbacks between the backward and the update, which may read gradients.
_BEFORE_UPDATE = ("on_substep_end", "on_pre_optimizer_step")
# Callbacks after an update, which may read weights while the update is still running.
_AFTER_UPDATE = ("on_optimizer_step", "on_step_end", "on_log", "on_epoch_end")


class FerrymanTrainer(Trainer):
    """Trains a model that may be larger than the device; takes the arguments of `transformers.Trainer`.

    `gradient_accumulation_steps` micro-batches of `per_device_train_batch_size` samples are one step of the engine,
    which fetches each block once for all of them. `engine` holds options of `ferryman.Engine`, such as
    `engine={"memory": "8GiB"}`. While `train` runs, the engine owns the model, and callbacks can use it as
    `trainer.engine`; afterwards the model is a plain model on the host. Evaluation streams the model through the device
    during training, before and after. Under torchrun each rank has its own samples and device, as with any Trainer.
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
        self._engine_stack = contextlib.ExitStack()  # closes the engine
        self.engine: Engine | None = None  # exists during training
        self._micro_batches: list[Any] = []  # of the current step
        self._losses: dict[int, torch.Tensor] = {}  # losses of these micro-batches, by number
        self._handed_out = 0
        self._update_is_due = False
        self._stepping = False
        self._checkpointing = False
        self._random: dict[str, Any] | None = None  # random states from a checkpoint
        super().__init__(model, args, *rest, **others)

    # The model stays on the host; accelerate must not move it or its batches.

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        pass

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no", "device_placement": False}

    # Creating and closing the engine.

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._engine_stack:
            return super()._inner_training_loop(*args, **kwargs)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        optimizer = self.create_optimizer()
        self.engine = self._engine_stack.enter_context(Engine(self.model, optimizer, loss=self._loss, **self._options))
        self.optimizer = _EngineOptimizer(optimizer, self._update)
        self._engine_stack.callback(self._release_engine, optimizer)
        self.create_scheduler(num_training_steps=max_steps)
        # In evaluation mode: otherwise accelerate would wrap the model in DDP, but the engine reduces gradients.
        self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        self.accelerator._optimizers.append(self.optimizer)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _release_engine(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before the engine is closed, which returns the optimizer's state."""
        self.engine, self.optimizer = None, optimizer
        self.callback_handler.optimizer = optimizer
        self.accelerator._optimizers.clear()
        self._micro_batches.clear()
        self._losses.clear()

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        arguments.check_optimizer(args)
        return Trainer.get_optimizer_cls_and_kwargs(args, model)

    # Steps.

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batch, items = super().get_batch_samples(*args, **kwargs)
        # Convert to dicts: collators may return other mappings, whose tensors the engine would not find.
        parts = [dict(part) if isinstance(part, Mapping) else part for part in batch]
        self._micro_batches = [(number, part, items) for number, part in enumerate(parts)]
        self._handed_out = 0
        return batch, items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Returns the loss of the next micro-batch. The first call of a step runs all micro-batches."""
        if self._handed_out == 0:
            model.train()
            self._run()
        loss = self._losses[self._handed_out]
        self._handed_out += 1
        return loss.to(self.args.device)

    def _run(self) -> None:
        assert self.engine is not None
        stops = self.control.should_epoch_stop or self.control.should_training_stop  # then there may be no update
        self._update_is_due = stops or self._is_heard(_BEFORE_UPDATE)
        self._stepping = True
        try:
            if self._update_is_due:
                self.engine.zero_grad()
                self.engine.forward_backward(self._micro_batches)
            else:
                self.engine.step(self._micro_batches)
        except ValueError as error:
            if "micro_batches=" in str(error):  # too large for the budget: name the trainer's arguments
                size = self.args.per_device_train_batch_size
                error.add_note(
                    f"In FerrymanTrainer, per_device_train_batch_size={size} is the size of micro-batches, and "
                    "gradient_accumulation_steps is their number"
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
        # The trainer scales losses for a mean over ranks, as DDP computes it. The engine sums over ranks.
        return loss / self.args.world_size  # type: ignore[no-any-return]

    def _is_scaled(self, items: Any) -> bool:
        """Whether the loss is already divided by the number of items in the whole step, not only in its micro-batch."""
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        return (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None

    def _prepare_input(self, data: Any) -> Any:
        return data if self._stepping else super()._prepare_input(data)  # in a step, the engine has moved it

    def _update(self) -> bool:
        """Updates the weights if that is still due. Returns False if the step was skipped, as in float16."""
        assert self.engine is not None
        if self._update_is_due:
            self.engine.update()
            self._update_is_due = False
        if self._is_heard(_AFTER_UPDATE, but_by="transformers"):
            self.engine.wait()  # they may read parameters
        return math.isfinite(self._get_grad_norm(self.model))

    def _is_heard(self, events: tuple[str, ...], *, but_by: str | None = None) -> bool:
        """Whether a callback implements one of these events; callbacks of the package `but_by` do not count."""
        return any(
            getattr(type(callback), event) is not getattr(TrainerCallback, event)
            for callback in self.callback_handler.callbacks
            if type(callback).__module__.partition(".")[0] != but_by
            for event in events
        )

    def _clip_grad_norm(self, model: nn.Module) -> float:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        """The gradient norm before clipping, which the trainer logs."""
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
        """Context in which the model runs on the device, with a temporary engine outside of training."""
        if self.engine is not None:
            yield
            return
        with Engine(self.model, **arguments.evaluation_options(self._options)):
            yield

    # Checkpoints are the engine's, with the trainer's own state beside. Those of a plain Trainer can be loaded as well.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as Trainer does. `resume_from_checkpoint=True` loads the newest complete checkpoint."""
        if resume_from_checkpoint is True:
            found = sort_checkpoints(str(self.args.output_dir))  # the newest last
            whole = [path for path in found if (Path(path) / TRAINER_STATE_NAME).is_file()]
            if not whole:
                raise ValueError(f"resume_from_checkpoint=True: no complete checkpoint in {self.args.output_dir}")
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
            self._save(output_dir)  # on all ranks, each of which writes a part
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
        self.engine.agree(checkpoint=output_dir)  # also makes all ranks wait until it has been moved
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
        pass  # part of the engine's checkpoint, as are random states

    def _save_rng_state(self, output_dir: str) -> None:
        pass

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not is_checkpoint(Path(resume_from_checkpoint)):  # the engine loads its own checkpoints later
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
        """Restores random states last, since skipping batches draws from the generators."""
        assert self.engine is not None
        if self._random is None:
            super()._load_rng_state(checkpoint)
        else:
            set_random_states(self._random, self.engine.device)

    def _load_best_model(self) -> None:
        """Loads into the plain model, since training is over."""
        self._engine_stack.close()
        best = self.state.best_model_checkpoint
        assert best is not None
        if not is_checkpoint(Path(best)):
            super()._load_best_model()
            return
        cpu = torch.device("cpu")
        random = random_states(cpu)
        with Engine(self.model, device=cpu) as engine:
            engine.load(best)  # without an optimizer: only the weights, in float32
        set_random_states(random, cpu)


class _EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer that the trainer and its callbacks use; the engine makes its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, update: Callable[[], bool]) -> None:
        super().__init__(optimizer, device_placement=False)
        self._update = update

    def step(self, closure: None = None) -> None:
        self._is_overflow = not self._update()


def _move_aside(checkpoint: Path) -> None:
    """Renames a plain Trainer's checkpoint, instead of replacing it, so that no trainer mistakes it for its own."""
    suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    names = (checkpoint.with_name(f"plain-{checkpoint.name}{suffix}") for suffix in suffixes)
    aside = next(path for path in names if not path.exists())
    checkpoint.rename(aside)
    warnings.warn(f"{checkpoint} was saved by a plain Trainer; it has been renamed to {aside}", stacklevel=2)
