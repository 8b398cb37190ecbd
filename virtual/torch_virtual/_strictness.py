"""What real devices do or lack, and this one can be told to: workspaces, float64, limits of pinned memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_virtual import _C
from torch_virtual._device import Device, index_of


def set_workspace(nbytes: int, device: Device = None) -> int:
    """From now on each pair of thread and stream that runs a matrix product takes so much device memory, as with
    cuBLAS. Workspaces that are there are freed. Returns the size before."""
    index = index_of(device)
    before = _C.workspace(index)
    _C.set_workspace(index, nbytes)
    return before


@contextmanager
def workspace(nbytes: int, device: Device = None) -> Iterator[None]:
    """`set_workspace` for a block of code."""
    index = index_of(device)
    before = set_workspace(nbytes, index)
    try:
        yield
    finally:
        set_workspace(before, index)


@contextmanager
def no_float64(device: Device = None) -> Iterator[None]:
    """Within, float64 on the device is a TypeError, as it is on devices that do not have it."""
    index = index_of(device)
    before = _C.has_float64(index)
    _C.set_float64(index, False)
    try:
        yield
    finally:
        _C.set_float64(index, before)


@contextmanager
def pinned_limit(nbytes: int) -> Iterator[None]:
    """Within, to pin more host memory than this in all is an out-of-memory error, as drivers have it that cap it."""
    _C.set_pinned_limit(nbytes)
    try:
        yield
    finally:
        _C.set_pinned_limit(2**64 - 1)


@contextmanager
def whole_pages() -> Iterator[None]:
    """Within, host memory is pinned page by page, as on CUDA: no two registered tensors may share a page."""
    before = _C.set_whole_pages(True)
    try:
        yield
    finally:
        _C.set_whole_pages(before)


def follow_environment() -> None:
    """Makes every device as unkind as CUDA is if TORCH_VIRTUAL_UNKIND says so: 1 for CUDA's own sizes of segments and
    workspaces, or the number by which they are divided, so that small models can be tested to scale."""
    text = os.environ.get("TORCH_VIRTUAL_UNKIND")
    if text is None:
        return
    scale = int(text) if text.isdecimal() else 0
    if not (1 <= scale <= 1 << 14 and scale & (scale - 1) == 0):
        raise ValueError(f"TORCH_VIRTUAL_UNKIND must be a power of two from 1 to {1 << 14}, not {text!r}")
    _C.set_unkind(scale)
    _C.set_whole_pages(True)


def contexts() -> list[int]:
    """Devices that this process has used in any way, on which CUDA would have opened a context."""
    return _C.contexts()


def streams_in_use(device: Device = None) -> int:
    """How many streams of the device have had work, the default one among them."""
    return _C.streams_in_use(index_of(device))


def bytes_copied_by_fork() -> int:
    """Pinned memory that `fork` would copy page by page: all that is not excluded with MADV_DONTFORK."""
    ranges = [(start, start + nbytes) for start, nbytes in _C.pinned_ranges()]
    total, mapping = 0, (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            low, high = first.split("-")
            mapping = int(low, 16), int(high, 16)
        elif first == "VmFlags:" and "dc" not in rest.split():
            total += sum(max(0, min(end, mapping[1]) - max(start, mapping[0])) for start, end in ranges)
    return total
