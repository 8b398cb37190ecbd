"""Decides which subgroups the host updates and which the device: from the policy, the queues and observed rates."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ferryman.model.units import Subgroup, Unit
from ferryman.plan.performance import predict
from ferryman.plan.rates import Rates
from ferryman.plan.schedule import Queues, Traffic, assign, choose, idle, on_device
from ferryman.plan.staging import BERTHS, MIN_DEVICE_SUBGROUP, Staging
from ferryman.runtime.marks import Mark, busy_seconds

# An assignment of all subgroups is kept until a rate has changed by more than this share: smaller changes are noise.
_REPLAN_CHANGE = 0.05

_MAX_PENDING = 1024  # pieces of work that a meter remembers

# In each step, a resource that had no work is assumed to be faster by this factor, up to the rate measured at first.
_RECOVERY_FACTOR = 1.2


class RateMeter:
    """The work that one resource has queued, and the rate at which it has worked."""

    def __init__(self) -> None:
        self._pending: list[tuple[Mark, float]] = []
        self._passed: list[tuple[Mark, float]] = []

    def add(self, mark: Mark, amount: float) -> None:
        self._pending.append((mark, amount))
        if len(self._pending) > _MAX_PENDING:  # not asked for a long time, as in an evaluation
            self._sort()
            del self._passed[:-_MAX_PENDING]

    def queued(self) -> float:
        """The amount that is not done yet."""
        self._sort()
        return sum(amount for _, amount in self._pending)

    def rate(self) -> float | None:
        """The rate of the work done since the last call; None if there was none."""
        self._sort()
        passed, self._passed = self._passed, []
        seconds = busy_seconds(mark for mark, _ in passed)
        amount = sum(amount for mark, amount in passed if not mark.failed())
        return amount / seconds if seconds > 0 and amount > 0 else None

    def forget(self) -> None:
        self._pending.clear()
        self._passed.clear()

    def _sort(self) -> None:
        """Moves work that is done from pending to passed."""
        waiting: list[tuple[Mark, float]] = []
        for mark, amount in self._pending:
            (self._passed if mark.passed() else waiting).append((mark, amount))
        self._pending = waiting


class Balancer:
    """Assigns subgroups to host or device. One meter for each resource; rates are in parameters or bytes per second."""

    def __init__(self) -> None:
        self.host, self.device, self.link_in, self.link_out = RateMeter(), RateMeter(), RateMeter(), RateMeter()
        self.rates: Rates | None = None  # None: not measured yet
        self._measured: Rates | None = None
        self._staging: Staging | None = None
        self._numbers: dict[Subgroup, int] = {}  # those that the device can update, in forward order
        self._traffic = Traffic(0, 0, 0, 0)
        self._weight_bytes = 0
        # Bytes per element of a waiting gradient that must cross to the device; 0 if it waits there.
        self.waiting_bytes = 0
        # By bytes per element of gradients from the host: the rates, and who updates each subgroup at these rates.
        self._assigned: dict[int, tuple[Rates, list[bool]]] = {}
        self._berths = [0.0] * BERTHS  # when each is free, as estimated: seconds of `time.perf_counter`

    def serve(self, units: Sequence[Unit], staging: Staging, *, held: bool) -> None:
        """Serves these units from now on, in forward order."""
        self._staging = staging
        subgroups = staging.subgroups(units) if staging.on_device else []
        if staging.policy.kind == "auto":
            subgroups = [subgroup for subgroup in subgroups if subgroup.size >= MIN_DEVICE_SUBGROUP]
        self._numbers = {subgroup: number for number, subgroup in enumerate(subgroups)}
        self._traffic, gradient_bytes = staging.traffic(units, held=held)
        self._weight_bytes = max((unit.weight_itemsize for unit in units), default=0)
        self.waiting_bytes = 0 if staging.has_gradient_berths(units, held=held) else gradient_bytes
        self._assigned.clear()

    def at_once(self, subgroup: Subgroup) -> bool:
        """Whether the device updates the subgroup eagerly: its gradient is on the device now."""
        if (owned := self._by_policy(subgroup)) is not None:
            return owned
        assert self.rates is not None
        queues, now = self._queues(), time.perf_counter()
        if not choose(queues, subgroup.size, self._traffic, self.rates):
            return False
        _, then = on_device(queues, subgroup.size, self._traffic, self.rates)
        self._berths = [now + seconds for seconds in then.berths]
        return True

    def among_all(self, subgroup: Subgroup, gradient_bytes: int) -> bool:
        """Whether the device updates the subgroup when all gradients are there.

        `gradient_bytes`: bytes per element of its gradient that must cross to the device.
        """
        if (owned := self._by_policy(subgroup)) is not None:
            return owned
        return self._plan(gradient_bytes)[self._numbers[subgroup]]

    def _by_policy(self, subgroup: Subgroup) -> bool | None:
        """Whether the device updates the subgroup, if the policy alone decides; None: queues and rates decide."""
        number, staging = self._numbers.get(subgroup), self._staging
        if number is None or staging is None:
            return False
        if staging.policy.kind != "auto":
            return staging.policy.device_owns(number)
        return False if self.rates is None else None

    def traffic(self, gradient_bytes: int) -> Traffic:
        """The traffic of deferred updates: gradients of the host's subgroups have crossed already."""
        own = self._traffic
        return Traffic(0, own.host_in, own.device_in + gradient_bytes, own.device_out)

    def predicted_rate(self, rates: Rates | None) -> float | None:
        """Parameters per second of updates alone, at these rates; None if nothing was measured."""
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
        """Sets the rates that were measured at the start."""
        self.rates = self._measured = rates

    def observe(self) -> None:
        """Between steps: rates follow what the meters have seen.

        A resource that had no work is assumed to recover, by `_RECOVERY_FACTOR` per step, towards its first rate.
        Otherwise one slow moment would exclude it forever.
        """
        seen = [meter.rate() for meter in (self.host, self.device, self.link_in, self.link_out)]
        if self.rates is None or self._measured is None:
            return
        host = seen[0] or max(self.rates.host, min(self._measured.host, _RECOVERY_FACTOR * self.rates.host))
        device = seen[1] or max(self.rates.device, min(self._measured.device, _RECOVERY_FACTOR * self.rates.device))
        self.rates = self.rates.following(host=host, device=device, link_in=seen[2], link_out=seen[3])

    def forget(self) -> None:
        """Called after a failure, when no lane has work: forgets work that was not done."""
        for meter in (self.host, self.device, self.link_in, self.link_out):
            meter.forget()

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
        if made_for is None or _have_changed(made_for, rates):
            choices = assign(self._sizes, self.traffic(gradient_bytes), rates, idle(BERTHS))
            self._assigned[gradient_bytes] = rates, choices
        return choices


def _have_changed(old: Rates, new: Rates) -> bool:
    pairs = [(getattr(old, name), getattr(new, name)) for name in ("host", "device", "link_in", "link_out")]
    return any(abs(after / before - 1) > _REPLAN_CHANGE for before, after in pairs)
