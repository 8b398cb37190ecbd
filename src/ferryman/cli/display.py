"""The progress display of a training run: a live panel on a terminal, plain lines elsewhere, or JSON for programs.

All of them show the same events, which are dicts: `start`, `note`, `step`, `eval`, `save`, `sample` and `end`. The
event `error` exists only in JSON; other displays leave errors to stderr.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ferryman.cli.run_directory import to_line
from ferryman.runtime.sizes import show_bytes, show_count

Event = Mapping[str, Any]

_SMOOTHING = 0.9  # weight of the previous value in the moving average of the loss
_BAR_WIDTH = 32


class Display(Protocol):
    def show(self, event: Event) -> None: ...


@contextlib.contextmanager
def open_display(*, json: bool = False, quiet: bool = False, console: Console | None = None) -> Iterator[Display]:
    console = console or Console(highlight=False)
    if json:
        yield JsonLines()
    elif quiet:
        yield NoDisplay()
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            yield LivePanel(live)
    else:
        yield LineDisplay(console)


@contextlib.contextmanager
def writing_output() -> Iterator[None]:
    """Context in which text is printed. Its errors name the standard output, which may go to a file on a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, "standard output") from error


class NoDisplay:
    def show(self, event: Event) -> None:
        pass


class JsonLines:
    def show(self, event: Event) -> None:
        sys.stdout.write(to_line(event) + "\n")
        sys.stdout.flush()


def show_error(message: str) -> None:
    """Prints an error event as JSON, unless the reader has closed the output."""
    with contextlib.suppress(OSError):
        JsonLines().show({"event": "error", "message": message})


class LineDisplay:
    """Prints one line per event; of the steps, the first, the last and one every few seconds."""

    def __init__(self, console: Console, every: float = 5.0) -> None:
        self._console = console
        self._every = every
        self._next = 0.0

    def show(self, event: Event) -> None:
        if event["event"] == "step":
            now = time.monotonic()
            if now < self._next and event["step"] != event["steps"]:
                return
            self._next = now + self._every
        for line in event_lines(event):
            self._console.print(line, soft_wrap=True)


class LivePanel:
    """Shows steps in a panel that is redrawn; all other events scroll above it."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._start: Event = {}
        self._loss: float | None = None
        self._validation: float | None = None

    def show(self, event: Event) -> None:
        kind = event["event"]
        if kind == "step":
            loss = event["loss"]
            if math.isfinite(loss):  # inf or NaN would stay in the moving average forever
                self._loss = loss if self._loss is None else _SMOOTHING * self._loss + (1 - _SMOOTHING) * loss
            self._live.update(self._panel(event))
            return
        if kind == "start":
            self._start = event
        if kind == "eval":
            self._validation = event["loss"]
        if kind == "end":
            self._live.stop()  # the last lines are printed below the panel
        for line in event_lines(event):
            self._live.console.print(line, soft_wrap=True)

    def _panel(self, event: Event) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", min_width=9)
        rows.add_column(min_width=_BAR_WIDTH)
        rows.add_column()
        done, steps = event["step"], event["steps"]
        left = event["seconds_left"]
        rows.add_row("step", _bar(done, steps), f"{done}/{steps}, {_clock(left)} left")
        seen = f"{event['loss'] if self._loss is None else self._loss:.3f}" + (
            "" if self._validation is None else f"   validation {self._validation:.3f}"
        )
        rows.add_row("loss", Text(seen, style="bold"), _learning_rate(event))
        speed = f"{event['tokens_per_second']:,.0f} tokens/s"
        rows.add_row(
            "speed", speed, f"step time {event['seconds']:.2f} s, {show_count(event['micro_batches'], 'micro-batch')}"
        )
        if event["device_peak"] is not None:
            budget = self._start.get("budget")
            of = f" of {show_bytes(budget)}" if budget else ""
            bar = _bar(event["device_peak"], budget) if budget else Text("")
            rows.add_row("device", bar, f"peak memory {show_bytes(event['device_peak'])}{of}")
        for name, share in sorted(event["lanes"].items(), key=_rank):
            rows.add_row(name, _bar(share, 1.0), f"busy {share:.0%} of the step")
        if event["device_share"] is not None:
            share = event["device_share"]
            rows.add_row("updates", _bar(share, 1.0), f"{share:.0%} on the device, {1 - share:.0%} on the host")
        return Group(Text(""), rows)


def event_lines(event: Event) -> Iterator[Text]:
    """The lines of text that show an event."""
    match event["event"]:
        case "start":
            each = f"{event['ranks']} ranks, each on {event['device'].partition(':')[0]}"
            where = (each if event["ranks"] > 1 else event["device"]) + (
                f", memory budget {show_bytes(event['budget'])}" if event["budget"] else ""
            )
            yield Text(f"{event['model']}: {event['parameters'] / 1e6:.1f} M parameters, on {where}", style="bold")
            resumed = f", resuming after step {event['step']}" if event["step"] else ""
            yield Text(
                f"{event['tokens']:,} tokens of data; {event['steps']} steps of {event['batch']} x {event['sequence']} "
                f"tokens{resumed}; output in {event['output']}"
            )
        case "note":
            yield Text(event["text"], style="yellow")
        case "step":
            peak = "" if event["device_peak"] is None else f"   device peak {show_bytes(event['device_peak'])}"
            yield Text(
                f"{_step(event):<15}loss {event['loss']:.3f}   "
                f"{event['tokens_per_second']:,.0f} tokens/s{peak}   {_clock(event['seconds_left'])} left"
            )
        case "eval":
            bits = "" if event["bits_per_byte"] is None else f" ({event['bits_per_byte']:.2f} bits per byte)"
            yield Text(f"{_step(event):<15}validation loss {event['loss']:.3f}{bits}", style="cyan")
        case "save":
            yield Text(f"{_step(event):<15}saved {event['path']} in {event['seconds']:.1f} s", style="green")
        case "sample":
            yield Text("sample prompt, from the data:", style="cyan")
            yield Text(event["prompt"])
            yield Text("sample continuation:", style="cyan")
            yield Text(event["text"])
        case "end":
            yield Text(_ending(event), style="bold")
            if event["report"]:
                yield Text(f"report: {event['report']}")
            if event["step"] < event["steps"]:
                yield Text(f"resume with: {event['resume']}")


def _step(event: Event) -> str:
    steps = event.get("steps")
    return f"step {event['step']}" + (f"/{steps}" if steps else "")


def _ending(event: Event) -> str:
    why = "done" if event["reason"] == "done" else f"stopped by {event['reason']}"
    return (
        f"{why} after step {event['step']}/{event['steps']}: {event['tokens']:,} tokens in {_clock(event['seconds'])}"
    )


def _rank(lane: tuple[str, float]) -> tuple[int, str]:
    """Sort key: the four main lanes first, in the order in which a layer passes through them."""
    order = ("h2d", "compute", "d2h", "host")
    return (order.index(lane[0]) if lane[0] in order else len(order), lane[0])


def _learning_rate(event: Event) -> str:
    norm = "" if event["grad_norm"] is None else f", gradient norm {event['grad_norm']:.2f}"
    return f"learning rate {event['lr']:.1e}{norm}"


def _bar(value: float, total: float) -> ProgressBar:
    return ProgressBar(total=total, completed=min(value, total), width=_BAR_WIDTH)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
