"""The allocator keeps freed memory as CUDA's does: segments, pools for each stream, and what is reserved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch_virtual
from torch_virtual import CUDA, EXACT, Caching

KB, MB = 1 << 10, 1 << 20
SCALED = Caching(rounding=512, small_segment=8 * KB, large_segment=80 * KB)


@pytest.fixture(params=[CUDA, SCALED], ids=["CUDA", "scaled"])
def sizes(request) -> Iterator[Caching]:
    """An empty device that caches."""
    torch_virtual.empty_cache()
    with torch_virtual.caching(request.param):
        yield request.param
    torch_virtual.empty_cache()


def new(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="virtual")


class Use:
    """How much more is in use than at the start."""

    def __init__(self) -> None:
        self._before = self._now()

    def _now(self) -> dict[str, int]:
        stats = torch_virtual.memory_stats()
        return {kind: stats[f"{kind}_bytes.all.current"] for kind in ("requested", "allocated", "active", "reserved")}

    def __getattr__(self, kind: str) -> int:
        return self._now()[kind] - self._before[kind]


@pytest.fixture
def use(sizes) -> Use:
    return Use()


def test_sizes_are_rounded_up(sizes, use):
    x = new(1)
    y = new(sizes.rounding + 1)
    assert use.requested == sizes.rounding + 2
    assert use.allocated == use.active == 3 * sizes.rounding
    assert use.reserved == sizes.small_segment
    assert (
        torch_virtual.memory_reserved() - torch_virtual.memory_allocated() >= sizes.small_segment - 3 * sizes.rounding
    )
    del x, y
    assert use.allocated == 0
    assert use.reserved == sizes.small_segment  # kept for later


def test_segments_by_the_size_of_the_allocation(sizes, use):
    small = new(sizes.small_segment // 2)
    assert use.reserved == sizes.small_segment
    medium = new(sizes.small_segment // 2 + 1)
    assert use.reserved == sizes.small_segment + sizes.large_segment
    large = new(sizes.large_segment + 1)  # more than that has left: a segment of its own
    assert use.reserved == sizes.small_segment + 2 * sizes.large_segment + sizes.small_segment
    del small, medium, large


def test_a_freed_block_is_used_again_and_split(sizes, use):
    x = new(sizes.large_segment - sizes.small_segment)
    reserved, address = use.reserved, x.data_ptr()
    del x
    pieces = [new(sizes.small_segment) for _ in range(4)]
    assert use.reserved == reserved
    assert min(piece.data_ptr() for piece in pieces) == address
    assert len({piece.data_ptr() for piece in pieces}) == 4
    pieces.clear()
    again = new(sizes.large_segment - sizes.small_segment)  # the pieces were joined
    assert (use.reserved, again.data_ptr()) == (reserved, address)
    del again


def test_a_large_block_is_not_split_for_a_small_rest(sizes, use):
    x = new(sizes.large_segment)
    del x
    rest = sizes.small_segment // 2
    y = new(sizes.large_segment - rest)
    assert use.allocated == sizes.large_segment  # the rest is lost inside
    del y


def test_another_stream_cannot_have_what_a_stream_has_freed(sizes, use, side):
    x = new(sizes.large_segment)
    del x
    side.wait_stream(torch_virtual.current_stream())
    with side:
        y = new(sizes.large_segment)
    assert use.reserved == 2 * sizes.large_segment
    del y


def test_the_cache_is_given_back_when_asked_for(sizes, use, side):
    kept = new(sizes.large_segment)
    x = new(sizes.large_segment)
    del x
    assert use.reserved == 2 * sizes.large_segment
    torch_virtual.empty_cache()
    assert use.reserved == sizes.large_segment
    del kept
    torch_virtual.empty_cache()
    assert use.reserved == 0


def test_the_cache_is_given_back_where_nothing_else_helps(sizes, use, side):
    torch_virtual.set_capacity(torch_virtual.memory_reserved() + 2 * sizes.large_segment)
    x = new(sizes.large_segment)
    del x
    side.wait_stream(torch_virtual.current_stream())
    with side:
        y = new(2 * sizes.large_segment)
    assert use.reserved == 2 * sizes.large_segment
    del y


def test_fragments_run_out_although_enough_is_free(sizes, use):
    torch_virtual.set_capacity(torch_virtual.memory_reserved() + sizes.large_segment)
    pieces = [new(sizes.small_segment) for _ in range(10)]
    del pieces[::2]
    assert use.allocated == 5 * sizes.small_segment
    with pytest.raises(torch.OutOfMemoryError, match="reserved and not allocated"):
        new(2 * sizes.small_segment)
    pieces.clear()
    x = new(2 * sizes.small_segment)
    del x


def test_memory_of_another_stream_stays_active_until_that_has_passed(sizes, use, side, pinned):
    x = torch.ones(sizes.large_segment, dtype=torch.uint8, device="virtual")
    host = torch.empty(sizes.large_segment, dtype=torch.uint8, pin_memory=True)
    side.wait_stream(torch_virtual.current_stream())
    gate = torch.Event("virtual")
    with torch_virtual.link(d2h=sizes.large_segment / 0.2), side:
        host.copy_(x, non_blocking=True)
        gate.record()
    x.record_stream(side)
    address = x.data_ptr()
    del x
    if not gate.query():
        assert use.allocated == 0
        assert use.active == sizes.large_segment
        y = new(sizes.large_segment)
        assert y.data_ptr() != address
        assert use.reserved == 2 * sizes.large_segment
        del y
    gate.synchronize()
    torch_virtual.synchronize()
    assert use.active == 0
    assert bool(host.all())


def test_a_fraction_bounds_what_is_reserved(sizes, use):
    capacity = torch_virtual.memory_reserved() + 8 * sizes.large_segment
    torch_virtual.set_capacity(capacity)
    torch_virtual.set_per_process_memory_fraction((capacity - 6 * sizes.large_segment) / capacity)
    try:
        x = new(2 * sizes.large_segment)
        with pytest.raises(torch.OutOfMemoryError, match="this process may take"):
            new(sizes.large_segment)
        assert torch_virtual.mem_get_info()[0] == 6 * sizes.large_segment  # the device has room
        del x
    finally:
        torch_virtual.set_per_process_memory_fraction(1.0)


def test_peaks_are_counted_apart(sizes, use):
    torch_virtual.reset_peak_memory_stats()
    x = new(sizes.large_segment)
    del x
    y = new(sizes.rounding)
    assert torch_virtual.max_memory_allocated() >= sizes.large_segment
    assert torch_virtual.max_memory_reserved() - torch_virtual.max_memory_allocated() >= sizes.small_segment
    del y


def test_without_caching_nothing_is_kept():
    torch_virtual.empty_cache()
    with torch_virtual.caching(EXACT):
        use = Use()
        x = new(1001)
        assert (use.requested, use.allocated, use.active, use.reserved) == (1001, 1001, 1001, 1001)
        del x
        assert use.reserved == 0


def test_what_was_cached_stays_so_when_caching_ends(sizes, use):
    x = new(sizes.large_segment)
    with torch_virtual.caching(EXACT):
        y = new(1000)
        del x, y
    assert use.reserved == sizes.large_segment
    torch_virtual.empty_cache()
    assert use.reserved == 0


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"rounding": 512}, "requires segments"),
        ({"rounding": 100, "small_segment": 2000, "large_segment": 20000}, "multiple of 64"),
        ({"rounding": 512, "small_segment": 1000, "large_segment": 20000}, "small_segment"),
        ({"rounding": 512, "small_segment": 2048, "large_segment": 2048}, "large_segment"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        Caching(**wrong)


def test_training_is_the_same_with_caching(sizes):
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).to("virtual")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 32, device="virtual")).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    with_caching = train()
    with torch_virtual.caching(EXACT):
        without = train()
    assert all(torch.equal(a, b) for a, b in zip(with_caching, without, strict=True))
