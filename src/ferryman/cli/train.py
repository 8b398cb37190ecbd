"""`ferryman train`: trains a causal language model."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import signal
from typing import Any

import torch
import typer
from typer.core import TyperCommand

from ferryman.cli.display import open_display, show_error
from ferryman.cli.engine_flags import NONE, SETTINGS, flag, values_of
from ferryman.cli.job import agents
from ferryman.cli.loop import DivergedError, Training
from ferryman.cli.run import Run, new_run, restarted, resumed_run
from ferryman.cli.stop import Interrupt
from ferryman.cli.train_options import OPTIONAL, PARAMETERS, TrainOptions
from ferryman.cli.words import MISTAKES, exit_code, in_words
from ferryman.distributed.ranks import RankError, Ranks

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
    [bold]ferryman train --resume --output run --device cpu --memory none[/bold]

On two devices; after a failure, from the last checkpoint on:

    [bold]torchrun --nproc-per-node 2 --max-restarts 3 --no-python ferryman train gpt:large --data corpus/ -o run[/bold]

Every checkpoint in run/checkpoints loads with transformers' from_pretrained. See also [bold]ferryman plan[/bold].
"""


class Command(TyperCommand):
    """With --json, a command line that is refused is an event, too; of several ranks one refuses it aloud."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "format_message"):  # not --help, which is an exception as well
                ranks = Ranks()
                if "--json" in given and ranks.rank == 0:
                    show_error(error.format_message())
                if not ranks.fail(error):
                    raise typer.Exit(2) from error
            raise


def train(ctx: typer.Context, **values: Any) -> None:
    explicit = {name for name in values if _is_explicit(ctx, name)}
    ranks = Ranks()
    try:
        given = TrainOptions(**{**values, **values_of({name: values[name] for name in SETTINGS})})
        code = _begin(ranks, given, explicit)
    except Exception as error:
        if values["json"] and ranks.rank == 0:
            show_error(in_words(error))
        is_first = ranks.fail(error)
        if not is_first and isinstance(error, (*MISTAKES, RankError)):  # the first has said it
            raise typer.Exit(exit_code(error)) from error
        raise
    if code:
        raise typer.Exit(code)


def _begin(ranks: Ranks, given: TrainOptions, explicit: set[str]) -> int:
    """The first rank looks after the run's directory. What it finds, or refuses, is so on all."""
    ranks.agree({flag(name): str(getattr(given, name)) for name in PARAMETERS})
    started_by = agents(ranks)
    with contextlib.ExitStack() as held:
        opened: list[tuple[TrainOptions, Run]] = []

        def open_run() -> list[Any]:
            options, run, notes = _open(given, explicit, started_by)
            held.enter_context(run.locked())
            opened.append((options, run))
            return [options.to_json(), {"resume": options.resume, "from_step": options.from_step}, notes]

        recorded, manner, notes = ranks.first("opening the run", open_run)
        if not opened:
            assert given.output is not None
            options = TrainOptions.from_json(
                recorded, **manner, output=given.output, json=given.json, quiet=given.quiet
            )
            opened.append((options, Run(given.output, is_new=False)))
        options, run = opened[0]
        try:
            with Interrupt():
                return _train(ranks, options, run, notes)
        except ValueError as error:
            for name in OPTIONAL:
                told = flag(name) in in_words(error) and name not in explicit and getattr(options, name) is not None
                if options.resume and told:
                    error.add_note(f"{flag(name)} is what the run had before; {flag(name)} {NONE} takes it back")
            raise


def _open(given: TrainOptions, explicit: set[str], started_by: list[str]) -> tuple[TrainOptions, Run, list[str]]:
    now, explicit = restarted(given, explicit, started_by)
    if not now.resume:
        return *new_run(now, started_by), []
    options, run, notes = resumed_run(now, explicit, started_by)
    if now != given:
        notes.append(f"started again: goes on from what was saved last in {run.directory}")
    return options, run, notes


def _train(ranks: Ranks, options: TrainOptions, run: Run, notes: list[str]) -> int:
    """The exit code. Errors name the last checkpoint, and a run that never began leaves nothing behind."""
    training: Training | None = None
    leads = ranks.rank == 0
    try:
        with open_display(json=options.json and leads, quiet=options.quiet or not leads) as display:
            for note in notes:
                display.show({"event": "note", "text": note})
            training = Training(options, run, display.show, ranks)
            # What it would say is about its own defaults, in the midst of the display.
            importlib.import_module("transformers").logging.set_verbosity_error()
            training.train()
        return 0
    except BaseException as error:
        if training is None or not training.has_begun:
            run.discard()
            if isinstance(error, ValueError):
                raise  # a mistake in what was given
        if not isinstance(error, ValueError | torch.OutOfMemoryError | OSError | KeyboardInterrupt | RankError):
            raise
        is_first = ranks.fail(error)
        saved = None if training is None else training.last_checkpoint
        kept = f"The last checkpoint is {saved}; go on from it: {options.command()}" if saved else "Nothing was saved."
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else in_words(error)
        told = what if isinstance(error, DivergedError) else f"{what}. {kept}"
        if options.json and leads:
            show_error(told)
        if is_first:
            typer.secho(f"ferryman: {told}", fg=typer.colors.RED, err=True)
        return 128 + signal.Signals[str(error) or "SIGINT"] if isinstance(error, KeyboardInterrupt) else 1


def _is_explicit(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


# Options are declared once, in `TrainOptions` and `EngineOptions`; typer reads them from the signature.
_CONTEXT = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
train.__signature__ = inspect.Signature([_CONTEXT, *PARAMETERS.values()])  # type: ignore[attr-defined]
