"""The link is shared: fetches are cut into pieces, so that no urgent copy waits behind a whole unit."""

import pytest
import torch

from ferryman.engine import Engine
from ferryman.relay import weight_slots
from ferryman.relay.weight_slots import LinkRate, piece_bytes
from ferryman.runtime.lanes import DeviceLane, Lanes
from support.devices import torch_virtual
from support.models import CASES, build, text


@pytest.mark.parametrize(("rate", "found"), [(1.0, 1 << 14), (12e6, 1 << 14), (12e9, 23_986_176), (1e8, 196_608)])
def test_a_piece_takes_at_most_2_ms(rate, found):
    assert piece_bytes(rate) == found
    assert found <= max(rate * 2e-3, 1 << 14)


def test_the_rate_is_that_of_the_last_fetch_that_has_ended(virtual):
    host, there = (
        torch.ones(1 << 20, dtype=torch.uint8).pin_memory(),
        torch.zeros(1 << 20, dtype=torch.uint8).to(virtual),
    )
    torch_virtual.set_link(virtual, h2d=1e8)
    found, rates = LinkRate(), []
    with Lanes(virtual) as lanes:
        h2d = lanes.device("h2d")
        for _ in range(3):
            mark = h2d.copy([(there, host)], label="fetch")
            found.observe(mark, host.nbytes)
            rates.append(found.rate)
            mark.wait()
    assert rates[0] > 1e9, "a guess"
    assert rates[1] < 2e8, "the first fetch was measured"


class Ahead:
    """For each urgent copy: bytes of the largest copy of another lane that the link may be busy with when it is
    submitted. Copies of one lane follow each other, so no more than one of them is ready."""

    def __init__(self, monkeypatch):
        self.largest, self.most = 0, None
        original = DeviceLane.copy, DeviceLane.submit
        ahead = self

        def copy(lane, copies, **options):
            if lane.name == "h2d":
                ahead.largest = max([ahead.largest, *(target.nbytes for target, _ in copies)])
            return original[0](lane, copies, **options)

        def submit(lane, work, **options):
            if lane.name == "stash in":
                ahead.most = max(ahead.most or 0, ahead.largest)
            return original[1](lane, work, **options)

        monkeypatch.setattr(DeviceLane, "copy", copy)
        monkeypatch.setattr(DeviceLane, "submit", submit)


@pytest.mark.parametrize("cut", [True, False], ids=["in pieces", "whole, the control"])
def test_no_stash_waits_behind_a_whole_unit(cut, virtual, monkeypatch):
    monkeypatch.setattr(LinkRate, "observe", lambda link, mark, nbytes: None)  # however busy this machine is
    monkeypatch.setattr(weight_slots, "_FIRST_RATE", 1e6 if cut else 1e12)
    monkeypatch.setattr(weight_slots, "_SMALLEST_PIECE", 1024)
    ahead = Ahead(monkeypatch)
    model = build(CASES["toy"])
    optimizer = torch.optim.AdamW(model.parameters())
    with Engine(model, optimizer, device=virtual, stash="host", held=False, slots=2) as engine:
        for seed in range(2):
            engine.step(text(8, seed), 4)
        whole = max(unit.nbytes for unit in engine.units)
    assert whole > 2048, "or the test shows nothing"
    assert (ahead.most <= 2e-3 * 1e6) == cut
    if not cut:
        assert ahead.most == whole
