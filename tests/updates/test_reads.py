"""Weights that are read right after a step are those of its update, whichever way they are read."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ferryman.engine import Engine
from ferryman.model.reads import Reads
from ferryman.server import kernels
from support.models import CASES, build, cut, plain_step, text
from support.slow import covering
from support.updates import WAYS, assert_near, slow_kernels


def fresh():
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    return model, plain, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)


def plainly(plain, theirs, seed, max_grad_norm=None, **_):
    torch.manual_seed(seed)
    plain_step(plain, cut(text(4, seed), 2))
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm)
    theirs.step()
    theirs.zero_grad()


def ours(engine, seed):
    torch.manual_seed(seed)
    return engine.step(text(4, seed), 2)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model):
    average = AveragedModel(model)
    average.update_parameters(model)
    return average.module


def exported(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def mixed(model):
    """What is read stands among plain tensors."""
    weight = model.blocks[1].up.weight
    return torch.zeros_like(weight, requires_grad=False).lerp_(weight, 0.5)


READS = {
    "an operation": lambda m, o: m.blocks[1].up.weight.sum(),
    "a function": lambda m, o: torch.linalg.norm(m.blocks[1].up.weight),
    "data": lambda m, o: m.blocks[1].up.weight.data.clone(),
    "detach": lambda m, o: m.blocks[1].up.weight.detach().clone(),
    "numpy": lambda m, o: torch.from_numpy(m.blocks[1].up.weight.detach().numpy().copy()),
    "tolist": lambda m, o: torch.tensor(m.blocks[1].up.weight.tolist()),
    "indexing": lambda m, o: m.blocks[1].up.weight[0, :3],
    "among plain tensors": lambda m, o: mixed(m),
    "foreach": lambda m, o: torch.stack(torch._foreach_norm(list(m.parameters()))),
    "the optimizer's groups": lambda m, o: sum(p.square().sum() for g in o.param_groups for p in g["params"]),
    "a vector": lambda m, o: nn.utils.parameters_to_vector(m.parameters()),
    "state_dict": lambda m, o: m.state_dict()["blocks.1.up.weight"].clone(),
    "a deep copy": lambda m, o: exported(copy.deepcopy(m)),
    "a copy of a parameter": lambda m, o: copy.deepcopy(m.blocks[1].up.weight).detach(),
    "a pickle": lambda m, o: pickle.loads(pickle.dumps(m.blocks[1].up.weight)).detach(),
    "a saved module": lambda m, o: exported(saved(m)),
    "an average": lambda m, o: exported(averaged(m)),
    "printing": lambda m, o: torch.tensor([float(n) for n in str(m.norm.bias.detach()[:2])[8:-2].split(",")]),
}


@covering
@pytest.mark.parametrize("way", WAYS)
def test_a_read_sees_the_update(way, device, monkeypatch):
    slow_kernels(monkeypatch, 0.005)
    model, plain, optimizer, theirs = fresh()
    with Engine(model, optimizer, device=device, **WAYS[way]) as engine:
        for seed, (name, read) in enumerate(READS.items()):
            ours(engine, seed)
            found = read(model, optimizer)
            plainly(plain, theirs, seed, **WAYS[way])
            torch.testing.assert_close(found, read(plain, theirs), atol=5e-5, rtol=1e-4, msg=name)
            assert {type(p) for p in model.parameters()} == {nn.Parameter}


@covering
@pytest.mark.parametrize("way", WAYS)
def test_references_and_earlier_state_dicts_see_the_update(way, device, monkeypatch):
    slow_kernels(monkeypatch, 0.01)
    model, plain, optimizer, theirs = fresh()
    reference, their_reference = model.head.weight, plain.head.weight
    with Engine(model, optimizer, device=device, **WAYS[way]) as engine:
        earlier, theirs_earlier = model.state_dict(), plain.state_dict()
        part = model.blocks[1].state_dict(prefix="blocks.1.")
        for seed in range(2):
            ours(engine, seed)
            plainly(plain, theirs, seed, **WAYS[way])
            for name, value in (part if seed else earlier).items():
                torch.testing.assert_close(value, theirs_earlier[name], atol=2e-6, rtol=0)
                assert type(value) is torch.Tensor
            ours(engine, seed + 2)
            plainly(plain, theirs, seed + 2, **WAYS[way])
            assert float((reference - their_reference).detach().abs().max()) < 2e-6
    assert {type(value) for value in earlier.values()} == {torch.Tensor}


@covering
@pytest.mark.parametrize("way", WAYS)
def test_an_edit_right_after_a_step_comes_after_the_update(way, device, monkeypatch):
    slow_kernels(monkeypatch, 0.01)
    model, plain, optimizer, theirs = fresh()
    with Engine(model, optimizer, device=device, **WAYS[way]) as engine:
        for seed in range(3):
            ours(engine, seed)
            plainly(plain, theirs, seed, **WAYS[way])
            for m in (model, plain):
                with torch.no_grad():
                    m.blocks[1].up.weight.mul_(0.9)
                m.head.weight.data.clamp_(-0.1, 0.1)
    assert_near(model, plain)


def test_steps_do_not_wait_where_nobody_reads(device):
    """Metadata and gradients may be looked at between them."""
    model, _, optimizer, _ = fresh()
    with Engine(model, optimizer, device=device, max_grad_norm=1.0) as engine:
        waits = []
        settle = engine._parts.reads._wait_for_updates
        engine._parts.reads._wait_for_updates = lambda: (waits.append(1), settle())
        for seed in range(3):
            ours(engine, seed)
            assert {type(p) for p in model.parameters()} != {nn.Parameter}  # and so a read would be noticed
            for parameter in model.parameters():
                assert isinstance(parameter, nn.Parameter)
                assert parameter.numel() == parameter.shape.numel() == torch.numel(parameter)
                assert parameter.dim() == parameter.ndim == len(parameter.size())
                assert parameter.is_leaf
                assert parameter.requires_grad
                assert parameter.grad is None
                assert parameter.dtype == torch.float32
                assert parameter.device.type == "cpu"
                assert parameter._version >= 0
                assert parameter in {parameter}
                assert type(parameter).__name__ == "Parameter"
            optimizer.zero_grad()
            model.zero_grad()
            model.requires_grad_()
            model.train()
        assert waits == []
        _ = model.head.bias.data
        assert waits == [1]
        _ = model.head.weight.data
        assert waits == [1]


def test_nothing_stays_behind(device):
    model, _, optimizer, _ = fresh()
    engine = Engine(model, optimizer, device=device, max_grad_norm=1.0)
    kept = model.state_dict()
    ours(engine, 0)
    with pytest.raises(ValueError, match="micro_batches"):
        engine.step(text(4), 5)
    engine.close()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert {type(value) for value in kept.values()} == {torch.Tensor}


def test_a_refused_step_leaves_reads_watched(device, monkeypatch):
    """The update before it may still be under way."""
    slow_kernels(monkeypatch, 0.01)
    model, plain, optimizer, theirs = fresh()
    with Engine(model, optimizer, device=device, deferred=True) as engine:
        ours(engine, 0)
        with pytest.raises(ValueError, match="micro_batches"):
            engine.step(text(4), 5)
        found = nn.utils.parameters_to_vector(model.parameters())
        plainly(plain, theirs, 0)
        torch.testing.assert_close(found, nn.utils.parameters_to_vector(plain.parameters()), atol=2e-6, rtol=0)


def test_a_failed_update_surfaces_at_the_read(device, monkeypatch):
    model, _, optimizer, _ = fresh()
    engine = Engine(model, optimizer, device=device, deferred=True)
    ours(engine, 0)
    engine.wait()
    step_is_over = threading.Event()

    def fail(*args, **kwargs):
        step_is_over.wait()
        raise MemoryError("of the update")

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "update", fail)
        ours(engine, 1)
        step_is_over.set()
        with pytest.raises(MemoryError, match="of the update"):
            model.blocks[1].up.weight.sum()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    engine.close()


def test_another_thread_reads(device, monkeypatch):
    slow_kernels(monkeypatch, 0.01)
    model, plain, optimizer, theirs = fresh()
    found = []
    with Engine(model, optimizer, device=device, deferred=True) as engine:
        for seed in range(3):
            ours(engine, seed)
            plainly(plain, theirs, seed)
            thread = threading.Thread(target=lambda: found.append(float(model.head.weight.detach().double().sum())))
            thread.start()
            thread.join()
            assert found[-1] == pytest.approx(float(plain.head.weight.detach().double().sum()), abs=1e-4)


def test_a_step_of_another_thread_meanwhile():
    """Reads that began before it do not stop the watch over its updates."""
    parameter = nn.Parameter(torch.zeros(3))
    reads = Reads(lambda: reads.begin([parameter]) if reads._begun == 1 else None, tuple)
    reads.begin([parameter])
    reads.wait()
    assert type(parameter) is not nn.Parameter
    assert float(parameter.detach().sum()) == 0
    assert type(parameter) is nn.Parameter


class Own(nn.Parameter):
    pass


def test_parameters_of_another_class(device, monkeypatch):
    """Their class stays, so the step waits."""
    slow_kernels(monkeypatch, 0.01)
    model, plain, optimizer, theirs = fresh()
    model.head.weight.__class__ = Own
    with Engine(model, optimizer, device=device, deferred=True) as engine:
        ours(engine, 0)
        plainly(plain, theirs, 0)
        assert type(model.head.weight) is Own
        assert float((model.head.weight - plain.head.weight).detach().abs().max()) < 2e-6


def test_state_dicts_that_are_gone_are_forgotten():
    weight = nn.Parameter(torch.zeros(3))
    reads = Reads(lambda: None, tuple)
    kept = [weight.detach() for _ in range(5)]
    for alias in kept:
        reads.remember(alias)
    for _ in range(5000):
        reads.remember(weight.detach())
    assert len(reads._aliases) < 2500
    reads.begin([weight])
    assert len(reads._aliases) == 5
    reads.end()


def test_moving_and_casting_are_still_noticed(device):
    model, _, optimizer, _ = fresh()
    with Engine(model, optimizer, device=device, deferred=True) as engine:
        ours(engine, 0)
        model.half()
        with pytest.raises(ValueError, match="was replaced while the engine used the model"):
            ours(engine, 1)


def test_copies_are_the_users_own(device):
    """They run by themselves, and neither their forwards nor their state_dicts ask the engine."""
    model, _, optimizer, _ = fresh()
    with Engine(model, optimizer, device=device, deferred=True) as engine:
        ours(engine, 0)
        copies = [copy.deepcopy(model), saved(model)]
        waits = []
        engine._parts.reads._wait_for_updates = lambda: waits.append(1)
        for copied in copies:
            copied.load_state_dict(copied.state_dict())
            plain_step(copied, cut(text(4), 2))
        assert waits == []
