"""The forecast: how long a step would take and what bounds it, from its work and the rates of a machine.

The sweeps of a step are phases of the performance model (`performance.py` has the equations). Weights are fetched,
gradients leave and the update runs once per sweep, for any number of micro-batches. Each micro-batch adds arithmetic
and, if the stash is on the host, copies of the stash in both directions. So more micro-batches add compute but no
fetches: from the *break-even* on, compute bounds the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ferryman.plan.network import ExchangeTimes
from ferryman.plan.performance import Phase, Prediction, predict, step_time
from ferryman.plan.policy import Policy
from ferryman.plan.rates import Rates
from ferryman.plan.schedule import MAX_SIMULATED, Traffic


@dataclass(frozen=True)
class Sweep:
    """The work of a forward or a backward."""

    operations: float  # floating-point operations per micro-batch
    fetched: float = 0.0  # bytes of weights to the device, once
    brought: float = 0.0  # bytes of the stash to the device, per micro-batch
    stowed: float = 0.0  # bytes of the stash to the host, per micro-batch


@dataclass(frozen=True)
class Update:
    """The work of an update, once per step and on each rank."""

    policy: Policy
    parameters: int  # number that this rank updates
    subgroup: int  # number of parameters in a subgroup
    berths: int
    deferred: bool  # True: it runs beside the next forward; False: beside the backward
    traffic: Traffic
    resident: Traffic  # traffic of subgroups whose state stays on the device
    landing: float  # bytes per parameter of gradients that wait on the host for the global norm
    waits_on_device: bool = False  # whether gradients of the device's subgroups wait on the device
    others: int = 0  # number that other ranks update: their gradients leave, and their weights come back, as well
    exchange: ExchangeTimes = field(default_factory=ExchangeTimes)


@dataclass(frozen=True)
class LaneTimes:
    """Seconds that each lane is busy in one phase."""

    compute: float
    link_in: float
    link_out: float
    update: float
    exchange: float | None = None  # None: there is no other rank to exchange with
    network: float | None = None

    @property
    def named(self) -> dict[str, float]:
        found = {"compute": self.compute, "link in": self.link_in, "link out": self.link_out, "update": self.update}
        others = {"exchange": self.exchange, "network": self.network}
        return found | {lane: seconds for lane, seconds in others.items() if seconds is not None}

    @property
    def bound(self) -> str:
        named = self.named
        return max(named, key=lambda lane: named[lane])


@dataclass(frozen=True)
class Forecast:
    """The predicted time of a step, and where it goes."""

    seconds: float
    forward: LaneTimes
    backward: LaneTimes
    share: float  # fraction of the parameters that the device updates
    break_even: int | None  # the number of micro-batches from which compute bounds both sweeps; None: it never does
    needed_operations: float  # floating-point operations per second at which compute would not bound the step


def forecast(
    forward: Sweep, backward: Sweep, update: Update | None, micro_batches: float, rates: Rates, operations: float | None
) -> Forecast:
    """Predicts a step. `micro_batches` is their number, in which a smaller one counts as a fraction. `operations` are
    the floating-point operations per second that the device reaches; None: not known, and ignored."""
    found = [_with(forward, backward, update, done, micro_batches, rates, operations) for done in _ways(update, rates)]
    return min(found, key=lambda one: one.seconds)


def _ways(update: Update | None, rates: Rates) -> list[Prediction]:
    """Ways to divide the update. `auto` also considers the host alone, which is better if the link is busy."""
    if update is None or not update.parameters:
        return [Prediction(0.0, 0.0, "host")]
    policies = [update.policy, Policy("host")] if update.policy.kind == "auto" else [update.policy]
    return [_predicted(replace(update, policy=policy), rates) for policy in policies]


def _predicted(update: Update, rates: Rates) -> Prediction:
    size = min(update.subgroup, update.parameters)
    count = min(MAX_SIMULATED, -(-update.parameters // size))
    found = predict(update.policy, [size] * count, update.traffic, rates, max(1, update.berths), update.resident)
    return replace(found, seconds=found.seconds * update.parameters / (size * count))


def _with(
    forward: Sweep,
    backward: Sweep,
    update: Update | None,
    done: Prediction,
    micro_batches: float,
    rates: Rates,
    operations: float | None,
) -> Forecast:
    phases = {}
    for name, sweep in (("forward", forward), ("backward", backward)):
        beside = update is not None and update.deferred == (name == "forward")
        fixed = _crossing(update, done.share, name) if update is not None else (0.0, 0.0)
        among = _among_ranks(update.exchange, name, beside=beside) if update is not None else (None, None)
        once = Phase(0.0, sweep.fetched + fixed[0], fixed[1], done.seconds if beside else 0.0, *among)
        whole = replace(
            once,
            compute=0.0 if operations is None else micro_batches * sweep.operations / operations,
            bytes_in=once.bytes_in + micro_batches * sweep.brought,
            bytes_out=once.bytes_out + micro_batches * sweep.stowed,
        )
        phases[name] = whole, once
    (first, first_once), (second, second_once) = phases["forward"], phases["backward"]
    seconds = step_time(first, second, rates)
    sweeps = ((forward, first_once, first), (backward, second_once, second))
    return Forecast(
        seconds,
        _lanes(first, rates),
        _lanes(second, rates),
        done.share,
        None if operations is None else _break_even(sweeps, rates, operations),
        max(_needed(micro_batches * sweep.operations, whole, rates) for sweep, _, whole in sweeps),
    )


def _needed(operations: float, phase: Phase, rates: Rates) -> float:
    others = _lanes(replace(phase, compute=0.0), rates)
    busiest = others.named[others.bound]
    return operations / busiest if busiest else math.inf


def _crossing(update: Update, share: float, phase: str) -> tuple[float, float]:
    """Bytes to the device and to the host in a phase, for an update and its gradients."""
    on_device, on_host = share * update.parameters, (1 - share) * update.parameters
    into = out = 0.0
    if update.deferred == (phase == "forward"):
        traffic = update.resident if update.policy.kind == "static" else update.traffic
        into += on_host * traffic.host_in + on_device * traffic.device_in
        out += on_host * traffic.host_out + on_device * traffic.device_out
        if update.others:  # if weights stay on the device, those that any rank has updated are fetched
            into += (update.others + on_device) * traffic.host_in
            out += update.others * traffic.host_out
    if update.deferred and phase == "backward":
        out += (on_host if update.waits_on_device else update.parameters + update.others) * update.landing
    return into, out


def _among_ranks(exchange: ExchangeTimes, phase: str, *, beside: bool) -> tuple[float | None, float | None]:
    """Seconds of exchanges in a phase: of gradients in the backward, of weights in the phase with the update."""
    gathered, crossed = exchange.gathered, exchange.crossed
    gone = phase == "backward"
    return (
        None if gathered is None else gone * gathered + beside * exchange.shared,
        None if crossed is None else gone * crossed + beside * exchange.returned,
    )


def _lanes(phase: Phase, rates: Rates) -> LaneTimes:
    link_in, link_out = phase.bytes_in / rates.link_in, phase.bytes_out / rates.link_out
    return LaneTimes(phase.compute, link_in, link_out, phase.update, phase.exchange, phase.network)


def _break_even(sweeps: tuple[tuple[Sweep, Phase, Phase], ...], rates: Rates, operations: float) -> int | None:
    most = 1
    for sweep, once, _ in sweeps:
        compute = sweep.operations / operations
        lanes = (
            (once.bytes_in / rates.link_in, sweep.brought / rates.link_in),
            (once.bytes_out / rates.link_out, sweep.stowed / rates.link_out),
            (once.update, 0.0),
            (once.exchange or 0.0, 0.0),
            (once.network or 0.0, 0.0),
        )
        for fixed, each in lanes:
            if each >= compute and (fixed or each):
                return None
            if fixed:
                most = max(most, math.ceil(fixed / (compute - each)))
    return most
