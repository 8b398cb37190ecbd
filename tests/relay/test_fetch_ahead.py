"""The first units of the next step are fetched while updates of this one run, and never with other weights."""

import threading

import pytest
import torch

from ferryman.engine import Engine
from ferryman.relay.weight_slots import WeightSlots
from ferryman.server import host_updates
from support.devices import delay_copies, torch_virtual
from support.models import CASES, build, cut, model_loss, on, plain_step, text
from support.slow import covering
from support.updates import assert_near, slow_kernels

WAYS = {"eager": {}, "deferred": {"max_grad_norm": 0.3}}
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def each_unit_is_updated_by_itself(monkeypatch):
    """As larger ones are: units as small as these would be updated together, and ready at the same time."""
    monkeypatch.setattr(host_updates, "_TOGETHER", 0)


def engine_on(device, model, way, loss=model_loss, lr=1e-2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return Engine(model, optimizer, device=device, loss=loss, held=False, slots=2, **WAYS[way])


def ours(engine, seed):
    torch.manual_seed(seed)
    return engine.step(text(4, seed), 2)


def plainly(plain, theirs, way, seed):
    torch.manual_seed(seed)
    plain_step(plain, cut(text(4, seed), 2))
    if "max_grad_norm" in WAYS[way]:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), WAYS[way]["max_grad_norm"])
    theirs.step()
    theirs.zero_grad()


class Gate:
    """Holds the host's lane before one piece of its work until it is opened."""

    def __init__(self, engine):
        self._lane = next(lane for lane in engine._parts.lanes if lane.name == "host")
        self._lane.prelude = self._pass
        self.count, self.held_at = 0, None
        self._open = threading.Event()
        self.timed_out = False

    def _pass(self):
        self.count += 1
        if self.count == self.held_at:
            self.timed_out = not self._open.wait(timeout=30)

    def hold_last_of(self, count):
        self.held_at = self.count + count

    def open(self):
        self._open.set()


@ways
def test_the_next_step_is_fetched_before_the_last_update_has_ended(way, virtual):
    with engine_on(virtual, build(CASES["toy"]), way) as engine:
        gate = Gate(engine)
        for seed in range(2):  # the trial, and the order of visits
            ours(engine, seed)
        engine.wait()
        before = gate.count
        ours(engine, 2)
        engine.wait()
        gate.hold_last_of(gate.count - before)
        ours(engine, 3)  # returns while its last update is held
        relay = engine._parts.relay
        ahead = [slot for slot in relay.weights._slots if slot.ahead is not None]
        assert [slot.unit for slot in sorted(ahead, key=lambda slot: relay.order.index(slot.unit))] == relay.order[:2]
        finished = ahead if way == "deferred" else [slot for slot in ahead if slot.unit is relay.order[1]]
        for slot in finished:
            slot.fetched.wait()
        assert not gate.timed_out, "the fetches have ended while the update is held"
        fetches = engine.fetches
        gate.open()
        ours(engine, 4)
        assert engine.fetches - fetches == 2 * len(engine.units) - 2, "what was fetched ahead is used"


def nothing(engine, model):
    pass


def evaluate(engine, model):
    batch = text(2)
    with torch.no_grad():
        model(**{name: value.to(next(iter(batch.values())).device) for name, value in batch.items()})


def edit(engine, model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def edit_data(engine, model):
    next(iter(model.parameters())).data.mul_(1.1)


def edit_data_of_all(engine, model):
    if engine is not None:  # the units that were fetched ahead have the weights from before the edit
        for slot in engine._parts.relay.weights._slots:
            if slot.ahead is not None:
                slot.fetched.wait()
    for parameter in model.parameters():
        parameter.data.add_(0.001)


def edit_state_dict(engine, model):
    for value in model.state_dict().values():
        value.mul_(1.01)


def read(engine, model):
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def load_weights(engine, model):
    model.load_state_dict({name: value * 1.02 for name, value in model.state_dict().items()})


ACTS = [nothing, evaluate, edit, edit_data, edit_data_of_all, edit_state_dict, read, load_weights]


@covering
@ways
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_steps_are_plain_ones_whatever_happens_between_them(way, act, virtual, monkeypatch):
    slow_kernels(monkeypatch, 0.002)
    delay_copies(virtual)
    model, plain = build(CASES["toy"]), on(virtual, build(CASES["toy"]))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with engine_on(virtual, model, way) as engine:
        for seed in range(3):
            ours(engine, seed)
            plainly(plain, theirs, way, seed)
            act(engine, model)
            if act is not evaluate:
                act(None, plain)
    assert_near(model, plain, 1e-5)


@ways
def test_frozen_weights_may_be_edited_through_data(way, virtual):
    model, plain = build(CASES["toy"]), on(virtual, build(CASES["toy"]))
    for one in (model, plain):
        for parameter in one.parameters():
            parameter.requires_grad_(parameter.dim() > 1)
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with Engine(model, optimizer, device=virtual, held=False, slots=2, **WAYS[way]) as engine:
        for seed in range(3):
            ours(engine, seed)
            plainly(plain, theirs, way, seed)
            for one in (model, plain):
                for parameter in one.parameters():
                    if not parameter.requires_grad:
                        parameter.data.add_(0.01)
    assert_near(model, plain, 1e-5)


@ways
def test_saving_failing_and_accumulating_between_steps(way, virtual, monkeypatch, tmp_path):
    slow_kernels(monkeypatch, 0.002)
    bad = []

    def loss(model, part):
        if bad:
            raise KeyError("the loss's own")
        return model_loss(model, part)

    model, plain = build(CASES["toy"]), on(virtual, build(CASES["toy"]))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with engine_on(virtual, model, way, loss) as engine:
        for seed in range(5):
            ours(engine, seed)
            plainly(plain, theirs, way, seed)
            if seed == 0:
                engine.save(tmp_path / "checkpoint")
                engine.load(tmp_path / "checkpoint")
            elif seed == 1:
                bad.append(True)
                with pytest.raises(KeyError):
                    ours(engine, 7)
                bad.clear()
            elif seed == 2:
                torch.manual_seed(seed)
                engine.forward_backward(text(4, 9), 2)
                engine.zero_grad()
            elif seed == 3:
                torch.manual_seed(8)
                engine.forward_backward(text(4, 8), 2)
                engine.update()
                plainly(plain, theirs, way, 8)
    assert_near(model, plain, 1e-5)


@ways
def test_an_engine_is_closed_while_units_are_fetched_ahead(way, virtual, monkeypatch):
    slow_kernels(monkeypatch, 0.01)
    delay_copies(virtual)
    model, plain = build(CASES["toy"]), on(virtual, build(CASES["toy"]))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with engine_on(virtual, model, way) as engine:
        ours(engine, 0)
    plainly(plain, theirs, way, 0)
    assert_near(model, plain, 1e-5)


def test_the_comparison_finds_weights_from_before_an_edit(virtual, monkeypatch):
    monkeypatch.setattr(WeightSlots, "drop_ahead", lambda slots: None)
    with pytest.raises((AssertionError, ValueError), match=r"is off by|gives other outputs"):
        test_steps_are_plain_ones_whatever_happens_between_them("deferred", edit_data_of_all, virtual, monkeypatch)


def test_the_comparison_finds_weights_from_before_an_update(virtual, monkeypatch):
    monkeypatch.setattr(
        WeightSlots, "_before_fetch", lambda slots, unit, slot: [slot.released] if slot.released else []
    )
    with pytest.raises((AssertionError, RuntimeError), match=r"is off by|race"):
        test_steps_are_plain_ones_whatever_happens_between_them("deferred", nothing, virtual, monkeypatch)
    torch_virtual.synchronize()
    torch_virtual.clear_races()
