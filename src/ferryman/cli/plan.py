"""`ferryman plan`: will it fit, where does each byte go, how long will a step take."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from ferryman import checks, measure
from ferryman.cli.defaults import LONGEST, budget, window
from ferryman.cli.device import find_device
from ferryman.cli.model import Description, describe, sizes
from ferryman.cli.options import Deferred, Held, OnNonfinite, Options, Resident, Slots, SubgroupSize, Units, or_none
from ferryman.cli.rule import RULES
from ferryman.cost.forecast import Forecast, Lanes
from ferryman.cost.plan import Plan
from ferryman.cost.rates import Rates
from ferryman.cost.sizes import parse_bytes, parse_rate, show_bytes, show_rate
from ferryman.outlook import Machine, Outlook, Training, look_ahead
from ferryman.server import memory as host_memory
from ferryman.server.precision import PRECISIONS
from ferryman.units import hint

EPILOG = """
[bold]Examples[/bold]

# the built-in GPT on this machine, measured
ferryman plan gpt:base

# a model of your own on a machine you do not have; nothing of it is allocated
ferryman plan path/to/config.json --device-memory 16GiB --host-memory 512GiB --link 12GB/s --device-flops 150TFLOPS

# what changes with more samples in a step, and with clipping
ferryman plan gpt:xl --device-memory 2GiB --link 12GB/s --batch 64 --max-grad-norm 1.0

# for a script: exit code 0 if it fits, 1 if not, 2 for bad input
ferryman plan gpt:xl --device-memory 2GiB --link 12GB/s --json | jq .step.seconds
"""

_WIDTH = 24  # of a bar


@dataclass(frozen=True)
class _Described:
    """The machine, and how each of its figures is known."""

    machine: Machine
    device: torch.device
    known: dict[str, str]


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
    host_memory: Annotated[str | None, typer.Option(help="Memory of the host, such as 512GiB")] = None,
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
    precision: Annotated[
        str | None, typer.Option(help="Of compute and of the link: fp32, bf16 or fp16; else what the model has.")
    ] = Options.precision,
    batch: Annotated[int, typer.Option(help="Samples in a step.")] = Options.batch,
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
    given = _described(
        device, device_memory, host_memory, link, link_in, link_out, device_flops, host_updates, training
    )
    checks.interleave_arguments(True, given.device, slots, held, updates, subgroup)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its hints are for who runs the model
    built = description.on_meta()
    outlook = look_ahead(built, RULES[optimizer](built.parameters(), lr=1e-4), training, given.machine, given.device)
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
            typer.echo(f"to train so: {asked.new_command()}")
    if not outlook.fits:
        raise typer.Exit(1)


# What was asked for.


def _check(training: Training, optimizer: str) -> None:
    if training.samples < 1:
        raise ValueError(f"--batch {training.samples}: a step has at least one sample")
    if optimizer not in RULES:
        raise ValueError(f"--optimizer {optimizer!r} is none that can be planned for{hint(optimizer, RULES)}")
    checks.update_arguments(
        True, training.precision, training.max_grad_norm, training.on_nonfinite, training.deferred, None
    )
    checks.arguments(
        nn.Identity(), len, "mean", units=training.units, resident=training.resident, stash=training.stash,
        slots=training.slots,
    )  # fmt: skip


def _described(
    device: str | None,
    device_memory: str | None,
    host_memory_given: str | None,
    link: str | None,
    link_in: str | None,
    link_out: str | None,
    device_flops: str | None,
    host_updates: str | None,
    training: Training,
) -> _Described:
    """What is not described is measured here, where there is something to measure."""
    known: dict[str, str] = {}
    described = any(given is not None for given in (device_memory, link, link_in, link_out, device_flops))
    here = find_device(device)
    elsewhere = described and here.type == "cpu"  # a device that this machine does not have
    kind = torch.device("meta") if elsewhere else here

    def of(name: str, text: str | None, parse: Any, otherwise: Any) -> Any:
        """Given, or measured, or not known."""
        if text is not None:
            known[name] = "given"
            return parse(text)
        value = otherwise()
        known[name] = "not known" if value is None else "measured here"
        return value

    memory = of("device memory", device_memory, lambda text: parse_bytes(text, "--device-memory"),
                lambda: _free_on(kind))  # fmt: skip
    ram = of("host memory", host_memory_given, lambda text: parse_bytes(text, "--host-memory"), host_memory.available)
    measured: tuple[float, ...] = (math.inf, math.inf)
    if here.type != "cpu" and None in (link_in or link, link_out or link):
        measured = measure.link(here)
    rates = {}
    for name, option, own, found in (
        ("link in", "--link-in", link_in, measured[0]),
        ("link out", "--link-out", link_out, measured[1]),
    ):
        text, option = (own, option) if own is not None else (link, "--link")
        rates[name] = of(
            name, text, lambda text, option=option: parse_rate(text, option, "bytes"), lambda found=found: found
        )
        if elsewhere and text is None:
            raise ValueError(
                f"{option} is needed for a machine that is not this one: the rate between host and device, like "
                "--link 12GB/s (PCIe 4.0 gives about 25GB/s, PCIe 3.0 about 12GB/s)"
            )
    dtype = PRECISIONS[training.precision or "fp32"]
    operations = of("device FLOP/s", device_flops, lambda text: parse_rate(text, "--device-flops", "operations"),
                    lambda: None if elsewhere else measure.operations(here, dtype))  # fmt: skip
    host = of("host updates", host_updates, lambda text: parse_rate(text, "--host-updates", "parameters"),
              measure.host_updates)  # fmt: skip
    return _Described(
        Machine(Rates(host, math.inf, rates["link in"], rates["link out"]), memory, ram, operations), kind, known
    )


def _free_on(device: torch.device) -> int | None:
    if device.type == "meta":
        raise ValueError("--device-memory is needed for a machine that is not this one, like --device-memory 16GiB")
    return budget(device, None)


# What is said.


def _assumptions(given: _Described, training: Training, outlook: Outlook) -> list[str]:
    said = [
        "Times are estimates: matrix products and attention are counted, all else on the device is taken to be free.",
        "A step is as long as the busiest lane of each sweep; what is measured is some percent above that.",
        "The device's arithmetic for updates is left out: the link on the way to it takes longer.",
        "Attention is taken not to write its matrix down; what kernels use within themselves is not counted.",
    ]
    if given.machine.operations is None:
        said.append("Compute is not known, and left out: give --device-flops, what the device reaches in practice.")
    if given.known["device FLOP/s"] == "measured here":
        said.append("Compute is as fast as one large matrix product here; narrow blocks reach less (--device-flops).")
    if given.known["host updates"] == "measured here":
        said.append("The host updates weights as fast as this one does.")
    if outlook.forecast is not None and outlook.plan.staging.policy.kind == "auto":
        said.append("'auto' shares updates by rates that it observes; the split here is what they suggest.")
    return said


def _advice(outlook: Outlook, training: Training, given: _Described) -> list[str]:
    found = outlook.forecast
    if found is None:
        return []
    said, count = [], outlook.choice.micro_batches
    bounds = {found.forward.bound, found.backward.bound}
    if given.machine.operations is None:
        if math.isinf(found.needed_operations):
            said.append(
                "In one of the sweeps there is nothing but compute: it is the bound, whatever the device reaches."
            )
        else:
            needed = show_rate(found.needed_operations, "operations")
            said.append(f"A device that reaches {needed} is not the bound; a slower one is.")
    elif bounds & {"link in", "link out", "update"} and found.break_even is not None and found.break_even > count:
        samples = found.break_even * outlook.sample_size
        said.append(
            f"More samples in a step: from {found.break_even} micro-batches on (--batch {samples} with micro-batches "
            f"of {outlook.sample_size}), compute bounds it, and the link costs nothing."
        )
    elif bounds & {"link in", "link out"} and found.break_even is None and outlook.choice.stash_on_host:
        said.append(
            "The stash crosses the link for each micro-batch: more device memory, or a shorter sequence, helps."
        )
    if found.forward.bound == "update" and training.max_grad_norm is not None:
        said.append(
            "The update waits for the norm of all gradients; without --max-grad-norm it runs beside the backward."
        )
    if "update" in bounds:
        said.append(
            "The host's updates bound a sweep: more host cores or memory bandwidth, or fewer trained parameters."
        )
    if not said:
        said.append("Compute bounds the step: nothing but a faster device, or less work, makes it shorter.")
    return said


def _document(
    description: Description, model: nn.Module, training: Training, given: _Described, outlook: Outlook
) -> dict[str, Any]:
    machine, found = given.machine, outlook.forecast
    return {
        "fits": outlook.fits,
        "problems": outlook.problems,
        "notes": outlook.notes,
        "model": {"name": description.name, "kind": type(model).__name__, "parameters": _parameters(model)},
        "training": asdict(training),
        "machine": {
            "device_memory": machine.device_memory,
            "host_memory": machine.host_memory,
            "link_in": _finite(machine.rates.link_in),
            "link_out": _finite(machine.rates.link_out),
            "operations": machine.operations,
            "host_updates": machine.rates.host,
            "known": given.known,
        },
        "plan": {
            "units": len(outlook.plan.units),
            "held": outlook.plan.held,
            "weight_slots": outlook.plan.weight_slots,
            "gradient_slots": outlook.plan.gradient_slots,
            "updates": str(outlook.plan.staging.policy),
            "deferred": outlook.plan.staging.deferred,
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
        },
        "advice": _advice(outlook, training, given),
        "assumptions": _assumptions(given, training, outlook),
    }


def _show(
    console: Console,
    description: Description,
    model: nn.Module,
    training: Training,
    given: _Described,
    outlook: Outlook,
) -> None:
    name, parameters = escape(description.name), _count(_parameters(model))
    if outlook.fits:
        console.print(f"[bold green]fits[/bold green]: {name}, {parameters} parameters")
    for problem in outlook.problems:
        console.print(f"[bold red]does not fit[/bold red]: {name}, {parameters} parameters: {escape(problem)}")
    for note in outlook.notes:
        console.print(f"[yellow]note[/yellow]: {escape(note)}")
    plan, choice = outlook.plan, outlook.choice
    console.print(
        f"{len(plan.units)} units, {_way(plan, given)}; {training.samples} samples of {training.length} tokens in "
        f"{choice.micro_batches} micro-batch{'' if choice.micro_batches == 1 else 'es'}; stash on the "
        f"{'host' if choice.stash_on_host else 'device'}; updates: {plan.staging.policy}, "
        f"{'deferred' if plan.staging.deferred else 'eager'}"
    )
    machine = given.machine
    if outlook.device:
        console.print(_account("on the device", outlook.device, machine.device_memory))
    console.print(_account("on the host", outlook.host, machine.host_memory))
    if outlook.forecast is not None:
        console.print(_times(outlook.forecast))
        _show_step(console, outlook.forecast, training, outlook)
    for advice in _advice(outlook, training, given):
        console.print(f"[bold]advice[/bold]: {advice}")
    console.print(f"[dim]{_figures(given)}[/dim]")
    for assumption in _assumptions(given, training, outlook):
        console.print(f"[dim]- {assumption}[/dim]")


def _way(plan: Plan, given: _Described) -> str:
    if given.device.type == "cpu":
        return "used where they are"
    return (
        "held on the device"
        if plan.held
        else f"relayed through {plan.weight_slots} slot{'' if plan.weight_slots == 1 else 's'}"
    )


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


def _show_step(console: Console, found: Forecast, training: Training, outlook: Outlook) -> None:
    tokens = _tokens(training)
    rate = f"{tokens / found.seconds:,.0f} tokens/s, {_span(found.seconds * 1e9 / tokens)} for a billion tokens"
    console.print(
        f"[bold]{_seconds(found.seconds)} a step[/bold], at least: {rate if found.seconds else 'nothing takes time'}. "
        f"The forward is bound by [red]{found.forward.bound}[/red], the backward by [red]{found.backward.bound}[/red]. "
        f"{found.share:.0%} of the updates on the device; "
        f"{outlook.forward_operations + outlook.backward_operations:.2e} floating-point operations"
    )


def _figures(given: _Described) -> str:
    machine, rates = given.machine, given.machine.rates
    shown = {
        "device memory": None if machine.device_memory is None else show_bytes(machine.device_memory),
        "host memory": None if machine.host_memory is None else show_bytes(machine.host_memory),
        "link in": None if math.isinf(rates.link_in) else show_rate(rates.link_in, "bytes"),
        "link out": None if math.isinf(rates.link_out) else show_rate(rates.link_out, "bytes"),
        "device FLOP/s": None if machine.operations is None else show_rate(machine.operations, "operations"),
        "host updates": show_rate(rates.host, "parameters"),
    }
    return "; ".join(f"{name} {value} ({given.known[name]})" for name, value in shown.items() if value is not None)


def _bounds(phase: Lanes, lane: str) -> bool:
    return phase.bound == lane and phase.named[lane] > 0


def _bar(share: float, colour: str = "blue") -> str:
    return f"[{colour}]{'█' * max(1 if share > 0 else 0, round(share * _WIDTH))}[/{colour}]"


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
