"""The `ferryman` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import ferryman
from ferryman.cli import doctor, plan, report, train, verify
from ferryman.cli.words import MISTAKES, exit_code, in_words
from ferryman.distributed.ranks import RankError

app = typer.Typer(
    name="ferryman",
    help="Trains neural networks that do not fit on the device.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ferryman {ferryman.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Before any command."""


app.command("train", help=train.HELP, cls=train.Command)(train.train)
app.command(epilog=plan.EPILOG)(plan.plan)
app.command()(report.report)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.command()(verify.verify)


def main() -> None:
    """Runs a command. What a user can get wrong ends with one message and the code 2, not with a traceback."""
    try:
        app()
    except (*MISTAKES, RankError) as error:
        typer.secho(f"ferryman: {in_words(error)}", fg=typer.colors.RED, err=True)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
