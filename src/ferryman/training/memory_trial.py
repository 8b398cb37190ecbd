"""Memory trials: measure the device memory that micro-batches need while they run."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ferryman.model.units import Unit
from ferryman.plan.fit import Choice, Stretch, TooLargeError, Trial
from ferryman.plan.keep import CallCost, Costs
from ferryman.plan.plan import Need
from ferryman.relay.call import Call
from ferryman.relay.driver import Relay
from ferryman.relay.micro_batch import MicroBatch
from ferryman.relay.observer import Observer, Roots
from ferryman.relay.step_state import LossRun
from ferryman.relay.tensor_identity import bytes_of_storages
from ferryman.relay.trial import run_trial
from ferryman.runtime.device_memory import DeviceMemory
from ferryman.training.discovery import Discovery

# A trial may exceed its room by this factor: if only a little more is needed, it finds out how much.
_TRIAL_SLACK = 1.1


def measure(
    relay: Relay,
    loss_runs: Sequence[LossRun],
    measured: Measured,
    roots: Roots,
    units: Sequence[Unit],
    choice: Choice,
) -> Trial:
    """Runs a step without effects, and returns the device memory that it needed. `choice`: the place of the stash and
    of boundaries, and the calls that keep their graphs.

    Raises a TooLargeError as soon as the step reserves clearly more than the room.
    """
    known = relay.order
    if not relay.state.is_known:  # micro-batches that take turns must not see each other's variables
        discovery = _Discovery(relay, roots, units, _Memory(measured, roots))
        discovery.run(
            lambda: run_trial(
                relay,
                loss_runs[:2],
                0,
                discovery,
                stash_on_host=True,
                interleaved=False,
                forward_only=True,
                check=False,
            )
        )

    def run(*, interleaved: bool) -> _Memory:
        relay.host_stash.reset_peak()
        memory = _Memory(measured, roots)
        on_host, staying, keep = choice.stash_on_host, choice.staying, choice.keep
        run_trial(
            relay, loss_runs, 0, memory,
            stash_on_host=on_host, staying=staying, keep=keep, interleaved=interleaved, check=False,
        )  # fmt: skip
        return memory

    interleaved = True
    for _ in range(2):  # the second run knows where the turn is, and keeps the graph there
        try:
            memory = run(interleaved=interleaved)
        except (TooLargeError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if len(loss_runs) == 1 or not interleaved:
                raise
            # Micro-batches of this code may be unable to take turns. The check of the step will find that out, too.
            traceback.clear_frames(error.__traceback__)  # they keep the trial's tensors on the device
            relay.lanes.drain()
            relay.recover()
            interleaved = False
            memory = run(interleaved=False)
        if relay.order == known:
            break
        known = relay.order
    stash = relay.host_stash.peak // len(loss_runs)
    return Trial(memory.stretches, stash, memory.boundary, memory.reserved, memory.costs())


class Measured(NamedTuple):
    """The memory that a trial measures."""

    memory: DeviceMemory
    device: torch.device
    fixed: int  # bytes that the engine always has
    room: int  # bytes for micro-batches


class _Discovery(Discovery):
    """Finds variables that change, within the same room."""

    def __init__(self, relay: Relay, roots: Roots, units: Sequence[Unit], memory: _Memory) -> None:
        super().__init__(relay, roots, units)
        self._memory = memory

    def resumes(self, batch: MicroBatch) -> None:
        self._memory.resumes(batch)

    def parked(self, batch: MicroBatch) -> None:
        self._memory.parked(batch)
        super().parked(batch)


class _Memory(Observer):
    """Records the peak of allocated memory in each stretch, above what was in use before the trial, and the peak of
    reserved memory, above what the engine always has."""

    def __init__(self, measured: Measured, roots: Roots) -> None:
        super().__init__(roots)
        self.stretches: list[Stretch] = []
        self.boundary = 0  # bytes
        self._recalled: dict[int, dict[int, int]] = {}  # by micro-batch: sources of saved inputs, and their bytes
        self.reserved = 0
        self._measured, self._device = measured, measured.device
        measured.memory.trim()  # memory of pending copies does not count, nor what earlier steps have left
        self._floor = torch.accelerator.memory_allocated(self._device)
        self._where = ""
        self._costs: dict[tuple[nn.Module, MicroBatch], CallCost] = {}

    def costs(self) -> Costs:
        """The costs of one micro-batch's calls, by module: the most bytes, and the least time, which has no noise."""
        found = dict[nn.Module, CallCost]()
        for (module, _), cost in self._costs.items():
            known = found.get(module, cost)
            nbytes, inputs = max(cost.nbytes, known.nbytes), max(cost.inputs, known.inputs)
            found[module] = CallCost(nbytes, inputs, min(cost.seconds, known.seconds))
        return found

    def run_again(
        self, call: Call, inputs: list[torch.Tensor], run: Callable[[], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        torch.accelerator.synchronize(self._device)
        before, start = torch.accelerator.memory_allocated(self._device), time.perf_counter()
        outputs = run()
        torch.accelerator.synchronize(self._device)
        seconds = time.perf_counter() - start
        taken = torch.accelerator.memory_allocated(self._device) - before - bytes_of_storages(outputs, self._device)
        given = bytes_of_storages(inputs, self._device)
        cost, key = CallCost(max(0, taken), given, seconds), (call.module, call.batch)
        self._costs[key] = cost + self._costs.get(key, CallCost(0, 0, 0.0))
        return outputs

    def resumes(self, batch: MicroBatch) -> None:
        self._where = "the start" if batch.request is None else batch.request.unit.name
        torch.accelerator.reset_peak_memory_stats(self._device)

    def parked(self, batch: MicroBatch) -> None:
        peak = torch.accelerator.max_memory_allocated(self._device)
        self.reserved = max(self.reserved, self._measured.memory.peak - self._measured.fixed)
        if self.reserved > self._measured.room * _TRIAL_SLACK:
            raise TooLargeError(Need(self.reserved, self._where, is_all=False))
        self.stretches.append(Stretch(self._where, peak - self._floor))
        if batch.request is not None:
            before = self._recalled.get(batch.number, {})
            self._recalled[batch.number] = recalled = dict(saved.source for saved in batch.request.recalls)
            again = sum(nbytes for source, nbytes in recalled.items() if source in before)
            self.boundary = max(self.boundary, bytes_of_storages(batch.request.needs, self._device) + again)
