"""Estimates whether a training run would fit, how it uses memory, and how long a step takes.

The model is not allocated, and the estimate may be for another machine. The plan is made as an engine makes it. The
memory of micro-batches comes from a dry run on the meta device (`forecast/dry_run.py`) instead of a memory trial, and
the times come from the performance model (`plan/step_forecast.py`).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ferryman.distributed.ranks import Share
from ferryman.forecast.dry_run import DryRun, DryRunError, dry_run
from ferryman.model.loss import model_loss
from ferryman.model.precision import dtype_of
from ferryman.model.units import Unit, landing_dtype
from ferryman.options import PlainOptions
from ferryman.plan.batch import parts_of, portion, take
from ferryman.plan.fit import Choice, Trial
from ferryman.plan.keep import HOST_RESERVE, bytes_of, fill, seconds_of
from ferryman.plan.network import Cluster, exchange_times
from ferryman.plan.plan import Plan, PlanTooLargeError
from ferryman.plan.rates import Rates
from ferryman.plan.schedule import Traffic
from ferryman.plan.slot_policy import weight_slot_policy
from ferryman.plan.step_forecast import Forecast, Sweep, Update, forecast
from ferryman.runtime.link_rate import class_of
from ferryman.runtime.sizes import show_bytes
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.state import part_elements
from ferryman.server.store import account
from ferryman.training import checks
from ferryman.training.micro_batching import MicroBatching
from ferryman.training.planner import Planner


@dataclass(frozen=True)
class Machine:
    """A machine, or each of several nodes, measured or described."""

    rates: Rates  # infinite if something takes no time; the host's rate is that of all its cores
    device_memory: int | None = None  # bytes per device; None: the device is the host itself
    host_memory: int | None = None  # bytes; None: not known
    operations: float | None = None  # floating-point operations per second, in the precision of compute; None: unknown
    cluster: Cluster = Cluster()  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class Training(PlainOptions):
    """The training run to estimate: the settings of the engine, and the batch of a step."""

    samples: int  # per step, over all ranks
    length: int  # tokens per sample
    micro_batches: int | None = None  # over all ranks; None: as few as the memory allows

    def of_one(self, size: int) -> Training:
        """The largest part of the batch, if `ferryman train` divides it among `size` ranks."""
        return max(self.of_each(size), key=lambda one: (one.samples, -(one.micro_batches or 0)))

    def of_each(self, size: int) -> list[Training]:
        """The parts of all ranks that have samples."""
        found = (portion(self.samples, self.micro_batches, rank, size) for rank in range(size))
        shares = ((len(range(self.samples)[mine]), count) for mine, count in found)
        return [replace(self, samples=samples, micro_batches=count) for samples, count in shares if samples]


@dataclass
class Estimate:
    """The memory and the time of a step."""

    plan: Plan
    device: dict[str, int]  # bytes on each device, by purpose
    host: dict[str, int]  # bytes on each node, by purpose
    choice: Choice  # for each rank
    samples: int  # of the rank that has the most
    sample_size: int  # samples per micro-batch; the last one may have fewer
    problems: list[str] = field(default_factory=list)  # why it does not fit, and what would help
    notes: list[str] = field(default_factory=list)
    forecast: Forecast | None = None  # None: the dry run failed
    forward_operations: float = 0.0  # per step
    backward_operations: float = 0.0
    kept_calls: int = 0  # per step; those at the turn, which are always kept, are in neither count
    recomputed_calls: int = 0
    one_device: Estimate | None = None  # with several devices: the same step on a single one

    @property
    def fits(self) -> bool:
        return not self.problems


def estimate_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, training: Training, machine: Machine, device: torch.device
) -> Estimate:
    """Estimates a step. `model` is on meta; `device` only says whether the device is the host itself.

    With several ranks, the estimate is for the last one: no rank has a larger part.
    """
    cluster, whole = machine.cluster, training
    _check_cut(whole, cluster.size)
    training = training.of_one(cluster.size)
    shares = [Share(rank, cluster.size) for rank in range(cluster.size - cluster.devices, cluster.size)]
    dtypes = dtype_of(model, training.precision)
    checks.parameters(model.named_parameters(), dtypes)
    optimizer_view = OptimizerView(optimizer, model, training.state)
    options = replace(training, memory=machine.device_memory)
    link = class_of(machine.rates.link_in) if math.isfinite(machine.rates.link_in) else None
    planner = Planner(model, device, options, dtypes, optimizer_view, shares[-1], link=link)
    result, dry_run_of = _fit(planner, training)
    plan = result.plan
    units = plan.in_forward_order
    result.host.update(account(units, optimizer_view, landing=plan.staging.deferred, shares=shares))
    count, size = result.choice.micro_batches, result.sample_size
    try:
        found = dry_run_of(plan, size)
        last = dry_run_of(plan, result.samples - (count - 1) * size)
    except DryRunError as error:
        result.notes.append(
            f"A dry run of the model needs real data ({error}), so neither the device memory of micro-batches nor the "
            "time of a step is known"
        )
        found = None
    if plan.staging.note is not None:
        result.notes.append(plan.staging.note)
    if found is not None:
        most = max(stretch.peak for stretch in found.trial.stretches)
        stashed = (count - 1) * found.trial.stash + last.trial.stash
        rates, operations = replace(machine.rates, host=machine.rates.host / cluster.devices), machine.operations
        if device.type == "cpu":
            result.device.clear()
            result.host["one call's activations"] = cluster.devices * most
            result.host["stash"] = cluster.devices * stashed
            result.choice = _keep_on_host(result, found, machine, training.recompute)
            if result.choice.keep:
                result.host["kept activations"] = cluster.devices * (result.choice.keep.nbytes or 0)
            operations = None if operations is None else operations / cluster.devices
        else:
            result.device["one call's activations"] = most
            if result.choice.keep:
                result.device["kept activations"] = result.choice.keep.nbytes or 0
            if result.choice.stash_on_host:
                result.host["stash"] = cluster.devices * stashed
                result.device["boundaries that stay"] = result.choice.staying * found.trial.boundary
            else:
                result.device["stash"] = stashed
        sweeps = _sweeps(plan, found, result.choice, device)
        costs = found.trial.costs
        result.kept_calls = sum((result.choice.keep.counts or {}).get(module, 0) for module in costs)
        result.recomputed_calls = count * len(costs) - result.kept_calls
        update = _update(plan, units, optimizer_view, shares[-1], cluster)
        result.forecast = forecast(*sweeps, update, result.samples / size, rates, operations)
        result.forward_operations, result.backward_operations = (
            whole.samples / size * sweep.operations for sweep in sweeps
        )
    _check_host(result, machine)
    if cluster.size > 1:
        one = replace(machine, cluster=Cluster())
        result.one_device = estimate_step(model, optimizer, replace(whole, micro_batches=None), one, device)
    return result


def _batch(training: Training) -> dict[str, torch.Tensor]:
    ids = torch.zeros(training.samples, training.length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def _check_cut(training: Training, size: int) -> None:
    """Raises a ValueError if a rank could not cut its part of the batch."""
    for one in training.of_each(size):
        try:
            parts_of(_batch(one), one.micro_batches)
        except ValueError as error:
            if size > 1:
                error.add_note(
                    f"This is the part of one of {size} ranks, which together have {training.samples} samples in "
                    f"{training.micro_batches} micro-batches"
                )
            raise


def _fit(planner: Planner, training: Training) -> tuple[Estimate, Callable[[Plan, int], DryRun]]:
    """A plan and a number of micro-batches, chosen as an engine chooses them at its first batch."""
    batch = _batch(training)

    @functools.cache
    def dry_run_of(plan_units: tuple[Unit, ...], residents: Unit, samples: int) -> DryRun:
        chunked_loss = bool(training.chunked_loss)
        parts = take(batch, samples)
        return dry_run(planner.model, plan_units, residents, model_loss, parts, chunked_loss=chunked_loss)

    def of(plan: Plan, samples: int) -> DryRun:
        return dry_run_of(plan.units, plan.residents, samples)

    problems: list[str] = []
    refusal: str | None = None
    try:
        plan = planner.make()
    except ValueError as error:  # an engine would stop here; a dry run finds out what a sample needs in addition
        refusal = str(error)
        plan = planner.make(smallest=True)
    choice = Choice(training.micro_batches or 1, training.stash == "host")
    while not problems:

        def try_out(contents: Sequence[Any], room: int, choice: Choice, plan: Plan = plan) -> Trial:
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
        choice = Choice(training.samples, training.stash != "device")  # micro-batches of one sample need the least
    size = -(-training.samples // choice.micro_batches)
    return Estimate(plan, dict(plan.account), {}, choice, training.samples, size, problems), of


def _keep_on_host(result: Estimate, found: DryRun, machine: Machine, recompute: str) -> Choice:
    """The calls that keep their graphs where the device is the host, which an engine decides while a step runs: see
    Note [Without a budget] in `micro_batching.py`."""
    choice, costs = result.choice, found.trial.costs
    if recompute == "always":
        return choice
    count, free = choice.micro_batches, sys.maxsize
    if recompute == "auto" and machine.host_memory is not None:
        free = int((1 - HOST_RESERVE) * machine.host_memory) - sum(result.host.values())
    keep = fill(costs, count, free // machine.cluster.devices, stash_on_host=False)
    nbytes = bytes_of(keep, costs, micro_batches=count, stash_on_host=False)
    return choice._replace(keep=replace(keep, nbytes=nbytes, seconds=seconds_of(keep, costs, micro_batches=count)))


def _sweeps(plan: Plan, found: DryRun, choice: Choice, device: torch.device) -> tuple[Sweep, Sweep]:
    fetched = [0.0, 0.0]
    if not plan.held and device.type != "cpu":
        for visit in weight_slot_policy(plan.weight_slot_sizes).fetched_visits(found.visits):
            fetched[visit >= found.forward_visits] += found.visits[visit].nbytes
    stashed = found.trial.stash if choice.stash_on_host and device.type != "cpu" else 0
    # Each boundary activation leaves once, and comes back in the backward. If it does not stay, it also comes back in
    # the forward; and in the backward, the gradient leaves when its micro-batch parks and comes back when it resumes.
    saved = (choice.keep.seconds or 0.0) / choice.micro_batches  # a dry run counts operations
    moving = stashed * (1 - choice.staying / choice.micro_batches)
    return (
        Sweep(found.forward, fetched[0], brought=moving, stowed=stashed),
        Sweep(found.backward - saved, fetched[1], brought=stashed + moving, stowed=moving),
    )


def _update(plan: Plan, units: Sequence[Unit], optimizer_view: OptimizerView, share: Share, cluster: Cluster) -> Update:
    staging = plan.staging
    parameters = sum(part_elements(unit, optimizer_view, share) for unit in units)
    weights = {unit: unit.trained_elements * unit.weight_itemsize for unit in units}
    traffic, gradient = staging.traffic(units, held=plan.held)
    on_device = staging.has_gradient_berths(units, held=plan.held)
    if staging.deferred:
        waiting = 0 if on_device else gradient
        traffic = Traffic(0, traffic.host_in, traffic.device_in + waiting, traffic.device_out)
    width = max((unit.weight_itemsize for unit in units), default=0)
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
        others=sum(unit.trained_elements for unit in units) - parameters,
        exchange=exchange_times(
            cluster,
            gradients=sum(unit.trained_elements * landing_dtype(unit).itemsize for unit in units),
            weights=sum(nbytes for unit, nbytes in weights.items() if unit.modules),
            residents=sum(nbytes for unit, nbytes in weights.items() if not unit.modules),
        ),
    )


def _check_host(result: Estimate, machine: Machine) -> None:
    needed = sum(result.host.values())
    if machine.host_memory is not None and needed > machine.host_memory:
        parts = ", ".join(f"{show_bytes(nbytes)} for {part}" for part, nbytes in result.host.items() if nbytes)
        result.problems.append(
            f"{'the host' if machine.cluster.nodes == 1 else 'a node'} has too little memory: {show_bytes(needed)} are "
            f"needed ({parts}), and there are {show_bytes(machine.host_memory)}. A narrower precision (bf16 takes 12 "
            "bytes per parameter with AdamW), compact state (state='8bit' takes 6), an optimizer with less state (sgd, "
            "lion) or fewer trained parameters need less; with more nodes, each has all weights and its part of the "
            "rest"
        )
