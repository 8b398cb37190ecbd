"""Trials: what micro-batches need on the device while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ferryman.model.units import Unit
from ferryman.plan.fit import Stretch, TooLargeError, Trial
from ferryman.plan.plan import Need
from ferryman.relay.driver import Relay
from ferryman.relay.micro_batch import MicroBatch
from ferryman.relay.observer import Observer, Roots
from ferryman.relay.trial import run_trial
from ferryman.training.discovery import Discovery

# A trial may go this far beyond its room, to know what is needed if that is only a little too much.
_BEYOND = 1.1


def measure(
    relay: Relay, works: Sequence[Callable[[], torch.Tensor]], room: int, roots: Roots, units: Sequence[Unit]
) -> Trial:
    """A step that leaves nothing behind, but what it has needed on the device; the stash is on the host.

    It is given up, with a TooLargeError, when it has needed more than `room`.
    """
    known = relay.order
    if not relay.state.is_known:  # micro-batches that take turns must not see each other's
        discovery = _Discovery(relay, roots, units, _Memory(relay.device, room, roots))
        run_trial(relay, works[:2], 0, discovery, stash_on_host=True, in_turn=True, forward_only=True, check=False)
        discovery.teach()
    for _ in range(2):  # the second knows where the turn is, and keeps its graph
        relay.host_stash.reset_peak()
        memory = _Memory(relay.device, room, roots)
        run_trial(relay, works, 0, memory, stash_on_host=True, check=False)
        if relay.order == known:
            break
        known = relay.order
    return Trial(memory.stretches, relay.host_stash.peak // len(works))


class _Discovery(Discovery):
    """Keeps to the same room."""

    def __init__(self, relay: Relay, roots: Roots, units: Sequence[Unit], memory: _Memory) -> None:
        super().__init__(relay, roots, units)
        self._memory = memory

    def resumes(self, batch: MicroBatch) -> None:
        self._memory.resumes(batch)

    def parked(self, batch: MicroBatch) -> None:
        self._memory.parked(batch)
        super().parked(batch)


class _Memory(Observer):
    """The peak of each stretch, beyond what was on the device before."""

    def __init__(self, device: torch.device, room: int, roots: Roots) -> None:
        super().__init__(roots)
        self.stretches: list[Stretch] = []
        self._device = device
        torch.accelerator.synchronize(device)  # memory of copies that are under way does not count
        self._floor = torch.accelerator.memory_allocated(device)
        self._ceiling = self._floor + int(room * _BEYOND)
        self._where = ""

    def resumes(self, batch: MicroBatch) -> None:
        self._where = "the start" if batch.request is None else batch.request.unit.name
        torch.accelerator.reset_peak_memory_stats(self._device)

    def parked(self, batch: MicroBatch) -> None:
        peak = torch.accelerator.max_memory_allocated(self._device)
        if peak > self._ceiling:
            raise TooLargeError(Need(peak - self._floor, self._where, is_all=False))
        self.stretches.append(Stretch(self._where, peak - self._floor))
