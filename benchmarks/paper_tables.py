"""Compares the performance model with the published tables of Deep Optimizer States, and predicts what they leave out.

    python benchmarks/paper_tables.py [--json]

Nothing is measured here: `ferryman.plan.performance` predicts, from published rates, what others measured on 4 x H100
and 4 x A100. Four processes share the parameters and the host, each with its own device and link, so one quarter is
computed, in subgroups of 100 M. The published code has one staging buffer and one stream: one berth, and one direction
at a time.

Inputs:

- Given: parameters per second with the host alone (8.6 and 3.8 G), 55.2 GB/s of PCIe 5 for H100, and half of that for
  the PCIe 4 of A100. Master weights and two moments in float32: 12 bytes in and 12 out. Weights in bfloat16: 2 in.
- Counted: the host's update moves 40 bytes of memory per parameter (16 read, 12 written, and 12 read because they are
  written). It is bound by memory, so a byte that crosses the link takes a fortieth of a parameter's time from it.
- Assumed: the device updates at its memory's bandwidth over 28 bytes, 60 % reached. It is never the bottleneck.
- Fitted, on the column k=10 alone, one number for each machine: parameters per second that the host updates when
  nothing blocks it. The curve over k is nearly flat, and k=10, with a tenth on the device, is already 1.3 to 1.5 times
  as fast as the host alone. So most of the gain does not come from the device, but from down-conversion and copies of
  weights that no longer block the host. This number separates that effect from the published host-only rate.
- Fitted, on the column 0 % of the static table: seconds of an iteration that are in none of the published phases.

The fitted numbers come from those columns alone. The form of the model does not: that transfers slow down the host was
found by looking at all strides on H100, but at none of the other tables. The count of 40 bytes matters most at k=2:
with 28 the largest error of a stride is 11 %, with 52 it is 17 % and with 64 it is 23 %, both on A100. With 55.2 GB/s
for A100 as well, no stride changes by more than 0.1 %, since the host bounds all of them.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace

from ferryman.plan.performance import Phase, Prediction, predict, step_time
from ferryman.plan.policy import Policy, parse_policy
from ferryman.plan.rates import Rates
from ferryman.plan.schedule import Traffic
from ferryman.plan.staging import BERTHS

GIGA = 1e9
RANKS, SUBGROUP = 4, 100_000_000
HOST_BYTES, DEVICE_BYTES = 40, 28  # of memory traffic per parameter
DEVICE_EFFICIENCY = 0.6  # the share of its memory's bandwidth that the device reaches
LINK_RATE = 55.2 * GIGA  # bytes per second, each way
GRADIENT_BYTES = 2
STEPS = 12  # until the scheduler has settled
MAX_ERROR = 0.15

CROSSING = Traffic(host_out=0, host_in=2, device_in=12, device_out=12)
STAYING = Traffic(host_out=0, host_in=2, device_in=0, device_out=0)
BLOCKED = Traffic(host_out=0, host_in=0, device_in=0, device_out=0)  # ZeRO-3: its copies are in its rate

# Seconds of 20B on H100: forward, backward, update.
ZERO3, WITHOUT_BLOCKING, INTERLEAVED = (0.208, 4.450, 2.271), (0.219, 0.983, 2.277), (0.229, 0.877, 1.298)

MODELS = {
    "7B": (7, 7.9, 14.2),
    "8.3B": (8.3, 6.0, 10.7),
    "10B": (10, 6.7, 11.9),
    "13B": (13, 7.7, 13.6),
    "20B": (20, 8.8, 15.4),
}
STATIC = {  # share: ZeRO-3 and interleaved, iteration and update
    0: (7.3, 3.0, 2.3, 1.3),
    10: (6.6, 2.7, 2.0, 1.1),
    20: (5.9, 2.6, 1.8, 1.0),
    30: (5.3, 2.5, 1.6, 0.9),
    40: (4.8, 2.3, 1.4, 0.8),
    50: (4.3, 2.2, 1.2, 0.7),
}

REMARKS = """\
- Iterations of models other than 20B are not predicted: their phases were not published.
- Published seconds have two digits: 0.7 s may be 0.65 or 0.75 s, which is 7 % of error by itself.
- The host is what bounds every stride, k=2 included. There the link is busy nearly as long, so a stride gains nothing
  from both ways at once: the gain is that more than half of the state can go to the device.
- A host that is bound by its memory moves 40 bytes to update a parameter and 24 to send it over and back: the device
  is then worth its traffic up to the link's limit, at any k. A kernel with fewer passes over memory changes that."""


@dataclass(frozen=True)
class Machine:
    """Rates of one process's share of a node."""

    name: str
    host_only: float  # parameters per second, with everything that blocks
    link: float  # bytes per second, each way
    device_memory: float  # bytes per second
    sweep: dict[int, float]  # G parameters per second of all processes, by stride
    host: float = 0.0  # parameters per second if nothing blocks and nothing crosses: fitted

    def memory_seconds(self, on_host: float, on_device: float) -> float:
        """Seconds that the host's memory is busy, with the host's updates and with everything that crosses."""
        crossing = on_host * CROSSING.host_in + on_device * (CROSSING.device_in + CROSSING.device_out)
        return (on_host + crossing / HOST_BYTES) / self.host

    def rates(self, on_host: float, on_device: float, *, duplex: bool) -> Rates:
        """While so many parameters are updated on either side."""
        host = on_host / self.memory_seconds(on_host, on_device)
        return Rates(host, DEVICE_EFFICIENCY * self.device_memory / DEVICE_BYTES, self.link, self.link, duplex)


H100 = Machine(
    "H100", 8.6 * GIGA / RANKS, LINK_RATE, 3350 * GIGA, {2: 15.3, 3: 14.9, 4: 14.2, 6: 13.3, 8: 13.0, 10: 12.7}
)
A100 = Machine(
    "A100", 3.8 * GIGA / RANKS, LINK_RATE / 2, 1555 * GIGA, {2: 5.7, 3: 5.6, 4: 5.3, 6: 5.1, 8: 5.1, 10: 5.1}
)


@dataclass(frozen=True)
class Cell:
    table: str
    column: str
    unit: str
    published: float
    predicted: float
    how: str = "predicted"  # or "given", "fitted"

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Promise:
    """What the same machine would reach with another schedule."""

    machine: str
    way: str
    seconds: float
    rate: float  # G parameters per second of all processes
    share: float
    bound: str


def subgroups(parameters: float) -> list[int]:
    """The sizes of one process's subgroups; the last one is the remainder."""
    count, rest = divmod(round(parameters / RANKS), SUBGROUP)
    return [SUBGROUP] * count + [rest] * (rest > 0)


def at_stride(machine: Machine, stride: int, sizes: list[int], *, duplex: bool, berths: int) -> Prediction:
    policy = Policy("stride", stride=stride)
    on_device = sum(size for index, size in enumerate(sizes) if policy.device_owns(index))
    rates = machine.rates(sum(sizes) - on_device, on_device, duplex=duplex)
    return predict(policy, sizes, CROSSING, rates, berths, STAYING)


def as_published(machine: Machine, stride: int, sizes: list[int]) -> float:
    """Seconds, with one direction at a time and with one berth."""
    return at_stride(machine, stride, sizes, duplex=False, berths=1).seconds


def with_auto(machine: Machine, sizes: list[int]) -> Prediction:
    """The scheduler, after some steps in which it followed the rate that the host has beside all that crosses."""
    total = sum(sizes)
    rates = machine.rates(total, 0, duplex=True)
    for _ in range(STEPS):
        found = predict(Policy("auto"), sizes, CROSSING, rates, 2, STAYING)
        on_device = found.share * total
        if on_device < total:  # otherwise the host has no part in it
            rates = rates.following(host=machine.rates(total - on_device, on_device, duplex=True).host)
    # With next to nothing on the host, its memory can still be what limits the link.
    memory = machine.memory_seconds(total - on_device, on_device)
    if memory > found.seconds:
        found = replace(found, seconds=memory, bound="memory of the host")
    return found


def fit(machine: Machine, sizes: list[int]) -> Machine:
    """The machine with the host rate that reproduces the published column k=10."""
    low, high = machine.host_only, 10 * machine.host_only
    for _ in range(40):
        middle = (low + high) / 2
        rate = in_all(sizes, as_published(replace(machine, host=middle), 10, sizes))
        low, high = (middle, high) if rate < machine.sweep[10] else (low, middle)
    return replace(machine, host=middle)


def in_all(sizes: list[int], seconds: float) -> float:
    """G parameters per second of all processes."""
    return RANKS * sum(sizes) / seconds / GIGA


def stride_cells(machine: Machine, sizes: list[int]) -> list[Cell]:
    table, unit = f"20B by stride, {machine.name}", "Gparam/s"
    given = RANKS * machine.host_only / GIGA
    alone = Rates(machine.host_only, machine.device_memory, machine.link, machine.link, duplex=False)
    none = predict(Policy("host"), sizes, BLOCKED, alone, 1, BLOCKED).seconds
    cells = [Cell(table, "none", unit, given, in_all(sizes, none), "given")]
    for stride, published in machine.sweep.items():
        predicted = in_all(sizes, as_published(machine, stride, sizes))
        cells.append(Cell(table, f"k={stride}", unit, published, predicted, "fitted" if stride == 10 else "predicted"))
    return cells


def static_cells(machine: Machine, sizes: list[int]) -> list[Cell]:
    """ZeRO-3 with a share of the state on the device; and with the rest of it interleaved."""
    alone = machine.rates(1, 0, duplex=False)
    zero3_rates = replace(alone, host=machine.host_only)
    blocking = ZERO3[1] - WITHOUT_BLOCKING[1]  # of backward: copies of the gradients that the host needs
    outside = [STATIC[0][0] - sum(ZERO3), STATIC[0][1] - sum(INTERLEAVED)]
    cells = []
    for percent, published in STATIC.items():
        share = percent / 100
        zero3 = predict(parse_policy(f"static:{share}"), sizes, BLOCKED, zero3_rates, 1, BLOCKED).seconds
        stays = round(share * len(sizes))
        ours = as_published(machine, 2, sizes[stays:]) + sum(sizes[:stays]) / alone.device
        predicted = (
            ZERO3[0] + ZERO3[1] - share * blocking + zero3 + outside[0],
            INTERLEAVED[0] + INTERLEAVED[1] + ours + outside[1],
            zero3,
            ours,
        )
        names = ("iteration, ZeRO-3", "iteration, interleaved", "update, ZeRO-3", "update, interleaved")
        for name, is_so, should_be in zip(names, published, predicted, strict=True):
            known = "given" if name == "update, ZeRO-3" else "fitted" if name.startswith("iteration") else "predicted"
            how = known if percent == 0 else "predicted"
            cells.append(Cell(f"20B with a static share, H100: {name}", f"{percent} %", "s", is_so, should_be, how))
    return cells


def model_cells(machine: Machine) -> list[Cell]:
    """Stride 2 from each model's own rate with the host alone, of which what blocks takes as much as at 20B."""
    cells = []
    for name, (billions, zero3, published) in MODELS.items():
        sizes = subgroups(billions * GIGA)
        host = machine.host * zero3 / (RANKS * machine.host_only / GIGA)
        predicted = in_all(sizes, as_published(replace(machine, host=host), 2, sizes))
        cells.append(Cell("models at stride 2, H100", name, "Gparam/s", published, predicted))
    return cells


def promises(machine: Machine, sizes: list[int]) -> list[Promise]:
    """The same machine, without what blocks the host."""

    def promise(way: str, found: Prediction) -> Promise:
        return Promise(machine.name, way, found.seconds, in_all(sizes, found.seconds), found.share, found.bound)

    strides = [at_stride(machine, stride, sizes, duplex=True, berths=BERTHS) for stride in machine.sweep]
    return [
        promise("stride:2, one way at a time", at_stride(machine, 2, sizes, duplex=False, berths=1)),
        promise("the best stride, both ways at once", min(strides, key=lambda found: found.seconds)),
        promise("auto, both ways at once", with_auto(machine, sizes)),
    ]


def step_bounds(machine: Machine, sizes: list[int]) -> dict[str, float]:
    """Lower bound of a 20B step with `auto`: deferred updates overlap with forward, eager ones with backward."""
    auto, rates = with_auto(machine, sizes), machine.rates(1, 0, duplex=True)
    gradients = GRADIENT_BYTES * sum(sizes) * (1 - auto.share)
    forward, backward = Phase(INTERLEAVED[0]), Phase(INTERLEAVED[1], bytes_out=gradients)
    return {
        "deferred": step_time(replace(forward, update=auto.seconds), backward, rates),
        "eager": step_time(forward, replace(backward, update=auto.seconds), rates),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The performance model against published tables.")
    parser.add_argument("--json", action="store_true", help="print the cells as JSON")
    as_json = parser.parse_args().json
    sizes = subgroups(20 * GIGA)
    machines = [fit(machine, sizes) for machine in (H100, A100)]
    h100 = machines[0]
    cells = [cell for machine in machines for cell in stride_cells(machine, sizes)]
    cells += static_cells(h100, sizes) + model_cells(h100)
    better = [promise for machine in machines for promise in promises(machine, sizes)]
    bounds = step_bounds(h100, sizes)
    if as_json:
        print(
            json.dumps(
                {
                    "cells": [asdict(cell) | {"error": cell.error} for cell in cells],
                    "fitted": {machine.name: RANKS * machine.host / GIGA for machine in machines},
                    "promises": [asdict(promise) for promise in better],
                    "step bounds": bounds,
                }
            )
        )
        return
    for machine in machines:
        blocked = 1 - machine.host_only / machine.host
        print(
            f"{machine.name}: fitted {RANKS * machine.host / GIGA:.1f} Gparam/s on the host if nothing blocks it; "
            f"{blocked:.0%} of an update by the host alone is blocked"
        )
    for table in dict.fromkeys(cell.table for cell in cells):
        print(f"\n{table}")
        for cell in (cell for cell in cells if cell.table == table):
            how = "" if cell.how == "predicted" else f"  ({cell.how})"
            print(
                f"  {cell.column:>5}  published {cell.published:5.1f} {cell.unit:9} predicted {cell.predicted:5.2f}"
                f"  error {cell.error:+6.1%}{how}"
            )
    errors = [abs(cell.error) for cell in cells if cell.how == "predicted"]
    within = sum(error <= MAX_ERROR for error in errors)
    print(f"\n{within} of {len(errors)} predicted cells are within {MAX_ERROR:.0%}; largest error: {max(errors):.1%}")
    print("\nThe same machines, with nothing that blocks the host and three berths (20B, update)")
    for found in better:
        print(
            f"  {found.machine}  {found.way:35} {found.seconds:5.2f} s {found.rate:5.1f} Gparam/s, {found.share:4.0%} "
            f"on the device, bound by: {found.bound}"
        )
    print("\nLower bound of a step of 20B on H100 with auto (published: 2.4 s in phases, 2.9 s in all)")
    for mode, seconds in bounds.items():
        print(f"  updates {mode:8} {seconds:5.2f} s")
    print(f"\n{REMARKS}")


if __name__ == "__main__":
    main()
