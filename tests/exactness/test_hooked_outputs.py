"""Hooks on a unit's outputs, from inside and outside, and gradients that are kept with `retain_grad`."""

import contextvars

import pytest
import torch
from torch import nn

from support.slow import covering
from support.small_models import Block, Model, assert_equal_to_plain, loss, made, train, train_plainly


def halve(gradient):
    return gradient * 0.5


def clamp(gradient):
    return gradient.clamp(-0.01, 0.01)


class HookedInside(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            y = super().forward(x)
            y.register_hook(clamp)
            return y


class HookedOutside(Model):
    """On tensors that are edited in place afterwards, and on the results of these edits."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x.register_hook(clamp)
            x.mul_(1.5)
            x.register_hook(halve)
        return self.head(x)


class HookedTwice(HookedInside):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x.register_hook(halve)
        return self.head(x)


class KeptOutside(HookedInside):
    def forward(self, x):
        self.kept = [x]
        for block in self.blocks:
            self.kept.append(block(self.kept[-1]))
            self.kept[-1].retain_grad()
        return self.head(self.kept[-1])


class Stored(Model):
    """Blocks store a tensor that they also use."""

    class block(Block):  # noqa: N801
        def forward(self, x):
            self.stored = torch.tanh(self.linear(x))
            CONTEXT.set(self.stored)
            return x + self.stored


def hook_stored(model, batch):
    value = loss(model, batch)
    model.blocks[1].stored.register_hook(halve)
    return value


def keep_stored(model, batch):
    value = loss(model, batch)
    model.blocks[1].stored.retain_grad()
    return value + model.blocks[1].stored.mean()


def ask_for_stored(model, batch):
    """The loss uses it as well; without that, torch would raise an error."""
    value = loss(model, batch) + model.blocks[1].stored.mean()
    (gradient,) = torch.autograd.grad(value, model.blocks[1].stored, retain_graph=True)
    return value + gradient.norm()


def ask_for_stored_alone(model, batch):
    value = loss(model, batch)
    (gradient,) = torch.autograd.grad(value, model.blocks[1].stored, retain_graph=True)
    return value + gradient.norm()


def ask_for_stored_if_used(model, batch):
    value = loss(model, batch)
    (gradient,) = torch.autograd.grad(value, [model.blocks[1].stored], retain_graph=True, allow_unused=True)
    return value + gradient.norm()


def backward_to_stored(model, batch):
    value = loss(model, batch) + model.blocks[1].stored.mean()
    value.backward(inputs=[torch.autograd.graph.get_gradient_edge(model.blocks[1].stored)], retain_graph=True)
    return value


def ask_for_context(model, batch):
    value = loss(model, batch) + CONTEXT.get().mean()
    (gradient,) = torch.autograd.grad(value, CONTEXT.get(), retain_graph=True)
    return value + gradient.norm()


CONTEXT = contextvars.ContextVar("stored")


class StoredAside(Model):
    """Blocks store a tensor that they do not use."""

    class block(Block):  # noqa: N801
        def forward(self, x):
            self.stored = torch.tanh(self.linear(x))
            return super().forward(x)


class KeptInside(Model):
    """Blocks keep the gradients of what they return and of what they store, as Grad-CAM does, and hook one of them."""

    class block(Block):  # noqa: N801
        guarded = False

        def forward(self, x):
            self.stored = torch.tanh(self.linear(x))
            self.returned = x + self.stored
            if not self.guarded or self.stored.requires_grad:
                self.stored.retain_grad()
                self.returned.retain_grad()
                self.stored.register_hook(halve)
            return self.returned


class KeptIfThereIsAGraph(KeptInside):
    class block(KeptInside.block):  # noqa: N801
        guarded = True


class NeedsGraph(Model):
    """Draws random numbers, counts and edits a buffer before the line that needs a graph."""

    class block(Block):  # noqa: N801
        calls = 0

        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))
            self.dropout = nn.Dropout(0.3)

        def forward(self, x):
            self.calls += 1
            self.mean.mul_(0.9).add_(x.detach().mean())
            y = self.dropout(super().forward(x)) + self.mean.clone()
            y.register_hook(clamp)
            return y


@covering
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("make", [HookedInside, HookedOutside, NeedsGraph])
def test_hooks_run_as_in_plain_pytorch(make, micro_batches, device):
    assert_equal_to_plain(make, loss, None, micro_batches, device)


@covering
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("make", [KeptInside, KeptIfThereIsAGraph])
def test_gradients_that_a_unit_keeps(make, micro_batches, device):
    model, plain = made(make, None), made(make, None)
    for some, function in ((plain, train_plainly), (model, train)):
        torch.manual_seed(2)
        function(some, auxiliary, device, micro_batches)
    for mine, theirs in zip(model.blocks, plain.blocks, strict=True):
        for name in ("stored", "returned"):
            assert getattr(mine, name).retains_grad
            torch.testing.assert_close(getattr(mine, name).grad, getattr(theirs, name).grad, atol=1e-7, rtol=1e-3)


def auxiliary(model, batch):
    return loss(model, batch) + sum(block.stored.square().mean() for block in model.blocks)


@covering
@pytest.mark.parametrize(
    ("make", "function", "words"),
    [
        (HookedTwice, loss, r"an output of the unit 'blocks\.3' has a hook .* and a hook .* from outside"),
        (KeptOutside, loss, r"an output of the unit 'blocks\.3' has a hook .* and retain_grad\(\) from outside"),
        (Stored, hook_stored, r"a tensor that the unit 'blocks\.1' has stored .* has a hook .* inside the unit"),
        (Stored, keep_stored, r"a tensor that the unit 'blocks\.1' has stored .* has retain_grad\(\)"),
        (Stored, ask_for_stored, r"asked for the gradient of a tensor that the unit 'blocks\.1' has stored"),
        (Stored, ask_for_stored_alone, r"asked for the gradient of a tensor that the unit 'blocks\.1' has stored"),
        (Stored, ask_for_stored_if_used, r"asked for the gradient of a tensor that the unit 'blocks\.1' has stored"),
        (Stored, backward_to_stored, r"asked for the gradient of a tensor that the unit 'blocks\.1' has stored"),
        (Stored, ask_for_context, r"asked for the gradient of a tensor that the unit 'blocks\.3' has stored"),
    ],
)
def test_hooks_that_would_see_another_gradient_are_refused(make, function, words, device):
    model = made(make, None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        train(model, function, device, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_gradients_of_tensors_that_a_unit_stores_and_does_not_use(device):
    assert_equal_to_plain(StoredAside, ask_for_stored, None, 2, device)


class KeptIfThereIsAGraph(Model):
    """Blocks keep a tensor and its gradient, unless the model is evaluated, without a graph."""

    class block(Block):  # noqa: N801
        def forward(self, x):
            y = super().forward(x)
            self.residual = torch.tanh(y)
            if self.residual.requires_grad:
                self.residual.retain_grad()
                self.kept = self.residual
            return y + self.residual


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_a_unit_keeps_only_where_there_is_a_graph(micro_batches, device):
    model, plain = made(KeptIfThereIsAGraph, None), made(KeptIfThereIsAGraph, None)
    train_plainly(plain, loss, device, micro_batches)
    train(model, loss, device, micro_batches)
    for mine, theirs in zip(model.blocks, plain.blocks, strict=True):
        torch.testing.assert_close(mine.kept.grad, theirs.kept.grad, atol=1e-6, rtol=1e-4)


class OnTheHost(Model):
    """Blocks return a tensor on the host as well, which they have logged."""

    class block(Block):  # noqa: N801
        def forward(self, x):
            y = super().forward(x)
            return y, y.detach().cpu().mean(0)

    def forward(self, x):
        for block in self.blocks:
            x, mean = block(x)
            x = x + mean.to(x.device)
        return self.head(x)


def test_outputs_on_the_host(device):
    assert_equal_to_plain(OnTheHost, loss, None, 2, device)


class EditedView(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            return super().forward(x)[:, :]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x += 1
        return self.head(x)


class EditedViewInTransform(EditedView):
    """The unit's first run can have no graph, since hooks on saved tensors are refused."""

    class block(EditedView.block):  # noqa: N801
        def forward(self, x):
            with torch.autograd.graph.disable_saved_tensors_hooks("no saved tensor hooks here"):
                return super().forward(x)


@pytest.mark.parametrize("kind", [EditedView, EditedViewInTransform])
def test_edits_of_a_view_that_a_unit_returns(kind, device):
    assert_equal_to_plain(kind, loss, None, 2, device)
