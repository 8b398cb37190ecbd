"""The estimate: whether a training would fit, where each byte would go and how long a step would take.

The model is not allocated, and the machine need not be this one. The plan is made as an engine makes it. What
micro-batches need comes from a dry run on the meta device (`forecast/dry_run.py`) instead of a memory trial, and the
times come from the performance model (`plan/step_forecast.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ferryman.distributed.ranks import Share
from ferryman.forecast.dry_run import DryRun, DryRunError, dry_run
from ferryman.model.loss import model_loss
from ferryman.model.precision import dtype_of
from ferryman.model.units import Unit, landing_dtype, trained_elements, weight_itemsize
from ferryman.options import PlainOptions
from ferryman.plan.batch import parts_of, portion, take
from ferryman.plan.fit import Choice, Trial
from ferryman.plan.network import Cluster, exchange_times
from ferryman.plan.plan import Plan, PlanTooLargeError
from ferryman.plan.rates import Rates
from ferryman.plan.schedule import Traffic
from ferryman.plan.step_forecast import Forecast, Sweep, Update, forecast
from ferryman.relay.weight_slots import fetched_visits
from ferryman.runtime.sizes import show_bytes
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.state import part_elements
from ferryman.server.store import account
from ferryman.training import checks
from ferryman.training.micro_batching import MicroBatching
from ferryman.training.planner import Planner


@dataclass(frozen=True)
class Machine:
    """What there is, measured or described; of several nodes, each."""

    rates: Rates  # infinite where something does not take time; the host's are of all that it has
    device_memory: int | None = None  # bytes of one; None: the device is the host itself
    host_memory: int | None = None  # bytes; None: not known
    operations: float | None = None  # floating-point, a second, in the precision of compute; None: not known
    cluster: Cluster = Cluster()  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class Training(PlainOptions):
    """What is asked for: the settings of the engine, and the batch of a step."""

    samples: int  # of a step; of several ranks, all of them
    length: int  # tokens of a sample
    micro_batches: int | None = None  # None: as few as the memory allows

    def of_one(self, size: int) -> Training:
        """What of it a rank does, of so many, as `ferryman train` gives it out; the one that does most."""
        return max(self.of_each(size), key=lambda one: (one.samples, -(one.micro_batches or 0)))

    def of_each(self, size: int) -> list[Training]:
        """Of ranks that have samples at all."""
        found = (portion(self.samples, self.micro_batches, rank, size) for rank in range(size))
        shares = ((len(range(self.samples)[mine]), count) for mine, count in found)
        return [replace(self, samples=samples, micro_batches=count) for samples, count in shares if samples]


@dataclass
class Estimate:
    plan: Plan
    device: dict[str, int]  # bytes of each, by what they are for
    host: dict[str, int]  # bytes of a node's
    choice: Choice  # of each rank
    samples: int  # of the rank that has most
    sample_size: int  # of a micro-batch, in samples; the last may have fewer
    problems: list[str] = field(default_factory=list)  # why it does not fit, and what would help
    notes: list[str] = field(default_factory=list)
    forecast: Forecast | None = None  # None: the dry run failed
    forward_operations: float = 0.0  # of a step
    backward_operations: float = 0.0
    one_device: Estimate | None = None  # of several: the same step on one of them, cut as that needs

    @property
    def fits(self) -> bool:
        return not self.problems


def estimate(
    model: nn.Module, optimizer: torch.optim.Optimizer, training: Training, machine: Machine, device: torch.device
) -> Estimate:
    """`model` is on meta, and `optimizer` has its parameters; `device` only says whether it is the host itself.

    Of several ranks, the last is looked at: where parts are not equal, none has more.
    """
    cluster, whole = machine.cluster, training
    _check_cut(whole, cluster.size)
    training = training.of_one(cluster.size)
    shares = [Share(rank, cluster.size) for rank in range(cluster.size - cluster.devices, cluster.size)]
    dtypes = dtype_of(model, training.precision)
    checks.parameters(model.named_parameters(), dtypes)
    optimizer_view = OptimizerView(optimizer, model)
    options = replace(training, memory=machine.device_memory)
    planner = Planner(model, device, options, dtypes, optimizer_view, shares[-1])
    outlook, dry_run_of = _fit(planner, training)
    plan = outlook.plan
    units = plan.in_forward_order
    outlook.host.update(account(units, optimizer_view, landing=plan.staging.deferred, shares=shares))
    count, size = outlook.choice.micro_batches, outlook.sample_size
    try:
        found = dry_run_of(plan, size)
        last = dry_run_of(plan, outlook.samples - (count - 1) * size)
    except DryRunError as error:
        outlook.notes.append(
            f"A dry run of the model needs real data ({error}), so neither what micro-batches take on the device "
            "nor the time of a step is known"
        )
        found = None
    if plan.staging.note is not None:
        outlook.notes.append(plan.staging.note)
    if found is not None:
        most = max(stretch.peak for stretch in found.trial.stretches)
        stashed = (count - 1) * found.trial.stash + last.trial.stash
        rates, operations = replace(machine.rates, host=machine.rates.host / cluster.devices), machine.operations
        if device.type == "cpu":
            outlook.device.clear()
            outlook.host["one call's activations"] = cluster.devices * most
            outlook.host["stash"] = cluster.devices * stashed
            operations = None if operations is None else operations / cluster.devices
        else:
            outlook.device["one call's activations"] = most
            if outlook.choice.stash_on_host:
                outlook.host["stash"] = cluster.devices * stashed
            else:
                outlook.device["stash"] = stashed
        sweeps = _sweeps(plan, found, outlook.choice, device)
        update = _update(plan, units, optimizer_view, shares[-1], cluster)
        outlook.forecast = forecast(*sweeps, update, outlook.samples / size, rates, operations)
        outlook.forward_operations, outlook.backward_operations = (
            whole.samples / size * sweep.operations for sweep in sweeps
        )
    _check_host(outlook, machine)
    if cluster.size > 1:
        one = replace(machine, cluster=Cluster())
        outlook.one_device = estimate(model, optimizer, replace(whole, micro_batches=None), one, device)
    return outlook


def _batch(training: Training) -> dict[str, torch.Tensor]:
    ids = torch.zeros(training.samples, training.length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def _check_cut(training: Training, size: int) -> None:
    """Refuses what a rank could not cut."""
    for one in training.of_each(size):
        try:
            parts_of(_batch(one), one.micro_batches)
        except ValueError as error:
            if size > 1:
                error.add_note(
                    f"That would be the part of one rank, of {size}, where all of them have {training.samples} samples "
                    f"in {training.micro_batches} micro-batches"
                )
            raise


def _fit(planner: Planner, training: Training) -> tuple[Estimate, Callable[[Plan, int], DryRun]]:
    """A plan and a cut into micro-batches, found as an engine finds them at its first batch."""
    batch = _batch(training)

    @functools.cache
    def dry_run_of(plan_units: tuple[Unit, ...], residents: Unit, samples: int) -> DryRun:
        return dry_run(planner.model, plan_units, residents, model_loss, take(batch, samples))

    def of(plan: Plan, samples: int) -> DryRun:
        return dry_run_of(plan.units, plan.residents, samples)

    problems: list[str] = []
    refusal: str | None = None
    try:
        plan = planner.make()
    except ValueError as error:  # an engine would stop here; a dry run can tell what a sample takes on top
        refusal = str(error)
        plan = planner.make(smallest=True)
    choice = Choice(training.micro_batches or 1, training.stash == "host")
    while not problems:

        def try_out(contents: Sequence[Any], room: int, plan: Plan = plan) -> Trial:
            return of(plan, len(contents[0]["input_ids"])).trial

        try:
            choice = MicroBatching(planner, plan, try_out).choose(batch, training.micro_batches, begun=False)
            break
        except PlanTooLargeError as error:
            plan = planner.make_smaller(error.need)
        except DryRunError:
            problems += [] if refusal is None else [refusal]
            break
        except ValueError as error:
            problems.append(str(error))
            break
    if problems and training.micro_batches is None:
        choice = Choice(training.samples, training.stash != "device")  # one sample each needs least
    size = -(-training.samples // choice.micro_batches)
    return Estimate(plan, dict(plan.account), {}, choice, training.samples, size, problems), of


def _sweeps(plan: Plan, found: DryRun, choice: Choice, device: torch.device) -> tuple[Sweep, Sweep]:
    fetched = [0.0, 0.0]
    if not plan.held and device.type != "cpu":
        for visit in fetched_visits(found.visits, plan.weight_slots):
            fetched[visit >= found.forward_visits] += found.visits[visit].nbytes
    stashed = found.trial.stash if choice.stash_on_host and device.type != "cpu" else 0
    # Each boundary leaves when its micro-batch parks and comes back when it goes on; in the backward that is the
    # gradient, and what the forward has left comes back beside it.
    return (
        Sweep(found.forward, fetched[0], brought=stashed, stowed=stashed),
        Sweep(found.backward, fetched[1], brought=2 * stashed, stowed=stashed),
    )


def _update(plan: Plan, units: Sequence[Unit], optimizer_view: OptimizerView, share: Share, cluster: Cluster) -> Update:
    staging = plan.staging
    parameters = sum(part_elements(unit, optimizer_view, share) for unit in units)
    weights = {unit: trained_elements(unit) * weight_itemsize(unit) for unit in units}
    traffic, gradient = staging.traffic(units, held=plan.held)
    on_device = staging.has_gradient_berths(units, held=plan.held)
    if staging.deferred:
        waiting = 0 if on_device else gradient
        traffic = Traffic(0, traffic.host_in, traffic.device_in + waiting, traffic.device_out)
    width = max((weight_itemsize(unit) for unit in units), default=0)
    return Update(
        policy=staging.policy,
        parameters=parameters,
        subgroup=staging.subgroup,
        berths=staging.berths,
        deferred=staging.deferred,
        traffic=traffic,
        resident=Traffic(traffic.host_out, traffic.host_in, 0, width),
        landing=gradient,
        waits_on_device=on_device,
        others=sum(trained_elements(unit) for unit in units) - parameters,
        exchange=exchange_times(
            cluster,
            gradients=sum(trained_elements(unit) * landing_dtype(unit).itemsize for unit in units),
            weights=sum(nbytes for unit, nbytes in weights.items() if unit.modules),
            residents=sum(nbytes for unit, nbytes in weights.items() if not unit.modules),
        ),
    )


def _check_host(outlook: Estimate, machine: Machine) -> None:
    needed = sum(outlook.host.values())
    if machine.host_memory is not None and needed > machine.host_memory:
        parts = ", ".join(f"{show_bytes(nbytes)} for {part}" for part, nbytes in outlook.host.items() if nbytes)
        outlook.problems.append(
            f"{'the host' if machine.cluster.nodes == 1 else 'a node'} cannot hold it: {show_bytes(needed)} are needed "
            f"({parts}), and there are {show_bytes(machine.host_memory)}. A narrower precision (bf16 takes 12 bytes a "
            "parameter with AdamW), an optimizer with less state (sgd, lion) or fewer trained parameters need less; of "
            "more nodes, each has all weights, and its part of the rest"
        )
