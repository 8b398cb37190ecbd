"""What an engine keeps does not grow with the number of steps."""

import gc
from collections import Counter

import pytest
import torch

from ferryman.engine import Engine
from ferryman.observe.trace import Trace
from support.slow import slow
from support.small_models import Model, batches, loss


def census(engine):
    """All living objects, by type; no lane has work."""
    engine.wait()
    engine._parts.lanes.wait()
    engine.stats()
    gc.collect()
    return Counter(f"{type(found).__module__}.{type(found).__qualname__}" for found in gc.get_objects())


@pytest.mark.parametrize(
    "options",
    [{"max_grad_norm": 1.0, "stash": "host"}, *slow({}, {"max_grad_norm": 1.0, "trace": 3})],
    ids=["deferred", "eager", "traced"],
)
def test_objects_after_20_and_after_60_steps(options, device):
    if "trace" in options:
        options = {**options, "trace": Trace(keep_steps=options["trace"])}
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    given = list(batches(5))
    with Engine(model, optimizer, device=device, loss=loss, **options) as engine:
        found = []
        for number in range(60):
            engine.step(given[number % 5], 2)
            if number in (19, 59):
                found.append(census(engine))
    after_20, after_60 = found
    # Not exactly equal: a lane's thread starts when work first has to wait. Of what a step leaves there are 40 more.
    grown = {kind: (after_20[kind], n) for kind, n in after_60.items() if n >= after_20[kind] + 20}
    figures = {"ferryman.observe.trace.Step", "ferryman.observe.trace.Note", "builtins.tuple"}  # thinned out at 10,000
    assert {kind: n for kind, n in grown.items() if not ("trace" in options and kind in figures)} == {}
