"""Deferred updates: gradients wait until all of them have arrived and their norm is known."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ferryman.model.units import GRADIENT, Item, Subgroup, Unit
from ferryman.runtime.marks import Mark
from ferryman.server.gradient_checks import HostGradient
from ferryman.server.landing_buffers import Landing
from ferryman.server.strategy import Arrival, Strategy, UpdateParts
from ferryman.server.update_step import DeviceGradient, WaitingGradients


class DeferredUpdates(Strategy):
    """Gradients wait on the host, or on the device where there is memory for that, until the end of the step."""

    is_eager = False

    def __init__(self, parts: UpdateParts, *, checks_losses: bool) -> None:
        super().__init__(parts, checks_losses=checks_losses)
        self._host_lane, self._scale = parts.host_lane, parts.scale

    def landing(self, subgroup: Subgroup, dtype: torch.dtype) -> Landing:
        flat = self._store.summed_gradients(subgroup.unit, dtype).view(dtype)
        # After the update that has used what was there.
        return Landing(flat[subgroup.start : subgroup.stop], self._log.weights_ready(subgroup.unit))

    def stays(self, subgroup: Subgroup) -> bool:
        if self._device_updates is None:
            return False
        self._log.observe()
        balancer = self._log.balancer
        return subgroup in self._device_updates.gradient_berths and balancer.among_all(subgroup, balancer.waiting_bytes)

    def receive_on_device(
        self, subgroup: Subgroup, gradient: torch.Tensor, items: Collection[Item], after: Collection[Mark]
    ) -> Mark:
        assert self._device_updates is not None, "gradients stay only if the device can use them"
        berth = self._device_updates.gradient_berths[subgroup]
        before = [] if berth.free is None else [berth.free]
        sums = self._device_updates.sum_squares(subgroup, gradient, items, [*after, *before], copy_to=berth)
        self._checks.check_sums(subgroup, sums)
        waiting = berth.memory[: gradient.nbytes].view(gradient.dtype)
        self._log.step.waiting_on_device[subgroup] = DeviceGradient(waiting, berth)
        self._waiting(subgroup.unit, gradient.dtype, items)
        return sums.read

    def receive(self, arrival: Arrival) -> None:
        subgroup, gradient, items = arrival.subgroup, arrival.gradient, arrival.items
        waiting = self._waiting(subgroup.unit, gradient.dtype, items)
        landed = [HostGradient(subgroup, gradient, items)]
        if arrival.buffer is None:  # the gradient waits where it has landed
            self._checks.check_on_host(landed, [arrival.mark])
            return
        target = waiting.of(subgroup)
        before = [arrival.mark, *self._log.weights_ready(subgroup.unit)]
        checked = self._checks.check_on_host(landed, before)
        arrival.buffer.free = self._host_lane.submit(
            lambda: target.copy_(gradient),
            after=[checked],
            label=f"land {subgroup.unit.name}",
            reads=[gradient],
            writes=[target],
        )

    def recover(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _waiting(self, unit: Unit, dtype: torch.dtype, items: Collection[Item]) -> WaitingGradients:
        waiting = self._log.step.waiting
        if unit not in waiting:
            flat = self._store.summed_gradients(unit, dtype).view(dtype)
            scale = 1.0 if dtype == GRADIENT else self._scale.value
            waiting[unit] = WaitingGradients(flat, items, scale, low=self._store.state(unit).low)
        return waiting[unit]
