"""The device under test: what it supports and what it reports about itself."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from typing import Any

import torch

from ferryman.model.precision import PRECISIONS
from ferryman.runtime.device_name import device_name


class Accelerator:
    """A device, possibly the CPU. A *simulated* device has a configurable link and a race detector."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_host = device.type == "cpu"
        self._module: Any = None if self.is_host else torch.get_device_module(device)
        self.is_simulated = hasattr(self._module, "set_link")

    @property
    def name(self) -> str:
        return device_name(self.device) + (" (simulated, on the CPU)" if self.is_simulated else "")

    def synchronize(self) -> None:
        if not self.is_host:
            torch.accelerator.synchronize(self.device)

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which kernels are launched on a separate stream."""
        return contextlib.nullcontext() if self.is_host else torch.Stream(self.device)

    def lacks(self, precision: str) -> str | None:
        """Why the device cannot train in this precision; None if it can."""
        try:
            x = torch.ones(8, 8, dtype=PRECISIONS[precision], device=self.device, requires_grad=True)
            torch.nn.functional.layer_norm(x @ x, (8,)).softmax(-1).sum().backward()
            self.synchronize()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            return f"the device does not support {precision}: {error}".splitlines()[0]
        return None

    @functools.cached_property
    def is_fast(self) -> bool:
        """Whether the device is so fast that small models would measure kernel launches only."""
        if self.is_host or self.is_simulated:
            return False
        square = torch.ones(1024, 1024, device=self.device, dtype=torch.float32)
        for _ in range(3):  # the first loads libraries
            self.synchronize()
            begin = time.perf_counter()
            for _ in range(10):
                square @ square
            self.synchronize()
            took = time.perf_counter() - begin
        return 10 * 2 * 1024**3 / took > 2e11

    # Memory.

    def lacks_memory_figures(self) -> str | None:
        """Why the use of device memory cannot be measured; None if it can."""
        if self.is_host:
            return "the device is the CPU, and units are used in place"
        try:
            torch.accelerator.reset_peak_memory_stats(self.device)
            there = torch.empty(2**20, dtype=torch.uint8, device=self.device)
            peak = torch.accelerator.max_memory_reserved(self.device)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            return f"the device does not report its use of memory: {error}".splitlines()[0]
        return None if peak >= there.nbytes else "the device does not report its use of memory"

    def memory(self) -> int:
        """Bytes reserved now, without those that no tensor uses."""
        gc.collect()
        self.synchronize()
        torch.accelerator.empty_cache()
        return torch.accelerator.memory_reserved(self.device)

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """The most that was reserved since `reset_peak`."""
        self.synchronize()
        return torch.accelerator.max_memory_reserved(self.device)

    # Simulated devices.

    def strict(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which a race raises an exception, if the device has a race detector."""
        return self._module.strict() if self.is_simulated else contextlib.nullcontext()

    def races(self) -> list[str]:
        """The races detected since the last call of `forget_races`."""
        return self._module.races() if self.is_simulated else []

    def forget_races(self) -> None:
        if self.is_simulated:
            self.synchronize()
            self._module.clear_races()

    def link(self, **changes: float) -> contextlib.AbstractContextManager[None]:
        """Context with another link (`h2d`, `d2h`: bytes per second, `delay`: seconds). Simulated devices only."""
        assert self.is_simulated, "the rate of a real link cannot be set"
        link: contextlib.AbstractContextManager[None] = self._module.link(self.device, **changes)
        return link
