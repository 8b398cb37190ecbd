"""`ferryman train`: trains a causal language model."""

from __future__ import annotations

import importlib
import inspect
import signal
from typing import Any

import torch
import typer

from ferryman.cli.display import open_display
from ferryman.cli.loop import Training
from ferryman.cli.options import Options
from ferryman.cli.run import Run, new_run, resumed_run
from ferryman.cli.stop import Interrupt

HELP = """
Trains a causal language model that may be larger than the device.

The built-in byte-level GPT on a folder of text, inside 2 GiB of device memory:

    [bold]ferryman train gpt:medium --data corpus/ --memory 2GiB --output run[/bold]

All weights of a pretrained model, in bf16 with float32 masters:

    [bold]ferryman train models/llama --data notes.txt --precision bf16 --lr 2e-5 --max-grad-norm 1 -o tuned[/bold]

A new model of any architecture, on tokens made elsewhere:

    [bold]ferryman train config.json --data tokens.bin --token-dtype uint32 --tokens 1000000000 -o run[/bold]

Ctrl-C, SIGTERM and SIGHUP finish the step, save, and say how to go on; a second Ctrl-C stops at once:

    [bold]ferryman train --resume --output run[/bold]
    [bold]ferryman train --resume --output run --memory 1GiB --steps 2000[/bold]

Every checkpoint in run/checkpoints loads with transformers' from_pretrained. See also [bold]ferryman plan[/bold].
"""


def train(ctx: typer.Context, **values: Any) -> None:
    given = Options(**values)
    explicit = {name for name in values if _is_explicit(ctx, name)}
    if given.resume:
        options, run, notes = resumed_run(given, explicit)
    else:
        options, run = new_run(given)
        notes = []
    with run.locked(), Interrupt():
        code = _train(options, run, notes)
    if code:
        raise typer.Exit(code)


def _train(options: Options, run: Run, notes: list[str]) -> int:
    """The exit code. Errors name the last checkpoint, and a run that never began leaves nothing behind."""
    training: Training | None = None
    try:
        with open_display(json=options.json, quiet=options.quiet) as display:
            for note in notes:
                display.show({"event": "note", "text": note})
            training = Training(options, run, display.show)
            # What it would say is about its own defaults, in the midst of the display.
            importlib.import_module("transformers").logging.set_verbosity_error()
            training.train()
        return 0
    except BaseException as error:
        if training is None or not training.has_begun:
            run.discard()
            if isinstance(error, ValueError):
                raise  # a mistake in what was given
        if not isinstance(error, ValueError | torch.OutOfMemoryError | OSError | KeyboardInterrupt):
            raise
        saved = None if training is None else training.last_checkpoint
        kept = f"The last checkpoint is {saved}; go on from it: {options.command()}" if saved else "Nothing was saved."
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else _in_full(error)
        typer.secho(f"ferryman: {what}. {kept}", fg=typer.colors.RED, err=True)
        return 128 + signal.Signals[str(error) or "SIGINT"] if isinstance(error, KeyboardInterrupt) else 1


def _in_full(error: BaseException) -> str:
    return ". ".join(str(part).rstrip(".") for part in (error, *getattr(error, "__notes__", [])))


def _is_explicit(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


# The options are written down once, in `Options`; typer reads them from the signature.
_CONTEXT = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
train.__signature__ = inspect.Signature([_CONTEXT, *inspect.signature(Options).parameters.values()])  # type: ignore[attr-defined]
