"""The command `ferryman train`: trains a causal language model."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import signal
from typing import Any

import torch
import typer
from typer.core import TyperCommand

from ferryman.cli.display import open_display, show_error, writing_output
from ferryman.cli.engine_flags import NONE, SETTINGS, flag, values_of
from ferryman.cli.errors import USER_ERRORS, exit_code, message_for
from ferryman.cli.run_directory import RunDirectory, new_run, restarted, resumed_run, torchrun_agents
from ferryman.cli.signals import InterruptOnSignal
from ferryman.cli.train_options import OPTIONAL, PARAMETERS, TrainOptions
from ferryman.cli.training_run import DivergedError, TrainingRun
from ferryman.distributed.ranks import RankError, Ranks

HELP = """
Train a causal language model that may be larger than the device's memory.

Train the built-in byte-level GPT on a folder of text, within 2 GiB of device memory:

    [bold]ferryman train gpt:medium --data corpus/ --memory 2GiB --output run[/bold]

Fine-tune all weights of a pretrained model, in bf16 with float32 master weights:

    [bold]ferryman train models/llama --data notes.txt --precision bf16 --lr 2e-5 --max-grad-norm 1 -o tuned[/bold]

Train a new model of any architecture on a file of token ids:

    [bold]ferryman train config.json --data tokens.bin --token-dtype uint32 --tokens 1000000000 -o run[/bold]

Ctrl-C, SIGTERM and SIGHUP finish the current step, save a checkpoint and print how to resume; a second Ctrl-C stops at
once. Resume a run, with the same settings or with others:

    [bold]ferryman train --resume --output run[/bold]
    [bold]ferryman train --resume --output run --memory 1GiB --steps 2000[/bold]
    [bold]ferryman train --resume --output run --device cpu --memory none[/bold]

Train on two devices, and restart from the last checkpoint after a failure:

    [bold]torchrun --nproc-per-node 2 --max-restarts 3 --no-python ferryman train gpt:large --data corpus/ -o run[/bold]

transformers' from_pretrained loads every checkpoint in run/checkpoints. [bold]ferryman plan[/bold] tells beforehand
whether a model fits.
"""


class Command(TyperCommand):
    """Reports an invalid command line as a JSON event with --json, and on one rank only."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "format_message"):  # a usage error; --help raises an exception, too
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
            show_error(message_for(error))
        is_first = ranks.fail(error)
        if not is_first and isinstance(error, (*USER_ERRORS, RankError)):  # another rank has printed it
            raise typer.Exit(exit_code(error)) from error
        raise
    if code:
        raise typer.Exit(code)


def _begin(ranks: Ranks, given: TrainOptions, explicit: set[str]) -> int:
    """Opens the run on the first rank, whose options and errors apply to all ranks, and trains."""
    ranks.agree({flag(name): str(getattr(given, name)) for name in PARAMETERS})
    started_by = torchrun_agents(ranks)
    with contextlib.ExitStack() as held:
        opened: list[tuple[TrainOptions, RunDirectory]] = []

        def open_run() -> list[Any]:
            options, run, notes = _open(given, explicit, started_by)
            held.enter_context(run.locked())
            opened.append((options, run))
            return [options.to_json(), {"resume": options.resume, "from_step": options.from_step}, notes]

        recorded, manner, notes = ranks.run_on_first("opening the run", open_run)
        if not opened:
            assert given.output is not None
            options = TrainOptions.from_json(
                recorded, **manner, output=given.output, json=given.json, quiet=given.quiet
            )
            opened.append((options, RunDirectory(given.output, is_new=False)))
        options, run = opened[0]
        try:
            with InterruptOnSignal():
                return _train(ranks, options, run, notes)
        except ValueError as error:
            for name in OPTIONAL:
                told = flag(name) in message_for(error) and name not in explicit and getattr(options, name) is not None
                if options.resume and told:
                    error.add_note(f"{flag(name)} comes from the resumed run; {flag(name)} {NONE} removes it")
            raise


def _open(
    given: TrainOptions, explicit: set[str], started_by: list[str]
) -> tuple[TrainOptions, RunDirectory, list[str]]:
    now, explicit = restarted(given, explicit, started_by)
    if not now.resume:
        return *new_run(now, started_by), []
    options, run, notes = resumed_run(now, explicit, started_by)
    if now != given:
        notes.append(f"restarted: resuming from the last checkpoint in {run.directory}")
    return options, run, notes


def _train(ranks: Ranks, options: TrainOptions, run: RunDirectory, notes: list[str]) -> int:
    """Returns the exit code. Errors name the last checkpoint; a run that fails before its first step is removed."""
    training: TrainingRun | None = None
    leads = ranks.rank == 0
    try:
        with open_display(json=options.json and leads, quiet=options.quiet or not leads) as display:
            with writing_output():
                for note in notes:
                    display.show({"event": "note", "text": note})
            training = TrainingRun(options, run, display.show, ranks)
            # Its messages are about its own defaults, and would disturb the display.
            importlib.import_module("transformers").logging.set_verbosity_error()
            training.train()
        return 0
    except BaseException as error:
        if training is None or not training.has_begun:
            run.discard()
            if isinstance(error, ValueError):
                raise  # invalid input
        if not isinstance(error, ValueError | torch.OutOfMemoryError | OSError | KeyboardInterrupt | RankError):
            raise
        is_first = ranks.fail(error)
        saved = run.newest_checkpoint()
        kept = f"The last checkpoint is {saved}; resume with: {options.command()}" if saved else "Nothing was saved."
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else message_for(error)
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
