"""Other tensors in the places of a unit's own: `torch.func.functional_call`, and assignments from outside the unit."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from ferryman.engine import Engine
from support.small_models import WIDTH, Block, Model, assert_equal_to_plain, batches, loss, made, train, train_plainly

# With torch.func.functional_call.


def other_weights(model, device):
    generator = torch.Generator().manual_seed(3)
    return {name: 0.1 * torch.randn(p.shape, generator=generator).to(device) for name, p in model.named_parameters()}


def like_another_model(model, batch):
    with torch.no_grad():
        expected = functional_call(model, other_weights(model, batch[0].device), (batch[0],))
    return loss(model, batch) + F.mse_loss(model(batch[0]), expected)


class CallsABlockTwice(Model):
    def forward(self, x):
        other = other_weights(self.blocks[1], x.device)
        return super().forward(x + functional_call(self.blocks[1], other, (x,)))


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("make", "function"), [(Model, like_another_model), (CallsABlockTwice, loss)])
def test_a_model_that_runs_with_other_weights(make, function, micro_batches, device):
    assert_equal_to_plain(make, function, None, micro_batches, device)


def test_gradients_of_what_other_weights_are_computed_from(device):
    model, plain = made(Model, None), made(Model, None)
    scales = [torch.tensor(0.5, device=device, requires_grad=True) for _ in range(2)]

    def scaled(scale):
        def function(model, batch):
            weights = {name: scale * weight for name, weight in other_weights(model, batch[0].device).items()}
            return loss(model, batch) + functional_call(model, weights, (batch[0],)).square().mean()

        return function

    torch.manual_seed(2)
    expected = train_plainly(plain, scaled(scales[0]), device, 4)
    torch.manual_seed(2)
    assert train(model, scaled(scales[1]), device, 4) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(scales[1].grad, scales[0].grad)


def with_one_weight_replaced(model, batch):
    other = {"blocks.1.linear.weight": 0.2 * torch.eye(WIDTH, device=batch[0].device)}
    return loss(model, batch) + functional_call(model, other, (batch[0],)).square().mean()


@pytest.mark.filterwarnings("ignore:.* is used outside its unit")
def test_where_only_some_units_have_other_weights_micro_batches_do_not_take_turns(device):
    with pytest.warns(UserWarning, match=r"blocks\.1\.linear\.weight is replaced by another tensor while units run"):
        assert_equal_to_plain(Model, with_one_weight_replaced, None, 4, device)


@pytest.mark.filterwarnings("ignore:.* is used outside its unit")
@pytest.mark.filterwarnings("ignore:micro-batches give other results")
@pytest.mark.parametrize("replaced", ["blocks.1.", "blocks."])
def test_where_memory_is_measured_some_units_may_have_other_weights_too(replaced, virtual):
    """The trial that measures memory fails where micro-batches take turns: one leaves its weights to another."""
    model, plain = made(Model, None), made(Model, None)
    scales = [torch.tensor(0.5, device=virtual, requires_grad=True) for _ in range(2)]

    def scaled(scale):
        def function(model, batch):
            other = other_weights(model, batch[0].device)
            weights = {name: scale * weight for name, weight in other.items() if name.startswith(replaced)}
            return loss(model, batch) + functional_call(model, weights, (batch[0],)).square().mean()

        return function

    torch.manual_seed(2)
    expected = train_plainly(plain, scaled(scales[0]), virtual, 4)
    torch.manual_seed(2)
    losses = train(model, scaled(scales[1]), virtual, 4, memory="1MiB", slots=2, held=False)
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(scales[1].grad, scales[0].grad)


def test_evaluation_with_other_weights(device):
    model = made(Model, None)
    batch = next(batches(1))
    other = other_weights(model, "cpu")
    with torch.no_grad():
        expected = functional_call(model, other, (batch[0],))
    at_first = like_another_model(made(Model, None), batch).item()
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=like_another_model) as engine:
        assert engine.evaluate(batch).item() == pytest.approx(at_first, rel=1e-5)
        engine.step(batch, 4)
        with torch.no_grad():
            torch.testing.assert_close(functional_call(model, other, (batch[0],)), expected)
            assert not torch.equal(model(batch[0]), expected)


# Assigned from outside the unit.


class Shifted(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(WIDTH), persistent=False)

    def forward(self, x):
        return super().forward(x + self.shift)


class AssignsBefore(Model):
    block = Shifted

    def forward(self, x):
        for block in self.blocks:
            block.shift = x.detach().mean(0)
            x = block(x)
        return self.head(x)


class AssignsAfter(Model):
    block = Shifted

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            block.shift = x.detach().mean(0)
        return self.head(x)


class EditsBefore(AssignsBefore):
    def forward(self, x):
        for block in self.blocks:
            block.shift.copy_(x.detach().mean(0))
            x = block(x)
        return self.head(x)


def replacing(model, batch):
    model.blocks[0].linear.bias = nn.Parameter(torch.zeros(WIDTH, device=batch[0].device))
    return loss(model, batch)


class AssignsAGraph(Model):
    class block(Shifted):  # noqa: N801
        def forward(self, x):
            self.shift = self.linear(x).mean(0)
            return super().forward(x)


def with_assigned(model, batch):
    return loss(model, batch) + sum(block.shift.square().sum() for block in model.blocks)


ASSIGNED = r"the buffer 'blocks\.0\.shift' is assigned outside the forward of its unit 'blocks\.0'"


@pytest.mark.filterwarnings("ignore:.* is used outside its unit")
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("make", "function", "resident", "words"),
    [
        (AssignsBefore, loss, [], ASSIGNED),
        (AssignsAfter, loss, [], ASSIGNED),
        (AssignsBefore, loss, ["*.shift"], ASSIGNED),
        (AssignsAfter, loss, ["*.shift"], ASSIGNED),
        (Model, replacing, [], r"'blocks\.0\.linear\.bias' is replaced by another tensor while"),
        (Model, replacing, ["*bias"], r"'blocks\.0\.linear\.bias' is replaced by another tensor while"),
        (AssignsAGraph, with_assigned, [], r"assigns a tensor with a graph to its buffer 'blocks\.0\.shift'"),
    ],
)
def test_refused_by_name_before_any_weight_has_changed(make, function, resident, words, micro_batches, device):
    model = made(make, None)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Engine(model, optimizer, device=device, loss=function, resident=resident) as engine:
        with pytest.raises(ValueError, match=words):
            engine.step(next(batches(1)), micro_batches)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.filterwarnings("ignore:.* is used outside its unit", "ignore:micro-batches give other results")
def test_a_buffer_of_a_unit_that_other_code_edits_in_place(device):
    assert_equal_to_plain(EditsBefore, loss, None, 4, device)
