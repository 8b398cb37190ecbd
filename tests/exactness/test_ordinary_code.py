"""Ordinary code that keeps state, hooks in, or draws random numbers of its own: equal to plain PyTorch, or refused."""

import dataclasses
import os
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.checkpoint import checkpoint

from ferryman.engine import Engine
from support.models import CASES, build, text
from support.slow import covering, slow
from support.small_models import WIDTH, Block, Model, assert_equal_to_plain, batches, loss, made

# Models.


class StateOnSelf(Model):
    def forward(self, x):
        self.residual = x
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.residual)


class SharedContext(Model):
    """Blocks read from a dict that the model fills, and add to a list that it empties."""

    class block(Block):  # noqa: N801
        def forward(self, x):
            self.context["seen"].append(x.mean())
            return super().forward(x) * (1 + self.context["scale"]) + self.context["seen"][0]

    def prepare(self):
        self.context = {"seen": []}
        for block in self.blocks:
            block.context = self.context

    def forward(self, x):
        self.context["scale"] = x.mean().tanh()
        self.context["seen"].clear()
        return super().forward(x)


class AuxiliaryLoss(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            y = super().forward(x)
            self.auxiliary = y.pow(2).mean()
            return y


def with_auxiliary(model, batch):
    return loss(model, batch) + sum(block.auxiliary for block in model.blocks)


class Counter(Model):
    class block(Block):  # noqa: N801
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) / self.calls


class AssignedBuffer(Model):
    def prepare(self):
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x + self.mean)


class EditedBuffer(AssignedBuffer):
    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return Model.forward(self, x * self.mean)  # of which autograd saves the buffer


class DataOfBuffer(AssignedBuffer):
    def forward(self, x):
        self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return Model.forward(self, x + self.mean.clone())


class BufferInBlock(Model):
    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().forward(x * (1 + self.mean))


class DataOfBufferInBlock(BufferInBlock):
    class block(BufferInBlock.block):  # noqa: N801
        def forward(self, x):
            self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return Block.forward(self, x * (1 + self.mean.clone()))


class FunctionalBatchNorm(Model):
    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("variance", torch.ones(WIDTH))

        def forward(self, x):
            return super().forward(F.batch_norm(x, self.mean, self.variance, training=True))


class Draws(Model):
    """From the global generators of random and numpy, in the blocks."""

    class block(Block):  # noqa: N801
        def forward(self, x):
            return super().forward(x) * (1 + random.random()) + float(np.random.rand())


class OwnGenerators(Model):
    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.python, self.torch = random.Random(1), torch.Generator().manual_seed(2)
            self.numpy = np.random.default_rng(3)

        def forward(self, x):
            drawn = self.python.random() + torch.rand((), generator=self.torch).item() + self.numpy.random()
            return super().forward(x) * drawn


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    scale: float


@dataclasses.dataclass
class Filled:
    x: torch.Tensor
    norms: list


class Named(NamedTuple):
    x: torch.Tensor
    scale: float


class Passed(Model):
    """Tensors between blocks are in objects, one of which each block adds to."""

    kind: type

    class block(Block):  # noqa: N801
        def forward(self, given):
            x = super().forward(given.x)
            if isinstance(given, Filled):
                given.norms.append(x.pow(2).mean())
                given.x = x
                return given
            return type(given)(x, given.scale)

    def forward(self, x):
        given = self.kind(x, [] if self.kind is Filled else 0.5)
        for block in self.blocks:
            given = block(given)
        extra = sum(given.norms) if self.kind is Filled else given.scale
        return self.head(given.x) * extra


class PassedFrozen(Passed):
    kind = Frozen


class PassedNamed(Passed):
    kind = Named


class PassedFilled(Passed):
    kind = Filled


# Losses, and what is set up around a model.


def input_gradient(model, batch):
    x = batch[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).logsumexp(-1).sum(), x)
    return loss(model, batch) + gradient.pow(2).mean()


def two_gradients(model, batch):
    """The graph is used twice before the backward, and once in it."""
    x = batch[0].clone().requires_grad_()
    value = F.cross_entropy(model(x), batch[1])
    parts = [torch.autograd.grad(value, x, retain_graph=True)[0] for _ in range(2)]
    return value + sum(part.pow(2).mean() for part in parts)


def hook_activations(model):
    model.store = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: model.store.append(output))
        block.linear.register_forward_hook(lambda module, args, output: model.store.append(output))


def loss_of_activations(model, batch):
    model.store.clear()
    return loss(model, batch) + 0.01 * sum(x.pow(2).mean() for x in model.store)


def temporary_hooks(model, batch):
    seen = []
    hooks = [block.register_forward_hook(lambda m, a, output: seen.append(output)) for block in model.blocks]
    value = loss(model, batch)
    for hook in hooks:
        hook.remove()
    return value + 0.01 * sum(x.pow(2).mean() for x in seen)


def hook_parameters(model):
    model.blocks[0].linear.weight.register_hook(lambda gradient: gradient * 0)
    model.blocks[1].linear.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    model.head.bias.register_hook(lambda gradient: None)


def log_losses(model):
    model.log = []


def logging(model, batch):
    value = loss(model, batch)
    model.log.append(value.item())
    return value


def regularized(model, batch):
    """By a weight of the last unit, which is still on the device by then."""
    return loss(model, batch) + 0.1 * model.head.weight.square().sum()


CASES_EQUAL = {
    "state on self": (StateOnSelf, loss, None),
    "shared context": (SharedContext, loss, None),
    "auxiliary losses": (AuxiliaryLoss, with_auxiliary, None),
    "counters in blocks": (Counter, loss, None),
    "an assigned buffer": (AssignedBuffer, loss, None),
    "an edited buffer": (EditedBuffer, loss, None),
    "a buffer edited through .data": (DataOfBuffer, loss, None),
    "buffers assigned in blocks": (BufferInBlock, loss, None),
    "buffers edited through .data in blocks": (DataOfBufferInBlock, loss, None),
    "functional batch norm": (FunctionalBatchNorm, loss, None),
    "random and numpy": (Draws, loss, None),
    "own generators": (OwnGenerators, loss, None),
    "a frozen dataclass": (PassedFrozen, loss, None),
    "a named tuple": (PassedNamed, loss, None),
    "an argument that is filled": (PassedFilled, loss, None),
    "autograd.grad": (Model, input_gradient, None),
    "autograd.grad twice": (Model, two_gradients, None),
    "activations of hooks": (Model, loss_of_activations, hook_activations),
    "temporary hooks": (Model, temporary_hooks, None),
    "hooks on parameters": (Model, loss, hook_parameters),
    "a log of losses": (Model, logging, log_losses),
    "a regularizer": (Model, regularized, None),
}


@covering
@pytest.mark.parametrize("micro_batches", [4, *slow(1)])
@pytest.mark.parametrize("name", CASES_EQUAL)
def test_equal_to_plain_pytorch(name, micro_batches, device):
    make, function, prepare = CASES_EQUAL[name]
    assert_equal_to_plain(make, function, prepare, micro_batches, device)


@pytest.mark.parametrize("names", [["transformer.wte.weight"], ["transformer.h.0.*"], ["*"]])
def test_a_unit_whose_trained_parameters_are_all_resident_trains(names, device):
    model = build(CASES["gpt2"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, resident=names) as engine:
        engine.step(text(8), 4)
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


# Refused.


class Clock(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            return super().forward(x) * (1 + int.from_bytes(os.urandom(2), "little") / 2**16)


def penalty(model, batch):
    x = batch[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return loss(model, batch) + gradient.pow(2).mean()


def keeping_graphs(model):
    model.kept = []


def of_all_so_far(model, batch):
    model.kept.append(loss(model, batch))
    return sum(model.kept)


def gradient_of_head(model, batch):
    value = loss(model, batch)
    (gradient,) = torch.autograd.grad(value, model.head.weight, retain_graph=True)
    return value + gradient.pow(2).mean()


@pytest.mark.parametrize(
    ("make", "function", "prepare", "words"),
    [
        (Clock, loss, None, r"the unit 'blocks\.\d' gives other outputs when it runs again"),
        (Model, penalty, None, r"create_graph=True goes through the unit 'head'"),
        (Model, of_all_so_far, keeping_graphs, r"micro-batch 0 is used by micro-batch 1|a second time"),
        (Model, gradient_of_head, None, r"autograd\.grad was called for 'head\.weight'.*resident="),
    ],
)
def test_refused_by_name_before_any_weight_has_changed(make, function, prepare, words, device):
    model = made(make, prepare)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=function) as engine,
        pytest.raises((ValueError, RuntimeError), match=words),
    ):
        engine.step(next(batches(1)), 4)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_reference_from_before_is_refused(device):
    model = made(Model, None)
    weights = list(model.parameters())

    def of_references(model, batch):
        return loss(model, batch) + 0.1 * sum(p.pow(2).sum() for p in weights)

    with (
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=of_references) as engine,
        pytest.raises(ValueError, match=r"'blocks\.0\.linear\.weight' is used in a step through a reference .* before"),
    ):
        engine.step(next(batches(1)), 4)


# What begins later.


class Later(Model):
    """Keeps its input on itself from the third step on."""

    steps = 0

    def forward(self, x):
        first = x
        if self.steps >= 2:
            self.residual = x
        for block in self.blocks:
            x = block(x)
        return self.head(x + (self.residual if self.steps >= 2 else first))


class LaterBackward(Later):
    """Keeps a penalty with its graph from the third step on, and runs its backward when others have kept theirs."""

    def prepare(self):
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = self.blocks[0](x * self.scale)
        if self.steps >= 2:
            self.penalty = torch.tanh(x.detach() * self.scale).square().mean()
        for block in self.blocks[1:]:
            x = block(x)
        if self.steps >= 2:
            self.penalty.backward()
        return self.head(x)


class LaterAndCheckpointed(Later):
    """No unit is finished before the step is: reentrant checkpointing may call any once more in a backward."""

    def prepare(self):
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = x * self.scale
        first = x.detach()
        if self.steps >= 2:
            self.residual = first
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return checkpoint(self.head, x + (self.residual if self.steps >= 2 else first), use_reentrant=True)


@pytest.mark.parametrize("make", [Later, LaterBackward, LaterAndCheckpointed], ids=lambda make: make.__name__)
def test_state_that_appears_after_the_first_steps_is_followed(make, device):
    model, plain = made(make, None), made(make, None)
    plain.to(device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    with Engine(model, optimizers[0], device=device, loss=loss) as engine:
        for number, (x, y) in enumerate(batches(4)):
            model.steps = plain.steps = number
            for part in zip(x.chunk(4), y.chunk(4), strict=True):
                (loss(plain, tuple(t.to(device) for t in part)) / 4).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            engine.step((x, y), 4)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.cpu(), atol=1e-6, rtol=1e-5)


def test_without_the_exchange_the_cross_check_finds_the_difference(device, monkeypatch):
    """The check fails where it should: micro-batches that see each other's state are noticed, by name."""
    monkeypatch.setattr("ferryman.exactness.user_state.UserState.enter", lambda *_: None)
    model = made(StateOnSelf, None)
    with (
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=loss) as engine,
        pytest.raises((UserWarning, ValueError), match=r"residual|used by micro-batch"),
    ):
        engine.step(next(batches(1)), 4)


def test_a_trial_leaves_no_trace(device):
    """Of what it does to attributes, containers, buffers and generators."""
    model = made(AssignedBuffer, log_losses)
    state = random.getstate()
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=logging) as engine:
        engine.step(next(batches(1)), 4)
    assert len(model.log) == 4
    assert random.getstate() == state
