"""`optimizer.state` has the meaning that it has in plain PyTorch while an engine has the optimizer."""

import copy
import pickle
from collections import defaultdict

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from support.models import CASES, build, cut, plain_step, text
from support.slow import covering, slow
from support.updates import WAYS, assert_near, slow_kernels

MAKERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),  # by its own step
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
}


class Pair:
    """A model in an engine, and the same in plain PyTorch."""

    def __init__(self, make=MAKERS["AdamW"], **options):
        self.model, self.plain = build(CASES["toy"]), build(CASES["toy"])
        self.optimizer, self.theirs = make(self.model.parameters()), make(self.plain.parameters())
        self.norm, self.seed = options.get("max_grad_norm"), 0
        self.engine = Engine(self.model, self.optimizer, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    @property
    def both(self):
        return (self.model, self.optimizer), (self.plain, self.theirs)

    def step(self, count=1):
        for self.seed in range(self.seed + 1, self.seed + 1 + count):  # noqa: B020 - it goes on from where it was
            torch.manual_seed(self.seed)
            self.engine.step(text(4, self.seed), 2)
            torch.manual_seed(self.seed)
            plain_step(self.plain, cut(text(4, self.seed), 2))
            self.update_plain()

    def update_plain(self):
        if self.norm is not None:
            nn.utils.clip_grad_norm_(self.plain.parameters(), self.norm)
        self.theirs.step()
        self.theirs.zero_grad()

    def assert_states_are_near(self):
        parameters = dict(self.plain.named_parameters())
        for name, parameter in self.model.named_parameters():
            ours, theirs = self.optimizer.state[parameter], self.theirs.state[parameters[name]]
            for key, value in theirs.items():
                torch.testing.assert_close(ours[key], torch.as_tensor(value), atol=1e-5, rtol=1e-3, msg=f"{name} {key}")


def delete_one(model, optimizer):
    del optimizer.state[model.head.weight]
    optimizer.state.pop(model.blocks[1].up.weight)


def replace(model, optimizer):
    optimizer.state = defaultdict(dict)


def halve(model, optimizer):
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step" and isinstance(value, torch.Tensor):
                value.mul_(0.5)


def put(model, optimizer):
    state = optimizer.state[model.head.weight]
    optimizer.state[model.head.weight] = {
        name: value.clone() if name == "step" or not isinstance(value, torch.Tensor) else value * 0.25
        for name, value in state.items()
    }


def load_a_part(model, optimizer):
    """Of what is not in it, plain PyTorch forgets the state."""
    loaded = copy.deepcopy(optimizer.state_dict())
    loaded["state"] = {key: value for key, value in loaded["state"].items() if key % 2}
    optimizer.load_state_dict(loaded)


CHANGES = {
    "clear": lambda model, optimizer: optimizer.state.clear(),
    "delete": delete_one,
    "replace": replace,
    "edit in place": halve,
    "put": put,
    "load a part": load_a_part,
}


@covering
@pytest.mark.parametrize("name", MAKERS)
def test_changes_have_the_effect_that_they_have_in_plain_pytorch(name, device):
    with Pair(MAKERS[name], device=device) as pair:
        for change in CHANGES.values():
            pair.step(2)
            for both in pair.both:
                change(*both)
            pair.step()
        assert_near(pair.model, pair.plain, 1e-4)
        pair.assert_states_are_near()


@covering
@pytest.mark.parametrize("way", WAYS)
def test_changes_right_after_a_step_wait_for_its_update(way, device, monkeypatch):
    slow_kernels(monkeypatch, 0.005)
    with Pair(device=device, **WAYS[way]) as pair:
        for change in CHANGES.values():
            pair.step()
            for both in pair.both:
                change(*both)
        pair.step()
        assert_near(pair.model, pair.plain, 1e-4)


@pytest.mark.parametrize("policy", ["host", "stride:2", *slow("static:0.5")])
def test_state_that_is_on_the_device(policy, accelerator):
    with Pair(device=accelerator, updates=policy, subgroup=256) as pair:
        for change in CHANGES.values():
            pair.step(2)
            for both in pair.both:
                change(*both)
            pair.assert_states_are_near()
        pair.step()
        assert_near(pair.model, pair.plain, 1e-4)


def test_reading_shows_the_true_state_and_changes_nothing(device, monkeypatch):
    slow_kernels(monkeypatch, 0.005)
    with Pair(device=device, deferred=True) as pair:
        held = None
        for _ in range(3):
            pair.step()
            if held is not None:  # a tensor that was taken before
                expected = pair.theirs.state[pair.plain.head.weight]["exp_avg"]
                torch.testing.assert_close(held, expected, atol=1e-5, rtol=1e-4)
            held = pair.optimizer.state[pair.model.head.weight]["exp_avg"]
            pair.assert_states_are_near()
            assert len(pair.optimizer.state) == len(pair.theirs.state)
            assert pair.model.head.weight in pair.optimizer.state
            assert {id(p) for p in pair.optimizer.state} == {id(p) for p in pair.model.parameters()}
        assert_near(pair.model, pair.plain)


@covering
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reading_rounds_nothing(precision, device):
    """Moments stay in float32, also those of parameters in another dtype."""
    models = []
    for look in (False, True):
        model = build(CASES["toy"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with Engine(model, optimizer, device=device, precision=precision) as engine:
            for seed in range(3):
                torch.manual_seed(seed)
                engine.step(text(4, seed), 2)
                if look:
                    assert optimizer.state[model.head.weight]["exp_avg"].dtype == torch.float32
                    optimizer.state_dict()
        models.append(model)
    assert_near(*models, 0)


def test_nobody_looks_nothing_waits(device):
    with Pair(device=device, deferred=True) as pair:
        pair.step()
        pair.engine._parts.store.show_states = None  # would be called
        pair.step(2)
        assert not pair.engine._optimizer_view.shows_states


@covering
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_last_is_there_after_closing(change, device):
    with Pair(device=device) as pair:
        pair.step(2)
        for both in pair.both:
            CHANGES[change](*both)
    assert type(pair.optimizer.state) is defaultdict
    pair.assert_states_are_near()
    for seed in (8, 9):
        for model, optimizer in pair.both:
            torch.manual_seed(seed)
            plain_step(model, cut(text(4, seed), 2))
            optimizer.step()
            optimizer.zero_grad()
    assert_near(pair.model, pair.plain)


def test_what_is_changed_is_saved(device, tmp_path):
    with Pair(device=device) as pair:
        pair.step(2)
        for both in pair.both:
            CHANGES["delete"](*both)
        pair.engine.save(tmp_path / "saved")
        for both in pair.both:
            CHANGES["edit in place"](*both)
        pair.engine.load(tmp_path / "saved")
        for state in pair.theirs.state.values():
            state["exp_avg"].mul_(2)
            state["exp_avg_sq"].mul_(2)
        pair.step(2)
        assert_near(pair.model, pair.plain, 1e-4)


def test_the_state_of_others_stays(device):
    """Such as of a parameter that is frozen by now."""
    with Pair(device=device) as pair:
        pair.step()
    for model, optimizer in pair.both:
        model.head.bias.requires_grad_(False)
        optimizer.state[model.head.bias]["mine"] = torch.ones(3)
    with Engine(pair.model, pair.optimizer, device=device) as pair.engine:
        pair.step(2)
        assert pair.optimizer.state[pair.model.head.bias]["mine"].sum() == 3
        pair.step()
        pair.assert_states_are_near()
    assert pair.optimizer.state[pair.model.head.bias]["mine"].sum() == 3
    assert_near(pair.model, pair.plain)


def test_copies_of_the_optimizer(device):
    with Pair(device=device) as pair:
        pair.step()
        for copied in (copy.deepcopy(pair.optimizer), pickle.loads(pickle.dumps(pair.optimizer))):
            assert type(copied.state) is defaultdict
            assert len(copied.state) == len(pair.theirs.state)
        for copied in (copy.copy(pair.optimizer.state), pair.optimizer.state.copy(), pair.optimizer.state | {}):
            assert type(copied) is defaultdict
            assert len(copied) == len(pair.theirs.state)
        assert len({**pair.optimizer.state}) == len(dict(pair.optimizer.state)) == len(pair.theirs.state)
        pair.step()
        assert_near(pair.model, pair.plain)
