"""Hooks that the user's code registers while the model or the loss runs, and code that looks at gradients there."""

import copy

import pytest
import torch
from torch import nn

from ferryman.engine import Engine

WIDTH = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Hooked(Block):
    """A block that does what is refused, until it is told not to."""

    asked = True


class HooksItsWeight(Hooked):
    """Once, as code does that keeps the handle."""

    handle = None

    def forward(self, x):
        if self.asked and self.handle is None:
            self.handle = self.linear.weight.register_hook(lambda gradient: gradient * 2)
        return super().forward(x)


class AccumulatesIntoItsWeight(Hooked):
    def forward(self, x):
        if self.asked:
            self.linear.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(2))
        return super().forward(x)


class ReadsItsGradient(Hooked):
    def forward(self, x):
        return super().forward(x) * (1 if not self.asked or self.linear.weight.grad is None else 2)


class ReadsItsGradientInTheBackward(Hooked):
    def __init__(self):
        super().__init__()
        self.register_full_backward_hook(self.scale)

    def scale(self, _module, inputs, _outputs):
        factor = 1 if not self.asked or self.linear.weight.grad is None else 2
        return None if inputs[0] is None else (inputs[0] * factor,)


class HooksItsInput(Block):
    """From the second step on, when no trial sees it."""

    late = False

    def forward(self, x):
        if self.late and x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)
        return torch.tanh(self.linear(x))


class Residual(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = x + block(x)
        return x


def mean_square(model, x):
    return model(x).square().mean()


def options_of(device):
    """With the relay, and with everything on the device."""
    kept = {"recompute": "never"}
    return [{}, kept if device.type == "cpu" else {"held": True, **kept}]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("block", "words"),
    [
        (HooksItsWeight, r"'\d\.linear\.weight' gets a hook on its gradient"),
        (AccumulatesIntoItsWeight, r"'\d\.linear\.weight' gets a hook on its gradient"),
        (ReadsItsGradient, r"the gradient of '0\.linear\.weight' is read or cleared"),
        (ReadsItsGradientInTheBackward, r"the gradient of '2\.linear\.weight' is read or cleared"),
    ],
)
def test_units_that_do_so_with_their_parameters_are_refused(block, words, micro_batches, device):
    for options in options_of(device):
        model = nn.Sequential(block(), block(), block())
        with Engine(model, device=device, loss=mean_square, **options) as engine:
            for _ in range(2):  # nothing of the first attempt is left
                with pytest.raises(ValueError, match=words):
                    engine.forward_backward(torch.randn(6, WIDTH), micro_batches)
            plain = nn.Sequential(*(Block() for _ in model))
            plain.load_state_dict(model.state_dict())
            for module in model:
                module.asked = False
            batch = torch.randn(6, WIDTH)
            engine.forward_backward(batch, micro_batches)
            mean_square(plain, batch).backward()
            for ours, its in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, its.grad)


@pytest.mark.parametrize("resident", [[], ["1.linear.weight"]], ids=["relayed", "resident"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_hooks_that_a_loss_registers_through_the_model_are_refused(micro_batches, resident, device):
    def loss(model, x):
        model[1].linear.weight.register_hook(lambda gradient: gradient * 2)
        return mean_square(model, x)

    model = nn.Sequential(Block(), Block())
    with (
        Engine(model, device=device, loss=loss, resident=resident) as engine,
        pytest.raises(ValueError, match=r"'1\.linear\.weight' gets a hook on its gradient"),
    ):
        engine.forward_backward(torch.randn(6, WIDTH), micro_batches)


@pytest.mark.parametrize("once", [True, False])
def test_hooks_that_a_loss_registers_on_the_users_own_reference_run_as_in_plain_pytorch(once, device):
    """Trials leave none behind."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    plain, batch = copy.deepcopy(model), torch.randn(6, WIDTH)

    def loss_with(weight):
        handles = []

        def loss(model, x):
            if not (once and handles):
                handles.append(weight.register_hook(lambda gradient: gradient * 2))
            return mean_square(model, x)

        return loss

    expected = loss_with(plain[1].linear.weight)
    with Engine(model, device=device, loss=loss_with(model[1].linear.weight)) as engine:
        for _ in range(2):
            engine.forward_backward(batch)
            expected(plain, batch).backward()
        torch.testing.assert_close(engine.gradient("1.linear.weight"), plain[1].linear.weight.grad)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_hook_on_an_input_that_no_trial_has_seen_gets_the_whole_gradient(micro_batches, device):
    for options in options_of(device):
        torch.manual_seed(0)
        model = Residual(HooksItsInput(), HooksItsInput(), HooksItsInput())
        plain, batch = copy.deepcopy(model), torch.randn(6, WIDTH)
        with Engine(model, device=device, loss=mean_square, **options) as engine:
            for late in (False, True, True):
                engine.zero_grad()
                plain.zero_grad()
                for block in (*model, *plain):
                    block.late = late
                engine.forward_backward(batch, micro_batches)
                for part in batch.chunk(micro_batches):
                    (mean_square(plain, part) / micro_batches).backward()
                for name, parameter in plain.named_parameters():
                    torch.testing.assert_close(engine.gradient(name), parameter.grad)


def test_a_unit_that_needs_the_dropped_graph_of_another_is_not_repeated_for_ever(device):
    class Stores(Block):
        def forward(self, x):
            self.stored = torch.tanh(self.linear(x))
            return x + self.stored

    class Differentiates(Block):
        runs = 0

        def forward(self, x):
            type(self).runs += 1
            self.others[0].stored.square().mean().backward(retain_graph=True)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Stores(), Differentiates())
    model[1].others = [model[0]]
    plain, batch = copy.deepcopy(model), torch.randn(6, WIDTH)
    mean_square(plain, batch).backward()
    Differentiates.runs = 0
    with Engine(model, device=device, loss=mean_square, units=["0", "1"]) as engine:
        engine.forward_backward(batch)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(engine.gradient(name), parameter.grad)
    assert Differentiates.runs < 20
