"""The outlook: whether a training would fit, where each byte would go and how long a step would take.

For a model that nobody has allocated, on a machine that need not be this one. The plan is made as an engine makes it,
what micro-batches take is rehearsed on the meta device (`rehearsal.py`) in place of a trial, and the times come
from the performance model (`cost/forecast.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ferryman.batch import split, take
from ferryman.cost.forecast import Forecast, Sweep, Update, forecast
from ferryman.cost.plan import Plan
from ferryman.cost.rates import Rates
from ferryman.cost.schedule import Traffic
from ferryman.cost.sizes import show_bytes
from ferryman.planner import Planner
from ferryman.rehearsal import NotRehearsedError, Rehearsal, rehearse
from ferryman.relay.fit import Choice, Trial
from ferryman.relay.slots import fetched_visits
from ferryman.server.panel import Panel
from ferryman.server.precision import dtype_of
from ferryman.server.settings import Settings
from ferryman.server.split import traffic_of
from ferryman.server.store import account
from ferryman.sizing import Sizing
from ferryman.units import Unit, trained_elements, weight_itemsize
from ferryman.work import model_loss


@dataclass(frozen=True)
class Machine:
    """What there is, measured or described."""

    rates: Rates  # infinite where something does not take time
    device_memory: int | None = None  # bytes; None: the device is the host itself
    host_memory: int | None = None  # bytes; None: not known
    operations: float | None = None  # floating-point, a second, in the precision of compute; None: not known


@dataclass(frozen=True)
class Training:
    """What is asked for, as an engine takes it."""

    samples: int
    length: int  # tokens of a sample
    micro_batches: int | None = None  # None: as few as the memory allows
    precision: str | None = None
    max_grad_norm: float | None = None
    on_nonfinite: str = "raise"
    deferred: bool = False
    units: Sequence[str] | None = None
    resident: Sequence[str] = ()
    stash: str = "auto"
    slots: int | None = None
    held: bool | None = None
    updates: str = "auto"
    subgroup: int | None = None


@dataclass
class Outlook:
    plan: Plan
    device: dict[str, int]  # bytes, by what they are for
    host: dict[str, int]
    choice: Choice
    sample_size: int  # of a micro-batch, in samples
    problems: list[str] = field(default_factory=list)  # why it does not fit, and what would help
    notes: list[str] = field(default_factory=list)
    forecast: Forecast | None = None  # None: the model could not be rehearsed
    forward_operations: float = 0.0  # of a step
    backward_operations: float = 0.0

    @property
    def fits(self) -> bool:
        return not self.problems


def look_ahead(
    model: nn.Module, optimizer: torch.optim.Optimizer, training: Training, machine: Machine, device: torch.device
) -> Outlook:
    """`model` is on meta, and `optimizer` has its parameters; `device` only says whether it is the host itself."""
    panel = Panel(optimizer, model)
    settings = Settings(training.max_grad_norm, training.on_nonfinite, training.deferred)
    planner = Planner(
        model, device, budget=machine.device_memory, slots=training.slots, units=training.units,
        resident=training.resident, held=training.held, subgroup=training.subgroup,
        dtype_of=dtype_of(model, training.precision), panel=panel, settings=settings,
    )  # fmt: skip
    outlook, rehearsed = _fit(planner, training)
    plan = outlook.plan
    units = plan.in_forward_order
    outlook.host.update(account(units, panel, landing=plan.staging.deferred))
    try:
        rehearsal = rehearsed(plan, outlook.sample_size)
    except NotRehearsedError as error:
        outlook.notes.append(
            f"The model cannot be rehearsed without data ({error}), so neither what micro-batches take on the device "
            "nor the time of a step is known"
        )
        rehearsal = None
    count = outlook.choice.micro_batches
    if rehearsal is not None:
        most = max(stretch.peak for stretch in rehearsal.trial.stretches)
        stashed = count * rehearsal.trial.stash
        if device.type == "cpu":
            outlook.device.clear()
            outlook.host["one call's activations"], outlook.host["stash"] = most, stashed
        else:
            outlook.device["one call's activations"] = most
            (outlook.host if outlook.choice.stash_on_host else outlook.device)["stash"] = stashed
        sweeps = _sweeps(plan, rehearsal, outlook.choice, device)
        update = _update(plan, units)
        outlook.forecast = forecast(*sweeps, update, count, machine.rates, machine.operations)
        outlook.forward_operations, outlook.backward_operations = (count * sweep.operations for sweep in sweeps)
    _check_host(outlook, machine)
    return outlook


def _fit(planner: Planner, training: Training) -> tuple[Outlook, Callable[[Plan, int], Rehearsal]]:
    """A plan and a cut into micro-batches, found as an engine finds them at its first batch."""
    ids = torch.zeros(training.samples, training.length, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    split(batch, training.micro_batches)  # to refuse what cannot be cut

    @functools.cache
    def rehearsed(plan_units: tuple[Unit, ...], residents: Unit, samples: int) -> Rehearsal:
        return rehearse(planner.model, plan_units, residents, model_loss, take(batch, samples))

    def of(plan: Plan, samples: int) -> Rehearsal:
        return rehearsed(plan.units, plan.residents, samples)

    problems: list[str] = []
    refusal: str | None = None
    try:
        plan = planner.make(training.updates)
    except ValueError as error:  # an engine would stop here; a rehearsal can tell what a sample takes on top
        refusal = str(error)
        plan = planner.make(training.updates, smallest=True)
    choice = Choice(training.micro_batches or 1, training.stash == "host")
    while not problems:

        def try_out(contents: Sequence[Any], room: int, plan: Plan = plan) -> Trial:
            return of(plan, len(contents[0]["input_ids"])).trial

        sizing = Sizing(planner, plan, training.updates, training.stash, try_out)
        try:
            chosen = sizing.choose(batch, training.micro_batches, begun=False)
        except NotRehearsedError:
            problems += [] if refusal is None else [refusal]
            break
        except ValueError as error:
            problems.append(str(error))
            break
        if isinstance(chosen, Choice):
            choice = chosen
            break
        plan = sizing.smaller(chosen)
    if problems and training.micro_batches is None:
        choice = Choice(training.samples, training.stash != "device")  # one sample each needs least
    return Outlook(plan, dict(plan.account), {}, choice, -(-training.samples // choice.micro_batches), problems), of


def _sweeps(plan: Plan, rehearsal: Rehearsal, choice: Choice, device: torch.device) -> tuple[Sweep, Sweep]:
    fetched = [0.0, 0.0]
    if not plan.held and device.type != "cpu":
        for visit in fetched_visits(rehearsal.visits, plan.weight_slots):
            fetched[visit >= rehearsal.forward_visits] += rehearsal.visits[visit].nbytes
    stashed = rehearsal.trial.stash if choice.stash_on_host and device.type != "cpu" else 0
    # Each boundary leaves when its micro-batch parks and comes back when it goes on; in the backward that is the
    # gradient, and what the forward has left comes back beside it.
    return (
        Sweep(rehearsal.forward, fetched[0], brought=stashed, stowed=stashed),
        Sweep(rehearsal.backward, fetched[1], brought=2 * stashed, stowed=stashed),
    )


def _update(plan: Plan, units: Sequence[Unit]) -> Update:
    staging = plan.staging
    traffic, gradient = traffic_of(units, staging, held=plan.held)
    on_device = bool(staging.holding(units, held=plan.held)) if staging.on_device else False
    if staging.deferred:
        waiting = 0 if on_device else gradient
        traffic = Traffic(0, traffic.host_in, traffic.device_in + waiting, traffic.device_out)
    weights = max((weight_itemsize(unit) for unit in units), default=0)
    return Update(
        policy=staging.policy,
        parameters=sum(trained_elements(unit) for unit in units),
        subgroup=staging.subgroup,
        berths=staging.berths,
        deferred=staging.deferred,
        traffic=traffic,
        resident=Traffic(traffic.host_out, traffic.host_in, 0, weights),
        landing=gradient,
        waits_on_device=on_device,
    )


def _check_host(outlook: Outlook, machine: Machine) -> None:
    needed = sum(outlook.host.values())
    if machine.host_memory is not None and needed > machine.host_memory:
        parts = ", ".join(f"{show_bytes(nbytes)} for {part}" for part, nbytes in outlook.host.items() if nbytes)
        outlook.problems.append(
            f"the host cannot hold it: {show_bytes(needed)} are needed ({parts}), and there are "
            f"{show_bytes(machine.host_memory)}. A narrower precision (bf16 takes 12 bytes a parameter with AdamW), an "
            "optimizer with less state (sgd, lion) or fewer trained parameters need less"
        )
