"""What `ferryman plan` takes for granted, and what it advises."""

from __future__ import annotations

import math

from ferryman.cli.machine import Described
from ferryman.forecast.estimate import Estimate, Training
from ferryman.model.units import landing_dtype, trained_elements
from ferryman.runtime.sizes import show_rate


def assumptions(given: Described, training: Training, outlook: Estimate) -> list[str]:
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
    said += _assumed_of_ranks(given)
    if outlook.forecast is not None and outlook.plan.staging.policy.kind == "auto":
        said.append("'auto' shares updates by rates that it observes; the split here is what they suggest.")
    return said


def _assumed_of_ranks(given: Described) -> list[str]:
    crew, said = given.machine.crew, list[str]()
    if crew.size == 1:
        return said
    said.append(
        "All devices are alike, and have links of their own; what they lose to each other there is not counted."
    )
    if crew.devices > 1:
        said.append("Ranks of a node share its cores: together they update as fast as the host does.")
        said.append("Gradients are exchanged over loopback, by one rank after the other; adding them up is left out.")
    if given.known.get("loopback") == "measured here":
        said.append("Ranks of a node exchange gradients as fast as two do here (--loopback).")
    if given.device.type == "cpu":
        said.append("On CPUs the ranks of a node share what one alone would have.")
    if crew.nodes > 1:
        said.append("Nodes are alike; every rank sends its own gradients over the network, which a node's ranks share.")
    said.append("What it takes ranks to find each other, for every unit and step, is left out.")
    return said


def advice(outlook: Estimate, training: Training, given: Described) -> list[str]:
    found = outlook.forecast
    if found is None:
        return []
    said, count, crew = [], outlook.samples / outlook.sample_size, given.machine.crew
    bounds = {found.forward.bound, found.backward.bound}
    if given.machine.operations is None:
        if math.isinf(found.needed_operations):
            said.append(
                "In one of the sweeps there is nothing but compute: it is the bound, whatever the device reaches."
            )
        else:
            needed = show_rate(found.needed_operations, "operations")
            said.append(f"A device that reaches {needed} is not the bound; a slower one is.")
    elif bounds - {"compute"} and found.break_even is not None and found.break_even > count:
        samples = found.break_even * outlook.sample_size * crew.size
        said.append(
            f"More samples in a step: from {found.break_even} micro-batches on (--batch {samples} with micro-batches "
            f"of {outlook.sample_size}), compute bounds it, and {'the link' if crew.size == 1 else 'all else'} costs "
            "nothing."
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
    if bounds & {"exchange", "network"}:
        wide = any(landing_dtype(unit).itemsize > 2 for unit in outlook.plan.units if trained_elements(unit))
        said.append(
            "Gradients on their way to the ranks that own them bound a sweep: they cross once a step, however many "
            f"samples it has{'; in bf16 they are half as many bytes' if wide else ''}."
        )
    if not said:
        said.append("Compute bounds the step: nothing but a faster device, or less work, makes it shorter.")
    return said
