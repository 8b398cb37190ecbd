"""The detector goes by bytes, and finds no races in ordinary training code."""

from __future__ import annotations

import pytest
import torch
import torch_virtual
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def streams() -> tuple[torch.Stream, torch.Stream]:
    return torch.Stream("virtual"), torch.Stream("virtual")


@pytest.fixture
def grid() -> torch.Tensor:
    grid = torch.zeros(32, 64, device="virtual")
    torch_virtual.synchronize()
    return grid


REGIONS = {
    "the same": (lambda g: g, lambda g: g, True),
    "rows apart": (lambda g: g[:16], lambda g: g[16:], False),
    "rows that share one": (lambda g: g[:17], lambda g: g[16:], True),
    "columns apart": (lambda g: g[:, :32], lambda g: g[:, 32:], False),
    "columns that share one": (lambda g: g[:, :33], lambda g: g[:, 32:], True),
    "a row and a column": (lambda g: g[3], lambda g: g[:, 5], True),
    "even and odd rows": (lambda g: g[::2], lambda g: g[1::2], False),
    "transposed": (lambda g: g.t()[:32], lambda g: g.t()[32:], False),
    "another dtype": (lambda g: g[0].view(torch.int16), lambda g: g[1].view(torch.int16), False),
    "one element and its neighbor": (lambda g: g[0, 0], lambda g: g[0, 1], False),
    "one element, seen twice": (lambda g: g[4, 4], lambda g: g.view(-1)[4 * 64 + 4], True),
    "views of views": (lambda g: g.view(64, 32)[2:4].view(-1)[:8], lambda g: g[1, 8:], False),
}


@pytest.mark.parametrize("case", REGIONS)
@pytest.mark.parametrize("kind", ["kernels", "copy and kernel", "kernel and copy"])
def test_only_the_same_bytes_race(grid, streams, take_races, case, kind):
    first, second, race = REGIONS[case]
    (a, b), (one, two) = (first(grid), second(grid)), streams
    buffer = torch.zeros(a.shape if kind == "copy and kernel" else b.shape, dtype=a.dtype, pin_memory=True)
    temporary = torch.zeros(1, device="virtual")
    torch_virtual.synchronize()
    with one:
        a.copy_(buffer, non_blocking=True) if kind == "copy and kernel" else a.add_(1)
    with two:
        b.copy_(buffer, non_blocking=True) if kind == "kernel and copy" else b.add_(1)
    assert len(take_races()) == race
    torch_virtual.synchronize()
    del temporary


def test_the_narrowest_label_is_named(grid, streams, take_races):
    torch_virtual.label(grid, "flat")
    torch_virtual.label(grid[:16], "layer 0")
    torch_virtual.label(grid[16:], "layer 1")
    torch_virtual.label(grid[16], "bias")
    torch_virtual.label(grid[16], "bias of layer 1")  # a name replaces the one before
    one, two = streams
    for row, name in ((3, "'layer 0'"), (20, "'layer 1'"), (16, "'bias of layer 1'")):
        with one:
            grid[row].add_(1)
        with two:
            grid[row].add_(1)
        (report,) = take_races()
        assert name in report
        assert f"bytes {row * 256} to {row * 256 + 256} of its allocation in virtual:0" in report
    torch_virtual.synchronize()


def test_pinned_buffers_are_shared_by_range(streams, take_races):
    x, y = torch.zeros(100, device="virtual"), torch.zeros(100, device="virtual")
    buffer = torch.zeros(200, pin_memory=True)
    torch_virtual.synchronize()
    one, two = streams
    with torch_virtual.strict():
        with one:
            buffer[:100].copy_(x, non_blocking=True)
        with two:
            buffer[100:].copy_(y, non_blocking=True)
        one.synchronize()
        torch_virtual.host_reads(buffer[:100])
        with pytest.raises(RuntimeError, match="race"):
            torch_virtual.host_reads(buffer[99:])
        two.synchronize()
    assert len(take_races()) == 1


def test_histories_do_not_grow_without_end(grid, streams):
    """Cheap enough to leave on: a loop of reads and writes in all places of one tensor."""
    flat = grid.view(-1)
    for i in range(2000):
        flat[i : i + 40].add_(1)
        flat[::3].sum()
    assert flat.sum().item() > 0


def test_reads_by_several_streams_are_all_remembered(grid, streams, take_races):
    one, two = streams
    three = torch.Stream("virtual")
    for stream in (one, two, three):
        with stream:
            grid.sum()
    grid_stream = torch_virtual.current_stream()
    with torch_virtual.strict():
        for stream in (one, two, three):
            with pytest.raises(RuntimeError, match=f"on stream {stream.stream_id} of virtual:0 reads"):
                grid.add_(1)
            grid_stream.wait_stream(stream)
        grid.add_(1)
    assert len(take_races()) == 3


# --- Right code.


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.1)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_on_a_side_stream_with_copies_on_others(streams, checkpointed):
    """Backward runs on PyTorch's own thread, and must be found to come after what this one waited for."""
    compute, down = streams
    up = torch.Stream("virtual")
    with torch_virtual.strict(), torch_virtual.link(delay=0.002), compute:
        model = nn.Sequential(*(Block(16) for _ in range(3))).to("virtual")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        host = torch.randn(4, 8, 16).pin_memory()
        gradients = {p: torch.empty(p.shape, pin_memory=True) for p in model.parameters()}
        with down:
            batch = torch.empty(4, 8, 16, device="virtual")
        for _ in range(3):
            with down:
                batch.copy_(host, non_blocking=True)
            compute.wait_stream(down)
            x = batch
            for block in model:
                x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            x.square().mean().backward()
            down.wait_stream(compute)
            up.wait_stream(compute)
            with up:
                for p, buffer in gradients.items():
                    buffer.copy_(p.grad, non_blocking=True)
            up.synchronize()
            for buffer in gradients.values():
                torch_virtual.host_reads(buffer)
            optimizer.step()
            optimizer.zero_grad()
        down.wait_stream(compute)
        del x, batch


def test_the_backward_pass_of_a_missing_wait_is_caught(streams, take_races):
    """The negative control: a weight is fetched on another stream and nobody waits before its backward pass."""
    fetch, _ = streams
    host = torch.randn(16, 16).pin_memory()
    x, weight = torch.randn(4, 16, device="virtual", requires_grad=True), torch.randn(16, 16, device="virtual")
    loss = (x @ weight).square().sum()
    fetch.wait_stream(torch_virtual.current_stream())
    with fetch:
        weight.copy_(host, non_blocking=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.no_grad(), fetch:
        weight.data.copy_(host, non_blocking=True)  # autograd does not see this one
    torch_virtual.synchronize()
    loss = (x @ weight).square().sum()
    fetch.wait_stream(torch_virtual.current_stream())
    with fetch:
        weight.data.copy_(host, non_blocking=True)
    loss.backward()
    (report,) = take_races()
    assert "aten::mm" in report
    assert "copy host to device" in report
    torch_virtual.synchronize()
