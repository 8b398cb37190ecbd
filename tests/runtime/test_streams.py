"""An engine has no more streams than a GPU has hardware queues by default."""

import torch

from ferryman.engine import Engine
from ferryman.runtime.lanes import DeviceLane, Lanes
from ferryman.runtime.segments import Segments
from ferryman.runtime.streams import Streams
from support.models import CASES, build, text

HARDWARE_QUEUES = 8


def all_lanes(lanes):
    streams = Streams(lanes)
    names = [name for name, value in vars(Streams).items() if hasattr(value, "attrname")]
    return [getattr(streams, name) for name in names]


def test_there_are_no_more_streams_than_hardware_queues(virtual):
    with Lanes(virtual) as lanes:
        made = all_lanes(lanes)
        streams = {lane.stream for lane in made if isinstance(lane, DeviceLane)}
        assert len(made) == 13
        assert len(streams) == HARDWARE_QUEUES


def test_an_engine_makes_no_others(virtual, monkeypatch):
    made, real = [], torch.Stream

    def stream(*args, **options):
        made.append(real(*args, **options))
        return made[-1]

    monkeypatch.setattr(torch, "Stream", stream)
    # The sizes of segments are found out with a tensor on a stream that never has a kernel or a copy.
    monkeypatch.setattr("ferryman.engine.find_segments", lambda device: Segments())
    model = build(CASES["toy"])
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"stash": "host", "updates": "stride:2", "subgroup": 512, "held": False, "max_grad_norm": 1.0}
    with Engine(model, optimizer, device=virtual, **options) as engine:
        for seed in range(2):
            engine.step(text(8, seed), 4)
        lanes = [lane for lane in engine._parts.lanes if isinstance(lane, DeviceLane)]
        assert {lane.name for lane in lanes} > {"compute", "h2d", "d2h", "stash in", "stash out", "update", "norms"}
    assert len(made) <= HARDWARE_QUEUES
