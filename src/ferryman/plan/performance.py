"""The performance model: how long an update and a step take, and how short they could be.

Rates: U_h and U_d, parameters a second that host and device update; B_in and B_out, bytes a second of the link to the
device and from it. Traffic: bytes per parameter, h_in and h_out for what the host updates, d_in and d_out for what the
device does. Of P parameters the device updates a share x. Then the lanes are busy for

    host        P (1 - x) / U_h
    link in     P (x d_in  + (1 - x) h_in ) / B_in
    link out    P (x d_out + (1 - x) h_out) / B_out
    device      P x / U_d

seconds, and an update that shares its work perfectly takes as long as the busiest of them: F(x), the *fluid* time. A
link that is used one way at a time is busy for the sum of both. Each line is straight, so F is least at x = 0, at x = 1
or where two lines cross; that x is what the share of a good schedule tends to, and P F(x) what none of them beats.

A stride k is x = 1/k: per k subgroups of S parameters, with state of 12 bytes and weights of 2,

    T(k) = max{ (k-1) S/U_h , (12 S + 2 (k-1) S)/B_in , 12 S/B_out , S/U_d }        k S parameters, or S k F(1/k)

and while a subgroup crosses in and is updated, which takes S (d_in/B_in + 1/U_d), the host should have work:

    k* = 1 + ceil( U_h (d_in/B_in + 1/U_d) )        the smallest useful stride

What fluid times leave out is that the pipe has to fill and to drain, and that a berth is held while a subgroup passes
through. `predict` simulates that (`schedule.makespan`).

A step is two phases, each as long as what is busiest in it:

    forward     max{ compute, bytes in / B_in, bytes out / B_out, update if deferred }
    backward    max{ compute, bytes in / B_in, bytes out / B_out, update if eager }

and, with several ranks, not shorter than what these exchange beside it (`exchange.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ferryman.plan.policy import Policy
from ferryman.plan.rates import Rates
from ferryman.plan.schedule import SAMPLE, Traffic, assign, idle, lane_seconds, makespan


@dataclass(frozen=True)
class Prediction:
    """Of an update phase that begins with everything idle."""

    seconds: float
    share: float  # of the parameters, on the device
    bound: str  # the busiest lane: "host", "link in", "link out" or "device"


@dataclass(frozen=True)
class Phase:
    """What a forward or a backward does, in seconds and in bytes."""

    compute: float
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    update: float = 0.0  # seconds of the updates that run beside it
    exchange: float | None = None  # seconds, of several ranks; None: there are none within the node
    network: float | None = None  # seconds; None: there is one node


def fluid_share(traffic: Traffic, rates: Rates) -> float:
    """The share of the parameters on the device at which the busiest lane is least busy; of equals, the smallest."""
    at_0, at_1 = (lane_seconds(1 - x, x, traffic, rates).values() for x in (0, 1))
    lines = [(start, end - start) for start, end in zip(at_0, at_1, strict=True)]
    shares = {0.0, 1.0}
    for (start, slope), (other_start, other_slope) in itertools.combinations(lines, 2):
        if slope != other_slope:
            shares.add(min(1.0, max(0.0, (other_start - start) / (slope - other_slope))))
    return min(sorted(shares), key=lambda x: _busiest(x, traffic, rates))


def fluid_time(parameters: float, traffic: Traffic, rates: Rates) -> float:
    """Seconds that no schedule beats."""
    return parameters * _busiest(fluid_share(traffic, rates), traffic, rates)


def stride_time(stride: int, parameters: float, traffic: Traffic, rates: Rates) -> float:
    """Seconds with one subgroup in `stride` on the device, in the long run."""
    return parameters * _busiest(1 / stride, traffic, rates)


def smallest_useful_stride(traffic: Traffic, rates: Rates) -> int:
    """Below it the host waits for the device."""
    return 1 + math.ceil(rates.host * (traffic.device_in / rates.link_in + 1 / rates.device))


def predict(
    policy: Policy, sizes: Sequence[int], traffic: Traffic, rates: Rates, berths: int, resident: Traffic
) -> Prediction:
    """An update phase of subgroups of these sizes, under any policy.

    `resident`: the traffic if the state of what the device updates stays there, as under `static`.
    """
    queues = idle(berths)
    if policy.kind == "auto":
        choices = assign(sizes, traffic, rates, queues)
    else:
        choices = [policy.device_owns(index) for index in range(len(sizes))]
    if policy.kind == "static":
        traffic, queues = resident, idle(len(sizes))  # what stays there needs no berth
    moved = sum(size for size, chosen in zip(sizes, choices, strict=True) if chosen)
    busy = lane_seconds(sum(sizes) - moved, moved, traffic, rates)
    some = sizes[:SAMPLE]
    seconds = makespan(choices[:SAMPLE], some, traffic, rates, queues) * sum(sizes) / sum(some)
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
