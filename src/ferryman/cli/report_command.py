"""The command `ferryman report`: writes a trace as one HTML file."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from ferryman.cli.display import writing_output
from ferryman.observe.report.figures import Figures, figures_of, summary, together
from ferryman.observe.report.page import write_report
from ferryman.observe.report.recording import read
from ferryman.runtime.sizes import show_bytes


def report(
    trace: Annotated[
        list[Path],
        typer.Argument(
            help="A trace file written by `Trace.save`. With several ranks, give the file of rank 0 (the others are "
            "found beside it) or all of them."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write. Default: the name of the trace, ending in .html."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON. A file is written only if -o is given.")
    ] = False,
) -> None:
    """Turn a trace into a report: one self-contained HTML file that can be opened without a network.

    It shows the lanes over time, device memory against the budget, the resource that bounds a step, where weights were
    updated, and the loss.

    \b
    [bold]Examples[/bold]
      ferryman report trace.json                    writes trace.html
      ferryman report trace.json --open             also opens it in a browser
      ferryman report trace.json -o out.html --force
      ferryman report trace.json --json | jq '.ranks[0].bound'
      ferryman report node0/trace.json node1/trace.rank1.json

    \b
    `ferryman train` writes a trace. In a loop of your own, the engine records one:
      trace = ferryman.observe.trace.Trace(keep_steps=20)
      engine = ferryman.Engine(model, optimizer, trace=trace)
      ...
      trace.save("trace.json")
    """
    target = output or trace[0].with_suffix(".html")
    if as_json and output is None:
        if open_it:
            raise ValueError("--open needs a file, and --json alone writes none: give -o FILE, or leave --json out")
        figures = [figures_of(recording) for recording in read(*trace)]
    else:
        figures = write_report(trace, target, overwrite=force)
    with writing_output():
        if as_json:
            typer.echo(json.dumps(summary(figures), allow_nan=False))
        else:
            for of in figures:
                typer.echo(_line(of, len(figures) > 1))
                if (warning := _warning(of)) is not None:
                    typer.echo(warning)
            if len(figures) > 1:
                typer.echo(_together(figures))
            typer.echo(f"report: {target}")
    if open_it and not webbrowser.open(target.resolve().as_uri()):
        raise ValueError(f"--open: no browser was found; open {target.resolve()} yourself")


def _together(figures: list[Figures]) -> str:
    found = together(figures)
    slowest = found["slowest_rank"]
    said = ["no rank is clearly the slowest" if slowest is None else f"the other ranks wait for rank {slowest}"]
    if found["tokens_per_second"] is not None:
        said.append(f"{found['tokens_per_second']:.4g} tokens/s")
    ranks = figures[0].recording.facts.get("ranks", len(figures))
    if ranks > len(figures):
        said.append(f"the traces of {ranks - len(figures)} of {ranks} ranks are missing here")
    return "all ranks: " + "; ".join(said)


def _warning(of: Figures) -> str | None:
    budget = of.recording.facts.get("budget")
    if of.peak is None or not budget or of.peak <= budget:
        return None
    return (
        f"warning: the device peak is {show_bytes(of.peak - budget)} above the budget of {show_bytes(budget)}; it "
        "includes tensors that your own code keeps on the device"
    )


def _line(of: Figures, several: bool) -> str:
    """The most important figures of a rank, in one line."""
    steps, whole = of.recording.steps, of.typical.whole
    parts = [f"{len(steps)} steps" if len(steps) != 1 else "1 step"]
    if thinned := of.recording.facts.get("thinned"):
        every = thinned["every"]
        parts = [f"{thinned['steps']} steps ({len(steps)} of them recorded, every {every}th of the older ones)"]
    if of.seconds is not None:
        parts.append(f"step time {of.seconds * 1e3:.4g} ms")
    if of.tokens_rate is not None:
        parts.append(f"{of.tokens_rate:.4g} tokens/s")
    if of.peak is not None:
        parts.append(f"device peak {show_bytes(of.peak)}")
    if whole.busiest is not None:
        parts.append(f"{'bounded by' if whole.bound else 'busiest:'} {whole.busiest}, {whole.share:.0%} of the step")
    return f"{f'rank {of.recording.rank}: ' if several else ''}{', '.join(parts)}"
