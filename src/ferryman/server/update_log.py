"""The log of updates: which marks others must wait for, and how fast host, device and link were.

Updates on the host and on the device write to it. It knows what must be over before weights are fetched or updated
again. The division of the next updates (`balancer.py`) and the statistics of a step (`stats.py`) follow from it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ferryman.model.units import Subgroup, Unit
from ferryman.plan.staging import Staging
from ferryman.runtime.lanes import Lanes
from ferryman.runtime.marks import Mark
from ferryman.server.balancer import Balancer
from ferryman.server.device_weights import DeviceWeights
from ferryman.server.stats import DeviceUpdate, Stats, StepRecord
from ferryman.server.update_step import UpdateStep


@dataclass(slots=True)
class UnitProgress:
    """The ends of the last work of each kind on a unit's weights."""

    host: Mark | None = None  # updates on the host
    device: Mark | None = None  # updates on the device, until the host has the weights
    ranks: Mark | None = None  # updates by other ranks
    fetch: Mark | None = None  # copies to the device

    def ready(self) -> list[Mark]:
        """The marks after which the host has the weights of the last update."""
        return [mark for mark in (self.host, self.device, self.ranks) if mark is not None]


@dataclass(slots=True)
class SubgroupProgress:
    """The ends of the last work on a subgroup's weights."""

    update: Mark | None = None
    returned: Mark | None = None  # the copy to the device of weights that the host has updated


class UpdateLog:
    """Marks and rates of all updates. `step` is the current step, `last` the record of the step before it."""

    def __init__(self, lanes: Lanes, staging: Staging) -> None:
        self.balancer = Balancer()
        self.weights: DeviceWeights | None = None  # set by `serve`
        self.steps = 0  # finished
        self.has_begun = False  # whether any update was ever submitted
        self.last: StepRecord | None = None
        self._lanes = lanes
        self._staging = staging
        self._units: defaultdict[Unit, UnitProgress] = defaultdict(UnitProgress)
        self._subgroups: defaultdict[Subgroup, SubgroupProgress] = defaultdict(SubgroupProgress)
        self.step = UpdateStep(self._new_record())

    def serve(self, weights: DeviceWeights, staging: Staging) -> None:
        """Called when the units, or who updates them, have changed. No lane may have work."""
        self.weights, self._staging = weights, staging
        self.forget_marks()

    def begin_record(self) -> None:
        """Begins the current step's record anew. Waiting gradients stay."""
        self.step.record = self._new_record()

    def begin_step(self) -> None:
        """Begins a step. Gradients and requests of the current one are dropped; submitted updates continue."""
        self.step = UpdateStep(self._new_record())

    def end_step(self) -> None:
        """Called when all updates of the step have been submitted."""
        self.last = self.step.record
        self.steps += 1
        self.begin_step()

    def restart(self, steps: int) -> None:
        """Called when a checkpoint from after `steps` steps has been loaded. No lane may have work."""
        self.steps, self.last = steps, None
        self.begin_record()

    def forget_unit(self, unit: Unit) -> None:
        """Called when the unit has been removed from the model."""
        self._units.pop(unit, None)

    def forget_marks(self) -> None:
        """Called when no lane has work, so that there is nothing to wait for."""
        self._units.clear()
        self._subgroups.clear()

    def recover(self) -> None:
        """Called after a failure, when no lane has work."""
        self.begin_step()
        self.forget_marks()
        self.balancer.forget()

    # What must be waited for.

    def weights_ready(self, unit: Unit) -> list[Mark]:
        """The marks after which the host's weights of the unit include the last update."""
        return self._units[unit].ready() if unit in self._units else []

    def before_update(self, subgroup: Subgroup) -> list[Mark]:
        """The marks after which the subgroup may be updated.

        Its last update may have been made elsewhere, and its weights may still be on their way to the device.
        """
        updatable = [] if self.weights is None else self.weights.updatable_after(subgroup.unit)  # may fetch the unit
        own = self._subgroups[subgroup]
        last = (own.update, own.returned, self._units[subgroup.unit].fetch)
        return [*updatable, *(mark for mark in last if mark is not None)]

    # What was submitted.

    def add_fetch(self, unit: Unit, mark: Mark, nbytes: int) -> None:
        """Records that the unit's weights are being copied to the device until the mark."""
        self._units[unit].fetch = mark
        self._add_link_in(mark, nbytes)

    def add_landing(self, mark: Mark, nbytes: int) -> None:
        """Records that a gradient is being copied to the host until the mark."""
        self._add_link_out(mark, nbytes)
        self.step.record.bytes_out += nbytes

    def add_host_updates(self, subgroups: Sequence[Subgroup], mark: Mark) -> None:
        """Records updates that run as one piece of work."""
        self.has_begun = True
        for subgroup in subgroups:
            self._units[subgroup.unit].host = self._subgroups[subgroup].update = mark
        size = sum(subgroup.size for subgroup in subgroups)
        self.balancer.host.add(mark, size)
        self.step.record.add_host_update(mark, size)

    def add_return(self, subgroup: Subgroup, mark: Mark, nbytes: int) -> None:
        """Records that weights that the host has updated are being copied to the device until the mark."""
        self._subgroups[subgroup].returned = mark
        self._add_link_in(mark, nbytes)
        self.step.record.add_return(mark, nbytes)

    def add_device_update(self, subgroup: Subgroup, update: DeviceUpdate) -> None:
        self.has_begun = True
        self._units[subgroup.unit].device = self._subgroups[subgroup].update = update.ended
        if self.weights is not None:
            self.weights.updated(subgroup.unit, update.used)
        self.balancer.device.add(update.used, subgroup.size)
        for mark in update.state_in:
            self._add_link_in(mark, update.bytes_in)
        self._add_link_out(update.ended, update.bytes_out)
        self.step.record.add_device_update(update, subgroup.size)

    def add_rank_updates(self, unit: Unit, mark: Mark) -> None:
        """Records that other ranks are updating parts of the unit until the mark."""
        self.has_begun = True
        self._units[unit].ranks = mark
        if self.weights is not None:
            self.weights.renew(unit)

    # Rates and statistics.

    def observe(self) -> None:
        """Makes the rates follow the last step: once per step, as late as possible, when its updates have ended."""
        record = self.step.record
        if not record.has_observed:
            self.trace_last()
            self.balancer.observe()
            record.has_observed, record.rates = True, self.balancer.rates

    def fix_prediction(self) -> None:
        """Predicts the last step's rate now, before the balancer gets other units."""
        if self.last is not None:
            self.last.predicted_rate = self.balancer.predicted_rate(self.last.rates)

    @property
    def stats(self) -> Stats | None:
        """Statistics of the last step; waits for weights that are copied back to the device."""
        if self.last is None:
            return None
        for mark in self.last.returned:
            mark.wait()
        return self._stats_of(self.last)

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """Parameters per second: as predicted, and as achieved in the last step, if its updates are over."""
        achieved = None if self.last is None or not self.last.is_over else self.last.stats().achieved_rate
        return self.balancer.predicted_rate(self.balancer.rates), achieved

    def trace_last(self) -> None:
        """Adds the last step's updates to the trace, if they are over."""
        trace, last = self._lanes.trace, self.last
        if trace is not None and last is not None and not last.is_traced and last.is_over:
            last.is_traced = True
            stats = self._stats_of(last)
            trace.note(stats.step, f"updates of step {stats.step}", dataclasses.asdict(stats))

    def _stats_of(self, record: StepRecord) -> Stats:
        if record.predicted_rate is None:
            record.predicted_rate = self.balancer.predicted_rate(record.rates)
        return record.stats()

    def _add_link_in(self, mark: Mark, nbytes: int) -> None:
        if self.balancer.rates is not None:
            self.balancer.link_in.add(mark, nbytes)

    def _add_link_out(self, mark: Mark, nbytes: int) -> None:
        if self.balancer.rates is not None:
            self.balancer.link_out.add(mark, nbytes)

    def _new_record(self) -> StepRecord:
        return StepRecord(self.steps, str(self._staging.policy), not self._staging.deferred, self.balancer.rates)
