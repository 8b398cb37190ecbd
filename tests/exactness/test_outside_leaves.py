"""Leaves outside the model: their gradients are those of plain PyTorch, whatever the engine tries beforehand."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from ferryman.engine import Engine
from support.small_models import WIDTH, Block, Model, batches, loss, made

MICRO_BATCHES = pytest.mark.parametrize("micro_batches", [1, 2, 4])


def gradients(model, function, device, micro_batches, leaf, *, plain, **options):
    """Of a leaf, after each of three steps."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def note():
        found.append(leaf.grad.cpu().clone())
        leaf.grad = None

    if plain:
        model.to(device)
        for x, y in batches(3):
            for part in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
                (function(model, tuple(t.to(device) for t in part)) / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
            note()
        return found
    with Engine(model, optimizer, device=device, loss=function, **options) as engine:
        for batch in batches(3):
            engine.step(batch, micro_batches)
            note()
    return found


@MICRO_BATCHES
def test_a_learned_temperature(micro_batches, device):
    temperature = torch.ones((), device=device, requires_grad=True)

    def function(model, batch):
        return F.cross_entropy(model(batch[0]) * temperature, batch[1])

    expected = gradients(made(Model, None), function, device, micro_batches, temperature, plain=True)
    found = gradients(made(Model, None), function, device, micro_batches, temperature, plain=False)
    torch.testing.assert_close(found, expected)


def test_an_optimizer_between_steps_may_drop_gradients_at_once(virtual):
    """They are allocated on the engine's stream, and used on the caller's: `virtual` is strict about races."""
    centers = torch.zeros(5, 5, device="virtual:0", requires_grad=True)
    theirs = torch.optim.SGD([centers], lr=0.1)

    def function(model, batch):
        return (model(batch[0]) - centers[batch[1]]).square().mean()

    model = made(Model, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Engine(model, optimizer, device="virtual:0", loss=function) as engine:
        for batch in batches(3):
            engine.step(batch, 2)
            theirs.step()
            theirs.zero_grad()


def test_a_leaf_that_a_unit_uses(device):
    scale = torch.ones((), device=device, requires_grad=True)

    class Scaled(Model):
        class block(Block):  # noqa: N801
            def forward(self, x):
                return super().forward(x) * scale

    expected = gradients(made(Scaled, None), loss, device, 2, scale, plain=True)
    found = gradients(made(Scaled, None), loss, device, 2, scale, plain=False)
    torch.testing.assert_close(found, expected)


def test_a_gradient_from_before_is_added_to(device):
    temperature = torch.ones((), device=device, requires_grad=True)
    before = temperature.grad = torch.full((), 3.0, device=device)
    model = made(Model, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def function(model, batch):
        return 0 * loss(model, batch) + temperature

    with Engine(model, optimizer, device=device, loss=function) as engine:
        engine.step(next(batches(1)), 2)
    assert temperature.grad is before
    assert before.item() == 4.0


@pytest.mark.parametrize("stash", ["device", "host"])
@MICRO_BATCHES
def test_a_batch_that_requires_a_gradient(micro_batches, stash, device):
    def inputs():
        return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()

    labels = torch.arange(8) % 5
    model, mine = made(Model, None), inputs()
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=loss, stash=stash) as engine:
        engine.step((mine, labels), micro_batches)
    plain, theirs = made(Model, None).to(device), inputs()
    for x, y in zip(theirs.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
        (loss(plain, (x.to(device), y.to(device))) / micro_batches).backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_refused_step_leaves_their_gradients(device):
    temperature = torch.ones((), device=device, requires_grad=True)

    def function(model, batch):
        model.total = getattr(model, "total", 0.0) + loss(model, batch) * temperature
        return model.total

    model = made(Model, None)
    with (
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=function) as engine,
        pytest.raises((ValueError, RuntimeError)),
    ):
        engine.step(next(batches(1)), 2)
    assert temperature.grad is None
