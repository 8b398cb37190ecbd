"""Forked processes beside an engine: its use there is refused at once, and all else works."""

import gc
import weakref

import pytest
import torch
from torch.utils.data import DataLoader

from ferryman.engine import Engine
from ferryman.runtime.caller import Caller
from ferryman.runtime.lanes import Lanes
from support.forks import in_a_fork
from support.small_models import Model, batches, loss

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python, where threads run
BATCH = next(batches(1))
REFUSAL = "ValueError: an engine of the process "


@pytest.fixture
def parts(device):
    """A model, its optimizer and its engine, after a step whose updates may be under way."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with Engine(model, optimizer, device=device, loss=loss, max_grad_norm=1.0) as engine:
        engine.step(BATCH, 2)
        yield model, optimizer, engine


@torch.no_grad()
def evaluate(model, optimizer, engine):
    return model(BATCH[0])


def leave(model, optimizer, engine):
    with engine:
        pass


USES = {
    "step": lambda model, optimizer, engine: engine.step(BATCH, 2),
    "update": lambda model, optimizer, engine: engine.update(),
    "save": lambda model, optimizer, engine: engine.save("nowhere"),
    "wait": lambda model, optimizer, engine: engine.wait(),
    "stats": lambda model, optimizer, engine: engine.stats(),
    "close": lambda model, optimizer, engine: engine.close(),
    "the with statement": leave,
    "the model": evaluate,
    "a unit": lambda model, optimizer, engine: model.blocks[0](torch.ones(2, 12)),
    "state_dict": lambda model, optimizer, engine: model.state_dict(),
    "a parameter": lambda model, optimizer, engine: model.head.weight.sum(),
    "the optimizer's state": lambda model, optimizer, engine: len(optimizer.state),
}


@pytest.mark.parametrize("use", USES)
def test_a_forked_child_is_refused(use, parts):
    said = in_a_fork(lambda: USES[use](*parts))
    assert said.startswith(REFUSAL), said
    assert "forked" in said
    parts[2].step(BATCH, 2)


def test_a_lane_that_was_busy_is_refused_as_well(device):
    """Whatever locks its thread had at that moment."""
    with Lanes(device) as lanes:
        lane = lanes.host("host")
        with lane._condition, lanes._lock:
            assert in_a_fork(lambda: lane.submit(lambda: None)).startswith(REFUSAL)
            assert in_a_fork(lanes.wait).startswith(REFUSAL)


def test_a_child_may_drop_the_engine(parts):
    """Its threads and its memory are the parent's."""
    _, _, engine = parts

    def drop():
        dropped = Engine.__new__(Engine)  # as the parent's: nothing is known of it but its finalizer
        Caller(dropped).when_dropped(engine._parts._close_dropped)
        reference = weakref.ref(dropped)
        del dropped
        gc.collect()
        return reference()

    assert in_a_fork(drop) == "returned None"
    engine.step(BATCH, 2)


def test_a_child_may_make_an_engine_of_its_own():
    """On the CPU, and without a backward: neither accelerators nor autograd's threads work in a fork."""
    with Engine(Model(), device="cpu", loss=loss) as engine:
        engine.forward_backward(BATCH, 2)

        def make():
            model = Model()
            with Engine(model, torch.optim.AdamW(model.parameters()), device="cpu", loss=loss) as own:
                own.wait()
                return own.total(len(evaluate(model, None, own)))

        assert in_a_fork(make) == f"returned {len(BATCH[0])}"


def test_workers_of_a_data_loader_run_beside_the_engine(parts):
    samples = list(zip(*BATCH, strict=True))
    _, _, engine = parts
    for _ in range(2):
        for batch in DataLoader(samples, batch_size=12, num_workers=2, multiprocessing_context="fork"):
            assert engine.step(tuple(batch), 2) > 0
