"""Losses that train something of their own, or add to gradients that are not the model's, by a `backward()` in them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from ferryman.engine import Engine
from support.slow import covering
from support.small_models import WIDTH, Model, batches, loss, made

MICRO_BATCHES = pytest.mark.parametrize("micro_batches", [1, 2, 4])


class Critic:
    """A discriminator in the loss: each call trains it on what the model gives, with an optimizer of its own."""

    def __init__(self, device, optimizer=torch.optim.Adam, scheduled=False, early=False):
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).to(device)
        self.optimizer = optimizer(self.net.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5) if scheduled else None
        self.early = early

    def __call__(self, model, batch):
        if self.early:
            self.train(torch.tanh(batch[0][:, :5]))
        output = model(batch[0])
        if not self.early:
            self.train(output.detach())
        return F.cross_entropy(output, batch[1]) - 0.3 * self.net(output).mean()

    def train(self, fake):
        self.optimizer.zero_grad()
        (self.net(fake).mean() - self.net(torch.ones_like(fake)).mean()).backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def state(self):
        tensors = [t for held in self.optimizer.state.values() for t in held.values()]
        gradients = [p.grad for p in self.net.parameters()]
        found = [*self.net.parameters(), *tensors, *gradients, torch.tensor(self.optimizer.param_groups[0]["lr"])]
        return [t.detach().cpu().clone() for t in found]


class Averaging(torch.optim.SGD):
    """Keeps attributes of its own, lists in its state, and an entry that belongs to no parameter."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.steps, self.history = 0, []

    @torch.no_grad()
    def step(self):
        super().step()
        self.steps += 1
        self.history.append(self.steps)
        for parameter in self.param_groups[0]["params"]:
            sums = self.state[parameter].setdefault("sums", [torch.zeros_like(parameter)])
            sums[0].add_(parameter, alpha=1 / self.steps)
            parameter.add_(sums[0], alpha=0.01)
        self.state["count"] = self.steps


class Temperature:
    """A `backward()` in the loss adds to the gradient of a leaf of its own."""

    def __init__(self, device):
        self.leaf = torch.ones((), device=device, requires_grad=True)

    def __call__(self, model, batch):
        output = model(batch[0])
        F.cross_entropy(output.detach() * self.leaf, batch[1]).backward()
        return F.cross_entropy(output, batch[1])

    def state(self):
        return [self.leaf.grad.cpu().clone()]


class Early(Temperature):
    """The same before the model is called."""

    def __call__(self, model, batch):
        (batch[0].mean() * self.leaf**2).backward()
        return loss(model, batch) * self.leaf


class Momentum:
    """A teacher that the loss moves, through `.data`, as momentum encoders do."""

    def __init__(self, device):
        torch.manual_seed(7)
        self.teacher = nn.Linear(WIDTH, 5).to(device).requires_grad_(False)

    def __call__(self, model, batch):
        for mine, theirs in zip(self.teacher.parameters(), model.head.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        output = model(batch[0])
        return F.cross_entropy(output, batch[1]) + F.mse_loss(output, self.teacher(batch[0]))

    def state(self):
        return [p.detach().cpu().clone() for p in self.teacher.parameters()]


def weights(model):
    return [p.detach().cpu().clone() for p in model.parameters()]


def plainly(model, function, device, micro_batches, steps=3):
    model.to(device)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in batches(steps):
        for part in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            (function(model, tuple(t.to(device) for t in part)) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([*weights(model), *function.state()])
    return found


def by_engine(model, function, device, micro_batches, steps=3, **options):
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    with Engine(model, optimizer, device=device, loss=function, **options) as engine:
        for batch in batches(steps):
            engine.step(batch, micro_batches)
            found.append([*weights(model), *function.state()])
    return found


MAKE = {
    "critic": Critic,
    "sgd critic": lambda device: Critic(device, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
    "scheduled critic": lambda device: Critic(device, scheduled=True),
    "critic before the model": lambda device: Critic(device, early=True),
    "temperature": Temperature,
    "temperature before the model": Early,
    "momentum teacher": Momentum,
}


@covering
@MICRO_BATCHES
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_loss_that_trains_something_of_its_own(make, micro_batches, device):
    expected = plainly(made(Model, None), make(device), device, micro_batches)
    found = by_engine(made(Model, None), make(device), device, micro_batches, resident=["head.*"])
    torch.testing.assert_close(found, expected)


class Late:
    """Something changes in the second step for the first time: the engine undoes the step and makes it again."""

    def __init__(self, function, late):
        self.function, self.late = function, late
        self.calls, self.seen = 0, None

    def __call__(self, model, batch):
        self.calls += 1
        value = self.function(model, batch)
        if self.calls > self.late:
            self.seen = "something new"
        return value

    def state(self):
        return self.function.state()


class Masking:
    """Edits its batch in place."""

    def __init__(self, device):
        self.masked = []

    def __call__(self, model, batch):
        batch[0].mul_(0.5)
        self.masked.append(batch[0].sum().item())
        return loss(model, batch)

    def state(self):
        return [torch.tensor(self.masked)]


@covering
@MICRO_BATCHES
@pytest.mark.parametrize("make", [*MAKE.values(), Masking], ids=[*MAKE, "masking"])
def test_a_step_that_is_made_again_has_one_effect(make, micro_batches, device):
    late = 4 * micro_batches  # in a step in which second runs are not compared
    expected = plainly(made(Model, None), Late(make(device), late), device, micro_batches, steps=6)
    found = by_engine(made(Model, None), Late(make(device), late), device, micro_batches, steps=6, resident=["head.*"])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", [Momentum, Critic])
def test_a_straight_step_that_is_made_again_has_one_effect(make, accelerator):
    """Of several micro-batches, for which all weights and gradients stay on the device."""
    expected = plainly(made(Model, None), Late(make(accelerator), 12), accelerator, 3, steps=6)
    options = {"resident": ["head.*"], "held": True, "recompute": "never"}
    found = by_engine(made(Model, None), Late(make(accelerator), 12), accelerator, 3, steps=6, **options)
    torch.testing.assert_close(found, expected)


class Trailing(Momentum):
    """Reads, before the first unit, what the micro-batch before it has moved after its last one."""

    def __call__(self, model, batch):
        output = model(batch[0] + 10 * self.teacher.weight.mean())
        for mine, theirs in zip(self.teacher.parameters(), model.head.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        return F.cross_entropy(output, batch[1])


def test_a_step_one_by_one_that_is_made_again_has_one_effect(device):
    """Of several micro-batches that cannot take turns."""
    expected = plainly(made(Model, None), Late(Trailing(device), 12), device, 3, steps=6)
    with pytest.warns(UserWarning, match="micro-batches give other results when they take turns"):
        found = by_engine(
            made(Model, None), Late(Trailing(device), 12), device, 3, steps=6, resident=["head.*"], recompute="always"
        )
    torch.testing.assert_close(found, expected)


def test_gradients_behind_a_batch_in_a_step_that_is_made_again(device):
    x, y = next(batches(1))
    found = []
    for plain in (True, False):
        model, leaf = made(Model, None), x.clone().to(device).requires_grad_()
        function = Late(loss, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if plain:
            model.to(device)
            for _ in range(5):
                for part in zip(leaf.chunk(2), y.to(device).chunk(2), strict=True):
                    (function(model, part) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            with Engine(model, optimizer, device=device, loss=function) as engine:
                for _ in range(5):
                    engine.step((leaf, y), 2)
        found.append(leaf.grad.cpu())
    torch.testing.assert_close(found[1], found[0])


@MICRO_BATCHES
def test_attributes_and_nested_state_of_an_optimizer_in_the_loss(device, micro_batches):
    model, plain = made(Model, None), made(Model, None).to(device)
    mine, theirs = Critic(device, Averaging), Critic(device, Averaging)
    optimizer, plain_optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    with Engine(model, optimizer, device=device, loss=mine) as engine:
        for number, batch in enumerate(batches(2), 1):
            engine.step(batch, micro_batches)
            chunks = (tensor.to(device).chunk(micro_batches) for tensor in batch)
            for part in zip(*chunks, strict=True):
                (theirs(plain, part) / micro_batches).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            assert mine.optimizer.steps == theirs.optimizer.steps == number * micro_batches
            assert mine.optimizer.history == theirs.optimizer.history
            assert mine.optimizer.state["count"] == theirs.optimizer.state["count"]
            for one, two in zip(mine.net.parameters(), theirs.net.parameters(), strict=True):
                assert torch.allclose(one, two, atol=1e-6)
                sums = [critic.optimizer.state[p]["sums"][0] for critic, p in ((mine, one), (theirs, two))]
                assert torch.allclose(*sums, atol=1e-6)
