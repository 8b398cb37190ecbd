"""Straight steps: where all weights are on the device and nothing has to take turns, nothing is left of the relay.

Micro-batches run one after the other, on the thread that called the engine, and their calls compute at once: no
threads and no parking, as in plain PyTorch. A single micro-batch has nobody to take turns with, whether its calls keep
their graphs or recompute.

Several micro-batches are straight if every graph is kept; only one of them has graphs at a time. Gradients are still
summed in slots, and a unit's are sent to the server when the last micro-batch's backward has left the unit. So each
unit needs a gradient slot of its own: otherwise sums would cross the link for each micro-batch. If calls recompute,
micro-batches take turns, because the gradients of a unit that has served all of them cross the link, and are used for
updates, while earlier units recompute.

Each micro-batch has its own values of the user's variables, as where they take turns, so that a step can be undone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ferryman.exactness.buffers import Bound
from ferryman.exactness.weight_edits import WeightEdits
from ferryman.model.units import Unit
from ferryman.relay.step_state import StepState, Visit
from ferryman.relay.weight_slots import UnitOnDevice

if TYPE_CHECKING:
    from ferryman.relay.bound_model import BoundModel
    from ferryman.relay.call import Call
    from ferryman.relay.call_host import CallHost

T = TypeVar("T")


class _Stay(NamedTuple):
    """A unit that is on the device from its first call in a step to the end of the step."""

    on_device: UnitOnDevice
    visit: Visit
    buffers: list[Bound]
    edits: WeightEdits


class Straight:
    """Computes the calls of one straight step, and sends the gradients of units that are finished."""

    def __init__(self, host: CallHost, model: BoundModel, step: StepState) -> None:
        self._host, self._model, self._step = host, model, step
        self._stays: dict[Unit, _Stay] = {}
        self._edited: dict[Unit, dict[int, Bound]] = {}  # buffers that calls have changed
        self._went_backward: Unit | None = None  # in the last call; autograd may not have freed its graph yet

    def compute(self, call: Call, compute: Callable[[], T]) -> T:
        """Computes a call's forward or backward."""
        step, unit, host = self._step, call.unit, self._host
        self.send_finished()
        step.between_visits()
        stay = self._stays.get(unit) or self._enter(unit)
        stay.visit.has_gradient_slot = False
        call.batch.random = host.randomness.state()
        host.buffers.visit(unit, stay.buffers)
        step.visit = stay.visit
        try:
            result = compute()
        finally:
            step.visit = None
            for item, tensor in host.buffers.leave():
                self._edited.setdefault(unit, {})[id(item)] = item, tensor
            if stay.visit.has_gradient_slot and not host.gradients.has_one_for_each:
                host.gradients.leave(unit, host.compute.here())  # another unit may need the slot, and flush this one
        if stay.visit.has_gradient_slot:
            self._went_backward = unit
        return result

    def send_finished(self) -> None:
        """Sends the gradients of the unit whose backward was the last, if it is over for all micro-batches."""
        unit, self._went_backward = self._went_backward, None
        if unit is None or not self._host.is_finished(unit):
            return
        self._stays[unit].edits.check()
        self._step.check_before_update()
        self._host.gradients.complete(unit)
        self._leave(unit)
        self._host.gradients.flush(unit)

    def end(self) -> None:
        """Called when all micro-batches are done."""
        for unit, stay in self._stays.items():
            stay.edits.check()
            if bound := [pair for pair in self._edited.get(unit, {}).values() if pair[0] in unit.items]:
                self._model.write_back(bound, self._host.compute.here())

    def leave(self) -> None:
        """Called at the end, with or without an exception: records until when the slots are in use."""
        for unit in self._stays:
            self._leave(unit)

    def _enter(self, unit: Unit) -> _Stay:
        step, host = self._step, self._host
        step.visited.append(unit)
        on_device = host.weights.enter(unit, step.upcoming())
        host.compute.follow(*on_device.ready)
        edits = WeightEdits(on_device.tensors, by_bytes=False)
        buffers = self._model.buffers_of(unit, on_device.tensors)
        visit = Visit(unit, on_device.of_unit, step.bindings(unit, on_device.of_unit, self._model.outside))
        stay = self._stays[unit] = _Stay(on_device, visit, buffers, edits)
        return stay

    def _leave(self, unit: Unit) -> None:
        end = self._host.compute.here()
        self._host.weights.leave(self._stays[unit].on_device.slot, end)
        self._host.gradients.leave(unit, end)
