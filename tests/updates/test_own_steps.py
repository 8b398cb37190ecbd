"""Optimizers that have no rule of ours: the engine calls their own `step`, tensor by tensor."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ferryman.engine import Engine
from support.block_changes import new_block
from support.models import CASES, Toy, build, cut, plain_step, text
from support.own_steps import OWN_STEPS, REFUSED, ScheduleFree, Soap
from support.slow import covering
from support.updates import WAYS, assert_near


def step_both(engine, model, plain, theirs, seed, norm=None):
    torch.manual_seed(seed)
    engine.step(text(4, seed), 2)
    torch.manual_seed(seed)
    plain_step(plain, cut(text(4, seed), 2))
    if norm is not None:
        nn.utils.clip_grad_norm_(plain.parameters(), norm)
    theirs.step()
    theirs.zero_grad()


def assert_same_state(optimizer, theirs, limit=1e-5):
    ours, expected = optimizer.state_dict(), theirs.state_dict()
    assert ours["param_groups"] == expected["param_groups"]
    kept = {key: state for key, state in expected["state"].items() if state}
    assert ours["state"].keys() == kept.keys()
    for key, state in kept.items():
        assert pytree.tree_structure(ours["state"][key]) == pytree.tree_structure(state)
        for mine, their in zip(pytree.tree_leaves(ours["state"][key]), pytree.tree_leaves(state), strict=True):
            torch.testing.assert_close(mine, their, atol=limit, rtol=1e-3)


@covering
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OWN_STEPS)
def test_steps_states_and_schedules_are_those_of_plain_pytorch(name, way, device):
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    optimizer, theirs = OWN_STEPS[name](model), OWN_STEPS[name](plain)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (optimizer, theirs)]
    limit = 1e-5
    with Engine(model, optimizer, device=device, **WAYS[way]) as engine:
        for seed in range(6):
            step_both(engine, model, plain, theirs, seed, WAYS[way].get("max_grad_norm"))
            for schedule in schedules:
                schedule.step()
            if seed in (0, 3):
                assert_same_state(optimizer, theirs, limit)
        assert_near(model, plain, limit)
    assert_same_state(optimizer, theirs, limit)
    for network, each in ((model, optimizer), (plain, theirs)):  # without an engine
        torch.manual_seed(9)
        plain_step(network, cut(text(4, 9), 2))
        each.step()
    assert_near(model, plain, 10 * limit)


@covering
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["Adafactor", "schedule-free", "split"])
def test_masters_and_state_are_in_float32(name, precision, device):
    """The update is what the optimizer does to float32 weights with the engine's gradients, to the last bit."""
    model = build(CASES["toy"])
    wide = copy.deepcopy(model)
    optimizer, theirs = OWN_STEPS[name](model), OWN_STEPS[name](wide)
    with Engine(model, optimizer, device=device, precision=precision) as engine:
        scale = engine.loss_scale
        for seed in range(3):
            engine.forward_backward(text(4, seed), 2)
            for key, parameter in wide.named_parameters():
                parameter.grad = engine.gradient(key).clone()
            engine.update()
            theirs.step()
            for mine, parameter in zip(model.parameters(), wide.parameters(), strict=True):
                kept = optimizer.state[mine]
                assert all(torch.equal(kept[key], value) for key, value in theirs.state[parameter].items())
        assert engine.loss_scale == scale
    assert_near(model, wide, 0)


@pytest.mark.parametrize("name", ["schedule-free", "Adafactor"])
def test_a_step_that_is_skipped_does_not_count(name, device):
    model = build(CASES["toy"])
    optimizer = OWN_STEPS[name](model)

    def loss(model, part):
        return model(part["input_ids"], part["labels"]).loss * part["factor"][0]

    with Engine(model, optimizer, device=device, loss=loss, on_nonfinite="skip") as engine:
        engine.step({**text(4), "factor": torch.ones(4)}, 2)
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        engine.step({**text(4), "factor": torch.full((4,), math.nan)}, 2)
        after = model.state_dict(), optimizer.state_dict()
        assert pytree.tree_all(
            lambda pair: pair[0] is None or bool(pair[0] == pair[1]),
            list(zip(*(_leaves(each) for each in (before, after)), strict=True)),
            is_leaf=lambda value: isinstance(value, tuple),
        )
        engine.step({**text(4), "factor": torch.ones(4)}, 2)
        if name == "schedule-free":
            assert optimizer.param_groups[0]["k"] == 2


def _leaves(tree):
    return [leaf.sum() if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves(tree)]


@covering
@pytest.mark.parametrize("way", WAYS)
def test_frozen_groups_and_tensors_without_gradients(way, device):
    """Group options advance as in plain PyTorch, also where nothing trains."""
    model, plain = build(CASES["toy"]), build(CASES["toy"])

    def make(model):
        model.blocks[0].requires_grad_(False)
        model.head.unused = nn.Parameter(torch.ones(3, 2))
        frozen = list(model.blocks[0].parameters())
        known = {id(p) for p in frozen}
        return ScheduleFree(
            [{"params": frozen, "beta": 0.8}, {"params": [p for p in model.parameters() if id(p) not in known]}]
        )

    optimizer, theirs = make(model), make(plain)
    with Engine(model, optimizer, device=device, **WAYS[way]) as engine:
        for seed in range(4):
            step_both(engine, model, plain, theirs, seed, WAYS[way].get("max_grad_norm"))
        assert_same_state(optimizer, theirs)
    assert [group["k"] for group in optimizer.param_groups] == [4, 4]
    assert_near(model, plain, 1e-5)


@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "skip"}])
def test_an_optimizer_that_changes_tensors_without_a_gradient(options, device):
    """It must get all gradients, and this is known before the first weight changes."""
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    optimizer, theirs = OWN_STEPS["decays all"](model), OWN_STEPS["decays all"](plain)
    with Engine(model, optimizer, device=device, **options) as engine:
        assert engine.plan.staging.deferred
        step_both(engine, model, plain, theirs, 0)
        before = copy.deepcopy(model.state_dict())
        engine.skip([1])
        with pytest.raises(ValueError, match=r"'blocks\.1\.\S+' has no gradient in this step, and DecaysAll would"):
            engine.step(text(4), 2)
        engine.forward_backward(text(4), 2)
        model.head.bias.grad = None
        with pytest.raises(ValueError, match=r"'head\.bias' has no gradient in this step.*No weight was changed"):
            engine.update()
        after = model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        step_both(engine, model, plain, theirs, 1)
        assert_near(model, plain, 1e-5)
        assert_same_state(optimizer, theirs)
        model.head.bias.requires_grad_(False)
        with pytest.raises(ValueError, match=r"DecaysAll .* its group 1 has a frozen one, of shape \(64,\)"):
            engine.step(text(4), 2)
    with pytest.raises(ValueError, match=r"DecaysAll .* its group 1 has a frozen one, of shape \(64,\)"):
        Engine(model, optimizer, device=device)


@covering
@pytest.mark.parametrize("name", ["Adafactor", "schedule-free"])
def test_blocks_come_and_go(name, device):
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    optimizer, theirs = OWN_STEPS[name](model), OWN_STEPS[name](plain)
    with Engine(model, optimizer, device=device) as engine:
        step_both(engine, model, plain, theirs, 0)
        block = new_block()
        for each, blocks in ((optimizer, block), (theirs, copy.deepcopy(block))):
            each.add_param_group({"params": list(blocks.parameters())})
            if each is theirs:
                plain.blocks.insert(1, blocks)
        engine.insert(1, block)
        step_both(engine, model, plain, theirs, 1)
        engine.remove(0)
        del plain.blocks[0]
        step_both(engine, model, plain, theirs, 2)
        assert_near(model, plain, 1e-5)


@pytest.mark.parametrize("name", ["Adafactor", "schedule-free", "split"])
def test_a_narrow_model_goes_on_without_an_engine_and_with_one(name, device):
    """Its state is in float32 in the engine, and in the weights' dtype outside."""
    model = build(CASES["toy"]).to(torch.bfloat16)
    optimizer = OWN_STEPS[name](model)

    def dtypes():
        states = list(optimizer.state.values())
        return {value.dtype for state in states for key, value in state.items() if key != "step"}

    for _ in range(2):
        plain_step(model, cut(text(4), 2))
        optimizer.step()
        optimizer.zero_grad()
        assert dtypes() == {torch.bfloat16}
        with Engine(model, optimizer, device=device) as engine:
            engine.step(text(4), 2)
            assert dtypes() == {torch.float32}
            engine.step(text(4), 2)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("options", [{}, {"maximize": True}])
def test_a_model_on_meta(options, device):
    """Its optimizer has made a state there, which is made anew."""
    with torch.device("meta"):
        model = Toy()
    plain = build(CASES["toy"])
    optimizer, theirs = (torch.optim.Adagrad(each.parameters(), lr=1e-2, **options) for each in (model, plain))
    with Engine(model, optimizer, device=device) as engine:
        model.load_state_dict(plain.state_dict())
        for seed in range(2):
            step_both(engine, model, plain, theirs, seed)
        assert_near(model, plain, 1e-5)


def test_evaluation_with_other_weights(device):
    """As with schedule-free optimizers, whose `eval` and `train` change the weights in place."""

    class Mine(ScheduleFree):
        @torch.no_grad()
        def turn(self, share):
            for group in self.param_groups:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], share)

    model, plain = build(CASES["toy"]), build(CASES["toy"])
    optimizer, theirs = Mine(model.parameters()), Mine(plain.parameters())
    with Engine(model, optimizer, device=device, deferred=True) as engine:
        for seed in range(3):
            step_both(engine, model, plain, theirs, seed)
            for each in (optimizer, theirs):
                each.turn(1 - 1 / 0.9)
            assert_near(model, plain, 1e-5)
            for each in (optimizer, theirs):
                each.turn(0.1)
        assert_near(model, plain, 1e-5)


@pytest.mark.parametrize("name", OWN_STEPS)
def test_the_host_account_knows_the_state(name):
    """To the byte, before the first step."""
    model = build(CASES["toy"])
    optimizer = OWN_STEPS[name](model)
    with Engine(model, optimizer, device="cpu") as engine:
        predicted = engine.host_account["optimizer state"]
        for seed in range(3):
            engine.step(text(4, seed), 2)
        leaves = pytree.tree_leaves([dict(state) for state in optimizer.state.values()])
        assert predicted == sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def test_what_a_user_sets_in_the_optimizer_is_used(device):
    class Mine(ScheduleFree):
        factor = 1.0

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(self.factor)
            super().step()

    model, plain = build(CASES["toy"]), build(CASES["toy"])
    optimizer, theirs = Mine(model.parameters()), Mine(plain.parameters())
    with Engine(model, optimizer, device=device) as engine:
        for seed, optimizer.factor in enumerate((1.0, 0.5, 0.25)):
            theirs.factor = optimizer.factor
            step_both(engine, model, plain, theirs, seed)
        assert_near(model, plain, 1e-5)


@pytest.mark.parametrize("what", REFUSED)
def test_what_an_engine_cannot_use_is_refused_before_anything_changes(what):
    make, words = REFUSED[what]
    model = Toy()
    optimizer = make(model)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    generator = torch.get_rng_state()
    with pytest.raises(ValueError, match=words) as refused:
        Engine(model, optimizer, device="cpu")
    assert "optimizer.step() and engine.zero_grad()" in str(refused.value)
    assert torch.equal(torch.get_rng_state(), generator)
    after = model.state_dict(), optimizer.state_dict()
    assert all(torch.equal(after[0][name], value) for name, value in before[0].items())
    assert repr(after[1]) == repr(before[1])
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_the_way_out_of_a_refusal(device):
    """An engine without an optimizer computes the gradients, and any optimizer uses them, with a closure as well."""
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    for module in (*model.modules(), *plain.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer, theirs = (torch.optim.LBFGS(each.parameters(), lr=0.1, max_iter=3) for each in (model, plain))

    def expected():
        theirs.zero_grad()
        return plain_step(plain, cut(text(4), 2)).loss

    with Engine(model, device=device) as engine:

        def closure():
            engine.zero_grad()
            return engine.forward_backward(text(4), 2)

        for _ in range(2):
            optimizer.step(closure)
            theirs.step(expected)
        assert_near(model, plain, 1e-4)


def test_the_probe_leaves_the_optimizer_as_it_is():
    model = Toy()
    for make in (ScheduleFree, Soap):
        optimizer = make(model.parameters())
        before = copy.deepcopy(vars(optimizer))
        Engine(model, optimizer, device="cpu").close()
        assert vars(optimizer).keys() == before.keys()
        assert not optimizer.state
        assert optimizer.state_dict()["param_groups"] == make(model.parameters()).state_dict()["param_groups"]
