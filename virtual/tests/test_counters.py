"""Counters: what crossed the link, what memory it took, how many races."""

from __future__ import annotations

import pytest
import torch
import torch_virtual


def test_bytes_and_copies_are_counted_exactly_each_way(pinned):
    host = pinned(1000)
    with torch_virtual.watch() as seen:
        x = host.to("virtual", non_blocking=True)  # 4000 down
        y = torch.ones(7, dtype=torch.int64).to("virtual")  # 56 down
        x.add_(1)
        z = x[:10].clone()  # stays on the device
        z.cpu()  # 40 up
        host.copy_(x, non_blocking=True)  # 4000 up
        y[3].item()  # 8 up
        torch.empty(0, device="virtual").cpu()  # nothing
        torch_virtual.synchronize()
    counters = seen.counters
    assert (counters.h2d_bytes, counters.h2d_copies) == (4056, 2)
    assert (counters.d2h_bytes, counters.d2h_copies) == (4048, 3)
    assert counters.races == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_what_crosses_is_counted_as_it_crosses(dtype):
    """Down, the host converts first; up, the device does: only the wanted bytes cross."""
    x = torch.zeros(100, 10, device="virtual")
    host = torch.zeros(100, 10, dtype=dtype)
    with torch_virtual.watch() as seen:
        x.copy_(host)
        host.copy_(x)
        x[:, :3].copy_(host[:, :3])
        host[:, :3].copy_(x[:, :3])
        host.copy_(x[:1].expand(100, 10))
    counters = seen.counters
    assert (counters.h2d_bytes, counters.h2d_copies) == (4000 + 1200, 2)
    assert (counters.d2h_bytes, counters.d2h_copies) == (host.nbytes + 300 * host.itemsize + host.nbytes, 3)


def test_peak_memory_of_a_block():
    base = torch_virtual.memory_allocated()
    big = torch.empty(1 << 20, device="virtual")
    del big
    with torch_virtual.watch() as seen:
        x = torch.empty(1000, device="virtual")
        y = torch.empty(2000, device="virtual")
        del y
    assert seen.counters.peak_memory - base == 12_000
    assert seen.counters.memory - base == 4000
    del x


def test_counters_can_be_read_within_the_block_and_stay_after_it():
    with torch_virtual.watch() as seen:
        assert seen.counters.h2d_copies == 0
        x = torch.ones(10).to("virtual")
        assert seen.counters.h2d_bytes == 40
        assert seen.counters.memory >= 40
    x.copy_(torch.ones(10))
    assert seen.counters.h2d_bytes == 40


def test_counters_are_a_devices_own():
    with torch_virtual.watch(0) as first, torch_virtual.watch("virtual:1") as second:
        torch.ones(10).to("virtual:1")
    assert first.counters.h2d_bytes == 0
    assert second.counters.h2d_bytes == 40
    before = torch_virtual.counters(1)
    torch.ones(10).to("virtual:1")
    assert torch_virtual.counters(1).h2d_bytes == before.h2d_bytes + 40
    with pytest.raises(ValueError, match="'cpu'"):
        torch_virtual.counters("cpu")


def test_races_of_a_block_are_counted(take_races):
    x = torch.zeros(10, device="virtual")
    with torch_virtual.watch() as right:
        side = torch.Stream("virtual")
        side.wait_stream(torch_virtual.current_stream())
        with side:
            x.add_(1)
    with torch_virtual.watch() as wrong:
        x.add_(1)
    assert (right.counters.races, wrong.counters.races) == (0, 1)
    assert len(take_races()) == 1


def test_a_copy_that_was_refused_is_not_counted(take_races, pinned):
    x, host = torch.zeros(1000, device="virtual"), pinned(1000)
    side = torch.Stream("virtual")
    with torch_virtual.watch() as seen, torch_virtual.strict(), pytest.raises(RuntimeError, match="race"), side:
        x.copy_(host, non_blocking=True)
    assert seen.counters.h2d_copies == 0
    assert seen.counters.races == len(take_races()) == 1


def test_all_races_are_counted_and_a_thousand_described():
    x = torch.zeros(10, device="virtual")
    torch_virtual.synchronize()
    streams = torch.Stream("virtual"), torch.Stream("virtual")
    for i in range(1200):
        with streams[i % 2]:
            x.add_(1)
    assert torch_virtual.race_count() == 1199
    assert len(torch_virtual.races()) == 1000
    torch_virtual.synchronize()
    torch_virtual.clear_races()
