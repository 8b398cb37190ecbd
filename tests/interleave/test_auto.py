"""`auto`: the split follows what host, device and link can do, while training runs."""

import time

import pytest

from ferryman.server import kernels
from support.devices import torch_virtual
from support.interleave import BROAD, Pair
from support.slow import slow
from support.updates import WAYS

both_ways = pytest.mark.parametrize(("way", "held"), [("eager", False), ("clipped", True)])
relayed = pytest.mark.parametrize(("way", "held"), [("eager", False), *slow(("clipped", True))])
held_first = pytest.mark.parametrize(("way", "held"), [("clipped", True), *slow(("eager", False))])
STEPS = 8  # within which the split has moved; it takes two or three


def slow_host(monkeypatch, seconds):
    """The real update, but each parameter takes so long; what it is set to later counts."""
    real, pace = kernels.update, [seconds]

    def late(rule, pieces, **options):
        time.sleep(pace[0] * sum(piece.gradient.numel() for piece in pieces))
        real(rule, pieces, **options)

    monkeypatch.setattr(kernels, "update", late)
    return pace


def share_moves(pair, reached, first=0):
    """Whether the device's share of the updates gets where it should within a few steps. Not in each of them: on a busy
    machine host, link and device may be slower in a step than they are."""
    for seed in range(first, first + STEPS):
        pair.step(seed)
        if reached(pair.engine.stats().device_share):
            return True
    return False


def is_none(share):
    return share == 0


def is_some(share):
    return share > 0


@relayed
def test_a_slow_host_moves_work_to_the_device_and_a_slow_link_takes_it_back(way, held, virtual, monkeypatch):
    slow_host(monkeypatch, 0.02 / 16384)
    with Pair(virtual, BROAD, updates="auto", held=held, **WAYS[way]) as pair:
        assert share_moves(pair, is_some)
        # A subgroup's way there and back now takes longer than the host takes for everything.
        torch_virtual.set_link(virtual, h2d=8e5, d2h=8e5)
        assert share_moves(pair, is_none, first=STEPS)
        torch_virtual.set_link(virtual, h2d=float("inf"), d2h=float("inf"))
    pair.check()


@held_first
def test_a_host_that_becomes_slow_gives_work_away(way, held, virtual, monkeypatch):
    pace = slow_host(monkeypatch, 0.0)
    torch_virtual.set_link(virtual, latency=0.01)
    with Pair(virtual, BROAD, updates="auto", held=held, **WAYS[way]) as pair:
        assert share_moves(pair, is_none)
        pace[0] = 0.2 / 16384
        assert share_moves(pair, is_some, first=STEPS)
    pair.check()


@both_ways
def test_a_fast_host_keeps_everything(way, held, virtual):
    torch_virtual.set_link(virtual, latency=0.01)  # far more than the host takes for all of it
    with Pair(virtual, BROAD, updates="auto", held=held, **WAYS[way]) as pair:
        for seed in range(3):
            pair.step(seed)
        assert share_moves(pair, is_none, first=3)
        plan = pair.engine.plan
        assert plan.predicted_rate > 0
        assert plan.achieved_rate > 0
        assert "predicted" in str(plan)
    pair.check()


def test_a_small_model_is_left_to_the_host(accelerator):
    with Pair(accelerator, updates="auto") as pair:
        assert "updates: host" in str(pair.engine.plan)
        for seed in range(2):
            pair.step(seed)
            assert pair.engine.stats().device_share == 0
    pair.check()
