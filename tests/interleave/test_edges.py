"""Where updates on the device meet edits, failures, blocks that come, and frozen tensors between trained ones."""

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from ferryman.server import kernels
from support.devices import torch_virtual
from support.interleave import BROAD, SUBGROUPS, Pair
from support.models import Block, model_loss, text
from support.slow import covering, slow

SIZE, WIDTH = SUBGROUPS[3], 16
relayed_and_held = pytest.mark.parametrize("held", [False, True], ids=["relayed", "held"])


@pytest.mark.parametrize("updates", ["stride:2", "auto", *slow("static:0.5")])
def test_a_block_comes_into_a_budget(updates, virtual):
    with Pair(virtual, BROAD, updates=updates, memory="8MiB") as pair:
        pair.ours(0)
        block, blocks = Block(64), list(pair.model.blocks)
        with pytest.raises(ValueError, match="the optimizer does not have"):
            pair.engine.insert(1, block)
        assert list(pair.model.blocks) == blocks
        group = {"params": list(block.parameters()), "lr": 1e-3, "initial_lr": 1e-3, "weight_decay": 0.0}
        pair.optimizer.add_param_group(group)
        pair.engine.insert(1, block)
        before = block.up.weight.detach().clone()
        pair.engine.step(text(4), 2)
        pair.engine.wait()
        assert not torch.equal(block.up.weight, before)


@covering
@relayed_and_held
@pytest.mark.parametrize("updates", ["static:1", "stride:2"])
def test_an_edit_outlives_a_step_that_fails(updates, held, accelerator):
    fails = [False]

    def loss(model, part):
        if fails[0]:
            raise RuntimeError("the user's")
        return model_loss(model, part)

    with Pair(accelerator, updates=updates, held=held, subgroup=SIZE, loss=loss) as pair:
        pair.step(0)
        pair.engine.wait()
        with torch.no_grad():
            for model in pair.models:
                model.head.weight.fill_(0.5)
        fails[0] = True
        with pytest.raises(RuntimeError, match="the user's"):
            pair.engine.forward_backward(pair.batch(4), 2)
        fails[0] = False
        assert (pair.model.head.weight == 0.5).all()
        pair.step(1)
    pair.check()


class Mixed(nn.Module):
    """Narrow tensors with a frozen one between, and a wide one: alike in neither memory."""

    def __init__(self):
        super().__init__()
        self.a, self.frozen, self.b = (nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH).bfloat16()) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + (self.norm(x).bfloat16() @ self.a @ self.frozen @ self.b).float()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mixed() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@covering
@relayed_and_held
@pytest.mark.parametrize("updates", ["static:1", "stride:2"])
def test_frozen_tensors_between_trained_ones_are_left_alone(updates, held, accelerator):
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = {"x": torch.randn(4, 3, WIDTH)}
    options = {"loss": lambda model, part: model(part["x"]).square().mean(), "subgroup": 4096}
    with Engine(model, optimizer, device=accelerator, updates=updates, held=held, **options) as engine:
        engine.step(batch, 2)
        engine.wait()
        with torch.no_grad():
            model.blocks[0].frozen.fill_(0.25)
        engine.step(batch, 2)
        engine.wait()
        assert (model.blocks[0].frozen == 0.25).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_edit_before_the_engine_closes_counts(precision, accelerator):
    with Pair(accelerator, updates="static:1", subgroup=SIZE, precision=precision) as pair:
        pair.ours(0)
        pair.engine.wait()
        with torch.no_grad():
            pair.model.head.weight.fill_(0.25)
    assert (pair.model.head.weight == 0.25).all()


@covering
@relayed_and_held
@pytest.mark.parametrize("updates", ["static:1", "stride:2"])
def test_an_update_that_fails_later_is_told_of_as_what_it_is(updates, held, accelerator, monkeypatch):
    real, made = kernels.update_in_torch, []

    def fails(rule, pieces, scratch):
        made.append(rule)
        if len(made) == 5:
            raise RuntimeError("no more")
        real(rule, pieces, scratch)

    with Pair(accelerator, updates=updates, held=held, subgroup=SIZE, deferred=True) as pair:
        pair.step(0)
        pair.engine.wait()
        monkeypatch.setattr(kernels, "update_in_torch", fails)
        pair.ours(1)
        with pytest.raises(RuntimeError, match="no more") as caught:
            pair.ours(2)
        assert "units were not updated" in " ".join(caught.value.__notes__)
        monkeypatch.undo()
        assert torch.isfinite(pair.ours(3))


@relayed_and_held
def test_memory_that_changes_hands_is_not_used_any_more(held, virtual):
    """An evaluation whose result stays on the device may still run when the policy is switched."""
    torch_virtual.set_link(virtual, delay=0.02)
    batch = {name: value.to(virtual) for name, value in text(4).items()}
    with Pair(virtual, updates="stride:3", held=held, subgroup=1024) as pair:
        for seed, updates in enumerate(("stride:2", "static:1")):
            pair.step(seed)
            with torch.no_grad():
                pair.model(**batch)
            pair.engine.set_updates(updates)
            for model in pair.models:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
            pair.update()
    pair.check()


def test_evaluations_leave_nothing_behind(accelerator):
    with Pair(accelerator, BROAD, updates="stride:2", subgroup=4096) as pair:
        pair.ours(0)
        for _ in range(400):
            with torch.no_grad():
                pair.model(**text(1))
        meter = pair.engine._parts.server._log.balancer.link_in
        assert len(meter._pending) + len(meter._passed) <= 2200
