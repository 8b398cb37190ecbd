"""Steps that update: weights, clip factors and schedules equal plain PyTorch's, eager and deferred."""

import contextlib
import copy
import warnings

import pytest
import torch

from ferryman.engine import Engine
from ferryman.server.server import Server
from support.devices import delay_copies, torch_virtual
from support.models import CASES, build, cut, model_loss, plain_step, text
from support.slow import covering, slow
from support.updates import MAIN_AND_SLOW, OPTIMIZERS, WAYS, adamw, assert_near, slow_kernels


def plain_update(plain, optimizer, scheduler, parts, max_grad_norm=None):
    result = plain_step(plain, parts)
    norm = None
    if max_grad_norm is not None:
        norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm))
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return result.loss, norm


@covering
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "steps"),
    [("gpt2", 12), *slow(*((name, 20) for name in ("gpt2", "frozen", "llama", "bert", "t5", "skipping")))],
)
def test_steps_beyond_the_warm_up(name, way, steps, device):
    delay_copies(device, 0.01)
    case = CASES[name]
    model = build(case)
    plain = copy.deepcopy(model)  # on the host: the update's arithmetic is the same, and so is the forward's
    (optimizer, scheduler), (theirs, their_scheduler) = adamw(model), adamw(plain)
    limit = WAYS[way].get("max_grad_norm")
    with warnings.catch_warnings(), Engine(model, optimizer, device=device, **WAYS[way]) as engine:
        warnings.simplefilter("error")  # of schedulers, that steps were in the wrong order
        for seed in range(steps):  # of which the first ten are the schedule's warm-up
            batch = case.batch(8, seed=seed)
            torch.manual_seed(seed)
            loss = engine.step(batch, 4)
            scheduler.step()
            torch.manual_seed(seed)
            expected, norm = plain_update(plain, theirs, their_scheduler, cut(batch, 4), limit)
            assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
            if norm is not None:
                assert engine.grad_norm == pytest.approx(norm, rel=1e-6)
            assert all(p.grad is None for p in model.parameters())
        assert_near(model, plain)
    assert_near(model, plain)


@pytest.mark.parametrize("stash", ["device", *slow("host")])
@pytest.mark.parametrize("way", WAYS)
def test_under_delays_longer_than_a_visit(way, stash, virtual):
    """Nothing is fetched before its update, and nothing lands on gradients that are still being used."""
    delay_copies(virtual)
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    (optimizer, scheduler), (theirs, their_scheduler) = adamw(model), adamw(plain)
    with Engine(model, optimizer, device=virtual, stash=stash, **WAYS[way]) as engine:
        for seed in range(3):
            torch.manual_seed(seed)
            engine.step(text(4, seed), 2)
            scheduler.step()
            torch.manual_seed(seed)
            plain_update(plain, theirs, their_scheduler, cut(text(4, seed), 2), WAYS[way].get("max_grad_norm"))
    assert_near(model, plain)


@covering
@pytest.mark.parametrize("way", WAYS)
def test_whoever_reads_weights_sees_the_finished_update(way, device, monkeypatch):
    slow_kernels(monkeypatch)
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    (optimizer, _), (theirs, their_scheduler) = adamw(model), adamw(plain)
    readers = {
        "state_dict": lambda m: m.state_dict()["head.weight"].clone(),
        "a part's": lambda m: m.blocks[2].state_dict()["up.weight"].clone(),
        "evaluation": lambda m: m.eval()(**text(2)).logits.cpu(),
        "a unit by itself": lambda m: m.eval().blocks[2](torch.ones(1, 2, 16)),
    }

    with Engine(model, optimizer, device=device, **WAYS[way]) as engine, torch.no_grad():
        for seed, read in enumerate(readers.values()):
            for m in (model, plain):
                m.train()
            with torch.enable_grad():
                torch.manual_seed(seed)
                engine.step(text(4, seed), 2)
                torch.manual_seed(seed)
                plain_update(plain, theirs, their_scheduler, cut(text(4, seed), 2), WAYS[way].get("max_grad_norm"))
                for group in optimizer.param_groups:  # as the plain one's scheduler has done
                    group["lr"] = theirs.param_groups[optimizer.param_groups.index(group)]["lr"]
            torch.testing.assert_close(read(model), read(plain), atol=1e-5, rtol=0)
    assert_near(model, plain)


def test_a_missing_wait_for_an_update_is_found(virtual, monkeypatch):
    """The negative control."""
    slow_kernels(monkeypatch, 0.05)
    monkeypatch.setattr(Server, "weights_ready", lambda self, unit: [])
    model = build(CASES["toy"])
    engine = Engine(model, adamw(model)[0], device=virtual, deferred=True)

    def train():
        for seed in range(3):
            engine.step(text(4, seed), 2)
        engine.close()

    with pytest.raises(RuntimeError, match=r"race: .*update"):
        train()
    monkeypatch.undo()
    torch_virtual.synchronize()
    with contextlib.suppress(RuntimeError):  # a second race, that nobody has seen yet
        engine.close()
    torch_virtual.clear_races()


@covering
@pytest.mark.parametrize("way", WAYS)
def test_accumulation_over_calls_and_looking_at_gradients(way, device):
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    (optimizer, scheduler), (theirs, their_scheduler) = adamw(model), adamw(plain)
    limit = WAYS[way].get("max_grad_norm")
    with Engine(model, optimizer, device=device, **WAYS[way]) as engine:
        for seed in range(6):
            for part in range(2):
                torch.manual_seed(seed + part)
                engine.forward_backward(text(4, seed + part), 2)
                torch.manual_seed(seed + part)
                plain_step(plain, cut(text(4, seed + part), 2))
            norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm().item()
            assert engine.grad_norm == pytest.approx(norm, rel=1e-6)
            torch.testing.assert_close(engine.gradient("head.bias"), plain.head.bias.grad)
            if seed % 2:
                for m in (model, plain):
                    m.head.weight.grad.mul_(0.1)  # edited in between
            if seed == 4:  # the rest of the gradient comes with a step
                torch.manual_seed(9)
                engine.step(text(4, 9), 2)
                torch.manual_seed(9)
                plain_step(plain, cut(text(4, 9), 2))
            else:
                engine.update()
            scheduler.step()
            if limit is not None:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
            theirs.step()
            theirs.zero_grad()
            their_scheduler.step()
    assert_near(model, plain)


@covering
@pytest.mark.parametrize("name", MAIN_AND_SLOW)
def test_every_optimizer(name, device):
    model, plain = build(CASES["skipping"]), build(CASES["skipping"])  # some blocks have no gradient at times
    optimizer, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](plain.parameters())
    with Engine(model, optimizer, device=device) as engine:
        for seed in range(6):
            torch.manual_seed(seed)
            engine.step(text(2, seed), 1)
            torch.manual_seed(seed)
            plain_step(plain, cut(text(2, seed), 1))
            theirs.step()
            theirs.zero_grad()
    assert_near(model, plain, 1e-5 if name in ("Rprop", "RMSprop", "Adadelta") else 2e-6)


def test_units_that_a_step_skips_are_not_updated(device):
    model = build(CASES["toy"])
    with Engine(model, adamw(model)[0], device=device) as engine:
        engine.step(text(4), 2)
        before = copy.deepcopy(model.blocks[1].state_dict())
        engine.skip({1})
        engine.step(text(4), 2)
        after = model.blocks[1].state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        engine.step(text(4), 2)
        assert not torch.equal(model.blocks[1].state_dict()["up.weight"], before["up.weight"])


def test_inserted_blocks_train_and_removed_ones_rest(device):
    model = build(CASES["toy"])
    optimizer, _ = adamw(model)
    block = type(model.blocks[0])()
    with Engine(model, optimizer, device=device) as engine:
        engine.step(text(4), 2)
        with pytest.raises(ValueError, match=r"the optimizer does not have 'blocks\.1\."):
            engine.insert(1, block)
        assert len(model.blocks) == 3
        optimizer.add_param_group({"params": list(block.parameters()), "lr": 1e-3, "weight_decay": 0.0})
        engine.insert(1, block)
        before = copy.deepcopy(block.state_dict())
        engine.step(text(4), 2)
        assert not torch.equal(block.state_dict()["up.weight"], before["up.weight"])
        removed = engine.remove(1)
        still = copy.deepcopy(removed.state_dict())
        engine.step(text(4), 2)
        assert all(torch.equal(value, still[name]) for name, value in removed.state_dict().items())


def test_a_loss_of_the_users_and_a_budget(virtual):
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    (optimizer, scheduler), (theirs, their_scheduler) = adamw(model), adamw(plain)
    with Engine(model, optimizer, device=virtual, memory="96KiB", loss=model_loss) as engine:
        for seed in range(4):
            torch.manual_seed(seed)
            engine.step(text(8, seed))
            scheduler.step()
            torch.manual_seed(seed)
            plain_update(plain, theirs, their_scheduler, cut(text(8, seed), engine.choice.micro_batches))
    assert_near(model, plain)


def test_weights_changed_between_steps_count(device):
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    (optimizer, scheduler), (theirs, their_scheduler) = adamw(model), adamw(plain)
    with Engine(model, optimizer, device=device) as engine:
        for seed in range(3):
            torch.manual_seed(seed)
            engine.step(text(4, seed), 2)
            scheduler.step()
            torch.manual_seed(seed)
            plain_update(plain, theirs, their_scheduler, cut(text(4, seed), 2))
            engine.wait()
            with torch.no_grad():
                for m in (model, plain):
                    m.head.weight.mul_(0.9)
    assert_near(model, plain)


@covering
@pytest.mark.parametrize("name", MAIN_AND_SLOW)
def test_training_goes_on_from_and_to_plain_pytorch(name, device):
    """The optimizer's state is taken over from torch, given back at the end, and taken over again."""
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    optimizer, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](plain.parameters())

    def plainly(model, optimizer, seed):
        torch.manual_seed(seed)
        plain_step(model, cut(text(2, seed), 1))
        optimizer.step()
        optimizer.zero_grad()

    for start in (0, 4):
        for seed in range(start, start + 2):
            plainly(model, optimizer, seed)
        with Engine(model, optimizer, device=device) as engine:
            for seed in range(start + 2, start + 4):
                torch.manual_seed(seed)
                engine.step(text(2, seed), 1)
    for seed in range(8):
        plainly(plain, theirs, seed)
    assert_near(model, plain, 1e-5 if name in ("Rprop", "RMSprop", "Adadelta") else 2e-6)
