"""Straight steps: weights, gradients and graphs stay on the device, so nothing of the relay is left."""

import copy
import threading

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from support.devices import delay_copies
from support.models import CASES, Toy, assert_same, build, compare_steps, cut, on, plain_step, step, text


class Threads:
    """Counts the threads that run a model's forward."""

    def __init__(self, model):
        self.seen = set()
        model.register_forward_pre_hook(lambda *_: self.seen.add(threading.current_thread()))


def assert_straight(device, model, batch, counts, loose=(), **options):
    """Steps equal plain PyTorch, and after the first one, all code runs on the calling thread."""
    plain = on(device, model)
    threads = Threads(model)
    with Engine(model, device=device, **{"recompute": "never", **options}) as engine:
        for number in compare_steps(engine, model, plain, batch, counts, loose):
            if number:
                assert threads.seen == {threading.current_thread()}
            threads.seen.clear()


@pytest.mark.parametrize(
    "name", ["toy", "gpt2", "t5", "mixtral", "reused", "skips", "skipping", "frozen", "two losses"]
)
def test_gradients_are_those_of_plain_pytorch(name, device):
    case = CASES[name]
    counts = (1, 1) if device.type == "cpu" else (4, 4)
    assert_straight(device, build(case), case.batch(8), counts, case.loose, **stays(device))


def stays(device):
    """Settings with which weights and gradients of all units stay on the device."""
    return {} if device.type == "cpu" else {"held": True}


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"precision": "bf16"}], ids=str)
def test_updates_are_those_of_steps_that_recompute(options, device):
    """Bitwise, with gradients that are sent when the last micro-batch has left a unit."""
    delay_copies(device)
    found, count = [], 1 if device.type == "cpu" else 3
    for recompute in ("always", "never"):
        torch.manual_seed(0)
        model = Toy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with Engine(model, optimizer, device=device, recompute=recompute, **stays(device), **options) as engine:
            threads = Threads(model)
            for number in range(3):
                threads.seen.clear()
                torch.manual_seed(number)
                engine.step(text(6), count)
            assert (threads.seen == {threading.current_thread()}) == (recompute == "never" or count == 1)
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_buffers_of_units_are_edited_once(device):
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x):
            self.mean.mul_(0.9).add_(x.detach().mean())
            return x + self.mean

    model = Toy().eval()
    model.blocks = nn.ModuleList(nn.Sequential(block, Averaging()) for block in model.blocks)
    assert_straight(device, model, text(8), (1, 1) if device.type == "cpu" else (4, 4), **stays(device))
    plain = copy.deepcopy(model)
    with Engine(model, device=device, recompute="never", **stays(device)) as engine:
        for part in cut(text(8), 4):
            engine.forward_backward(part, 1)
            plain(**part).loss.backward()
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_running_statistics_that_functional_batch_norm_edits(device):
    """It edits them without a new version."""

    class Normalizing(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("variance", torch.ones(8))

        def forward(self, x):
            x = nn.functional.batch_norm(x, self.mean, self.variance, training=True)
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            return x.square().mean()

    torch.manual_seed(0)
    model, x = Normalizing(), torch.randn(12, 8)
    plain = on(device, model)
    options = {"recompute": "never", **stays(device)}
    with Engine(model, device=device, loss=lambda model, x: model(x), **options) as engine:
        for _ in range(3):
            torch.testing.assert_close(engine.forward_backward(x, 1), plain(x.to(device)).detach())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer.cpu(), msg=name)


def test_a_step_that_fails_leaves_everything_as_it_was(device):
    """Weights, buffers and thread-local variables, which the code changes on the caller's own thread."""

    class Fails(Toy):
        local, fails = threading.local(), False

        def forward(self, input_ids, labels=None):
            self.local.calls = getattr(self.local, "calls", 0) + 1
            result = super().forward(input_ids, labels)
            if self.fails:
                raise ValueError("in the loss")
            return result

    model = Fails()
    optimizer = torch.optim.SGD(model.parameters())
    with Engine(model, optimizer, device=device, recompute="never", **stays(device)) as engine:
        engine.step(text(4), 1)
        assert model.local.calls == 1
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model.fails = True
        with pytest.raises(ValueError, match="in the loss"):
            engine.step(text(4), 1)
        assert model.local.calls == 1
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        model.fails = False
        engine.step(text(4), 1)
        assert model.local.calls == 2


def test_weights_that_do_not_stay_are_relayed(accelerator):
    model = Toy()
    threads = Threads(model)
    with Engine(model, device=accelerator, recompute="never", held=False) as engine:
        engine.forward_backward(text(8), 4)
        assert threading.current_thread() not in threads.seen
        assert len(engine._parts.relay.gradients._slots) < len(engine.units)


def test_weights_that_the_user_edits_are_fetched_before_they_are_used(accelerator):
    delay_copies(accelerator)
    model = Toy().eval()
    plain = on(accelerator, model)
    with Engine(model, device=accelerator, recompute="never", held=True) as engine:
        for _ in range(3):
            plain.zero_grad()
            engine.zero_grad()
            assert_same(step(engine, model, text(6), 3), plain_step(plain, cut(text(6), 3)))
            with torch.no_grad():
                for one in (model, plain):
                    for parameter in one.parameters():
                        parameter.mul_(1.25)


def test_units_that_share_gradient_slots_are_flushed_when_their_gradients_are_there(accelerator):
    """With one micro-batch. Blocks that are called in turn, twice each, take each other's slots."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))

        def forward(self, x):
            for block in [*self.blocks, *self.blocks]:
                x = x + torch.tanh(block(x))
            return x

    torch.manual_seed(0)
    model, batch = Twice(), torch.randn(4, 128)
    plain = copy.deepcopy(model)

    def loss(model, x):
        return model(x).square().mean()

    loss(plain, batch).backward()
    options = {"memory": 1_300_000, "held": True, "recompute": "never"}
    with Engine(model, device=accelerator, loss=loss, **options) as engine:
        assert engine.plan.gradient_slots < len(engine.units)
        for _ in range(3):
            engine.zero_grad()
            engine.forward_backward(batch, 1)
            for name, parameter in plain.named_parameters():
                torch.testing.assert_close(engine.gradient(name), parameter.grad)
