"""Translates transformers' TrainingArguments into options of an engine, and refuses those that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from ferryman.model.unit_discovery import hint
from ferryman.options import SETTINGS

# Options that the trainer sets itself, and what a user writes instead of engine={name: ...}.
_TRAINERS = {
    "model": "pass it to the trainer",
    "optimizer": "pass it to the trainer, as optimizers=(optimizer, None)",
    "loss": "override compute_loss, or pass compute_loss_func=",
    "reduction": "the trainer divides losses by a count over the whole batch",
    "split": "a step has gradient_accumulation_steps micro-batches of per_device_train_batch_size samples",
    "precision": "set bf16=True or fp16=True in TrainingArguments",
    "max_grad_norm": "set it in TrainingArguments(max_grad_norm=...)",
}
_OPTIONS = tuple(name for name in SETTINGS if name not in _TRAINERS)

# The training arguments that cannot be used, and why.
_REFUSED = {
    "deepspeed": "it would move and shard the model itself",
    "fsdp": "it would shard the model itself",
    "parallelism_config": "the engine itself trains data parallel",
    "torch_compile": "the engine runs the model's blocks one at a time; engine={'compile': True} compiles these",
    "auto_find_batch_size": "the engine itself stays within a budget: pass engine={'memory': '8GiB'}",
    "enable_jit_checkpoint": "it marks a checkpoint's directory first, and the engine replaces directories as a whole",
    "bf16_full_eval": "it would move the whole model to the device; bf16=True evaluates in bfloat16 while it trains",
    "fp16_full_eval": "it would move the whole model to the device; fp16=True evaluates in float16 while it trains",
}

_OPTIMIZERS = (
    OptimizerNames.ADAMW_TORCH,
    OptimizerNames.ADAMW_TORCH_FUSED,
    OptimizerNames.SGD,
    OptimizerNames.ADAGRAD,
    OptimizerNames.RMSPROP,
    OptimizerNames.ADAFACTOR,
)


def check(args: TrainingArguments) -> None:
    for name, reason in _REFUSED.items():
        if getattr(args, name):
            raise ValueError(f"TrainingArguments({name}=...) cannot be used with FerrymanTrainer: {reason}")
    args._n_gpu = min(args.n_gpu, 1)  # otherwise the trainer would put a copy of the model on each GPU


def check_optimizer(args: TrainingArguments) -> None:
    if args.optim not in _OPTIMIZERS:
        known = ", ".join(repr(name.value) for name in _OPTIMIZERS)
        raise ValueError(
            f"TrainingArguments(optim={OptimizerNames(args.optim).value!r}) cannot be used with FerrymanTrainer, whose "
            f"engine updates parameters piece by piece; choose {known}, or pass another torch.optim.Optimizer as "
            "optimizers=(optimizer, None)"
        )


def engine_options(given: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any]:
    """The engine's keyword arguments: those given, and those that follow from the training arguments."""
    for name in given:
        if name in _TRAINERS:
            raise ValueError(f"engine={{{name!r}: ...}} cannot be set here: {_TRAINERS[name]}")
        if name not in _OPTIONS:
            raise ValueError(f"engine={{{name!r}: ...}}: the engine has no such option{hint(name, _OPTIONS)}")
    options: dict[str, Any] = {
        "reduction": "sum",
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
        "max_grad_norm": args.max_grad_norm or None,
    }
    if args.use_cpu:
        options["device"] = "cpu"
    return {**options, **given}


def evaluation_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that an engine without an optimizer accepts, without the trace, which is for training only."""
    return {name: value for name, value in options.items() if not SETTINGS[name].needs_optimizer and name != "trace"}
