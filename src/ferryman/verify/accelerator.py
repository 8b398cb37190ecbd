"""A device as the checks see it: what it can do, and what it tells about itself."""

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
    """A device, which may be the host itself. A *simulated* one has a link that can be set and a race detector."""

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
        """Within, kernels are launched on a stream of its own."""
        return contextlib.nullcontext() if self.is_host else torch.Stream(self.device)

    def lacks(self, precision: str) -> str | None:
        """Why this device cannot train in a precision; None if it can."""
        try:
            x = torch.ones(8, 8, dtype=PRECISIONS[precision], device=self.device, requires_grad=True)
            torch.nn.functional.layer_norm(x @ x, (8,)).softmax(-1).sum().backward()
            self.synchronize()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            return f"the device has no {precision}: {error}".splitlines()[0]
        return None

    @functools.cached_property
    def is_fast(self) -> bool:
        """Whether models must be large for a step to take longer than its launches."""
        if self.is_host or self.is_simulated:
            return False
        square = torch.ones(1024, 1024, device=self.device)
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
        """Why its use of memory cannot be measured; None if it can."""
        if self.is_host:
            return "the device is the host itself, and units are used where they are"
        try:
            torch.accelerator.reset_peak_memory_stats(self.device)
            there = torch.empty(2**20, dtype=torch.uint8, device=self.device)
            peak = torch.accelerator.max_memory_allocated(self.device)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            return f"the device does not tell how much memory is in use: {error}".splitlines()[0]
        return None if peak >= there.nbytes else "the device does not tell how much memory is in use"

    def memory(self) -> int:
        """Bytes in use now."""
        gc.collect()
        self.synchronize()
        return torch.accelerator.memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        self.synchronize()
        return torch.accelerator.max_memory_allocated(self.device)

    # What a simulated one has.

    def strict(self) -> contextlib.AbstractContextManager[Any]:
        """Within, a race raises, where the device has a detector."""
        return self._module.strict() if self.is_simulated else contextlib.nullcontext()

    def races(self) -> list[str]:
        """Found since they were last forgotten."""
        return self._module.races() if self.is_simulated else []

    def forget_races(self) -> None:
        if self.is_simulated:
            self.synchronize()
            self._module.clear_races()

    def link(self, **changes: float) -> contextlib.AbstractContextManager[None]:
        """Within, the link is so (`h2d`, `d2h`: bytes a second, `delay`: seconds); only where it can be set."""
        assert self.is_simulated, "a real link is what it is"
        link: contextlib.AbstractContextManager[None] = self._module.link(self.device, **changes)
        return link
