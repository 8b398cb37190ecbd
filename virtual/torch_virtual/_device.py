"""Which virtual devices there are, and which one and which stream is current. Thin: PyTorch has the rest."""

from __future__ import annotations

import torch

from torch_virtual import _C

Device = torch.device | str | int | None


def index_of(device: Device = None) -> int:
    """The number of a device given in any of the ways that PyTorch takes; of the current one for None."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "virtual":
        raise ValueError(f"a virtual device is required here, this is {str(device)!r}")
    return current_device() if device.index is None else device.index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing to do: devices come to be at their first use."""


def device_count() -> int:
    return _C.device_count()  # torch.accelerator.device_count asks here


def set_device_count(count: int) -> None:
    """Adds devices. There are four from the start, or as many as TORCH_VIRTUAL_DEVICES says."""
    _C.set_device_count(count)


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Device) -> None:
    torch.accelerator.set_device_index(index_of(device))


class device(torch.accelerator.device_index):  # noqa: N801 - as torch.cuda.device
    """Makes a device current for a block of code."""

    def __init__(self, device: Device) -> None:
        super().__init__(index_of(device))


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: Device = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=_device_type())


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(index_of(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _device_type() -> int:
    return torch.accelerator.current_stream(0).device_type
