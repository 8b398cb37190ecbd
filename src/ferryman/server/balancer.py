"""The split: which subgroups are the host's and which the device's, from what was asked for and what is observed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ferryman.model.units import Subgroup, Unit, weight_itemsize
from ferryman.plan.performance import predict
from ferryman.plan.rates import Rates
from ferryman.plan.schedule import Queues, Traffic, assign, choose, idle, on_device
from ferryman.plan.staging import BERTHS, LEAST, Staging
from ferryman.runtime.marks import Mark, busy_seconds

# A plan for all subgroups stays as long as no rate has moved by more than this: noise is no reason to make another.
_MOVED = 0.05

_MANY = 1024  # pieces of work that are remembered

_BACK = 1.2  # how fast it is expected back, each step


class Gauge:
    """What one resource has been given and has not done, and how fast it was with what it has done."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Mark, float]] = []
        self._passed: list[tuple[Mark, float]] = []

    def add(self, mark: Mark, amount: float) -> None:
        self._under_way.append((mark, amount))
        if len(self._under_way) > _MANY:  # nobody has asked for a long time, as between steps
            self._look()
            del self._passed[:-_MANY]

    def queued(self) -> float:
        """The amount that is not done yet."""
        self._look()
        return sum(amount for _, amount in self._under_way)

    def rate(self) -> float | None:
        """Of what was done since this was asked last; None if that is too little to tell."""
        self._look()
        passed, self._passed = self._passed, []
        seconds = busy_seconds(mark for mark, _ in passed)
        amount = sum(amount for mark, amount in passed if not mark.failed())
        return amount / seconds if seconds > 0 and amount > 0 else None

    def forget(self) -> None:
        self._under_way.clear()
        self._passed.clear()

    def _look(self) -> None:
        waiting: list[tuple[Mark, float]] = []
        for mark, amount in self._under_way:
            (self._passed if mark.passed() else waiting).append((mark, amount))
        self._under_way = waiting


class Balancer:
    """Knows the policy, the rates and the queues."""

    def __init__(self) -> None:
        self.host, self.device, self.link_in, self.link_out = Gauge(), Gauge(), Gauge(), Gauge()
        self.rates: Rates | None = None  # not before they were measured
        self._measured: Rates | None = None
        self._staging: Staging | None = None
        self._numbers: dict[Subgroup, int] = {}  # those that the device can update, in forward order
        self._traffic = Traffic(0, 0, 0, 0)
        self._weight_bytes = 0
        self.waiting_bytes = 0  # of a gradient that waits for the norm and is the device's: none, if it waits there
        self._assigned: dict[int, tuple[Rates, list[bool]]] = {}  # by bytes of gradients that come from the host
        self._berths = [0.0] * BERTHS  # when each is free, as far as can be told

    def serve(self, units: Sequence[Unit], staging: Staging, *, held: bool) -> None:
        """These are the units from now on, in forward order."""
        self._staging = staging
        subgroups = staging.subgroups(units) if staging.on_device else []
        if staging.policy.kind == "auto":
            subgroups = [subgroup for subgroup in subgroups if subgroup.size >= LEAST]
        self._numbers = {subgroup: number for number, subgroup in enumerate(subgroups)}
        self._traffic, gradient_bytes = staging.traffic(units, held=held)
        self._weight_bytes = max((weight_itemsize(unit) for unit in units), default=0)
        self.waiting_bytes = 0 if staging.holds_any(units, held=held) else gradient_bytes
        self._assigned.clear()

    def at_once(self, subgroup: Subgroup) -> bool:
        """Whether the device updates it with a gradient that is there now, beside the backward."""
        if (owned := self._is_settled(subgroup)) is not None:
            return owned
        assert self.rates is not None
        queues, now = self._queues(), time.perf_counter()
        if not choose(queues, subgroup.size, self._traffic, self.rates):
            return False
        _, then = on_device(queues, subgroup.size, self._traffic, self.rates)
        self._berths = [now + seconds for seconds in then.berths]
        return True

    def among_all(self, subgroup: Subgroup, gradient_bytes: int) -> bool:
        """Whether the device updates it when all gradients are there; of its own, so many bytes come from the host."""
        if (owned := self._is_settled(subgroup)) is not None:
            return owned
        return self._plan(gradient_bytes)[self._numbers[subgroup]]

    def _is_settled(self, subgroup: Subgroup) -> bool | None:
        """Whether it is the device's, if that does not depend on queues and rates."""
        number, staging = self._numbers.get(subgroup), self._staging
        if number is None or staging is None:
            return False
        if staging.policy.kind != "auto":
            return staging.policy.device_owns(number)
        return False if self.rates is None else None

    def traffic(self, gradient_bytes: int) -> Traffic:
        """Of an update that has waited for all gradients: those of the host's are there."""
        own = self._traffic
        return Traffic(0, own.host_in, own.device_in + gradient_bytes, own.device_out)

    def predicted_rate(self, rates: Rates | None) -> float | None:
        """Parameters a second that updates would reach by themselves, at these rates."""
        if rates is None or self._staging is None or not self._numbers:
            return None
        traffic = self.traffic(self.waiting_bytes)
        resident = Traffic(traffic.host_out, traffic.host_in, 0, self._weight_bytes)
        sizes = self._sizes
        return sum(sizes) / predict(self._staging.policy, sizes, traffic, rates, BERTHS, resident).seconds

    @property
    def _sizes(self) -> list[int]:
        return [subgroup.size for subgroup in self._numbers]

    def start_from(self, rates: Rates | None) -> None:
        """What was measured at the start."""
        self.rates = self._measured = rates

    def observe(self) -> None:
        """Between steps: rates follow what was seen.

        Whoever had nothing to do is taken to be on its way back to what it could do at first; else one bad moment
        would keep it out for ever.
        """
        seen = [gauge.rate() for gauge in (self.host, self.device, self.link_in, self.link_out)]
        if self.rates is None or self._measured is None:
            return
        host = seen[0] or max(self.rates.host, min(self._measured.host, _BACK * self.rates.host))
        device = seen[1] or max(self.rates.device, min(self._measured.device, _BACK * self.rates.device))
        self.rates = self.rates.following(host=host, device=device, link_in=seen[2], link_out=seen[3])

    def forget(self) -> None:
        """After a failure, when no lane has work any more."""
        for gauge in (self.host, self.device, self.link_in, self.link_out):
            gauge.forget()

    def _queues(self) -> Queues:
        rates, now = self.rates, time.perf_counter()
        assert rates is not None
        return Queues(
            self.host.queued() / rates.host,
            self.link_in.queued() / rates.link_in,
            self.device.queued() / rates.device,
            self.link_out.queued() / rates.link_out,
            tuple(max(0.0, free - now) for free in self._berths),
        )

    def _plan(self, gradient_bytes: int) -> list[bool]:
        rates = self.rates
        assert rates is not None
        made_for, choices = self._assigned.get(gradient_bytes, (None, []))
        if made_for is None or _have_moved(made_for, rates):
            choices = assign(self._sizes, self.traffic(gradient_bytes), rates, idle(BERTHS))
            self._assigned[gradient_bytes] = rates, choices
        return choices


def _have_moved(old: Rates, new: Rates) -> bool:
    pairs = [(getattr(old, name), getattr(new, name)) for name in ("host", "device", "link_in", "link_out")]
    return any(abs(after / before - 1) > _MOVED for before, after in pairs)
