"""What users do between steps to weights, gradients and the optimizer counts, and what fails leaves nothing behind."""

import copy

import pytest
import torch

import ferryman
from ferryman.engine import Engine
from support.devices import torch_virtual
from support.models import CASES, build, cut, model_loss, plain_step, text
from support.slow import covering
from support.small_models import Model, batches, loss, made
from support.updates import MAIN_AND_SLOW, OPTIMIZERS, WAYS, assert_near, slow_kernels


def fresh():
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    return model, plain, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)


def plainly(plain, theirs, seed):
    torch.manual_seed(seed)
    plain_step(plain, cut(text(4, seed), 2))
    theirs.step()
    theirs.zero_grad()


def ours(engine, seed):
    torch.manual_seed(seed)
    return engine.step(text(4, seed), 2)


@covering
@pytest.mark.parametrize("make", [torch.optim.RMSprop, lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True)])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_survive_updates_by_torch(make, precision, device):
    """Steps too small for the narrow dtype add up all the same, and round nothing."""
    model = build(CASES["toy"])
    before = copy.deepcopy(model.state_dict())
    with Engine(model, make(model.parameters(), lr=1e-7), device=device, precision=precision) as engine:
        for seed in range(5):
            ours(engine, seed)
    moved = max(float((value - before[name]).abs().max()) for name, value in model.state_dict().items())
    assert 0 < moved < 1e-5


def test_refused_steps_do_not_count(device):
    model, plain, optimizer, theirs = fresh()
    with Engine(
        model, optimizer, device=device, loss=lambda m, part: model_loss(m, part) * (float("nan") if bad[0] else 1)
    ) as engine:
        bad = [False]
        for seed in range(4):
            for bad[0] in (True, False):
                if bad[0]:
                    with pytest.raises(ferryman.NonFiniteError, match="No weight was changed"):
                        ours(engine, seed)
                else:
                    ours(engine, seed)
            plainly(plain, theirs, seed)
    assert_near(model, plain)


@covering
@pytest.mark.parametrize("way", WAYS)
def test_loading_weights_waits_for_the_update(way, device, monkeypatch):
    slow_kernels(monkeypatch)
    model, other, optimizer, _ = fresh()
    with Engine(model, optimizer, device=device, **WAYS[way]) as engine:
        ours(engine, 0)
        model.load_state_dict(other.state_dict())
        assert_near(model, other, 0)


def test_gradients_set_right_after_a_step_wait_for_it(device, monkeypatch):
    slow_kernels(monkeypatch, 0.05)
    model, plain, optimizer, theirs = fresh()
    with Engine(model, optimizer, device=device, deferred=True) as engine:
        ours(engine, 0)
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.grad = None
        plainly(plain, theirs, 0)
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.grad = torch.ones_like(parameter)
        engine.update()
        theirs.step()
    assert_near(model, plain)


def test_gradients_that_were_saved_stay_as_they_were(device):
    model, plain, optimizer, theirs = fresh()
    with Engine(model, optimizer, device=device) as engine:
        saved = {}
        for seed in range(2):
            torch.manual_seed(seed)
            engine.forward_backward(text(4, seed), 2)
            torch.manual_seed(seed)
            plain_step(plain, cut(text(4, seed), 2))
            for m in (model, plain):
                for name, parameter in m.named_parameters():
                    saved.setdefault((m, name), []).append(parameter.grad)
                    parameter.grad = None
        for m in (model, plain):
            for name, parameter in m.named_parameters():
                parameter.grad = saved[m, name][0] + 2 * saved[m, name][1]
        engine.update()
        theirs.step()
    assert_near(model, plain)


def test_the_optimizers_own_checkpoint(device):
    """Its state_dict is complete while the engine has it, and one that is loaded counts."""
    model, plain, optimizer, theirs = fresh()
    with Engine(model, optimizer, device=device) as engine:
        for seed in range(2):
            ours(engine, seed)
            plainly(plain, theirs, seed)
        state = copy.deepcopy(optimizer.state_dict())
        expected = theirs.state_dict()
        assert state["state"].keys() == expected["state"].keys()
        for key, values in expected["state"].items():
            for name, value in values.items():
                torch.testing.assert_close(state["state"][key][name], value, atol=1e-6, rtol=1e-5)
        for seed in range(2, 4):
            ours(engine, seed)
        optimizer.load_state_dict(state)
        model.load_state_dict(plain.state_dict())
        for seed in range(2, 4):
            ours(engine, seed)
            plainly(plain, theirs, seed)
    assert_near(model, plain)


def test_the_optimizer_itself_is_not_stepped(device):
    model, _, optimizer, _ = fresh()
    with Engine(model, optimizer, device=device) as engine:
        engine.forward_backward(text(4), 2)
        with pytest.raises(ValueError, match=r"optimizer.step\(\) was called while an engine has the optimizer"):
            optimizer.step()
    optimizer.step()


@pytest.mark.trials  # they find out which units are called in the backward
@covering
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_checkpointing_of_the_users_own(reentrant, stash, device):
    """It has nothing left to do, as units run again anyway; where it calls them in the backward, that counts."""
    case = CASES["gpt2"]
    model, plain = build(case), build(case).to(device)
    for each in (model, plain):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, stash=stash) as engine:
        for seed in range(3):
            torch.manual_seed(seed)
            expected = plain_step(plain, cut(case.batch(8, seed), 4))
            theirs.step()
            theirs.zero_grad()
            torch.manual_seed(seed)
            torch.testing.assert_close(engine.step(case.batch(8, seed), 4).cpu(), expected.loss)
    for name, parameter in plain.cpu().named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, msg=name)


def test_an_engine_that_cannot_be_made_leaves_the_optimizers_state(virtual):
    model, _, optimizer, _ = fresh()
    plainly(model, optimizer, 0)
    entries = len(optimizer.state)
    torch_virtual.set_capacity(torch.accelerator.memory_allocated(virtual) + 100, virtual)
    with pytest.raises(torch.OutOfMemoryError):
        Engine(model, optimizer, device=virtual)
    assert len(optimizer.state) == entries
    optimizer.step()


@covering
@pytest.mark.parametrize("name", MAIN_AND_SLOW)
def test_asking_for_the_optimizers_state_changes_nothing(name, device):
    """Also before the first step, when all there is came from torch, and right after another was loaded."""
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    optimizer, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](plain.parameters())
    for seed in range(2):
        plainly(model, optimizer, seed)
        plainly(plain, theirs, seed)
    loaded = copy.deepcopy(theirs.state_dict())
    with Engine(model, optimizer, device=device) as engine:
        for _ in range(2):
            assert optimizer.state_dict()["state"].keys() == loaded["state"].keys()
        optimizer.load_state_dict(loaded)
        assert optimizer.state_dict()["state"].keys() == loaded["state"].keys()
        for seed in range(2, 4):
            ours(engine, seed)
            optimizer.state_dict()
    for seed in range(2, 4):
        plainly(plain, theirs, seed)
    assert_near(model, plain, 1e-5 if name in ("Rprop", "RMSprop", "Adadelta") else 2e-6)


@covering
@pytest.mark.parametrize("name", ["Adagrad", "SGD, momentum", "RMSprop"])
def test_parameters_that_never_had_a_gradient_go_on_plainly(name, device):
    model = build(CASES["toy"])
    optimizer = OPTIMIZERS[name](model.parameters())
    with Engine(model, optimizer, device=device) as engine:
        engine.skip({1})
        ours(engine, 0)
    plainly(model, optimizer, 1)  # torch finds for all what it looks for


@covering
@pytest.mark.parametrize("way", WAYS)
def test_updates_of_the_step_before_are_not_counted_to_one_that_fails(way, device, monkeypatch):
    """They may still be under way when it begins."""
    slow_kernels(monkeypatch, 0.01)
    model, plain, optimizer, theirs = fresh()
    bad = [False]

    def loss(model, part):
        return model_loss(model, part) * (float("nan") if bad[0] else 1)

    with Engine(model, optimizer, device=device, loss=loss, **WAYS[way]) as engine:
        for seed in range(3):
            bad[0] = False
            ours(engine, seed)
            torch.manual_seed(seed)
            plain_step(plain, cut(text(4, seed), 2))
            if (limit := WAYS[way].get("max_grad_norm")) is not None:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
            theirs.step()
            theirs.zero_grad()
            bad[0] = True
            with pytest.raises(ferryman.NonFiniteError) as caught:
                ours(engine, seed)
            notes = " ".join(getattr(caught.value, "__notes__", []))
            assert "updated already" not in f"{caught.value} {notes}"
    assert_near(model, plain)


@pytest.mark.parametrize("cleared", ["all", "a block", "one parameter"])
def test_gradients_that_were_cleared_are_not_used(cleared, device):
    def clear(model, optimizer):
        if cleared == "all":
            optimizer.zero_grad()
        elif cleared == "a block":
            model.blocks[1].zero_grad()
        else:
            model.blocks[1].linear.weight.grad = None

    model, plain = made(Model, None), made(Model, None).to(device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    with Engine(model, optimizers[0], device=device, loss=loss) as engine:
        for number, (x, y) in enumerate(batches(3)):
            engine.forward_backward((x, y))
            loss(plain, (x.to(device), y.to(device))).backward()
            if number == 1:
                clear(model, optimizers[0])
                clear(plain, optimizers[1])
            engine.update()
            optimizers[1].step()
            optimizers[1].zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter.cpu(), msg=name)
