"""Copies are asynchronous where CUDA's are, and in their stream's order."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch_virtual

SLOW = {"h2d": 2e6, "d2h": 2e6}  # with 400 kB: 0.2 s
COUNT = 100_000


def elapsed(work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_copy_from_or_to_pinned_memory_returns_at_once(device_tensor, pinned, direction, holds_once):
    host = pinned(COUNT)
    to, source = (device_tensor, host) if direction == "h2d" else (host, device_tensor)

    def returns_at_once() -> bool:
        asked = elapsed(lambda: to.copy_(source, non_blocking=True))
        is_under_way = not torch_virtual.current_stream().query()
        return asked < 0.1 and is_under_way and elapsed(torch_virtual.synchronize) > 0.05

    with torch_virtual.link(**SLOW):
        assert holds_once(returns_at_once)
    torch_virtual.synchronize()
    assert torch_virtual.current_stream().query()
    assert torch.equal(to.cpu(), source.cpu())


def test_a_copy_that_was_not_waited_for_has_not_arrived(device_tensor, pinned, holds_once):
    host = pinned(COUNT)

    def is_still_there() -> bool:
        host.fill_(7)
        host.copy_(device_tensor, non_blocking=True)
        before = host[-1] == 7
        torch_virtual.synchronize()
        assert host[-1] == 0
        return bool(before)

    with torch_virtual.link(d2h=4e6):
        assert holds_once(is_still_there)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize("kind", ["unpinned", "blocking"])
def test_other_copies_return_when_they_are_done(device_tensor, pinned, direction, kind):
    host = torch.ones(COUNT) if kind == "unpinned" else pinned(COUNT)
    to, source = (device_tensor, host) if direction == "h2d" else (host, device_tensor)
    with torch_virtual.link(**SLOW):
        assert elapsed(lambda: to.copy_(source, non_blocking=kind == "unpinned")) > 0.19
    assert torch_virtual.current_stream().query()
    assert torch.equal(to.cpu(), source.cpu())


def test_a_copy_runs_on_its_streams_own_thread(device_tensor, pinned, side):
    host = pinned(COUNT)
    with side:
        device_tensor.copy_(host, non_blocking=True)
    side.synchronize()
    names = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    assert f"virtual0.{side.stream_id}" in names


def test_to_and_cpu_are_asynchronous_where_cuda_is(pinned, holds_once):
    host = pinned(COUNT)

    def returns_at_once() -> bool:
        asked = elapsed(lambda: host.to("virtual", non_blocking=True))
        torch_virtual.synchronize()
        return asked < 0.1

    with torch_virtual.link(**SLOW):
        assert holds_once(returns_at_once)
        x = host.to("virtual")
        assert elapsed(lambda: x.cpu()) > 0.19


def test_one_element_dimensions_do_not_make_a_copy_synchronous(device_tensor, pinned, holds_once):
    """Their strides mean nothing, and differ between tensors that lie alike."""
    host = pinned(COUNT).as_strided((1, COUNT), (1, 1))

    def returns_at_once() -> bool:
        asked = elapsed(lambda: device_tensor.view(1, COUNT).copy_(host, non_blocking=True))
        torch_virtual.synchronize()
        return asked < 0.1

    with torch_virtual.link(**SLOW):
        assert holds_once(returns_at_once)
    assert torch.equal(device_tensor.cpu(), host[0])


def test_a_streams_work_is_done_in_order(device_tensor, pinned, side):
    first, second = pinned(COUNT).fill_(1), pinned(COUNT).fill_(2)
    back = pinned(COUNT)
    with torch_virtual.link(delay=0.02), side:
        device_tensor.copy_(first, non_blocking=True)
        device_tensor.add_(10)  # a kernel waits for its turn
        back.copy_(device_tensor, non_blocking=True)
        device_tensor.copy_(second, non_blocking=True)
    side.synchronize()
    assert (back[0], back[-1]) == (11, 11)
    assert device_tensor.sum().item() == 2 * COUNT
