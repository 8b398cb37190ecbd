"""Random numbers that do not depend on the order in which the relay runs micro-batches and units.

Each micro-batch draws from its own sequence, on the CPU and on the device. So dropout is the same for any number of
slots, any division into units and either location of the stash, and equal to a plain loop that seeds each micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class State(NamedTuple):
    """The states of the CPU's generator and of the device's generator."""

    cpu: torch.Tensor
    device: torch.Tensor | None

    def same_as(self, other: State) -> bool:
        if not _are_same(self.cpu, other.cpu):
            return False
        return self.device is None or other.device is None or _are_same(self.device, other.device)


def _are_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two states, which are bytes on the CPU, are equal. `torch.equal` takes twice as long for 5 KB (2.5 us),
    and each forward asks."""
    return bool(a.numpy().tobytes() == b.numpy().tobytes())


class _ThroughModule(NamedTuple):
    """A device's generator, for modules that do not show it: they look it up in each call."""

    module: Any
    device: torch.device

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self.module.get_rng_state(self.device)
        return state

    def set_state(self, state: torch.Tensor) -> None:
        self.module.set_rng_state(state, self.device)


class Randomness:
    """The generators that a step uses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._found: torch.Generator | _ThroughModule | None = None

    @property
    def _generator(self) -> torch.Generator | _ThroughModule:
        """The device's own. Each call reads and sets its state, for which `get_rng_state` takes three times as long."""
        if self._found is None:
            generators = getattr(self._module, "default_generators", ())  # empty until the device is first used
            self._found = generators[self._device.index] if generators else _ThroughModule(self._module, self._device)
        return self._found

    def state(self) -> State:
        of_device = None if self._module is None else self._generator.get_state()
        return State(torch.default_generator.get_state(), of_device)

    def restore(self, state: State) -> None:
        torch.default_generator.set_state(state.cpu)
        if state.device is not None:
            self._generator.set_state(state.device)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context in which the generators may be used. On exit, their states are restored."""
        before = self.state()
        try:
            yield
        finally:
            self.restore(before)

    def seeded(self, seed: int) -> State:
        """The state after `torch.manual_seed(seed)`. The generators themselves do not change.

        Does not call that function: it would also seed every other kind of device, and format a traceback for each.
        """
        with self.unchanged():
            torch.default_generator.manual_seed(seed)
            if self._module is not None:
                with torch.accelerator.device_index(self._device.index):
                    self._module.manual_seed(seed)
            return self.state()
