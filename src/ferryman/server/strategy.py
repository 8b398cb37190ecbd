"""When updates are made: the interface of the two strategies, and what they have in common.

*Eager* (`eager.py`): a gradient is used as soon as it has arrived, during the backward of earlier units. A few small
landing buffers are enough. *Deferred* (`deferred.py`): gradients wait until all have arrived and their norm is known.
Then units are updated in forward order, during the next forward. Updates are eager unless something needs all gradients
first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from ferryman.model.precision import LossScale
from ferryman.model.units import GRADIENT, Item, Subgroup, Unit
from ferryman.runtime.arena import Arena
from ferryman.runtime.lanes import Lane
from ferryman.runtime.marks import Mark
from ferryman.server.device_updates import DeviceUpdates
from ferryman.server.gradient_checks import GradientChecks
from ferryman.server.host_updates import HostUpdates, grouped
from ferryman.server.landing_buffers import Buffer, Landing
from ferryman.server.state import UpdateArgs
from ferryman.server.store import RamStore
from ferryman.server.update_log import UpdateLog
from ferryman.server.update_step import SubgroupUpdate, WaitingGradients


class Arrival(NamedTuple):
    """A subgroup's gradient on the host, summed over all ranks, after the mark."""

    subgroup: Subgroup
    gradient: torch.Tensor
    items: Collection[Item]  # the tensors that have a gradient; complete after the mark, at the latest
    mark: Mark
    buffer: Buffer | None = None  # to be used again when the gradient is; None: the gradient is where it can wait
    items_are_known: bool = True  # whether `items` is complete before the mark


class UpdateParts(NamedTuple):
    """What strategies work with."""

    store: RamStore
    log: UpdateLog
    checks: GradientChecks
    host_lane: Lane
    host_updates: HostUpdates
    device_updates: DeviceUpdates | None  # None: the device updates nothing
    arena: Arena  # for buffers
    scale: LossScale
    describe_changes: Callable[[], str]  # which weights this step has changed, for an error


class Strategy(ABC):
    """Decides when gradients are used. `checks_losses`: a loss that is not finite ends the step."""

    is_eager: bool  # whether a unit's updates are submitted as soon as its gradients have arrived

    def __init__(self, parts: UpdateParts, *, checks_losses: bool) -> None:
        self._store, self._log, self._checks = parts.store, parts.log, parts.checks
        self._host_updates, self._device_updates = parts.host_updates, parts.device_updates
        self._checks_losses = checks_losses

    @abstractmethod
    def landing(self, subgroup: Subgroup, dtype: torch.dtype) -> Landing:
        """Where the gradient of a subgroup lands on the host, if no other rank adds to it."""

    @abstractmethod
    def stays(self, subgroup: Subgroup) -> bool:
        """Whether the subgroup's gradient is used, or waits, on the device."""

    @abstractmethod
    def receive_on_device(
        self, subgroup: Subgroup, gradient: torch.Tensor, items: Collection[Item], after: Collection[Mark]
    ) -> SubgroupUpdate | Mark:
        """Takes a gradient on the device, complete after the marks. Returns the update that the device makes with it
        now or, if it waits elsewhere, the mark after which its memory may be used again."""

    @abstractmethod
    def receive(self, arrival: Arrival) -> None:
        """Takes a gradient on the host."""

    def check_losses(self) -> None:
        """Checks the losses that have not been checked yet."""
        if self._checks_losses:
            self._checks.check_losses()

    def update_waiting(self, owned: Mapping[Unit, Sequence[Subgroup]], clip: float) -> None:
        """Updates these subgroups of units with gradients that have waited, multiplied by `clip`."""
        on_host, step = list[SubgroupUpdate](), self._log.step
        for unit, subgroups in owned.items():
            if (waiting := step.waiting.get(unit)) is None:
                continue
            args, factor = self._args(unit, waiting.items), clip / waiting.scale
            for subgroup in subgroups:
                on_device = step.waiting_on_device.get(subgroup)
                gradient = waiting.of(subgroup) if on_device is None else on_device.gradient
                update = SubgroupUpdate(subgroup, args, gradient, factor)
                if self._device_updates is None or not (on_device or self._is_for_device(subgroup, waiting)):
                    on_host.append(update)
                    continue
                used = self._device_updates.update(update)
                if on_device is not None:
                    on_device.berth.free = used
        for updates in grouped(on_host, lambda update: update.subgroup.size):
            self._host_updates.update(updates)

    def _is_for_device(self, subgroup: Subgroup, waiting: WaitingGradients) -> bool:
        """Whether the device updates the subgroup, whose gradient waits on the host."""
        balancer = self._log.balancer
        return balancer.among_all(subgroup, GRADIENT.itemsize if waiting.is_left_for_user else balancer.waiting_bytes)

    @abstractmethod
    def recover(self) -> None:
        """Called after a failure, when no lane has work."""

    @abstractmethod
    def close(self) -> None:
        """Frees memory. No lane may have work."""

    def _args(self, unit: Unit, items: Collection[Item]) -> list[UpdateArgs]:
        """The arguments of the unit's updates in this step, made once."""
        requested = self._log.step.requested.args
        if unit not in requested:
            requested[unit] = self._store.state(unit).request(items)
        return requested[unit]
