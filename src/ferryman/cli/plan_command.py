"""The command `ferryman plan`: whether a model fits, how it uses memory, and how long a step takes."""

from __future__ import annotations

import inspect
import json
import logging
import math
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from ferryman.cli import engine_flags
from ferryman.cli.advice import advice, assumptions
from ferryman.cli.defaults import DEFAULT_TEXTS, MAX_SEQUENCE, chunked_loss, window
from ferryman.cli.engine_flags import values_of
from ferryman.cli.machine import MachineDescription, describe_machine
from ferryman.cli.model_argument import ModelSpec, model_help, parse_model
from ferryman.cli.optimizer import OPTIMIZERS
from ferryman.cli.train_options import TrainOptions
from ferryman.forecast.estimate import Estimate, Training, estimate_step
from ferryman.model.unit_discovery import hint
from ferryman.plan.fit import Choice
from ferryman.plan.network import Cluster
from ferryman.plan.plan import Plan
from ferryman.plan.step_forecast import Forecast, LaneTimes
from ferryman.runtime.sizes import show_bytes, show_count, show_rate
from ferryman.training import checks

EPILOG = """
[bold]Examples[/bold]

# the built-in GPT on this machine, whose rates are measured
ferryman plan gpt:base

# your own model on a machine that you do not have
ferryman plan path/to/config.json --device-memory 16GiB --host-memory 512GiB --link 12GB/s --device-flops 150TFLOPS

# more samples per step, and gradient clipping
ferryman plan gpt:xl --device-memory 2GiB --link 12GB/s --batch 64 --max-grad-norm 1.0

# eight devices on each of four hosts, with 64 samples per step
ferryman plan path/to/config.json --device-memory 80GiB --host-memory 1TiB --link 24GB/s --device-flops 400TFLOPS
    --devices 8 --nodes 4 --network 25GB/s --batch 64

# in a script: the exit code is 0 if it fits, 1 if it does not, 2 for invalid input
ferryman plan gpt:xl --device-memory 2GiB --link 12GB/s --json | jq .step.seconds
"""

_BAR_WIDTH = 24

# The engine's settings that are options of this command too; those of the machine have options of their own.
_SETTINGS = [name for name in engine_flags.SETTINGS if name not in ("device", "memory", "host_threads")]


def plan(
    model: Annotated[
        str,
        typer.Argument(help=model_help()),
    ],
    device: Annotated[
        str | None, typer.Option(help="The device of this machine to plan for, such as cuda or virtual.")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(help="Device memory that may be used, such as 16GiB.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory, such as 512GiB; with several nodes, of each node.")
    ] = None,
    link: Annotated[str | None, typer.Option(help="Rate of the link in each direction, such as 12GB/s.")] = None,
    link_in: Annotated[str | None, typer.Option(help="Rate of the link from host to device.")] = None,
    link_out: Annotated[str | None, typer.Option(help="Rate of the link from device to host.")] = None,
    device_flops: Annotated[
        str | None,
        typer.Option(help="Rate that the device reaches in matrix products of this precision, such as 150TFLOPS."),
    ] = None,
    host_updates: Annotated[
        str | None,
        typer.Option(
            help="Rate at which the host updates parameters with AdamW, such as 900Mparam/s. Default: measured here."
        ),
    ] = None,
    devices: Annotated[
        int, typer.Option(help="Devices per node, each with one rank of torchrun. --batch is distributed over all.")
    ] = 1,
    nodes: Annotated[int, typer.Option(help="Nodes, each with --devices devices.")] = 1,
    loopback: Annotated[
        str | None,
        typer.Option(
            help="Total rate at which the ranks of a node exchange gradients, such as 2GB/s. Default: measured here."
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help="Rate between nodes in each direction, such as 10GB/s or 100Gbit/s."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples per step, over all devices.")] = TrainOptions.batch,
    sequence: Annotated[
        int | None,
        typer.Option(help=f"Tokens per sample. Default: the model's context, at most {MAX_SEQUENCE}."),
    ] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches per step. Default: as few as fit.")] = None,
    optimizer: Annotated[str, typer.Option(help=f"Optimizer: {', '.join(OPTIMIZERS)}.")] = TrainOptions.optimizer,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    **typed: Any,
) -> None:
    """Tell whether a training run will fit, how it uses memory, and what bounds the time of a step.

    Plans for this machine, which is measured, or for one that you describe. The model is not allocated, so models of
    half a trillion parameters can be planned on a laptop.
    """
    description = parse_model(model)
    settings = values_of(typed)
    training = Training(batch, window(sequence, description), micro_batches, **settings)
    _check(training, optimizer)
    given = describe_machine(
        device, device_memory, host_memory, link, link_in, link_out, device_flops, host_updates, devices, nodes,
        loopback, network, training,
    )  # fmt: skip
    checks.settings(training, given.device)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its hints are about running the model
    built = description.on_meta()
    training = replace(training, chunked_loss=chunked_loss(training.chunked_loss, built))
    estimate = estimate_step(
        built, OPTIMIZERS[optimizer](built.parameters(), lr=1e-4), training, given.machine, given.device
    )
    if as_json:
        typer.echo(json.dumps(_document(description, built, training, given, estimate), indent=2))
    else:
        _show(Console(), description, built, training, given, estimate)
        asked = TrainOptions(
            model, device=None if given.device.type == "meta" else device, memory=device_memory, batch=batch,
            sequence=sequence, micro_batches=micro_batches, optimizer=optimizer, **settings,  # type: ignore[arg-type]
        )  # fmt: skip
        if estimate.fits:
            typer.echo(f"train with: {_launcher(given.machine.cluster)}{asked.new_command()}")
    if not estimate.fits:
        raise typer.Exit(1)


_OWN = [
    one
    for one in inspect.signature(plan, eval_str=True).parameters.values()
    if one.kind is not inspect.Parameter.VAR_KEYWORD
]
plan.__signature__ = engine_flags.signature(  # type: ignore[attr-defined]
    _OWN, (engine_flags.parameter(name, DEFAULT_TEXTS.get(name, "")) for name in _SETTINGS), before="as_json"
)


def _launcher(cluster: Cluster) -> str:
    if cluster.size == 1:
        return ""
    where = (
        "--standalone"
        if cluster.nodes == 1
        else f"--nnodes {cluster.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
    )
    return f"torchrun {where} --nproc-per-node {cluster.devices} --no-python "


def _check(training: Training, optimizer: str) -> None:
    if training.samples < 1:
        raise ValueError(f"--batch {training.samples}: must be at least 1")
    if training.micro_batches is not None and training.micro_batches < 1:
        raise ValueError(f"--micro-batches {training.micro_batches}: must be at least 1")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer {optimizer!r} is not supported{hint(optimizer, OPTIMIZERS)}")


# Output.


def _document(
    description: ModelSpec, model: nn.Module, training: Training, given: MachineDescription, estimate: Estimate
) -> dict[str, Any]:
    machine, found = given.machine, estimate.forecast
    return {
        "fits": estimate.fits,
        "problems": estimate.problems,
        "notes": [*given.notes, *estimate.notes],
        "model": {"name": description.name, "kind": type(model).__name__, "parameters": _parameters(model)},
        "training": {name: getattr(training, name) for name in ("samples", "length", "micro_batches", *_SETTINGS)},
        "machine": {
            "device_memory": machine.device_memory,
            "host_memory": machine.host_memory,
            "link_in": _finite(machine.rates.link_in),
            "link_out": _finite(machine.rates.link_out),
            "operations": machine.operations,
            "host_updates": machine.rates.host,
            "devices": machine.cluster.devices,
            "nodes": machine.cluster.nodes,
            "loopback": _finite(machine.cluster.loopback),
            "network": _finite(machine.cluster.network),
            "known": given.known,
        },
        "plan": {
            "units": len(estimate.plan.units),
            "held": estimate.plan.held,
            "weight_slots": estimate.plan.weight_slots,
            "gradient_slots": estimate.plan.gradient_slots,
            "updates": str(estimate.plan.staging.policy),
            "deferred": estimate.plan.staging.deferred,
            "samples": estimate.samples,
            "micro_batches": estimate.choice.micro_batches,
            "stash": "host" if estimate.choice.stash_on_host else "device",
            "boundaries_that_stay": estimate.choice.staying,
            "recompute": training.recompute,
            "kept_calls": estimate.kept_calls,
            "recomputed_calls": estimate.recomputed_calls,
        },
        "device": estimate.device,
        "host": estimate.host,
        "step": None
        if found is None
        else {
            "seconds": found.seconds,
            "tokens_per_second": _tokens(training) / found.seconds if found.seconds else None,
            "hours_per_billion_tokens": found.seconds * 1e9 / _tokens(training) / 3600,
            "operations": estimate.forward_operations + estimate.backward_operations,
            "operations_saved": estimate.choice.keep.seconds or 0.0,
            "forward": {**found.forward.named, "bound": found.forward.bound},
            "backward": {**found.backward.named, "bound": found.backward.bound},
            "device_share_of_updates": found.share,
            "break_even_micro_batches": found.break_even,
            "operations_needed": _finite(found.needed_operations),
            "one_device": _against_one(estimate, training, machine.cluster),
        },
        "advice": advice(estimate, training, given),
        "assumptions": assumptions(given, training, estimate),
    }


def _against_one(estimate: Estimate, training: Training, cluster: Cluster) -> dict[str, Any] | None:
    one, found = estimate.one_device, estimate.forecast
    if one is None or one.forecast is None or found is None or not found.seconds:
        return None
    speedup = one.forecast.seconds / found.seconds
    return {
        "fits": one.fits,
        "seconds": one.forecast.seconds,
        "tokens_per_second": _tokens(training) / one.forecast.seconds,
        "speedup": speedup,
        "efficiency": speedup / cluster.size,
    }


def _show(
    console: Console,
    description: ModelSpec,
    model: nn.Module,
    training: Training,
    given: MachineDescription,
    estimate: Estimate,
) -> None:
    name, parameters = escape(description.name), _count(_parameters(model))
    if estimate.fits:
        console.print(f"[bold green]fits[/bold green]: {name}, {parameters} parameters")
    for problem in estimate.problems:
        console.print(f"[bold red]does not fit[/bold red]: {name}, {parameters} parameters: {escape(problem)}")
    for note in (*given.notes, *estimate.notes):
        console.print(f"[yellow]note[/yellow]: {escape(note)}")
    plan, choice = estimate.plan, estimate.choice
    machine = given.machine
    console.print(
        f"{show_count(len(plan.units), 'unit')}, {_way(plan, given)}; {show_count(training.samples, 'sample')} of "
        f"{show_count(training.length, 'token')}{_shared_out(training, machine.cluster, estimate)} in "
        f"{show_count(choice.micro_batches, 'micro-batch')}; stash on the {_place(choice)}; {_kept(estimate)}"
        f"updates: {plan.staging.policy}, "
        f"{'deferred' if plan.staging.deferred else 'eager'}"
    )
    several, nodes = machine.cluster.size > 1, machine.cluster.nodes > 1
    if estimate.device:
        console.print(_account(f"on {'each' if several else 'the'} device", estimate.device, machine.device_memory))
    console.print(_account("on each node" if nodes else "on the host", estimate.host, machine.host_memory))
    if estimate.forecast is not None:
        console.print(_times(estimate.forecast))
        _show_step(console, estimate.forecast, training, estimate)
        _show_speedup(console, training, machine.cluster, estimate)
    for said in advice(estimate, training, given):
        console.print(f"[bold]advice[/bold]: {said}")
    console.print(f"[dim]{_figures(given)}[/dim]")
    for assumption in assumptions(given, training, estimate):
        console.print(f"[dim]- {assumption}[/dim]")


def _place(choice: Choice) -> str:
    if not choice.stash_on_host:
        return "device"
    if choice.staying == choice.micro_batches:
        return "host, boundaries on the device"
    return f"host, boundaries of {choice.staying} on the device" if choice.staying else "host"


def _kept(estimate: Estimate) -> str:
    kept, calls = estimate.kept_calls, estimate.kept_calls + estimate.recomputed_calls
    return f"activations of {kept} of {show_count(calls, 'call')} kept; " if kept else ""


def _shared_out(training: Training, cluster: Cluster, estimate: Estimate) -> str:
    if cluster.size == 1:
        return ""
    devices = show_count(cluster.devices, "device")
    where = devices if cluster.nodes == 1 else f"{cluster.nodes} nodes with {devices} each"
    most = "" if estimate.samples * cluster.size == training.samples else "at most "
    return f" on {where}, {most}{estimate.samples} per device,"


def _way(plan: Plan, given: MachineDescription) -> str:
    if given.device.type == "cpu":
        return "used in place"
    return "held on the device" if plan.held else f"relayed through {show_count(plan.weight_slots, 'slot')}"


def _account(title: str, account: dict[str, int], memory: int | None) -> Table:
    table = Table("", "bytes", "", title=title, title_justify="left", box=None, pad_edge=False)
    total = sum(account.values())
    for part, nbytes in sorted(account.items(), key=lambda pair: -pair[1]):
        if nbytes:
            table.add_row(part, show_bytes(nbytes), _bar(nbytes / max(total, memory or 0)))
    of = "" if memory is None else f" of {show_bytes(memory)}"
    table.add_row("[bold]total[/bold]", f"[bold]{show_bytes(total)}[/bold]{of}")
    table.columns[1].justify = "right"
    return table


def _times(found: Forecast) -> Table:
    table = Table(
        "lane", "forward", "", "backward", "", title="time of a step", title_justify="left", box=None, pad_edge=False
    )
    longest = max((*found.forward.named.values(), *found.backward.named.values())) or 1.0
    for lane in found.forward.named:
        row = [lane]
        for phase in (found.forward, found.backward):
            seconds = phase.named[lane]
            row += [_seconds(seconds), _bar(seconds / longest, "red" if _bounds(phase, lane) else "blue")]
        table.add_row(*row)
    return table


def _show_step(console: Console, found: Forecast, training: Training, estimate: Estimate) -> None:
    tokens = _tokens(training)
    rate = f"{tokens / found.seconds:,.0f} tokens/s, {_span(found.seconds * 1e9 / tokens)} per billion tokens"
    console.print(
        f"[bold]step time at least {_seconds(found.seconds)}[/bold]{f' ({rate})' if found.seconds else ''}. The "
        f"forward is bound by [red]{found.forward.bound}[/red], the backward by [red]{found.backward.bound}[/red]. "
        f"{found.share:.0%} of the updates run on the device; "
        f"{estimate.forward_operations + estimate.backward_operations:.2e} floating-point operations per step"
    )


def _show_speedup(console: Console, training: Training, cluster: Cluster, estimate: Estimate) -> None:
    if (against := _against_one(estimate, training, cluster)) is not None:
        console.print(
            f"[bold]{against['speedup']:.2f} times as fast as one device[/bold], which would take "
            f"{_seconds(against['seconds'])} for the same batch ({against['tokens_per_second']:,.0f} tokens/s)"
            f"{'' if against['fits'] else ' if it had the memory'}; scaling efficiency {against['efficiency']:.0%}"
        )


def _figures(given: MachineDescription) -> str:
    machine, rates = given.machine, given.machine.rates
    shown = {
        "device memory": None if machine.device_memory is None else show_bytes(machine.device_memory),
        "host memory": None if machine.host_memory is None else show_bytes(machine.host_memory),
        "link in": None if math.isinf(rates.link_in) else show_rate(rates.link_in, "bytes"),
        "link out": None if math.isinf(rates.link_out) else show_rate(rates.link_out, "bytes"),
        "device FLOP/s": None if machine.operations is None else show_rate(machine.operations, "operations"),
        "host updates": show_rate(rates.host, "parameters"),
        "loopback": None if math.isinf(machine.cluster.loopback) else show_rate(machine.cluster.loopback, "bytes"),
        "network": None if math.isinf(machine.cluster.network) else show_rate(machine.cluster.network, "bytes"),
    }
    return "; ".join(f"{name} {value} ({given.known[name]})" for name, value in shown.items() if value is not None)


def _bounds(phase: LaneTimes, lane: str) -> bool:
    return phase.bound == lane and phase.named[lane] > 0


def _bar(share: float, color: str = "blue") -> str:
    return f"[{color}]{'█' * max(1 if share > 0 else 0, round(share * _BAR_WIDTH))}[/{color}]"


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def _tokens(training: Training) -> int:
    return training.samples * training.length


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _span(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} hours"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
