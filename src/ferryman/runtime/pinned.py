"""Host memory that copies can use asynchronously, allocated to the byte.

PyTorch's own pinned allocator rounds up to a power of two, which can double a model's footprint. So memory is allocated
exactly and then registered with the device, where the device can do that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class PinnedMemory:
    """Zeroed bytes, pinned for a device; plain memory where the device is the host itself.

    The registration ends with `close`, or with this object. The bytes live on for as long as a tensor uses them.
    """

    def __init__(self, nbytes: int, device: torch.device, memory: torch.Tensor | None = None) -> None:
        """`memory`: existing bytes to register, such as memory that several processes share."""
        # Zeros touch the pages now: first-touch page faults cost three times as much as later accesses.
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8) if memory is None else memory
        self._unregister: Callable[[], object] = lambda: None
        if device.type == "cpu" or nbytes == 0:
            return
        if _register(self.bytes, device):
            self._unregister = end = weakref.finalize(self, _unregister, self.bytes, device)
            end.atexit = False
        elif memory is None:  # shared memory cannot be moved: its copies are slower
            self.bytes = self.bytes.pin_memory()

    def close(self) -> None:
        self._unregister()


def _register(memory: torch.Tensor, device: torch.device) -> bool:
    """Pins memory in place; returns whether the device can do that."""
    module = torch.get_device_module(device)
    if device.type == "cuda":  # the one place that names it: `torch.accelerator` has no way to register memory
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        return True
    if hasattr(module, "register_host"):
        module.register_host(memory)
        return True
    return False


def _unregister(memory: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
    else:
        torch.get_device_module(device).unregister_host(memory)
