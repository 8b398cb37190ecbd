"""What the tests share: a clean device for each, and the check that right code is never called a race."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_virtual


def _settle() -> None:
    """Nothing of an earlier test is alive, under way or unknown to the host."""
    gc.collect()
    gc.freeze()  # what is left are imports, also of the test itself: collecting takes no time after the next one
    for index in range(torch_virtual.device_count()):
        torch_virtual.synchronize(index)


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    """Link, capacity, seeds, device and stream are as at the start; a race that a test did not take fails it."""
    _settle()
    torch_virtual.clear_races()
    torch.manual_seed(0)
    links = [torch_virtual.set_link(i) for i in range(torch_virtual.device_count())]
    capacities = [torch_virtual.capacity(i) for i in range(torch_virtual.device_count())]
    yield
    for index, (link, capacity) in enumerate(zip(links, capacities, strict=True)):
        torch_virtual.set_link(index, h2d=link.h2d, d2h=link.d2h, latency=link.latency, delay=link.delay)
        torch_virtual.set_capacity(capacity, index)
    for index in reversed(range(torch_virtual.device_count())):
        torch_virtual.set_stream(torch_virtual.default_stream(index))  # makes its device current, too
    _settle()
    assert torch_virtual.races() == []


@pytest.fixture
def take_races() -> Callable[[], list[str]]:
    """Returns what was reported so far and forgets it."""

    def take() -> list[str]:
        found = torch_virtual.races()
        assert torch_virtual.race_count() == len(found)
        torch_virtual.clear_races()
        return found

    return take


@pytest.fixture
def holds_once() -> Callable[[Callable[[], bool]], bool]:
    """Whether what depends on time holds in one of many tries: others may have the cores."""

    def holds(attempt: Callable[[], bool]) -> bool:
        return any(attempt() for _ in range(20))

    return holds


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs code in a process of its own, for what would end or spoil this one."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        header = "import ctypes, os, threading, time, torch, torch_virtual\n"
        return subprocess.run(
            [sys.executable, "-c", header + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )

    return run


def _same(a: Any, b: Any, path: str = "result") -> None:
    if isinstance(a, torch.Tensor):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        a, b = a.detach().cpu(), b.detach().cpu()
        if not ((a == b) | (a.isnan() & b.isnan())).all():
            pytest.fail(f"{path}: {int((a != b).sum())} of {a.numel()} elements differ, by up to {(a - b).abs().max()}")
    elif isinstance(a, tuple | list):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _same(x, y, f"{path}[{i}]")
    else:
        assert a == b, path


@pytest.fixture
def same() -> Callable[[Any, Any], None]:
    """Asserts that two results are equal to the bit, wherever their tensors are."""
    return _same


@pytest.fixture
def on_both(same) -> Callable[..., None]:
    """Runs a function of tensors on the CPU and on the device, forward and, where it can, backward: all equal bitwise.

    Both start from the same seed, so that random numbers are the same.
    """

    def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
        return tensor.detach().clone().to(device).requires_grad_(tensor.requires_grad)

    def run(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
        results = []
        for device in ("cpu", "virtual"):
            torch.manual_seed(11)
            inputs = [moved(t, device) for t in tensors]
            out = function(*inputs)
            outputs = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor)]
            assert all(t.device.type == device for t in outputs)
            differentiable = [t for t in outputs if t.requires_grad]
            if differentiable:
                torch.manual_seed(12)
                torch.autograd.backward(differentiable, [torch.randn_like(t) for t in differentiable])
            results.append([out, inputs, [t.grad for t in inputs]])
        same(*results)

    return run


@pytest.fixture
def pinned() -> Callable[..., torch.Tensor]:
    """A pinned float tensor that counts up, of a number of elements or of bytes."""

    def make(elements: int | None = None, *, nbytes: int = 0) -> torch.Tensor:
        count = nbytes // 4 if elements is None else elements
        tensor = torch.empty(count, pin_memory=True)
        torch.arange(count, dtype=torch.float32, out=tensor)
        return tensor

    return make


@pytest.fixture
def device_tensor() -> torch.Tensor:
    x = torch.zeros(100_000, device="virtual")
    torch_virtual.synchronize()  # streams of the tests need not wait for its making
    return x


@pytest.fixture
def side() -> torch.Stream:
    return torch.Stream("virtual")
