"""Every optimizer that is supported, with every option that changes its arithmetic, through steps and closing."""

import inspect

import pytest
import torch
from torch import optim

from ferryman.engine import Engine
from ferryman.server.rules import Lion
from support.models import CASES, build, cut, plain_step, text
from support.slow import covering, slow
from support.updates import assert_near

RATES = {optim.SGD: 1e-1, optim.ASGD: 1e-1, optim.Adadelta: 1e-1, optim.Rprop: 1e-3, Lion: 1e-3}
OPTIMIZERS = [
    *(optim.AdamW, optim.Adam, optim.SGD, optim.Adagrad, Lion, optim.RMSprop, optim.NAdam),
    *(optim.Adadelta, optim.Adamax, optim.ASGD, optim.RAdam, optim.Rprop),
]
OPTIONS = {
    "amsgrad": True,
    "centered": True,
    "decoupled_weight_decay": True,
    "foreach": False,
    "fused": True,
    "initial_accumulator_value": 0.1,
    "lr_decay": 0.1,
    "maximize": True,
    "momentum": 0.9,
    "weight_decay": 0.1,
}
# What others of these need to have an effect.
TOGETHER = {"nesterov": {"nesterov": True, "momentum": 0.9}, "dampening": {"dampening": 0.3, "momentum": 0.9}}
# Options that are the same numbers in another way, and those that the engine refuses by name.
ELSEWHERE = {"params", "lr", "betas", "eps", "rho", "alpha", "lambd", "t0", "etas", "step_sizes", "momentum_decay"}
REFUSED = {"capturable", "differentiable"}


def options_of(kind):
    """Each by itself, and each with `maximize`."""
    known = inspect.signature(kind).parameters
    assert known.keys() <= ELSEWHERE | REFUSED | OPTIONS.keys() | TOGETHER.keys(), "a new option"
    alone = [{}, *({name: value} for name, value in OPTIONS.items() if name in known)]
    alone += [together for together in TOGETHER.values() if together.keys() <= known.keys()]
    every = alone + [{**one, "maximize": True} for one in alone if "maximize" in known and "maximize" not in one]
    return [one for one in every if one.get("fused") is not True or "amsgrad" not in one]


def name(value):
    return value.__name__ if isinstance(value, type) else "+".join(value) or "as it is"


CASES_OF_OPTIONS = [(kind, options) for kind in OPTIMIZERS for options in options_of(kind)]
MAIN = [case for case in CASES_OF_OPTIONS if len(case[1]) == 1 and ("maximize" in case[1] or "amsgrad" in case[1])]
REST = [case for case in CASES_OF_OPTIONS if case not in MAIN]


def train(engine, plain, theirs, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        engine.step(text(4, seed), 2)
        train_plainly(plain, theirs, seed)


def train_plainly(model, optimizer, seed):
    torch.manual_seed(seed)
    plain_step(model, cut(text(4, seed), 2))
    optimizer.step()
    optimizer.zero_grad()


@covering
@pytest.mark.parametrize(("kind", "options"), [*MAIN, *slow(*REST)], ids=name)
def test_steps_closing_and_going_on(kind, options, device):
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    make = {"lr": RATES.get(kind, 1e-3), **options}
    optimizer, theirs = kind(model.parameters(), **make), kind(plain.parameters(), **make)
    with Engine(model, optimizer, device=device) as engine:
        train(engine, plain, theirs, range(3))
        loaded = optimizer.state_dict()
        optimizer.load_state_dict(loaded)
        train(engine, plain, theirs, range(3, 5))
    ours, expected = optimizer.state_dict()["state"], theirs.state_dict()["state"]
    for key, state in expected.items():
        for kept, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(ours[key][kept], value, atol=1e-4, rtol=1e-3, msg=f"{key} {kept}")
    train_plainly(model, optimizer, 6)
    train_plainly(plain, theirs, 6)
    assert_near(model, plain, 1e-5)
