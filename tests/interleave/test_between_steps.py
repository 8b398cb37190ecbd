"""With device updates, what users do between steps counts as ever: to policies, weights, state, gradients, blocks."""

import copy

import pytest
import torch

from support.devices import torch_virtual
from support.interleave import MIX, ODD, SUBGROUPS, Pair, let_auto_guess
from support.models import Block, cut, plain_step, text
from support.slow import covering, slow
from support.updates import WAYS, assert_near

relayed_and_held = pytest.mark.parametrize("held", [False, True], ids=["relayed", "held"])
mixed = pytest.mark.parametrize(("updates", "way", "held"), [*MIX[:3], *slow(MIX[3])])
SIZE = SUBGROUPS[3]

TURNS = ("host", "stride:2", "auto", "static:0.5", "stride:3", "static:1", "static:0.5", "host", "auto", "static:1")


@pytest.mark.parametrize(("way", "held"), [("eager", False), ("clipped", True), *slow(("clipped", False))])
def test_switching_policies_changes_nothing(way, held, accelerator, monkeypatch):
    let_auto_guess(monkeypatch)
    with Pair(accelerator, updates="static:0.5", held=held, subgroup=SIZE, **WAYS[way]) as pair:
        for seed, updates in enumerate(TURNS):
            pair.step(seed)
            pair.engine.set_updates(updates)
            assert f"updates: {updates}" in str(pair.engine.plan)
        pair.step(len(TURNS))
        pair.check_state()
        assert pair.engine.stats().updates == "static:1"
    pair.check()


@covering
@relayed_and_held
@pytest.mark.parametrize("updates", ["host", "stride:2", *slow("static:0.5")])
def test_switching_while_gradients_wait_for_their_update(updates, held, accelerator):
    with Pair(accelerator, updates="stride:3", held=held, subgroup=SIZE) as pair:
        for seed in range(3):
            pair.backward(seed)
            pair.engine.set_updates(updates if seed % 2 == 0 else "stride:3")
            pair.update()
            pair.step(10 + seed)
    pair.check()


@mixed
def test_the_optimizer_shows_state_that_is_on_the_device_and_takes_what_is_loaded(updates, way, held, accelerator):
    with Pair(accelerator, updates=updates, held=held, subgroup=SIZE, **WAYS[way]) as pair:
        for seed in range(2):
            pair.step(seed)
            pair.check_state()  # and is fetched again
        state, weights = copy.deepcopy(pair.optimizer.state_dict()), copy.deepcopy(pair.model.state_dict())
        schedule = copy.deepcopy(pair.scheduler.state_dict())
        for seed in range(5, 7):
            pair.ours(seed)
        pair.optimizer.load_state_dict(state)
        pair.scheduler.load_state_dict(schedule)
        pair.model.load_state_dict(weights)
        for seed in range(2, 4):
            pair.step(seed)
        pair.check_state()
    pair.check()


@mixed
def test_weights_edited_between_steps_count(updates, way, held, accelerator):
    with Pair(accelerator, updates=updates, held=held, subgroup=SIZE, **WAYS[way]) as pair:
        for seed in range(3):
            pair.step(seed)
            pair.engine.wait()
            with torch.no_grad():
                for model in pair.models:
                    model.head.weight.mul_(0.9)
                    model.blocks[1].up.weight[3:7].add_(0.01)
        pair.check_state()
    pair.check()


@covering
@relayed_and_held
@pytest.mark.parametrize("updates", ["host", "static:1", "stride:2"])
def test_weights_edited_between_backward_and_update_count(updates, held, accelerator):
    with Pair(accelerator, updates=updates, held=held, subgroup=SIZE) as pair:
        for seed in range(2):
            pair.backward(seed)
            with torch.no_grad():
                for model in pair.models:
                    model.head.weight.mul_(0.5)
                    model.blocks[1].up.weight.mul_(0.5)
            pair.update()
            pair.engine.wait()
        pair.check()
        pair.step(2)
    pair.check()


@covering
@relayed_and_held
@pytest.mark.parametrize("updates", ["host", "stride:2", *slow("static:1")])
def test_gradients_of_the_users_own_before_any_step(updates, held, virtual):
    """No weight has been on the device before the first update, and no forward is between it and the next."""
    torch_virtual.set_link(virtual, delay=0.01)
    with Pair(virtual, updates=updates, held=held, subgroup=SIZE) as pair:
        for _ in range(2):
            for model in pair.models:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
            pair.update()
        pair.check()
        pair.step(2)
    pair.check()


@mixed
def test_gradients_are_accumulated_over_calls_and_edited(updates, way, held, accelerator):
    with Pair(accelerator, updates=updates, held=held, subgroup=SIZE, **WAYS[way]) as pair:
        for seed in range(3):
            for part in range(2):
                pair.backward(seed + 10 * part)
            for model in pair.models:
                model.head.weight.grad.mul_(0.1)
            torch.testing.assert_close(pair.engine.gradient("head.bias"), pair.plain.head.bias.grad)
            if seed == 1:  # the rest of the gradient comes with a step
                torch.manual_seed(20)
                pair.engine.step(text(4, 20), 2)
                pair.scheduler.step()
                pair.plainly(20)
            else:
                pair.update()
    pair.check()


@mixed
def test_whoever_reads_weights_sees_the_new_ones(updates, way, held, virtual):
    torch_virtual.set_link(virtual, delay=0.002)
    with Pair(virtual, updates=updates, held=held, subgroup=SUBGROUPS[1], **WAYS[way]) as pair:
        for seed in range(2):
            pair.step(seed)
            pair.check()  # by state_dict
            pair.step(10 + seed)
            with torch.no_grad():
                ours, theirs = (model.eval()(**text(2)).logits for model in pair.models)
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
            for model in pair.models:
                model.train()


@covering
@relayed_and_held
@pytest.mark.parametrize("updates", ["host", "stride:2", *slow("static:1")])
def test_an_evaluation_on_the_device_is_over_before_its_weights_are_updated(updates, held, virtual):
    """What it returns stays on the device, so nothing has waited for it."""
    torch_virtual.set_link(virtual, delay=0.01)
    batch = {name: value.to(virtual) for name, value in text(4).items()}
    results = []
    with Pair(virtual, updates=updates, held=held, subgroup=SUBGROUPS[1]) as pair:
        for seed in range(3):
            pair.backward(seed)
            for model in pair.models:
                model.eval()
            with torch.no_grad():
                results.append((pair.model(**batch).logits, pair.plain(**text(4)).logits))
            pair.update()
            for model in pair.models:
                model.train()
        for ours, theirs in results:
            torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=0)
    pair.check()


@pytest.mark.parametrize(("updates", "held"), [("static:0.5", True), ("static:1", False), ("stride:2", True)])
def test_training_goes_on_in_plain_pytorch(updates, held, accelerator):
    """All state comes back."""
    pair = Pair(accelerator, updates=updates, held=held, subgroup=SIZE)
    for seed in range(3):
        pair.step(seed)
    pair.engine.close()
    for seed in range(3, 5):
        pair.plainly(seed)
        torch.manual_seed(seed)
        plain_step(pair.model, cut(text(4, seed), 2))
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.scheduler.step()
    pair.check()


@mixed
def test_blocks_come_and_go(updates, way, held, accelerator):
    torch.manual_seed(3)
    block = Block(13)
    twin = copy.deepcopy(block)
    with Pair(accelerator, updates=updates, held=held, subgroup=SIZE, **WAYS[way]) as pair:
        pair.step(0)
        for optimizer, each in ((pair.optimizer, block), (pair.theirs, twin)):
            group = {"params": list(each.parameters()), "lr": 1e-3, "initial_lr": 1e-3, "weight_decay": 0.0}
            optimizer.add_param_group(group)
        for scheduler in (pair.scheduler, pair.their_scheduler):
            scheduler.lr_lambdas.append(lambda step: 1.0)
            scheduler.base_lrs.append(1e-3)
        pair.engine.insert(1, block)
        pair.plain.blocks.insert(1, twin)
        for seed in range(1, 4):
            pair.step(seed)
        pair.check()
        pair.check_state()
        gone = pair.engine.remove(2)
        theirs = pair.plain.blocks[2]
        del pair.plain.blocks[2]
        assert_near(gone, theirs)
        for seed in range(4, 6):
            pair.step(seed)
    pair.check()


def test_a_model_of_which_only_a_part_is_visited_keeps_the_rest(accelerator):
    """Of blocks that a step skips neither weights nor state change, though their subgroups are the device's."""
    for held in (False, True):
        with Pair(accelerator, ODD, updates="static:1", held=held, subgroup=SIZE) as pair:
            pair.step(0)
            before = copy.deepcopy(pair.model.blocks[1].state_dict())
            pair.engine.skip({1})
            pair.ours(1)
            after = pair.model.blocks[1].state_dict()
            assert all(torch.equal(after[name], value) for name, value in before.items())
            steps = [int(pair.optimizer.state_dict()["state"][key]["step"]) for key in range(2)]
            assert steps == [2, 2]
            pair.ours(2)
            assert not torch.equal(pair.model.blocks[1].state_dict()["up.weight"], before["up.weight"])


def test_two_engines_one_after_another(accelerator):
    """The second takes the state that the first has given back, from the device too."""
    with Pair(accelerator, updates="static:1", subgroup=SIZE) as pair:
        pair.step(0)
    with Pair(accelerator, updates="stride:2", subgroup=SIZE) as other:
        other.model.load_state_dict(pair.model.state_dict())
        other.plain.load_state_dict(pair.plain.state_dict())
        for optimizer, source in ((other.optimizer, pair.optimizer), (other.theirs, pair.theirs)):
            optimizer.load_state_dict(source.state_dict())
        other.check_state()
        other.step(1)
        other.check_state()
    other.check()
