"""Carries updates out: each subgroup's on the host or on the device, after whatever used its memory before.

`balancer.py` says where, `device_updates.py` does the device's part. Here is known which updates a unit waits for, how
long they took, and what crossed the link for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from ferryman.model.spans import Span
from ferryman.model.units import Item, Subgroup, Unit
from ferryman.plan.staging import Staging
from ferryman.runtime.marks import Mark
from ferryman.runtime.streams import Streams
from ferryman.server import calibration
from ferryman.server.balancer import Balancer
from ferryman.server.device_updates import DeviceUpdates, Done
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.state import Order
from ferryman.server.stats import Record, Stats
from ferryman.server.store import RamStore


class DeviceWeights(Protocol):
    """The relay's weights on the device, where updates concern them."""

    def memory(self, unit: Unit) -> torch.Tensor | None:
        """Of a unit whose weights stay there."""

    def forget(self) -> None:
        """Weights may have been changed on the host."""

    def settle(self, unit: Unit) -> list[Mark]:
        """After which they can be updated there: they are the host's, and nothing uses them any more."""

    def refresh(self, unit: Unit, runs: Sequence[Span], after: Mark) -> Mark | None:
        """The host has updated these; where they stay on the device they are copied there, until the mark."""

    def updated(self, unit: Unit, mark: Mark) -> None:
        """The device has; they are there after the mark."""

    def renew(self, unit: Unit) -> None:
        """Other ranks have, or will have by the time it is ready: it must be fetched."""


class Updates:
    """`alone`: no other rank updates parts of the same units."""

    def __init__(
        self,
        store: RamStore,
        streams: Streams,
        device: torch.device,
        staging: Staging,
        threads: int | None,
        *,
        alone: bool,
    ) -> None:
        self.balancer = Balancer()
        self.on_device: DeviceUpdates | None = None
        self.begun: set[Unit] = set()  # units whose updates were carried out, or begun, in the step that runs
        self.has_begun = False  # any, ever
        self._store, self._streams, self._device, self._threads = store, streams, device, threads
        self._host = streams.host
        self._alone = alone
        self._staging = staging
        self._weights: DeviceWeights | None = None
        self._ready: dict[Unit, dict[str, Mark]] = {}  # the ends of the unit's last updates, by who makes them
        self._updated: dict[Subgroup, Mark] = {}  # the end of its last update
        self._returned: dict[Subgroup, Mark] = {}  # what the host has updated is on the device
        self._fetched: dict[Unit, Mark] = {}  # the end of the last copy to the device
        self._record = self._new_record(0)
        self._last: Record | None = None

    def serve(
        self,
        units: Sequence[Unit],
        weights: DeviceWeights,
        staging: Staging,
        optimizer_view: OptimizerView | None,
        *,
        held: bool,
    ) -> None:
        """These are the units from now on, in forward order; when no lane has work."""
        if self._last is not None:
            self._last.predicted_rate = self.balancer.predicted_rate(self._last.rates)
        self._weights, self._staging = weights, staging
        if optimizer_view is not None and staging.on_device:
            if self.on_device is None:
                self.on_device = DeviceUpdates(self._store, staging, self._streams, self._device, weights.memory)
            self.on_device.make_room_for(units, staging, held=held)
            if self.balancer.rates is None:
                measured = calibration.measure(self.on_device, staging, units, optimizer_view, self._threads)
                self.balancer.start_from(measured)
        elif self.on_device is not None:
            self.on_device.bring_home()
            self.on_device.release()
        self.forget_marks()
        self.balancer.serve(units, staging, held=held)
        self._record = self._new_record(self._record.step)

    @property
    def steps(self) -> int:
        """That were finished."""
        return self._record.step

    def restart(self, steps: int) -> None:
        """Everything has been loaded, as it was after this many steps; no lane has work."""
        self._last = None
        self._record = self._new_record(steps)

    def ready(self, unit: Unit) -> list[Mark]:
        """After which the unit's weights, on the host, are those of the last update."""
        return list(self._ready.get(unit, {}).values())

    def shared(self, unit: Unit, mark: Mark) -> None:
        """Until the mark other ranks update parts of it, and may still be at it."""
        self.has_begun = True
        self._ready.setdefault(unit, {})["shared"] = mark
        if self._weights is not None:
            self._weights.renew(unit)

    def settle(self) -> None:
        """Blocks until all are done."""
        self._host.wait()
        if self.on_device is not None:
            self.on_device.wait()
        self._note_last()

    def bring_home(self) -> None:
        """The host has all of the optimizer's state; when all are done."""
        if self.on_device is not None:
            self.on_device.bring_home()

    def forget_weights(self) -> None:
        """They may have been changed on the host."""
        if self._weights is not None:
            self._weights.forget()

    @property
    def stats(self) -> Stats | None:
        """Of the last step; waits for its updates, and for weights that return to the device."""
        if self._last is None:
            return None
        for mark in self._last.returned:
            mark.wait()
        return self._stats_of(self._last)

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """Parameters a second: as predicted, and as they were in the last step, if that is over."""
        last = self._last
        achieved = None if last is None or not last.is_over else last.stats().achieved_rate
        return self.balancer.predicted_rate(self.balancer.rates), achieved

    def fetched(self, unit: Unit, mark: Mark, nbytes: int) -> None:
        """The unit's weights are read until the mark."""
        self._fetched[unit] = mark
        self._saw_link("in", mark, nbytes)

    def landed(self, mark: Mark, nbytes: int) -> None:
        """A gradient has left the device until the mark."""
        self._saw_link("out", mark, nbytes)
        self._record.bytes_out += nbytes

    def observe(self) -> None:
        """Once a step, as late as can be: the updates of the last one may have ended only now."""
        if not self._record.observed:
            self._note_last()
            self.balancer.observe()
            self._record.observed, self._record.rates = True, self.balancer.rates

    def end_step(self) -> None:
        """All of its updates have been asked for."""
        self._last, self._record = self._record, self._new_record(self._record.step + 1)

    def begin_again(self) -> None:
        """Gradients were used up, or given up."""
        self.begun = set()  # another one: updates that are still under way belong to the step that asked for them

    def make_on_host(
        self,
        subgroup: Subgroup,
        orders: Sequence[Order],
        gradients: torch.Tensor,
        factor: float,
        only: Collection[Item] | None = None,
    ) -> Mark:
        """`only`: of the orders, those for tensors that will be in it by then."""
        unit = subgroup.unit
        state, begun = self._store.state(unit), self.begun
        spans = state.spans(subgroup, self._store.weights(unit))
        self.has_begun = True

        def update() -> None:
            begun.add(unit)
            state.update(orders, gradients, subgroup.start, factor, self._threads, only)

        mark = self._host.submit(
            update,
            after=self._before(subgroup),
            label=f"update {unit.name}",
            nbytes=gradients.nbytes,
            reads=[gradients],
            writes=spans.tensors(),
        )
        self._ready.setdefault(unit, {})["host"] = self._updated[subgroup] = mark
        self.balancer.host.add(mark, subgroup.size)
        self._record.by_host(mark, subgroup.size)
        if self._weights is None or not self._alone:  # all that ranks have updated is fetched at once
            return mark
        if (back := self._weights.refresh(unit, spans.weights, mark)) is not None:
            nbytes = sum(run.host.nbytes for run in spans.weights)
            self._returned[subgroup] = back
            self._saw_link("in", back, nbytes)
            self._record.bytes_in += nbytes
            self._record.returned.append(back)
        return mark

    def make_on_device(
        self,
        subgroup: Subgroup,
        orders: Sequence[Order],
        gradient: torch.Tensor,
        factor: float,
        after: Collection[Mark],
    ) -> Done:
        assert self.on_device is not None
        assert self._weights is not None
        unit, begun = subgroup.unit, self.begun
        self.has_begun = True
        before = [*after, *self._before(subgroup)]
        done = self.on_device.update(subgroup, orders, gradient, factor, before, lambda: begun.add(unit))
        self._ready.setdefault(unit, {})["device"] = self._updated[subgroup] = done.ended
        self._weights.updated(unit, done.used)
        self.balancer.device.add(done.used, subgroup.size)
        for mark in done.came:
            self._saw_link("in", mark, done.bytes_in)
        self._saw_link("out", done.ended, done.bytes_out)
        self._record.by_device(done, subgroup.size)
        return done

    def forget_unit(self, unit: Unit) -> None:
        """It has left the model."""
        self._ready.pop(unit, None)

    def forget_marks(self) -> None:
        """No lane has work: there is nothing to wait for."""
        for marks in (self._ready, self._updated, self._returned, self._fetched):
            marks.clear()

    def recover(self) -> None:
        """After a failure, when no lane has work any more."""
        self._record = self._new_record(self._record.step)
        self.forget_marks()
        self.balancer.forget()
        if self.on_device is not None:
            self.on_device.recover()

    def close(self) -> None:
        """When no lane has work."""
        self._note_last()
        if self.on_device is not None:
            self.on_device.release()

    def _before(self, subgroup: Subgroup) -> list[Mark]:
        """Its last update may have been made elsewhere, and its weights may still be on their way to the device."""
        settled = [] if self._weights is None else self._weights.settle(subgroup.unit)  # may fetch it
        last = [self._updated.get(subgroup), self._returned.get(subgroup), self._fetched.get(subgroup.unit)]
        return [*settled, *(mark for mark in last if mark is not None)]

    def _saw_link(self, direction: str, mark: Mark, nbytes: int) -> None:
        """Something crosses the link, which shows how fast it is, and what is queued there."""
        if self.balancer.rates is not None:
            (self.balancer.link_in if direction == "in" else self.balancer.link_out).add(mark, nbytes)

    def _new_record(self, step: int) -> Record:
        return Record(step, str(self._staging.policy), not self._staging.deferred, self.balancer.rates)

    def _note_last(self) -> None:
        """The last step's updates, if they are over, go into the trace."""
        trace, last = self._streams.lanes.trace, self._last
        if trace is not None and last is not None and not last.noted and last.is_over:
            last.noted = True
            stats = self._stats_of(last)
            trace.note(stats.step, f"updates of step {stats.step}", dataclasses.asdict(stats))

    def _stats_of(self, record: Record) -> Stats:
        if record.predicted_rate is None:
            record.predicted_rate = self.balancer.predicted_rate(record.rates)
        return record.stats()
