"""Units whose code differentiates, hooks its inputs or uses leaves outside the model, and derivatives through units."""

import functools
import queue
import types

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.utils import parametrizations, parametrize

from ferryman.engine import Engine
from support.slow import covering
from support.small_models import WIDTH, Block, Model, assert_equal_to_plain, loss, made, train, train_plainly


class Energy(Model):
    """Blocks that go down the gradient of an energy; the first one may be frozen."""

    class block(Block):  # noqa: N801
        def forward(self, x):
            at = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(torch.tanh(self.linear(at)).square().sum(), at)
            return super().forward(x) - 0.1 * gradient


class FrozenEnergy(Energy):
    def prepare(self):
        self.blocks[:2].requires_grad_(False)


class Forces(Model):
    """The gradient of an energy is trained itself."""

    class block(Block):  # noqa: N801
        def forward(self, x):
            at = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.linear(at)).square().sum()
            (gradient,) = torch.autograd.grad(energy, at, create_graph=True)
            return super().forward(x) - 0.1 * gradient


class HookedInput(Model):
    """Blocks hook their inputs, which are used elsewhere as well; the hook sees the whole gradient."""

    class block(Block):  # noqa: N801
        def forward(self, x):
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            return super().forward(x)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) + 0.3 * x
        return self.head(x)


class HookedHead(Model):
    """At the turn, where the forward's graph is kept."""

    def prepare(self):
        self.head.__class__ = _HookedLinear


class _HookedLinear(nn.Linear):
    def forward(self, x):
        x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        y = super().forward(x)
        y.register_hook(lambda gradient: gradient * 0.5)
        return y


class Sparse(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            return super().forward(x), torch.eye(WIDTH).to_sparse()

    def forward(self, x):
        for block in self.blocks:
            x, matrix = block(x)
            x = x + torch.sparse.mm(matrix, x.T).T
        return self.head(x)


@covering
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("make", [Energy, FrozenEnergy, Forces, HookedInput, HookedHead])
def test_equals_plain_pytorch(make, micro_batches, device):
    assert_equal_to_plain(make, loss, None, micro_batches, device)


class KeptIfItHasAGraph(Model):
    """Blocks return another value, and store a tensor, only if there is a graph."""

    class block(Block):  # noqa: N801
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.retain_grad()
                self.kept = y
                return y * 0.5
            return y


def test_code_that_looks_whether_there_is_a_graph(device):
    assert_equal_to_plain(KeptIfItHasAGraph, loss, None, 2, device)


class UsedIfItHasAGraph(Model):
    """What blocks keep only if there is a graph is used outside them."""

    detaches = False

    class block(Block):  # noqa: N801
        def forward(self, x):
            y = torch.tanh(self.linear(x))
            if y.requires_grad:
                self.kept = y.detach() if self.detaches else y
            return x + y

    def prepare(self):
        for block in self.blocks:
            block.detaches = self.detaches

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x + sum(getattr(block, "kept", 0) for block in self.blocks))


class UsedDetached(UsedIfItHasAGraph):
    detaches = True


@pytest.mark.parametrize("make", [UsedIfItHasAGraph, UsedDetached])
def test_what_is_kept_if_it_has_a_graph_is_used(make, device):
    assert_equal_to_plain(make, loss, None, 3, device)


def test_sparse_outputs():
    assert_equal_to_plain(Sparse, loss, None, 2, torch.device("cpu"))


class KeptInput(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            if x.requires_grad:
                x.retain_grad()
                self.kept = x
            return super().forward(x)


def test_gradients_of_inputs_that_a_unit_keeps(device):
    model, plain = made(KeptInput, None), made(KeptInput, None)
    for some, function in ((plain, train_plainly), (model, train)):
        torch.manual_seed(2)
        function(some, loss, device, 2)
    for mine, theirs in zip(model.blocks[1:], plain.blocks[1:], strict=True):
        torch.testing.assert_close(mine.kept.grad, theirs.kept.grad, atol=1e-7, rtol=1e-3)


class Scaled(Model):
    """Blocks multiply by a leaf that belongs to the user; some of them are frozen, the first one included."""

    class block(Block):  # noqa: N801
        def forward(self, x):
            return super().forward(x) * self.scale[0]

    def prepare(self):
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


def test_leaves_outside_the_model_in_frozen_units(device):
    found = []
    for function in (train_plainly, train):
        model, scale = made(Scaled, None), torch.full((), 0.7, device=device, requires_grad=True)
        for block in model.blocks:
            block.scale = [scale]
        torch.manual_seed(2)
        found.append((function(model, loss, device, 2), scale.grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1])


# Functions as arguments of units.


class Closures(Model):
    """Blocks get a function with a tensor in its closure, which is nested, and one in its defaults."""

    class block(Block):  # noqa: N801
        def forward(self, function):
            return function(self.linear)

    def forward(self, x):
        scale = 1 + x.detach().abs()  # without a graph
        for block in self.blocks:
            half = x / 2

            def inner(linear, half=half):
                return torch.tanh(linear(half))

            x = block(lambda linear, x=x, inner=inner: x + inner(linear) / scale)
        return self.head(x)


class Partials(Closures):
    def forward(self, x):
        for block in self.blocks:
            x = block(functools.partial(_apply, x, half=x / 2))
        return self.head(x)


def _apply(x, linear, *, half):
    return x + torch.tanh(linear(half))


class LocalClass(Closures):
    """The method of a local class has closures over a tensor with a graph, and over one without."""

    def forward(self, x):
        scale = 1 + x.detach().abs()
        for block in self.blocks:
            held = types.SimpleNamespace(x=x)

            class Step:
                def __call__(self, linear, held=held):
                    return held.x + torch.tanh(linear(held.x)) / scale

            x = block(Step())
        return self.head(x)


class Methods(Closures):
    """The function is in an object."""

    class block(Block):  # noqa: N801
        def forward(self, given):
            return given.function(self.linear)

    def forward(self, x):
        for block in self.blocks:
            x = block(types.SimpleNamespace(function=_Step(x).apply))
        return self.head(x)


class _Step:
    def __init__(self, x):
        self.x = x

    def apply(self, linear):
        return self.x + torch.tanh(linear(self.x))


@covering
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("make", [Closures, Partials, LocalClass, Methods])
def test_functions_that_hold_tensors(make, micro_batches, device):
    assert_equal_to_plain(make, loss, None, micro_batches, device)


# Refused.


def refused(make, function, device, words):
    model = made(make, None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        train(model, function, device, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def through_grad(model, batch):
    gradient = torch.func.grad(lambda x: model(x).logsumexp(-1).sum())(batch[0])
    return loss(model, batch) + gradient.square().mean()


def through_vmap(model, batch):
    return F.cross_entropy(torch.func.vmap(lambda x: model(x[None])[0])(batch[0]), batch[1])


def through_dual(model, batch):
    with forward_ad.dual_level():
        output = forward_ad.unpack_dual(model(forward_ad.make_dual(batch[0], torch.ones_like(batch[0]))))
    return F.cross_entropy(output.primal, batch[1])


@pytest.mark.parametrize("function", [through_grad, through_vmap, through_dual])
def test_other_derivatives_through_a_unit(function):
    words = r"the unit 'blocks\.0' is called in a transformation of torch\.(func|autograd\.forward_ad)"
    refused(Model, function, torch.device("cpu"), words)


class Normalized(Model):
    def prepare(self):
        for block in self.blocks:
            parametrizations.weight_norm(block.linear)


def cached(model, batch):
    with parametrize.cached():
        return loss(model, batch)


def test_a_cache_of_parametrized_weights_around_units(device):
    refused(Normalized, cached, device, r"the unit 'blocks\.0' is called in torch\.nn\.utils\.parametrize\.cached")


class NormalizedInside(Normalized):
    class block(Block):  # noqa: N801
        def forward(self, x):
            with parametrize.cached():
                return super().forward(x) + torch.tanh(self.linear(x))


@covering
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_cache_of_parametrized_weights_inside_a_unit(micro_batches, device):
    assert_equal_to_plain(NormalizedInside, loss, None, micro_batches, device)


class Listens(Model):
    """Uses hooks on nodes of autograd's graph, which a unit has only one of."""

    def prepare(self):
        self.blocks[1].register_backward_hook(lambda module, given, received: None)


class OnTheNode(Model):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x.grad_fn.register_hook(lambda given, received: None)
        return self.head(x)


class Related(Model):
    """Blocks differentiate with respect to an input on which their other input depends."""

    class block(Block):  # noqa: N801
        def forward(self, x, first):
            y = super().forward(x)
            (gradient,) = torch.autograd.grad((y * first).sum(), first, retain_graph=True)
            return y + 0.1 * gradient

    def forward(self, x):
        first = self.blocks[0](x, (x * 1.0).requires_grad_())
        x = first * 2
        for block in self.blocks[1:]:
            x = block(x, first)
        return self.head(x)


class Iterators(Model):
    class block(Block):  # noqa: N801
        def forward(self, parts):
            return sum(super(Iterators.block, self).forward(x) for x in parts)

    def forward(self, x):
        for block in self.blocks:
            x = block(x * factor for factor in (0.5, 1.0))
        return self.head(x)


class Generators(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            return (super(Generators.block, self).forward(x) for _ in range(1))

    def forward(self, x):
        for block in self.blocks:
            (x,) = block(x)
        return self.head(x)


class Queued(Model):
    """Blocks pass tensors on in a place that the engine does not know."""

    class block(Block):  # noqa: N801
        def forward(self, x):
            y = super().forward(x) * self.queue.get()
            self.queue.put(torch.sigmoid(y))
            return y

    def prepare(self):
        self.queue = queue.SimpleQueue()
        for block in self.blocks:
            block.queue = self.queue

    def forward(self, x):
        self.queue.put(x)
        y = super().forward(x)
        self.queue.get()
        return y


@covering
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Listens, r"the unit 'blocks\.1' has a hook on its node .*register_full_backward_hook"),
        (OnTheNode, r"the unit 'blocks\.0' has a hook on its node .*tensor\.register_hook"),
        (Iterators, r"the unit 'blocks\.0' was given a generator as 'parts', an iterator .* Pass a list"),
        (Generators, r"the unit 'blocks\.0' returns a generator, .* Return a list"),
        (Related, r"called in a unit, for the gradient of one of its inputs on which another"),
        (Queued, r"the unit 'blocks\.1' uses a tensor with a graph .* pass the tensor to the unit"),
    ],
)
def test_what_a_second_run_cannot_repeat(make, words, device):
    refused(make, loss, device, words)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_on_several_parameters(mode, device):
    model = made(Model, None)
    torch.autograd.graph.register_multi_grad_hook([*model.parameters()], lambda gradients: None, mode=mode)
    with pytest.raises(ValueError, match=r"'blocks.0.linear.weight' has a hook .*register_multi_grad_hook"):
        Engine(model, device=device)


def test_parameters_without_a_shape(device):
    model = made(Model, None)
    model.head = nn.LazyLinear(5)
    with pytest.raises(ValueError, match=r"'head' is a LazyLinear .* call the model once"):
        Engine(model, device=device)


def test_a_batch_in_another_dtype_than_the_weights(device):
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        train(made(Model, None), loss, device, 2, precision="bf16")
    assert any("precision= sets the dtype of the weights" in note for note in caught.value.__notes__)
