"""What an engine has taken of its device's memory.

Note [What counts]
The budget bounds what the engine *reserves* (`segments.py`), and the rest of the process may reserve what it likes. The
allocator does not record who has reserved what, so the engine counts: what was reserved when it was made belongs to
others, and so does what is reserved between its calls. If there is less reserved than after its last call, someone has
emptied the cache or freed tensors. The engine then assumes that this was its own cache, as far as it had one beside the
memory that it always has, so it never counts memory of others as its own. Libraries keep a workspace for
each pair of thread and stream that has computed a matrix product. Those that a trial leaves belong to the engine, too.

Note [The cap]
While a step runs, PyTorch's cap on the process (`set_per_process_memory_fraction`) is set to what others have reserved
and the budget. An allocation beyond it first makes the allocator give its unused segments back to the device, and only
then fails. Between calls the cap is as the user has set it, so that other code of the same process can allocate as it
always could. A lower cap of the user's own stays in force. Devices whose cap cannot be read have none set, because it
could not be restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch


def carve(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Memories of these sizes, in bytes, that are one allocation: an allocator would round up each of many."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()  # memory that these replace, and that is too small for them
    return list(torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(list(sizes)))


_USUAL_SHARE = 0.9  # of the free device memory; fragmentation and the device's libraries need the rest


def usual_budget(device: torch.device) -> int | None:
    """The budget where none is given; None: the device is the host, or does not report its memory."""
    if device.type == "cpu":
        return None
    try:
        free = torch.accelerator.get_memory_info(device)[0]
    except (NotImplementedError, RuntimeError):
        return None
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return int(_USUAL_SHARE * (free + cached))


class Usage(NamedTuple):
    """Bytes of a device: now, and their peak since the statistics were reset."""

    now: int
    peak: int


def usage(device: torch.device, kind: str) -> Usage:
    """The bytes of a device that are "allocated" or "reserved" in this process.

    `torch.accelerator.memory_allocated` returns the same, but flattens and sorts all statistics of the device: 70 us in
    place of 15, seven times a step.
    """
    if not torch._C._accelerator_isAllocatorInitialized():
        return Usage(0, 0)
    found = torch._C._accelerator_getDeviceStats(device.index or 0)[f"{kind}_bytes"]["all"]
    return Usage(found["current"], found["peak"])


class DeviceMemory:
    """The reserved memory of one engine. If its device is the CPU, nothing is counted."""

    def __init__(self, device: torch.device, budget: int | None) -> None:
        self._device = device
        self._budget = budget
        self._counts = device.type != "cpu"
        self._others = self._last = 0  # bytes reserved by others now, and in all after the engine's last call
        self._fixed = 0  # bytes that the engine always has
        self._is_counting = False
        self.streams: dict[str, torch.Stream] = {}  # by lane, of all plans: libraries have workspaces for them
        self.trim()
        self._others = self._last = self._reserved()

    def trim(self) -> None:
        """Gives memory that no tensor uses back to the device. No lane may have work."""
        if self._counts:
            torch.accelerator.synchronize(self._device)
            torch.accelerator.empty_cache()

    def forget(self) -> None:
        """Called after a trial: drops what it has left in the cache, and its peak."""
        self.trim()
        if self._counts:
            torch.accelerator.reset_peak_memory_stats(self._device)

    def measure_fixed(self) -> None:
        """Called when all memory that the engine always has is allocated, and nothing else."""
        self.trim()
        self._fixed = self.used

    def add_fixed(self, nbytes: int) -> None:
        """Called when so much memory was allocated that stays for good, such as workspaces of libraries."""
        self._fixed += max(0, nbytes)

    @property
    def allocated(self) -> int:
        """Bytes of tensors and workspaces on the device, whoever has allocated them."""
        return self._allocated()

    @property
    def used(self) -> int:
        """Bytes that the engine has reserved."""
        return max(0, self._reserved() - self._others)

    @property
    def peak(self) -> int:
        """The most that it had reserved since the device's peaks were last reset."""
        return max(0, torch.accelerator.max_memory_reserved(self._device) - self._others) if self._counts else 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Context of a call of the engine. What is reserved outside of it belongs to others; see Note [What counts]."""
        if self._is_counting:  # a call within a call
            yield
            return
        now = self._reserved()
        self._others += max(0, now - self._last)
        self._others = min(self._others, max(0, now - self._fixed))
        # Memory that the engine had reserved after its last call may have been freed since, and taken by others.
        self._others = max(self._others, self._allocated() - self._fixed)
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting, self._last = False, self._reserved()

    @contextlib.contextmanager
    def capped(self) -> Iterator[None]:
        """Context in which the process cannot reserve more than the budget allows; see Note [The cap]."""
        module = torch.get_device_module(self._device)
        read = getattr(module, "get_per_process_memory_fraction", None)
        if self._budget is None or not self._counts or read is None:
            yield
            return
        before = read(self._device)
        # Half a byte more, so that rounding down cannot take one away.
        fraction = (self._others + self._budget + 0.5) / _whole(module, self._device)
        module.set_per_process_memory_fraction(min(before, fraction), self._device)
        try:
            yield
        finally:
            module.set_per_process_memory_fraction(before, self._device)

    def _allocated(self) -> int:
        return usage(self._device, "allocated").now if self._counts else 0

    def _reserved(self) -> int:
        return usage(self._device, "reserved").now if self._counts else 0


def _whole(module: object, device: torch.device) -> int:
    """The memory that a fraction of the device's memory is a fraction of."""
    properties = getattr(module, "get_device_properties", None)
    if properties is not None:
        return int(properties(device).total_memory)
    return torch.accelerator.get_memory_info(device)[1]
