"""Engines that are dropped without `close()` are closed: notebooks make one after the other."""

import gc
import sys
import threading
import weakref
from collections import Counter

import pytest
import torch

from ferryman.engine import Engine
from support.small_models import Model, batches, loss

ENGINES = 30
BATCH = next(batches(1))


class Census:
    """What there is now: threads, bytes on the device, and objects by their type."""

    def __init__(self, device):
        gc.collect()
        self.threads = {*threading.enumerate()}
        self.memory = 0
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # memory that several streams used returns when all have passed
            self.memory = torch.accelerator.memory_allocated(device)
        self.objects = Counter(f"{type(found).__module__}.{type(found).__qualname__}" for found in gc.get_objects())

    def assert_nothing_more(self, device):
        now = Census(device)
        assert now.threads <= self.threads
        assert now.memory <= self.memory
        ours = {name: now.objects[name] - self.objects[name] for name in now.objects if name.startswith("ferryman.")}
        assert {name: more for name, more in ours.items() if more > 0} == {}
        # Caches of torch and Python may grow by a few; anything of which one use leaves one each time shows.
        many = {
            name: more
            for name in now.objects
            if (more := now.objects[name] - self.objects[name]) >= ENGINES // len(USES)
        }
        # Models keep their weights where the engine has put them: a mapping for each unit, with several parameters.
        if now.objects["mmap.mmap"] <= now.objects["torch.nn.parameter.Parameter"]:
            many.pop("mmap.mmap", None)
        assert many == {}


def nothing(engine):
    pass


def step(engine):
    engine.step(BATCH, 2)


def gradients(engine):
    engine.forward_backward(BATCH, 2)


def evaluation(engine):
    with torch.no_grad():
        engine._model(BATCH[0])


def exception(engine):
    with pytest.raises(KeyError, match="loss"):
        engine.step((*BATCH, torch.ones(len(BATCH[0]))), 2)


def read_state(engine):
    engine.step(BATCH, 2)
    dict(engine._optimizer_view.optimizers[0].state)


def loss_that_may_fail(model, batch):
    value = loss(model, batch)
    if len(batch) > 2:
        raise KeyError("loss")
    return value


def use(model, device, what, **options):
    """The engine is dropped at the end."""
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(model, optimizer, device=device, loss=loss_that_may_fail, **options)
    what(engine)
    return weakref.ref(engine)


USES = [nothing, step, gradients, evaluation, exception, read_state]


@pytest.mark.exact
@pytest.mark.parametrize("models", [1, ENGINES])
def test_nothing_is_left(models, device):
    """Each use leaves five engines, some of them with their stash on the host."""
    for what in USES:  # what torch and Python keep from the first use
        use(Model(), device, what, stash="host")
    kept = [Model() for _ in range(models)]
    before = Census(device)
    for number in range(ENGINES):
        model, what = kept[number % models], USES[number % len(USES)]
        use(model, device, what, stash=["device", "host"][number // len(USES) % 2])
        model.zero_grad()
    before.assert_nothing_more(device)


@pytest.mark.parametrize("what", [nothing, step, gradients, evaluation], ids=lambda what: what.__name__)
def test_the_engine_goes_at_once_and_the_model_is_its_own_again(what, device):
    """Without a garbage collection; with the weights that were trained."""
    model, expected = Model(), Model()
    expected.load_state_dict(model.state_dict())
    gc.disable()
    try:
        assert use(model, device, what)() is None
    finally:
        gc.enable()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
    with Engine(expected, torch.optim.AdamW(expected.parameters()), device=device, loss=loss_that_may_fail) as engine:
        what(engine)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    model(BATCH[0]).sum().backward()


def test_an_engine_that_is_dropped_in_an_evaluation_is_closed_after_it(device):
    model, held = Model(), []
    with torch.no_grad():
        expected = model(BATCH[0])
        held.append(Engine(model, device=device, loss=loss))
        engine = weakref.ref(held[0])
        found = []

        def drop(*_):
            held.clear()
            gc.collect()
            found.append(engine() is not None)

        model.blocks[1].register_forward_pre_hook(drop)
        torch.testing.assert_close(model(BATCH[0]), expected)
    assert found == [True]
    assert engine() is None
    assert "forward" not in model.__dict__


def test_a_lane_may_collect_its_own_engine(device):
    """A cycle through the engine is collected in whichever thread the garbage collector happens to run."""
    model, dropped, collected = Model(), threading.Event(), []
    threads = {*threading.enumerate()}

    class Holder:
        pass

    def collect():
        assert dropped.wait(60)
        gc.collect()
        collected.append(threading.current_thread())

    def drop():
        holder = Holder()
        holder.engine = Engine(model, torch.optim.AdamW(model.parameters()), device=device, loss=loss)
        holder.self = holder
        holder.engine.step(BATCH, 2)
        holder.engine._parts.lanes.host("collecting").submit(collect)
        return weakref.ref(holder.engine)

    gc.disable()
    try:
        engine = drop()
        dropped.set()
        for thread in {*threading.enumerate()} - threads:
            thread.join(60)
        for thread in {*threading.enumerate()} - threads:  # the one that closes it
            thread.join(60)
    finally:
        gc.enable()
    assert engine() is None
    assert collected[0] is not threading.current_thread()
    assert {*threading.enumerate()} <= threads
    assert "forward" not in model.__dict__


def test_a_failure_that_nobody_has_seen_is_reported(device, monkeypatch):
    """Nobody is there to catch it, so Python reports it; the model is given back all the same."""
    model, reported = Model(), []

    def fail():
        raise KeyError("lane")

    def drop():
        engine = Engine(model, device=device, loss=loss)
        engine._parts.lanes.host("failing").submit(fail)

    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(str(report.exc_value)))
    drop()
    assert reported == ["'lane'"]
    assert "forward" not in model.__dict__
