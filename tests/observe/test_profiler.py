"""PyTorch's own profiler shows what the lanes do, under the labels of our trace."""

import pytest
import torch
from torch.profiler import profile

from ferryman import Engine
from ferryman.runtime.lanes import Lanes
from support.models import CASES, build

ALL_THREADS = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


@pytest.mark.parametrize("updates", ["host", "static:1"])
def test_units_fetches_flushes_and_updates_are_profiler_ranges(updates, accelerator):
    case = CASES["toy"]
    model = build(case)
    with Engine(
        model, torch.optim.AdamW(model.parameters()), device=accelerator, updates=updates, held=False
    ) as engine:
        engine.step(case.batch(4), 2)
        engine._parts.lanes.wait()
        with profile(experimental_config=ALL_THREADS) as profiled:
            engine.step(case.batch(4), 2)
            engine._parts.lanes.wait()
        units = [unit.name for unit in engine.units]
    ranges = {event.key for event in profiled.key_averages()}
    crossing = "flush" if updates == "host" else "state out"
    assert ranges >= {f"{what} {name}" for what in ("visit", "fetch", "update", crossing) for name in units}


def test_without_a_profiler_no_range_is_made(monkeypatch):
    made = []

    class Noted(torch.profiler.record_function):
        def __init__(self, label):
            super().__init__(label)
            made.append(label)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Noted)
    with Lanes("cpu") as lanes:
        lane = lanes.host("host")
        lane.submit(lambda: None, label="before").wait()
        with profile():
            lane.submit(lambda: None, label="during").wait()
        lane.submit(lambda: None, label="after").wait()
    assert made == ["during"]
