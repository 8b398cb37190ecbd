"""How many calls there are from `engine.step` to a transfer: a reader has to follow them all.

Counted are the frames on the calling thread's stack from `Engine.step` to the lane that the transfer is submitted to
(`Lane.copy`), both included. What the lane does with it is not counted, as it is the same for all work.
`python -m pytest -s tests/repository/test_call_depth.py` prints the calls.
"""

import sys

import torch

from ferryman import Engine
from ferryman.runtime.lanes import Lane
from support.models import CASES, build

MOST = {"fetch": 5, "flush": 6}


def test_calls_from_a_step_to_its_transfers(accelerator, monkeypatch):
    case, copy, found = CASES["toy"], Lane.copy, {}
    model = build(case)
    with Engine(model, torch.optim.AdamW(model.parameters()), device=accelerator, updates="host", held=False) as engine:
        units = {unit.name for unit in engine.units}

        def counted(lane, copies, *, label, **how):
            what, _, name = label.partition(" ")
            if name in units:
                found.setdefault(what, set()).add(tuple(calls_from(Engine.step)))
            return copy(lane, copies, label=label, **how)

        engine.step(case.batch(4), 2)  # with the trials of a first step
        monkeypatch.setattr(Lane, "copy", counted)
        engine.step(case.batch(4), 2)
        monkeypatch.undo()
    for what, paths in found.items():
        for path in paths:
            print(f"\n{what}: {len(path)} calls: {' > '.join(path)}")
    assert {what: max(map(len, paths)) for what, paths in found.items()} == MOST


def calls_from(function):
    """The names of the functions on the stack from this one on, without those of this file; the lane's copy is last."""
    names, frame = ["Lane.copy"], sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        if frame.f_code.co_filename != __file__:
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    assert frame is not None, "the transfer was submitted by another thread"
    return [function.__qualname__, *reversed(names)]
