"""`ferryman plan`: will it fit, where does each byte go, how long will a step take."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from ferryman.cli.advice import advice, assumptions
from ferryman.cli.defaults import LONGEST, window
from ferryman.cli.machine import Described, described
from ferryman.cli.model import Description, describe, sizes
from ferryman.cli.options import Deferred, Held, OnNonfinite, Options, Resident, Slots, SubgroupSize, Units, or_none
from ferryman.cli.rule import RULES
from ferryman.forecast.estimate import Estimate, Training, estimate
from ferryman.model.units import hint
from ferryman.plan.network import Crew
from ferryman.plan.plan import Plan
from ferryman.plan.step_forecast import Forecast, Lanes
from ferryman.runtime.sizes import show_bytes, show_rate
from ferryman.training import checks

EPILOG = """
[bold]Examples[/bold]

# the built-in GPT on this machine, measured
ferryman plan gpt:base

# a model of your own on a machine you do not have; nothing of it is allocated
ferryman plan path/to/config.json --device-memory 16GiB --host-memory 512GiB --link 12GB/s --device-flops 150TFLOPS

# what changes with more samples in a step, and with clipping
ferryman plan gpt:xl --device-memory 2GiB --link 12GB/s --batch 64 --max-grad-norm 1.0

# eight devices on each of four hosts, which share 64 samples out
ferryman plan path/to/config.json --device-memory 80GiB --host-memory 1TiB --link 24GB/s --device-flops 400TFLOPS
    --devices 8 --nodes 4 --network 25GB/s --batch 64

# for a script: exit code 0 if it fits, 1 if not, 2 for bad input
ferryman plan gpt:xl --device-memory 2GiB --link 12GB/s --json | jq .step.seconds
"""

_WIDTH = 24  # of a bar


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A directory or config.json of transformers, or gpt:SIZE, the built-in byte-level GPT. "
            f"SIZE is {sizes()}."
        ),
    ],
    device: Annotated[
        str | None, typer.Option(help="The device to plan for, if it is in this machine, such as cuda, virtual")
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Memory of the device, or what may be used of it, such as 16GiB")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of the host, such as 512GiB; of a node, if there are several.")
    ] = None,
    link: Annotated[str | None, typer.Option(help="Rate of the link, in each direction, such as 12GB/s")] = None,
    link_in: Annotated[str | None, typer.Option(help="The same, host to device only.")] = None,
    link_out: Annotated[str | None, typer.Option(help="The same, device to host only.")] = None,
    device_flops: Annotated[
        str | None,
        typer.Option(help="What the device reaches in matrix products, in the precision, such as 150TFLOPS"),
    ] = None,
    host_updates: Annotated[
        str | None,
        typer.Option(
            help="Parameters that the host updates with AdamW, such as 900Mparam/s; else this host's, measured."
        ),
    ] = None,
    devices: Annotated[
        int, typer.Option(help="Devices of a node, each with a rank of torchrun; they share --batch out.")
    ] = 1,
    nodes: Annotated[int, typer.Option(help="Hosts, with so many devices each.")] = 1,
    loopback: Annotated[
        str | None,
        typer.Option(
            help="Rate at which ranks of a node exchange gradients, all together, such as 2GB/s; else this host's, "
            "measured."
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help="Rate between --nodes, in each direction, such as 10GB/s or 100Gbit/s."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of compute and of the link: fp32, bf16 or fp16; else what the model has.")
    ] = Options.precision,
    batch: Annotated[int, typer.Option(help="Samples in a step, of all devices together.")] = Options.batch,
    sequence: Annotated[
        int | None, typer.Option(help=f"Tokens in a sample; else what the model takes, at most {LONGEST}.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Parts that a step's batch is cut into; else as few as fit.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(RULES)}.")] = Options.optimizer,
    max_grad_norm: Annotated[
        float | None,
        typer.Option(help="Clip gradients by their global norm; updates are deferred then.", **or_none(float)),
    ] = None,
    updates: Annotated[
        str, typer.Option(help="Who updates the weights: auto, host, stride:K or static:R.")
    ] = Options.updates,
    stash: Annotated[str, typer.Option(help="Where boundary activations wait: auto, device or host.")] = Options.stash,
    on_nonfinite: OnNonfinite = Options.on_nonfinite,
    deferred: Deferred = Options.deferred,
    units: Units = Options.units,
    resident: Resident = Options.resident,
    slots: Slots = Options.slots,
    held: Held = Options.held,
    subgroup: SubgroupSize = Options.subgroup,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, and nothing else.")] = False,
) -> None:
    """Tells whether a training will fit, where each byte goes, and what bounds its steps.

    For this machine, which is measured, or for one that you describe. Nothing of the model is allocated, so half a
    trillion parameters can be planned on a laptop.
    """
    description = describe(model)
    training = Training(
        batch, window(sequence, description), micro_batches, precision, max_grad_norm, on_nonfinite, deferred,
        units or None, resident or (), stash, slots, held, updates, subgroup,
    )  # fmt: skip
    _check(training, optimizer)
    given = described(
        device, device_memory, host_memory, link, link_in, link_out, device_flops, host_updates, devices, nodes,
        loopback, network, training,
    )  # fmt: skip
    checks.interleave_arguments(True, given.device, slots, held, updates, subgroup)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its hints are for who runs the model
    built = description.on_meta()
    outlook = estimate(built, RULES[optimizer](built.parameters(), lr=1e-4), training, given.machine, given.device)
    if as_json:
        typer.echo(json.dumps(_document(description, built, training, given, outlook), indent=2))
    else:
        _show(Console(), description, built, training, given, outlook)
        asked = Options(
            model, device=None if given.device.type == "meta" else device, memory=device_memory, precision=precision,  # type: ignore[arg-type]
            batch=batch, sequence=sequence, micro_batches=micro_batches, optimizer=optimizer, updates=updates,  # type: ignore[arg-type]
            max_grad_norm=max_grad_norm, stash=stash, on_nonfinite=on_nonfinite, deferred=deferred,  # type: ignore[arg-type]
            units=units or None, resident=resident or None, slots=slots, held=held, subgroup=subgroup,
        )  # fmt: skip
        if outlook.fits:
            typer.echo(f"to train so: {_launcher(given.machine.crew)}{asked.new_command()}")
    if not outlook.fits:
        raise typer.Exit(1)


def _launcher(crew: Crew) -> str:
    if crew.size == 1:
        return ""
    where = (
        "--standalone" if crew.nodes == 1 else f"--nnodes {crew.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
    )
    return f"torchrun {where} --nproc-per-node {crew.devices} --no-python "


# What was asked for.


def _check(training: Training, optimizer: str) -> None:
    if training.samples < 1:
        raise ValueError(f"--batch {training.samples}: a step has at least one sample")
    if training.micro_batches is not None and training.micro_batches < 1:
        raise ValueError(f"--micro-batches {training.micro_batches}: a batch is cut into at least one")
    if optimizer not in RULES:
        raise ValueError(f"--optimizer {optimizer!r} is none that can be planned for{hint(optimizer, RULES)}")
    checks.update_arguments(
        True, training.precision, training.max_grad_norm, training.on_nonfinite, training.deferred, None
    )
    checks.arguments(
        nn.Identity(), len, "mean", units=training.units, resident=training.resident, stash=training.stash,
        slots=training.slots,
    )  # fmt: skip


# What is said.


def _document(
    description: Description, model: nn.Module, training: Training, given: Described, outlook: Estimate
) -> dict[str, Any]:
    machine, found = given.machine, outlook.forecast
    return {
        "fits": outlook.fits,
        "problems": outlook.problems,
        "notes": [*given.notes, *outlook.notes],
        "model": {"name": description.name, "kind": type(model).__name__, "parameters": _parameters(model)},
        "training": asdict(training),
        "machine": {
            "device_memory": machine.device_memory,
            "host_memory": machine.host_memory,
            "link_in": _finite(machine.rates.link_in),
            "link_out": _finite(machine.rates.link_out),
            "operations": machine.operations,
            "host_updates": machine.rates.host,
            "devices": machine.crew.devices,
            "nodes": machine.crew.nodes,
            "loopback": _finite(machine.crew.loopback),
            "network": _finite(machine.crew.network),
            "known": given.known,
        },
        "plan": {
            "units": len(outlook.plan.units),
            "held": outlook.plan.held,
            "weight_slots": outlook.plan.weight_slots,
            "gradient_slots": outlook.plan.gradient_slots,
            "updates": str(outlook.plan.staging.policy),
            "deferred": outlook.plan.staging.deferred,
            "samples": outlook.samples,
            "micro_batches": outlook.choice.micro_batches,
            "stash": "host" if outlook.choice.stash_on_host else "device",
        },
        "device": outlook.device,
        "host": outlook.host,
        "step": None
        if found is None
        else {
            "seconds": found.seconds,
            "tokens_per_second": _tokens(training) / found.seconds if found.seconds else None,
            "hours_per_billion_tokens": found.seconds * 1e9 / _tokens(training) / 3600,
            "operations": outlook.forward_operations + outlook.backward_operations,
            "forward": {**found.forward.named, "bound": found.forward.bound},
            "backward": {**found.backward.named, "bound": found.backward.bound},
            "device_share_of_updates": found.share,
            "break_even_micro_batches": found.break_even,
            "operations_needed": _finite(found.needed_operations),
            "one_device": _against_one(outlook, training, machine.crew),
        },
        "advice": advice(outlook, training, given),
        "assumptions": assumptions(given, training, outlook),
    }


def _against_one(outlook: Estimate, training: Training, crew: Crew) -> dict[str, Any] | None:
    one, found = outlook.one_device, outlook.forecast
    if one is None or one.forecast is None or found is None or not found.seconds:
        return None
    speedup = one.forecast.seconds / found.seconds
    return {
        "fits": one.fits,
        "seconds": one.forecast.seconds,
        "tokens_per_second": _tokens(training) / one.forecast.seconds,
        "speedup": speedup,
        "efficiency": speedup / crew.size,
    }


def _show(
    console: Console,
    description: Description,
    model: nn.Module,
    training: Training,
    given: Described,
    outlook: Estimate,
) -> None:
    name, parameters = escape(description.name), _count(_parameters(model))
    if outlook.fits:
        console.print(f"[bold green]fits[/bold green]: {name}, {parameters} parameters")
    for problem in outlook.problems:
        console.print(f"[bold red]does not fit[/bold red]: {name}, {parameters} parameters: {escape(problem)}")
    for note in (*given.notes, *outlook.notes):
        console.print(f"[yellow]note[/yellow]: {escape(note)}")
    plan, choice = outlook.plan, outlook.choice
    machine = given.machine
    console.print(
        f"{len(plan.units)} units, {_way(plan, given)}; {_many(training.samples, 'sample')} of "
        f"{_many(training.length, 'token')}{_shared_out(training, machine.crew, outlook)} in "
        f"{_many(choice.micro_batches, 'micro-batch')}; stash on the "
        f"{'host' if choice.stash_on_host else 'device'}; updates: {plan.staging.policy}, "
        f"{'deferred' if plan.staging.deferred else 'eager'}"
    )
    several, nodes = machine.crew.size > 1, machine.crew.nodes > 1
    if outlook.device:
        console.print(_account(f"on {'each' if several else 'the'} device", outlook.device, machine.device_memory))
    console.print(_account("on each node" if nodes else "on the host", outlook.host, machine.host_memory))
    if outlook.forecast is not None:
        console.print(_times(outlook.forecast))
        _show_step(console, outlook.forecast, training, outlook)
        _show_speedup(console, training, machine.crew, outlook)
    for said in advice(outlook, training, given):
        console.print(f"[bold]advice[/bold]: {said}")
    console.print(f"[dim]{_figures(given)}[/dim]")
    for assumption in assumptions(given, training, outlook):
        console.print(f"[dim]- {assumption}[/dim]")


def _shared_out(training: Training, crew: Crew, outlook: Estimate) -> str:
    if crew.size == 1:
        return ""
    devices = _many(crew.devices, "device")
    where = devices if crew.nodes == 1 else f"{crew.nodes} nodes with {devices} each"
    most = "" if outlook.samples * crew.size == training.samples else "at most "
    return f" on {where}, {most}{outlook.samples} to each,"


def _way(plan: Plan, given: Described) -> str:
    if given.device.type == "cpu":
        return "used where they are"
    return "held on the device" if plan.held else f"relayed through {_many(plan.weight_slots, 'slot')}"


def _account(title: str, account: dict[str, int], memory: int | None) -> Table:
    table = Table("", "bytes", "", title=title, title_justify="left", box=None, pad_edge=False)
    total = sum(account.values())
    for part, nbytes in sorted(account.items(), key=lambda pair: -pair[1]):
        if nbytes:
            table.add_row(part, show_bytes(nbytes), _bar(nbytes / max(total, memory or 0)))
    of = "" if memory is None else f" of {show_bytes(memory)}"
    table.add_row("[bold]together[/bold]", f"[bold]{show_bytes(total)}[/bold]{of}")
    table.columns[1].justify = "right"
    return table


def _times(found: Forecast) -> Table:
    table = Table("lane", "forward", "", "backward", "", title="a step", title_justify="left", box=None, pad_edge=False)
    longest = max((*found.forward.named.values(), *found.backward.named.values())) or 1.0
    for lane in found.forward.named:
        row = [lane]
        for phase in (found.forward, found.backward):
            seconds = phase.named[lane]
            row += [_seconds(seconds), _bar(seconds / longest, "red" if _bounds(phase, lane) else "blue")]
        table.add_row(*row)
    return table


def _show_step(console: Console, found: Forecast, training: Training, outlook: Estimate) -> None:
    tokens = _tokens(training)
    rate = f"{tokens / found.seconds:,.0f} tokens/s, {_span(found.seconds * 1e9 / tokens)} for a billion tokens"
    console.print(
        f"[bold]{_seconds(found.seconds)} a step[/bold], at least: {rate if found.seconds else 'nothing takes time'}. "
        f"The forward is bound by [red]{found.forward.bound}[/red], the backward by [red]{found.backward.bound}[/red]. "
        f"{found.share:.0%} of the updates on the device; "
        f"{outlook.forward_operations + outlook.backward_operations:.2e} floating-point operations"
    )


def _show_speedup(console: Console, training: Training, crew: Crew, outlook: Estimate) -> None:
    if (against := _against_one(outlook, training, crew)) is not None:
        console.print(
            f"[bold]{against['speedup']:.2f} times one device[/bold], which would take {_seconds(against['seconds'])} "
            f"for the same batch, {against['tokens_per_second']:,.0f} tokens/s"
            f"{'' if against['fits'] else ', if it had the memory'}: {against['efficiency']:.0%} of {crew.size} times"
        )


def _figures(given: Described) -> str:
    machine, rates = given.machine, given.machine.rates
    shown = {
        "device memory": None if machine.device_memory is None else show_bytes(machine.device_memory),
        "host memory": None if machine.host_memory is None else show_bytes(machine.host_memory),
        "link in": None if math.isinf(rates.link_in) else show_rate(rates.link_in, "bytes"),
        "link out": None if math.isinf(rates.link_out) else show_rate(rates.link_out, "bytes"),
        "device FLOP/s": None if machine.operations is None else show_rate(machine.operations, "operations"),
        "host updates": show_rate(rates.host, "parameters"),
        "loopback": None if math.isinf(machine.crew.loopback) else show_rate(machine.crew.loopback, "bytes"),
        "network": None if math.isinf(machine.crew.network) else show_rate(machine.crew.network, "bytes"),
    }
    return "; ".join(f"{name} {value} ({given.known[name]})" for name, value in shown.items() if value is not None)


def _bounds(phase: Lanes, lane: str) -> bool:
    return phase.bound == lane and phase.named[lane] > 0


def _bar(share: float, colour: str = "blue") -> str:
    return f"[{colour}]{'█' * max(1 if share > 0 else 0, round(share * _WIDTH))}[/{colour}]"


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"


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
