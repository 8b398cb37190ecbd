"""What transformers' training arguments mean to an engine, and which of them cannot be followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from ferryman.model.units import hint
from ferryman.options import SETTINGS

# What the trainer says itself, by what a user would write instead of engine={name: ...}.
_TRAINERS = {
    "model": "give it to the trainer",
    "optimizer": "give it to the trainer, as optimizers=(optimizer, None)",
    "loss": "override compute_loss, or give compute_loss_func=",
    "reduction": "the trainer's losses have been divided by all that counts",
    "split": "micro-batches are per_device_train_batch_size samples, and gradient_accumulation_steps of them a step",
    "precision": "say bf16=True or fp16=True in TrainingArguments",
    "max_grad_norm": "say it in TrainingArguments(max_grad_norm=...)",
}
_OPTIONS = tuple(name for name in SETTINGS if name not in _TRAINERS)

# The training arguments that cannot be followed, and why.
_REFUSED = {
    "deepspeed": "it would move and cut the model itself",
    "fsdp": "it would cut the model itself",
    "parallelism_config": "the engine trains data parallel, by itself",
    "torch_compile": "the engine runs the model's blocks one by one, and a compiled model cannot be taken apart",
    "auto_find_batch_size": "the engine keeps to a budget by itself: give engine={'memory': '8GiB'}",
    "enable_jit_checkpoint": "it marks a checkpoint's directory first, and the engine writes directories as a whole",
    "bf16_full_eval": "it would move the whole model to the device; bf16=True evaluates in bfloat16 while it trains",
    "fp16_full_eval": "it would move the whole model to the device; fp16=True evaluates in float16 while it trains",
}

_OPTIMIZERS = (
    OptimizerNames.ADAMW_TORCH,
    OptimizerNames.ADAMW_TORCH_FUSED,
    OptimizerNames.SGD,
    OptimizerNames.ADAGRAD,
    OptimizerNames.RMSPROP,
)


def check(args: TrainingArguments) -> None:
    for name, reason in _REFUSED.items():
        if getattr(args, name):
            raise ValueError(f"TrainingArguments({name}=...) cannot be used with FerrymanTrainer: {reason}")
    args._n_gpu = min(args.n_gpu, 1)  # or the trainer would put a copy of the model on each


def check_optimizer(args: TrainingArguments) -> None:
    if args.optim not in _OPTIMIZERS:
        known = ", ".join(repr(name.value) for name in _OPTIMIZERS)
        raise ValueError(
            f"TrainingArguments(optim={OptimizerNames(args.optim).value!r}) cannot be used with FerrymanTrainer, whose "
            f"engine updates parameters piece by piece on the host; there are {known}. Others of torch.optim are given "
            "as optimizers=(optimizer, None)"
        )


def engine_options(given: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any]:
    """The engine's keyword arguments: those given, and what the training arguments say."""
    for name in given:
        if name in _TRAINERS:
            raise ValueError(f"engine={{{name!r}: ...}} is not for the engine to say here: {_TRAINERS[name]}")
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
    """Those of the engine's options that an engine without an optimizer takes; a trace is of the training alone."""
    return {name: value for name, value in options.items() if not SETTINGS[name].needs_optimizer and name != "trace"}
