"""The assumptions behind a plan, and the advice that `ferryman plan` gives."""

from __future__ import annotations

import math

from ferryman.cli.machine import MachineDescription
from ferryman.forecast.estimate import Estimate, Training
from ferryman.model.units import landing_dtype
from ferryman.runtime.sizes import show_rate


def assumptions(given: MachineDescription, training: Training, estimate: Estimate) -> list[str]:
    lines = [
        "Times are estimates: only matrix products and attention are counted as work of the device.",
        "A step takes as long as the busiest lane of each sweep; measured steps take a few percent longer.",
        "The compute time of updates on the device is ignored: moving their state over the link takes longer.",
        "Attention is assumed not to store its score matrix; the internal workspace of kernels is not counted.",
    ]
    if given.machine.operations is None:
        lines.append("Compute time is unknown and ignored: give --device-flops, the rate reached in practice.")
    if given.known["device FLOP/s"] == "measured here":
        lines.append(
            "Compute runs at the rate of one large matrix product here; narrow blocks are slower (--device-flops)."
        )
    if given.known["host updates"] == "measured here":
        lines.append("The host updates weights as fast as this machine does.")
    lines += _assumed_of_ranks(given)
    if estimate.forecast is not None and estimate.plan.staging.policy.kind == "auto":
        lines.append("'auto' divides updates by observed rates; the division shown here follows from the rates above.")
    return lines


def _assumed_of_ranks(given: MachineDescription) -> list[str]:
    cluster, lines = given.machine.cluster, list[str]()
    if cluster.size == 1:
        return lines
    lines.append("All devices are alike, and each has a link of its own; contention between links is not counted.")
    if cluster.devices > 1:
        lines.append("The ranks of a node share its cores: together they update as fast as the host does.")
        lines.append("Gradients are exchanged over loopback, one rank after the other; adding them up is not counted.")
    if given.known.get("loopback") == "measured here":
        lines.append("The ranks of a node exchange gradients at the rate measured between two ranks here (--loopback).")
    if given.device.type == "cpu":
        lines.append("On CPUs the ranks of a node share the compute of one.")
    if cluster.nodes > 1:
        lines.append(
            "All nodes are alike; every rank sends its own gradients, and the ranks of a node share its network."
        )
    lines.append("The time that ranks wait for one another at every unit and step is not counted.")
    return lines


def advice(estimate: Estimate, training: Training, given: MachineDescription) -> list[str]:
    found = estimate.forecast
    if found is None:
        return []
    lines, count, cluster = [], estimate.samples / estimate.sample_size, given.machine.cluster
    bounds = {found.forward.bound, found.backward.bound}
    if given.machine.operations is None:
        if math.isinf(found.needed_operations):
            lines.append(
                "One of the sweeps consists only of compute, so compute bounds it, however fast the device is."
            )
        else:
            needed = show_rate(found.needed_operations, "operations")
            lines.append(f"A device that reaches {needed} does not bound the step; a slower one does.")
    elif bounds - {"compute"} and found.break_even is not None and found.break_even > count:
        samples = found.break_even * estimate.sample_size * cluster.size
        lines.append(
            f"Use more samples per step: with {found.break_even} or more micro-batches (--batch {samples} with "
            f"micro-batches of {estimate.sample_size}) compute bounds the step, and "
            f"{'the link' if cluster.size == 1 else 'everything else'} costs no time."
        )
    elif bounds & {"link in", "link out"} and found.break_even is None and estimate.choice.stash_on_host:
        lines.append(
            "The stash crosses the link for every micro-batch: more device memory or a shorter sequence helps."
        )
    if found.forward.bound == "update" and training.max_grad_norm is not None:
        lines.append(
            "The update waits for the norm of all gradients; without --max-grad-norm it overlaps with the backward."
        )
    if "update" in bounds:
        lines.append(
            "Updates on the host bound a sweep: more host cores or memory bandwidth, or fewer trained parameters, help."
        )
    if bounds & {"exchange", "network"}:
        wide = any(landing_dtype(unit).itemsize > 2 for unit in estimate.plan.units if unit.trained_elements)
        lines.append(
            "The exchange of gradients between ranks bounds a sweep. Gradients cross once per step, however many "
            f"samples it has{'; in bf16 they take half as many bytes' if wide else ''}."
        )
    if not lines:
        lines.append("Compute bounds the step: only a faster device or less work makes it shorter.")
    return lines
