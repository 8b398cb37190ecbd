"""The `ferryman` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import ferryman
from ferryman.cli import doctor_command, plan_command, report_command, train_command, verify_command
from ferryman.cli.errors import USER_ERRORS, exit_code, message_for
from ferryman.distributed.ranks import RankError

app = typer.Typer(
    name="ferryman",
    help="Train neural networks that do not fit on the device.",
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
    """Options that come before any command."""


app.command("train", help=train_command.HELP, cls=train_command.Command)(train_command.train)
app.command(epilog=plan_command.EPILOG)(plan_command.plan)
app.command()(report_command.report)
app.command(epilog=doctor_command.EPILOG)(doctor_command.doctor)
app.command()(verify_command.verify)


def main() -> None:
    """Runs a command. Errors that the user can fix end with one message and exit code 2, not with a traceback."""
    try:
        app()
    except (*USER_ERRORS, RankError) as error:
        typer.secho(f"ferryman: {message_for(error)}", fg=typer.colors.RED, err=True)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
