"""Subgroups are as large as the link is fast: what crosses it for one takes about 2 ms."""

import time

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from ferryman.plan.staging import SUBGROUP, subgroup_on
from ferryman.runtime.link_rate import class_of, link_rate
from support.devices import torch_virtual

LINKS = [6.25e9, 12.5e9, 25e9, 50e9]  # bytes per second: PCIe 3.0 x8 to PCIe 5.0 x16
ADAM = 12  # bytes per element in each direction: weights and two moments


@pytest.mark.parametrize("link", LINKS)
def test_a_subgroup_takes_2_ms_on_the_wire(link):
    assert subgroup_on(link, ADAM, ranks=1) * ADAM / link >= 2e-3
    assert subgroup_on(link, 2 * ADAM, ranks=1) * 2 * ADAM / link >= 2e-3


def test_a_constant_size_would_not():
    """The negative control: on a fast link, a million elements cross in a fraction of that."""
    assert SUBGROUP * ADAM / LINKS[-1] < 1e-3


def test_slow_links_and_none_do_not_make_subgroups_small():
    assert subgroup_on(1e8, ADAM, ranks=1) == subgroup_on(None, ADAM, ranks=1) == SUBGROUP


@pytest.mark.parametrize("link", LINKS)
def test_two_measurements_of_a_link_find_the_same_rate(link):
    assert {class_of(link * noise) for noise in (0.75, 0.9, 1.0, 1.1, 1.3)} == {link}


def test_a_slow_link_is_measured_as_one(virtual):
    """No faster than it is; and no slower than the time that the whole measurement takes allows."""
    rate, nbytes = 4e8, 1 << 20
    with torch_virtual.link(virtual, h2d=rate):
        began = time.perf_counter()
        found = link_rate(virtual, 1 << 25)
        elapsed = time.perf_counter() - began
    assert class_of(3 * nbytes / elapsed) <= found <= class_of(1.1 * rate)  # the fastest of three copies counts


@pytest.mark.parametrize(("link", "size"), [(50e9, 1200 * 1200), (1e9, SUBGROUP)])
def test_the_plan_of_an_engine_follows_the_link(link, size, virtual, monkeypatch):
    monkeypatch.setattr("ferryman.training.planner.link_rate", lambda device, most: link)
    model = nn.Sequential(nn.Linear(1200, 1200, bias=False), nn.Linear(1200, 8, bias=False))
    with Engine(model, torch.optim.AdamW(model.parameters()), device=virtual) as engine:
        assert engine.plan.staging.subgroup == size
