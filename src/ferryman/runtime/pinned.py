"""Pinned host memory, for asynchronous copies: separate mappings that are registered with the device.

PyTorch's own pinned allocator rounds sizes up to a power of two, which can double a model's footprint. So memory of the
exact size is mapped, and then registered with the device if the device supports that.

Note [Registration]
A driver pins whole pages and refuses a page that is already pinned. So each block of memory is a separate mapping,
which shares no page with other memory and is registered once. Small buffers are parts of larger blocks (`arena.py`).
Registration opens a context on the current device, so the right device is made current first. A driver may refuse,
because some drivers limit the amount of pinned memory (WSL2). The memory then stays pageable: copies are slower, and
nothing else changes.

Note [Fork]
The kernel copies pinned private pages at once when a process forks, so each worker of a DataLoader would take as much
memory as the model and its state. Registered memory is therefore excluded from forks (`MADV_DONTFORK`). A forked child
does not have these pages, and reading weights there raises an error (`model/reads.py`). When the registration ends, the
memory is included in forks again, because the user's tensors may still use it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from collections.abc import Callable

import torch

from ferryman.runtime.sizes import show_bytes

_logger = logging.getLogger("ferryman")


class PinnedMemory:
    """Zeroed bytes, pinned for a device. If the device is the CPU, they are ordinary memory.

    The registration ends when this object is closed or dropped. The bytes live as long as a tensor uses them.
    """

    def __init__(self, nbytes: int, device: torch.device, memory: torch.Tensor | None = None) -> None:
        """`memory`: existing bytes to register, on separate pages, such as memory that several processes share."""
        mapping = None
        if memory is None:
            mapping, memory = _map(nbytes)
        self.bytes = memory
        self.is_pinned = False
        self._end: Callable[[], object] = lambda: None
        if device.type == "cpu" or nbytes == 0:
            return
        if not _can_register(device):
            if mapping is not None:  # shared memory cannot be moved, so it stays pageable
                self.bytes = memory.pin_memory()
                self.is_pinned = True
            return
        try:
            with torch.accelerator.device_index(device.index):
                _register(memory, device)
        except RuntimeError as error:  # a limit was reached; pages that are already registered raise a ValueError
            _warn(device, nbytes, error)
            return
        self.is_pinned = True
        if mapping is not None:
            mapping.madvise(mmap.MADV_DONTFORK)
        self._end = end = weakref.finalize(self, _end_registration, memory, device, mapping, os.getpid())
        end.atexit = False

    def close(self) -> None:
        self._end()
        self.is_pinned = False


def _map(nbytes: int) -> tuple[mmap.mmap | None, torch.Tensor]:
    """A private mapping and its bytes, which keep the mapping alive."""
    if nbytes == 0:
        return None, torch.empty(0, dtype=torch.uint8, device="cpu")
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Zeros touch the pages now: first-touch page faults cost three times as much as later accesses.
    return mapping, torch.frombuffer(mapping, dtype=torch.uint8).zero_()


_warned: set[torch.device] = set()


def _warn(device: torch.device, nbytes: int, error: RuntimeError) -> None:
    """Warns once per device: if one block of memory is refused, others will be too."""
    if device not in _warned:
        _warned.add(device)
        _logger.warning(
            "ferryman: the driver refuses to pin %s of host memory for %s (%s). Memory that it refuses stays pageable, "
            "so copies are slower and do not overlap with compute. Drivers limit what can be pinned: raise the limit "
            "(ulimit -l unlimited; for WSL2, memory= in .wslconfig)",
            show_bytes(nbytes),
            device,
            str(error).partition("\n")[0],
        )


def _end_registration(memory: torch.Tensor, device: torch.device, mapping: mmap.mmap | None, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has neither the memory nor the device
    with torch.accelerator.device_index(device.index):
        _unregister(memory, device)
    if mapping is not None:
        mapping.madvise(mmap.MADV_DOFORK)


def _can_register(device: torch.device) -> bool:
    return device.type == "cuda" or hasattr(torch.get_device_module(device), "register_host")


def _register(memory: torch.Tensor, device: torch.device) -> None:
    """Pins memory in place for the current device. Raises a RuntimeError if the driver refuses."""
    if device.type != "cuda":
        torch.get_device_module(device).register_host(memory)
        return
    # The only place that names CUDA: `torch.accelerator` cannot register memory.
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except RuntimeError:
        # The runtime would report the error at the next kernel launch, so a launch here clears it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device, dtype=torch.float32)
        raise


def _unregister(memory: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
    else:
        torch.get_device_module(device).unregister_host(memory)
