"""The performance model: how long an update and a step take, and how short they could be.

Rates: U_h and U_d are the parameters per second that host and device update; B_in and B_out are the bytes per second of
the link to the device and from it. Traffic, in bytes per parameter: h_in and h_out for parameters that the host
updates, d_in and d_out for those that the device updates. The device updates a share x of P parameters. Then the lanes
are busy for

    host        P (1 - x) / U_h
    link in     P (x d_in  + (1 - x) h_in ) / B_in
    link out    P (x d_out + (1 - x) h_out) / B_out
    device      P x / U_d

seconds. An update that divides its work perfectly takes as long as the busiest lane: P F(x), the *fluid* time. A link
that is used in one direction at a time is busy for the sum of both. Each time is linear in x, so F has its minimum at
x = 0, at x = 1 or where two lines cross. The share of a good schedule tends to that x, and no schedule beats P F(x).

A stride k means x = 1/k. With 12 bytes of state and 2 bytes of weights per parameter, k subgroups of S parameters take

    T(k) = max{ (k-1) S/U_h , (12 S + 2 (k-1) S)/B_in , 12 S/B_out , S/U_d }        that is, S k F(1/k)

seconds. While a subgroup crosses to the device and is updated, which takes S (d_in/B_in + 1/U_d) seconds, the host
should have work:

    k* = 1 + ceil( U_h (d_in/B_in + 1/U_d) )        the smallest useful stride

Fluid times ignore that the pipeline has to fill and to drain, and that a subgroup occupies a berth while it passes
through. `predict` simulates both (`schedule.makespan`).

A step consists of two phases, each as long as its busiest lane:

    forward     max{ compute, bytes in / B_in, bytes out / B_out, update if deferred }
    backward    max{ compute, bytes in / B_in, bytes out / B_out, update if eager }

With several ranks, each phase is also at least as long as the exchanges beside it (`network.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ferryman.plan.policy import Policy
from ferryman.plan.rates import Rates
from ferryman.plan.schedule import MAX_SIMULATED, Traffic, assign, idle, lane_seconds, makespan


@dataclass(frozen=True)
class Prediction:
    """The predicted time of an update phase that begins with all lanes idle."""

    seconds: float
    share: float  # fraction of the parameters that the device updates
    bound: str  # the busiest lane: "host", "link in", "link out" or "device"


@dataclass(frozen=True)
class Phase:
    """The work of a forward or a backward."""

    compute: float  # seconds
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    update: float = 0.0  # seconds of the updates that run beside it
    exchange: float | None = None  # seconds of exchanges within a node; None: the node has one rank
    network: float | None = None  # seconds of exchanges between nodes; None: there is one node


def fluid_share(traffic: Traffic, rates: Rates) -> float:
    """The share of parameters updated on the device that minimizes the fluid time; of equal ones, the smallest."""
    at_0, at_1 = (lane_seconds(1 - x, x, traffic, rates).values() for x in (0, 1))
    lines = [(start, end - start) for start, end in zip(at_0, at_1, strict=True)]
    shares = {0.0, 1.0}
    for (start, slope), (other_start, other_slope) in itertools.combinations(lines, 2):
        if slope != other_slope:
            shares.add(min(1.0, max(0.0, (other_start - start) / (slope - other_slope))))
    return min(sorted(shares), key=lambda x: _busiest(x, traffic, rates))


def fluid_time(parameters: float, traffic: Traffic, rates: Rates) -> float:
    """The fluid time in seconds: a lower bound for every schedule."""
    return parameters * _busiest(fluid_share(traffic, rates), traffic, rates)


def stride_time(stride: int, parameters: float, traffic: Traffic, rates: Rates) -> float:
    """Seconds if the device updates one subgroup in `stride`, without filling and draining the pipeline."""
    return parameters * _busiest(1 / stride, traffic, rates)


def smallest_useful_stride(traffic: Traffic, rates: Rates) -> int:
    """The smallest stride at which the host does not wait for the device."""
    return 1 + math.ceil(rates.host * (traffic.device_in / rates.link_in + 1 / rates.device))


def predict(
    policy: Policy, sizes: Sequence[int], traffic: Traffic, rates: Rates, berths: int, resident: Traffic
) -> Prediction:
    """Predicts an update phase of subgroups of these sizes, under any policy.

    `resident`: the traffic if the device keeps the state of its subgroups, as under `static`.
    """
    queues = idle(berths)
    if policy.kind == "auto":
        choices = assign(sizes, traffic, rates, queues)
    else:
        choices = [policy.device_owns(index) for index in range(len(sizes))]
    if policy.kind == "static":
        traffic, queues = resident, idle(len(sizes))  # each subgroup has its own berth
    moved = sum(size for size, chosen in zip(sizes, choices, strict=True) if chosen)
    busy = lane_seconds(sum(sizes) - moved, moved, traffic, rates)
    some = sizes[:MAX_SIMULATED]
    seconds = makespan(choices[:MAX_SIMULATED], some, traffic, rates, queues) * sum(sizes) / sum(some)
    return Prediction(seconds, moved / sum(sizes), max(busy, key=lambda lane: busy[lane]))


def step_time(forward: Phase, backward: Phase, rates: Rates) -> float:
    """The lower bound of a step: each phase is at least as long as its busiest lane."""
    return sum(
        max(
            phase.compute,
            phase.bytes_in / rates.link_in,
            phase.bytes_out / rates.link_out,
            phase.update,
            phase.exchange or 0.0,
            phase.network or 0.0,
        )
        for phase in (forward, backward)
    )


def _busiest(share: float, traffic: Traffic, rates: Rates) -> float:
    return max(lane_seconds(1 - share, share, traffic, rates).values())
