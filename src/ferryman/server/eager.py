"""Eager updates: each gradient is used as soon as it has arrived."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ferryman.model.units import Item, Subgroup
from ferryman.runtime.marks import Mark
from ferryman.server.gradient_checks import HostGradient
from ferryman.server.landing_buffers import Landing, LandingBuffers
from ferryman.server.strategy import Arrival, Strategy, UpdateParts
from ferryman.server.update_step import SubgroupUpdate


class EagerUpdates(Strategy):
    """Updates run during the backward of earlier units. A gradient that is not finite ends the step."""

    is_eager = True

    def __init__(self, parts: UpdateParts, *, checks_losses: bool) -> None:
        super().__init__(parts, checks_losses=checks_losses)
        self._describe_changes = parts.describe_changes
        self._landing = LandingBuffers(parts.arena)

    def landing(self, subgroup: Subgroup, dtype: torch.dtype) -> Landing:
        return self._landing.landing(subgroup.size, dtype)

    def stays(self, subgroup: Subgroup) -> bool:
        if self._device_updates is None:
            return False
        self._log.observe()
        return self._log.balancer.at_once(subgroup)

    def receive_on_device(
        self, subgroup: Subgroup, gradient: torch.Tensor, items: Collection[Item], after: Collection[Mark]
    ) -> SubgroupUpdate:
        assert self._device_updates is not None, "gradients stay only if the device can use them"
        self.check_losses()
        sums = self._device_updates.sum_squares(subgroup, gradient, items, after)
        checked = self._checks.check_sums(subgroup, sums, self._describe_changes)  # see Note [Checks before updates]
        args, before = self._args(subgroup.unit, items), [*after, *self._checks.losses_checked, checked]
        return SubgroupUpdate(subgroup, args, gradient, 1.0, before)

    def receive(self, arrival: Arrival) -> None:
        subgroup, gradient, items, known = arrival.subgroup, arrival.gradient, arrival.items, arrival.items_are_known
        unit = subgroup.unit
        self.check_losses()
        if not known and unit not in self._log.step.requested.args:
            # Which tensors the last step has updated, and so their step counts, is known when its updates are done.
            for mark in self._log.weights_ready(unit):
                mark.wait()
        args = self._args(unit, items if known else unit.trained)
        landed = HostGradient(subgroup, gradient, items)
        checked = self._checks.check_on_host([landed], [arrival.mark], self._describe_changes)
        self._log.balancer.host.add(checked, 0)  # the host's rate includes the time of the check
        end = self._host_updates.update([SubgroupUpdate(subgroup, args, gradient, 1.0, only=None if known else items)])
        if arrival.buffer is not None:
            arrival.buffer.free = end

    def recover(self) -> None:
        self._landing.recover()

    def close(self) -> None:
        self._landing.close()
