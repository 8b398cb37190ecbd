"""PyTorch's own profiler shows what the lanes do, under the labels of our trace."""

import contextlib

import pytest
import torch
from torch.profiler import profile

from ferryman import Engine
from ferryman.runtime.lanes import _profiler_range
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


def test_without_a_profiler_no_range_is_made():
    assert isinstance(_profiler_range("work"), contextlib.nullcontext)
    with profile():
        assert isinstance(_profiler_range("work"), torch.profiler.record_function)
    assert isinstance(_profiler_range("work"), contextlib.nullcontext)
