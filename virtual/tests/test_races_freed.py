"""The detector and memory that is freed, used again or unregistered while somebody needs it."""

from __future__ import annotations

import pytest
import torch
import torch_virtual

N = 1000


@pytest.fixture
def side() -> torch.Stream:
    return torch.Stream("virtual")


@pytest.fixture
def buffer() -> torch.Tensor:
    return torch.zeros(N, pin_memory=True)


def test_memory_freed_while_another_stream_needs_it(buffer, side, take_races):
    for keep in ("nothing", "wait", "record_stream", "host"):
        x = torch_virtual.label(torch.zeros(N, device="virtual"), "activations")
        side.wait_stream(torch_virtual.current_stream())
        with side:
            buffer.copy_(x, non_blocking=True)
        if keep == "wait":
            torch_virtual.current_stream().wait_stream(side)
        elif keep == "record_stream":
            x.record_stream(side)
        elif keep == "host":
            side.synchronize()
        del x
        found = take_races()
        assert len(found) == (1 if keep == "nothing" else 0), keep
        if found:
            assert "'activations'" in found[0]
            assert "was freed while 'copy device to host' on stream" in found[0]
            assert "record_stream" in found[0]


def test_memory_freed_too_early_raises_at_the_next_operation_or_the_blocks_end(buffer, side, take_races):
    def free_early() -> None:
        x = torch.zeros(N, device="virtual")
        side.wait_stream(torch_virtual.current_stream())
        with side:
            buffer.copy_(x, non_blocking=True)

    with torch_virtual.strict():
        free_early()
        with pytest.raises(RuntimeError, match="was freed while"):
            torch.zeros(3, device="virtual")
        torch.zeros(3, device="virtual")
    with pytest.raises(RuntimeError, match="was freed while"), torch_virtual.strict():
        free_early()
    assert len(take_races()) == 2


def test_a_copy_still_in_flight_keeps_its_bytes_even_so(side, take_races):
    """The race is reported; the bytes are nevertheless not given away under the copy."""
    x = torch.ones(100_000, device="virtual")
    back = torch.zeros(100_000, pin_memory=True)
    side.wait_stream(torch_virtual.current_stream())
    with torch_virtual.link(delay=0.1), side:
        back.copy_(x, non_blocking=True)
    del x
    others = [torch.zeros(100_000, device="virtual") for _ in range(4)]
    side.synchronize()
    assert back.sum() == 100_000
    assert len(take_races()) == 1
    del others


@pytest.mark.parametrize("elements", [N, 10 * N])
@pytest.mark.parametrize("wait", [False, True])
def test_memory_that_is_used_again_on_another_stream(buffer, side, take_races, elements, wait):
    """A new tensor may lie where an old one did that its stream still works on, whether this one does or not."""
    old = torch.zeros(elements, device="virtual")
    old.add_(1)
    del old
    new = torch.empty(N, device="virtual")
    if wait:
        side.wait_stream(torch_virtual.current_stream())
    with side:
        new.copy_(buffer, non_blocking=True)
    found = take_races()
    assert len(found) == (0 if wait else 1)
    if found:
        assert "an earlier owner of the memory" in found[0]
    torch_virtual.synchronize()


def test_unregistering_memory_that_a_copy_needs(side, take_races):
    x, host = torch.zeros(N, device="virtual"), torch.zeros(N)
    torch_virtual.synchronize()
    for wait in (False, True):
        torch_virtual.register_host(host)
        with torch_virtual.link(delay=0.05), side:
            x.copy_(host, non_blocking=True)
        if wait:
            side.synchronize()
        torch_virtual.unregister_host(host)
        assert side.query()  # it waited, so that the owner may free the memory
        assert len(take_races()) == (0 if wait else 1)
    torch_virtual.register_host(host)
    with side:
        x.copy_(host, non_blocking=True)
    with pytest.raises(RuntimeError, match="unregistering the memory"), torch_virtual.strict():
        torch_virtual.unregister_host(host)
    side.synchronize()
    take_races()
