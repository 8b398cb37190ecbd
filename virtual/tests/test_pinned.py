"""Pinned host memory: exactly as much as asked for, and known as such."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch_virtual
from torch.utils.data import DataLoader, TensorDataset


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_is_pinned_tells_the_truth():
    x = torch.empty(1000, pin_memory=True)
    plain = torch.empty(1000)
    assert x.is_pinned()
    assert plain.pin_memory().is_pinned()
    for view in (x[10:20], x.view(10, 100), x.view(10, 100).t(), x[::3], x.detach(), x[999:], x.untyped_storage()):
        assert view.is_pinned()
    assert not plain.is_pinned()
    assert not x.clone().is_pinned()
    assert not (x + 1).is_pinned()
    assert not torch.empty(1000, device="virtual").is_pinned()
    assert not torch.empty(0).is_pinned()


def test_memory_is_pinned_no_longer_than_it_lives():
    x = torch.empty(1 << 20, pin_memory=True)
    address = x.data_ptr()
    del x
    others = [torch.empty(1 << 20) for _ in range(8)]
    assert not any(o.is_pinned() for o in others), address


def test_pinned_memory_is_not_rounded_up():
    nbytes = (32 << 20) + 4096  # a power of two and a page: an allocator that rounds up takes twice as much
    before = resident()
    x = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    x.fill_(1)
    assert nbytes - (1 << 20) < resident() - before < nbytes + (4 << 20)
    del x
    assert resident() - before < 4 << 20


def test_pinned_memory_is_touched_when_it_is_made():
    before = resident()
    x = torch.empty(32 << 20, dtype=torch.uint8, pin_memory=True)
    assert resident() - before > 31 << 20
    del x


def test_pinned_memory_lives_as_long_as_its_copies():
    x = torch.zeros(100_000, device="virtual")
    with torch_virtual.link(h2d=4e6):
        x.copy_(torch.ones(100_000).pin_memory(), non_blocking=True)  # the source is gone before the copy is done
    assert x.sum().item() == 100_000


def test_registered_memory_is_pinned_until_it_is_unregistered():
    x = torch.zeros(1001, dtype=torch.uint8)
    torch_virtual.register_host(x)
    assert x.is_pinned()
    assert x[100:].is_pinned()
    torch_virtual.unregister_host(x)
    assert not x.is_pinned()
    torch_virtual.register_host(x)
    torch_virtual.unregister_host(x)


def test_memory_is_registered_to_the_byte():
    x = torch.zeros(1001, dtype=torch.uint8)
    torch_virtual.register_host(x[100:900])
    for overlapping in (x, x[899:], x[:101], x[100:900], x[200:300]):
        with pytest.raises(ValueError, match="overlaps"):
            torch_virtual.register_host(overlapping)
    torch_virtual.register_host(x[900:])  # next to it is not over it
    torch_virtual.register_host(x[:100])
    for part in (x[:100], x[100:900], x[900:]):
        torch_virtual.unregister_host(part)


def test_registered_memory_is_copied_asynchronously_and_unregistered_memory_not():
    x = torch.zeros(100_000, device="virtual")
    host = torch.ones(100_000)
    torch_virtual.register_host(host)
    with torch_virtual.link(h2d=4e6):
        x.copy_(host, non_blocking=True)
        assert not torch_virtual.current_stream().query()
        torch_virtual.synchronize()
        torch_virtual.unregister_host(host)
        x.copy_(host, non_blocking=True)
        assert torch_virtual.current_stream().query()


def test_a_tensor_half_of_which_is_registered_is_copied_synchronously():
    x = torch.zeros(100_000, device="virtual")
    host = torch.ones(100_000)
    torch_virtual.register_host(host[:50_000])
    with torch_virtual.link(h2d=4e6):
        x.copy_(host, non_blocking=True)
        assert torch_virtual.current_stream().query()
    torch_virtual.unregister_host(host[:50_000])


def test_what_cannot_be_registered_or_unregistered_is_refused():
    pinned = torch.zeros(1000, pin_memory=True)
    for wrong in (torch.zeros(10), pinned):
        with pytest.raises(ValueError, match="not registered"):
            torch_virtual.unregister_host(wrong)
    assert pinned.is_pinned()
    assert pinned.sum() == 0  # and still mapped
    with pytest.raises(ValueError, match="pinned already"):
        torch_virtual.register_host(pinned)
    for wrong, why in (
        (torch.zeros(4, 4).t(), "contiguous"),
        (torch.zeros(3, device="virtual"), "host tensor"),
        (torch.zeros(0), "0 bytes"),
    ):
        with pytest.raises(ValueError, match=why):
            torch_virtual.register_host(wrong)
    with pytest.raises(ValueError, match="only host memory"):
        torch.empty(3, device="virtual", pin_memory=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_pins_its_batches(workers):
    """With workers that are forked while the device is in use, too: they touch only the host."""
    x = torch.arange(64.0).view(16, 4)
    loader = DataLoader(TensorDataset(x), batch_size=4, pin_memory=True, num_workers=workers)
    got = []
    for (batch,) in loader:
        assert batch.is_pinned()
        got.append(batch.to("virtual", non_blocking=True))
    assert torch.equal(torch.cat(got).cpu(), x)
