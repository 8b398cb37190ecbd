"""Pieces of pinned memory: carved from few regions, merged when they are given back, bounded by the peak."""

import random

import pytest
import torch

from ferryman.runtime import pinned
from ferryman.runtime.arena import Arena, latest
from ferryman.runtime.lanes import Lanes
from ferryman.runtime.pinned import PinnedMemory
from support.devices import torch_virtual

MB = 1 << 20


@pytest.fixture
def arena(device):
    arena = Arena(device)
    yield arena
    arena.close()


def test_pieces_do_not_overlap_and_are_aligned(arena):
    pieces = [arena.take(size) for size in (1, 64, 65, 1000, 3 * MB, 0)]
    for number, piece in enumerate(pieces):
        piece.bytes.fill_(number)
    assert [piece.bytes.numel() for piece in pieces] == [1, 64, 65, 1000, 3 * MB, 0]
    assert all((piece.bytes == number).all() for number, piece in enumerate(pieces))
    assert all(piece.bytes.data_ptr() % 64 == 0 for piece in pieces if piece.bytes.numel())
    assert len(arena._regions) == 2


def test_freed_neighbors_are_merged(arena):
    pieces = [arena.take(MB // 4) for _ in range(4)]
    for number in (1, 3, 0, 2):  # each order of neighbors: none, none, after, on both sides
        arena.give(pieces[number])
    again = arena.take(MB)
    assert (len(arena._regions), arena.reserved, arena.peak) == (1, MB, MB)
    assert again.bytes.data_ptr() == pieces[0].bytes.data_ptr()


def test_many_regions_are_replaced_by_one(arena):
    for size in range(1, 20):  # there is no room for five of these where there was for five of the size before
        pieces = [arena.take(size * MB) for _ in range(5)]
        for piece in pieces:
            arena.give(piece)
    arena.take(1)
    assert (len(arena._regions), arena.reserved, arena.peak) == (1, 5 * 19 * MB, 5 * 19 * MB)


@pytest.mark.parametrize("order", ["first in, first out", "last in, first out", "any"])
def test_memory_is_bounded_by_the_peak_whatever_the_sizes(arena, order):
    rng, seen = random.Random(0), set()
    for _ in range(300):
        unit = rng.randrange(1000, 100_000)
        pieces = [arena.take(unit)]
        assert len(arena._regions) == 1
        assert arena.reserved <= max(1.5 * arena.peak, MB)
        for _ in range(rng.randrange(1, 20)):
            pieces.append(arena.take(unit * rng.choice((1, 4))))
        while pieces:
            if rng.random() < 0.3:
                pieces.append(arena.take(unit))
            at = {"first in, first out": 0, "last in, first out": -1}.get(order, rng.randrange(len(pieces)))
            arena.give(pieces.pop(at))
            seen.update(arena._regions)
    assert len(seen) < 50  # not registered anew for every size


def test_a_piece_comes_after_the_last_use_of_what_was_there(device):
    with Lanes(device) as lanes:
        one, two = lanes.device("one"), lanes.device("two")
        arena = Arena(device)
        pieces = [arena.take(MB // 2) for _ in range(2)]
        marks = [one.submit(lambda: None) for _ in range(3)]
        other = two.submit(lambda: None)
        arena.give(pieces[0], [marks[1]])
        arena.give(pieces[1], [marks[0], other])
        assert set(arena.take(MB).after) == {marks[1], other}
        assert latest(marks) == [marks[2]]
        lanes.wait()
        arena.close()


def test_a_piece_that_was_not_used_is_still_in_use_by_others(device):
    with Lanes(device) as lanes:
        arena, lane = Arena(device), lanes.device("lane")
        mark = lane.submit(lambda: None)
        arena.give(arena.take(MB), [mark])
        arena.give(arena.take(MB))
        assert arena.take(MB).after == [mark]
        lanes.wait()
        arena.close()


def is_registered(tensor):
    ranges = torch_virtual._C.pinned_ranges()
    return any(start <= tensor.data_ptr() < start + nbytes for start, nbytes in ranges)


def test_registered_memory_has_pages_of_its_own(virtual):
    with torch_virtual.whole_pages():
        memories = [PinnedMemory(size, virtual) for size in (1, 100, 5000, MB) for _ in range(3)]
        arena = Arena(virtual)
        pieces = [arena.take(100) for _ in range(50)]
        assert all(memory.is_pinned for memory in memories)
        assert all(is_registered(tensor) for tensor in [m.bytes for m in memories] + [p.bytes for p in pieces])
        assert len(arena._regions) == 1
    arena.close()
    for memory in memories:
        memory.close()
        assert not is_registered(memory.bytes)
        memory.bytes.fill_(1)  # it lives on


def test_a_driver_that_refuses_leaves_pageable_memory_and_warns_once(virtual, caplog, monkeypatch):
    monkeypatch.setattr(pinned, "_warned", set())
    with torch_virtual.pinned_limit(0):
        memories = [PinnedMemory(MB, virtual) for _ in range(3)]
    assert not any(memory.is_pinned or is_registered(memory.bytes) for memory in memories)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "refuses to pin 1.00MiB of host memory for virtual:0" in caplog.text
    assert torch.equal(memories[0].bytes.to(virtual).cpu(), torch.zeros(MB, dtype=torch.uint8))


def test_registered_memory_is_not_copied_by_fork_and_is_again_when_it_is_not_registered(virtual):
    before = torch_virtual.bytes_copied_by_fork()
    memory = PinnedMemory(MB, virtual)
    assert torch_virtual.bytes_copied_by_fork() == before
    memory.bytes.fill_(7)
    memory.close()
    torch_virtual.register_host(memory.bytes)  # by somebody who does not exclude it
    try:
        assert torch_virtual.bytes_copied_by_fork() == before + MB
    finally:
        torch_virtual.unregister_host(memory.bytes)
