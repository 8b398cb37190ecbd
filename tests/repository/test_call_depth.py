"""How many calls there are from `engine.step` to what moves data or weights: a reader has to follow them all.

Counted are the frames on the calling thread's stack from `Engine.step` to the function that submits the work, both
included. What the lane does with it is not counted, as it is the same for all work.
`python -m pytest -s tests/repository/test_call_depth.py` prints the calls.
"""

import sys

import pytest
import torch

from ferryman import Engine
from ferryman.runtime.lanes import Lane
from ferryman.server.device_updates import DeviceUpdates
from ferryman.server.gradient_checks import GradientChecks
from ferryman.server.host_updates import HostUpdates
from support.models import CASES, build

MOST = {
    "eager": {"fetch": 5, "flush": 6, "host update": 7, "device update": 6, "norm": 4},
    "deferred": {"fetch": 5, "flush": 6, "host update": 5, "device update": 5, "norm": 4},
}


@pytest.mark.parametrize("updates", ["host", "stride:2"])
@pytest.mark.parametrize("strategy", ["eager", "deferred"])
def test_calls_from_a_step(accelerator, monkeypatch, strategy, updates):
    case, found = CASES["toy"], {}
    model = build(case)
    clipping = {"max_grad_norm": 1.0} if strategy == "deferred" else {}
    optimizer = torch.optim.AdamW(model.parameters())
    with Engine(model, optimizer, device=accelerator, updates=updates, held=False, subgroup=256, **clipping) as engine:
        units = {unit.name for unit in engine.units}

        def count(owner, name, what):
            """`what` tells what a call of this function is, and of which unit."""
            function = getattr(owner, name)

            def counted(*args, **how):
                kind, unit = what(*args, **how)
                if unit in units:  # residents take another way: they are flushed at the end of a step
                    found.setdefault(kind, set()).add((*calls_from(Engine.step.__wrapped__), function.__qualname__))
                return function(*args, **how)

            monkeypatch.setattr(owner, name, counted)

        engine.step(case.batch(4), 2)  # with the trials of a first step
        engine.wait()
        count(Lane, "copy", lambda *_, label, **__: label.partition(" ")[::2])
        count(HostUpdates, "update", lambda _, updates: ("host update", updates[-1].subgroup.unit.name))
        count(DeviceUpdates, "update", lambda _, requested: ("device update", requested.subgroup.unit.name))
        count(GradientChecks, "norm", lambda *_: ("norm", min(units)))
        engine.step(case.batch(4), 2)
        monkeypatch.undo()
    for what, paths in found.items():
        for path in paths:
            print(f"\n{what}: {len(path)} calls: {' > '.join(path)}")
    most = {what: max(map(len, paths)) for what, paths in found.items()}
    assert most.keys() >= {"fetch", "flush", "host update"} | ({"device update"} if updates != "host" else set())
    assert {what: number for what, number in most.items() if number > MOST[strategy][what]} == {}


def calls_from(function):
    """The names of the functions on the stack from this one on, without those of this file."""
    names, frame = [], sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        if frame.f_code.co_filename != __file__:
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    assert frame is not None, "the work was submitted by another thread"
    return [function.__qualname__, *reversed(names)]
