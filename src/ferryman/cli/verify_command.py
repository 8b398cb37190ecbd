"""The command `ferryman verify`: checks that Ferryman works correctly on this machine's device."""

from __future__ import annotations

import json
import platform
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import ferryman
from ferryman.cli.machine import find_device
from ferryman.model.unit_discovery import hint
from ferryman.verify.context import CheckContext
from ferryman.verify.result import Measurements, Outcome, Result
from ferryman.verify.suite import GROUPS
from ferryman.verify.suite import verify as run
from ferryman.verify.user_model import UserModel

_COLORS = {Outcome.OK: "green", Outcome.FAILED: "bold red", Outcome.INCONCLUSIVE: "yellow", Outcome.SKIPPED: "dim"}


def verify(
    device: Annotated[
        str | None,
        typer.Option(help="The device, such as cuda, cuda:1, cpu or virtual. Default: the accelerator, else the CPU."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Check fewer modes, in fewer rounds.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run one group of checks: parity, races, overlap, memory or process. May be repeated."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Check your own model: a function without arguments that returns (model, batch) or (model, batch, "
            "loss), in a module that can be imported from the current directory. Other groups run only if --only "
            "names them.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail on inconclusive rows, too: those that have shown nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Check Ferryman on this machine's device: parity with plain PyTorch, races, overlap, memory; or your own model.

    The exit code is 0 if no check fails and 1 if one does; with --strict, also 1 if one is inconclusive. docs/verify.md
    explains each row.

    \b
    [bold]Examples[/bold]
      ferryman verify                            on the default accelerator
      ferryman verify --device virtual --quick   on a virtual accelerator, without a GPU
      ferryman verify --only races --json        one group, as JSON
      ferryman verify --model my_module:make     your own model and loss
    """
    groups = only or ([] if model else list(GROUPS))
    for group in groups:
        if group not in GROUPS:
            raise ValueError(f"--only {group}: there is no such group of checks{hint(group, GROUPS)}")
    user = None if model is None else UserModel(model)
    context = CheckContext(find_device(device), quick=quick)
    about = _about(context)
    console = Console(stderr=as_json)
    console.print(", ".join(str(value) for value in about.values()), highlight=False)
    with console.status("") as status:
        results = list(run(context, groups, lambda c: status.update(f"{c.group}: {c.name}"), user))
    if as_json:
        typer.echo(json.dumps(_report(about, results, strict=strict), indent=2))
    else:
        console.print(_table(results))
        console.print(_summary(results), highlight=False)
    if not _passes(results, strict=strict):
        raise typer.Exit(1)


def _about(context: CheckContext) -> dict[str, str]:
    """The device and the versions that the results are for."""
    return {
        "device": context.accelerator.name,
        "ferryman": f"ferryman {ferryman.__version__}",
        "torch": f"torch {torch.__version__}",
        "python": f"Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
    }


def _of(results: list[Result], outcome: Outcome) -> list[Result]:
    return [result for result in results if result.verdict.outcome is outcome]


def _passes(results: list[Result], *, strict: bool) -> bool:
    return not _of(results, Outcome.FAILED) and not (strict and _of(results, Outcome.INCONCLUSIVE))


def _report(about: dict[str, str], results: list[Result], *, strict: bool) -> dict[str, Any]:
    rows = [
        {
            "group": check.group,
            "check": check.name,
            "compared": check.compared,
            "result": str(verdict.outcome),
            "reason": verdict.reason,
            "figures": verdict.figures,
            "seconds": round(seconds, 3),
        }
        for check, verdict, seconds in results
    ]
    counts = {str(outcome).lower(): len(_of(results, outcome)) for outcome in Outcome}
    return {**about, "ok": _passes(results, strict=strict), "counts": counts, "checks": rows}


def _table(results: list[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", ratio=3)
    table.add_column("compared", ratio=4, style="dim")
    table.add_column("result", no_wrap=True)
    table.add_column("figures", ratio=5)
    groups: set[str] = set()
    compared: set[str] = set()
    for check, verdict, _ in results:
        if check.group not in groups:
            table.add_section()
        groups.add(check.group)
        said = check.compared if check.compared not in compared else '"'
        compared.add(check.compared)
        outcome = f"[{_COLORS[verdict.outcome]}]{verdict.outcome}[/]"
        table.add_row(f"{check.group}: {check.name}", said, outcome, _shown(verdict.figures, verdict.reason))
    return table


def _shown(figures: Measurements, reason: str) -> str:
    values = {
        name: f"{value:.1e}" if isinstance(value, float) and value < 1e-2 else value for name, value in figures.items()
    }
    shown = ", ".join(f"{name} {value}" for name, value in values.items())
    return "\n".join(part for part in (reason.replace("[", "\\["), shown) if part)


def _summary(results: list[Result]) -> str:
    counts = [f"{len(found)} {outcome}" for outcome in Outcome if (found := _of(results, outcome))]
    seconds = sum(result.seconds for result in results)
    return f"{', '.join(counts)}, in {seconds:.0f} s"
