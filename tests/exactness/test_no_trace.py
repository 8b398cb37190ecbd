"""What trials and refusals must not leave behind in a batch or in weights, and gradients that a loss clears."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.checkpoint import checkpoint

from ferryman.engine import Engine
from support.models import CASES, build, text
from support.small_models import WIDTH, Model, batches, loss, made, train_plainly


class Masked(Model):
    """Writes a random mask into its input, as SpecAugment does."""

    def forward(self, x):
        x[:, np.random.randint(0, WIDTH)] = 0
        return super().forward(x)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("on_device", [True, False])
def test_edits_of_a_batch_are_made_once(on_device, micro_batches, device):
    expected, kept = [], []

    def noting(model, batch):
        value = loss(model, batch)
        expected.append((batch[0] == 0).all(0).cpu())
        return value

    model, plain = made(Masked, None), made(Masked, None)
    torch.manual_seed(2)
    losses = train_plainly(plain, noting, device, micro_batches)
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Engine(model, optimizer, device=device, loss=loss, max_grad_norm=1.0) as engine:
        for number, (x, y) in enumerate(batches(3)):
            kept.append(x.to(device) if on_device else x)
            value = engine.step((kept[-1], y), micro_batches)
            assert value.item() == pytest.approx(losses[number], rel=1e-5)
    for number, x in enumerate(kept):
        masks = [(part == 0).all(0).cpu() for part in x.chunk(micro_batches)]
        own = on_device or device.type == "cpu"
        for mask, theirs in zip(masks, expected[number * micro_batches :], strict=False):
            assert torch.equal(mask, theirs if own else torch.zeros(WIDTH, dtype=torch.bool))


class Doubled(Model):
    def forward(self, x):
        x *= 2
        return super().forward(x)


def test_edits_of_micro_batches_that_overlap_are_made_once(device):
    model, plain = made(Doubled, None), made(Doubled, None).to(device)
    (x, y), *_ = batches(1)
    mine, theirs, y = x.to(device, copy=True), x.to(device, copy=True), y.to(device)
    expected = 0.0
    for part in (slice(0, 16), slice(8, 24)):
        value = loss(plain, (theirs[part], y[part])) / 2
        value.backward()
        expected += value.item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    one_by_one = pytest.warns(UserWarning, match="run one after the other")
    with Engine(model, optimizer, device=device, loss=loss) as engine, one_by_one:
        value = engine.step([(mine[part], y[part]) for part in (slice(0, 16), slice(8, 24))])
    assert value.item() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(mine, theirs)


class MaskedAndSaved(Masked):
    """The graph between its units needs the input, of which each micro-batch edits a part."""

    def prepare(self):
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x[:, np.random.randint(0, WIDTH)] = 0
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("on_device", [True, False])
def test_edits_of_parts_of_one_tensor_do_not_disturb_the_other_parts(on_device, device):
    model, plain = made(MaskedAndSaved, None), made(MaskedAndSaved, None)
    torch.manual_seed(2)
    expected = train_plainly(plain, loss, device, 3)
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Engine(model, optimizer, device=device, loss=loss, max_grad_norm=1.0) as engine:
        losses = [engine.step((x.to(device) if on_device else x, y), 3).item() for x, y in batches(3)]
    assert losses == pytest.approx(expected, rel=1e-5)


class Renormalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, max_norm=1.0)
        self.rest = Model()

    def forward(self, x):
        return self.rest(self.embedding(x))


class EditsData(Renormalized):
    def forward(self, x):
        self.embedding.weight.data.mul_(0.5)
        return self.rest(F.embedding(x, self.embedding.weight))


@pytest.mark.parametrize(
    ("make", "resident"),
    [(Renormalized, []), (Renormalized, ["embedding.weight"]), (EditsData, ["embedding.weight"])],
)
def test_weights_are_as_they_were_after_edits_were_refused(make, resident, device):
    torch.manual_seed(0)
    model = make()
    before = model.embedding.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        Engine(model, optimizer, device=device, loss=loss, resident=resident) as engine,
        pytest.raises(ValueError, match=r"'embedding\.weight' is edited in place"),
    ):
        engine.step((torch.arange(8), torch.arange(8) % 5), 1)
    assert torch.equal(model.embedding.weight, before)


def adversarial(model, batch):
    x = batch[0].clone()
    for _ in range(2):
        x = x.detach().requires_grad_()
        loss(model, (x, batch[1])).backward()
        x = x + 0.05 * x.grad.sign()
    model.zero_grad()
    return loss(model, (x.detach(), batch[1]))


def clearing(model, batch):
    model.zero_grad()
    return loss(model, batch)


@pytest.mark.parametrize(("function", "micro_batches"), [(adversarial, 1), (adversarial, 2), (clearing, 2)])
def test_gradients_that_are_cleared_in_the_loss(function, micro_batches, device):
    model = made(Model, None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=function) as engine,
        pytest.raises(ValueError, match=r"the gradient of 'blocks\.0\.linear\.weight' is read or cleared"),
    ):
        engine.step(next(batches(1)), micro_batches)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_backward_in_the_loss_adds_to_gradients(device):
    def twice(model, batch):
        loss(model, batch).backward()
        return loss(model, batch)

    model, plain = made(Model, None), made(Model, None)
    torch.manual_seed(2)
    expected = train_plainly(plain, twice, device, 2)
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Engine(model, optimizer, device=device, loss=twice, max_grad_norm=1.0) as engine:
        assert [engine.step(batch, 2).item() for batch in batches(3)] == pytest.approx(expected, rel=1e-5)


def test_parameters_of_a_loss_on_another_device(virtual):
    temperature = torch.ones(5, requires_grad=True)

    def function(model, batch):
        return F.cross_entropy(model(batch[0]) @ torch.diag(temperature), batch[1])

    model = made(Model, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Engine(model, optimizer, device=virtual, loss=function) as engine, pytest.raises(RuntimeError) as raised:
        engine.step(next(batches(1)), 1)
    assert "its parameters, must be there too" in "".join(raised.value.__notes__)


def test_clearing_gradients_by_the_optimizer_in_a_loss_is_refused(device):
    model = build(CASES["toy"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clearing(model, batch):
        optimizer.zero_grad()
        return model(**batch).loss

    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Engine(model, optimizer, device=device, loss=clearing) as engine:
        with pytest.raises(ValueError, match=r"optimizer\.zero_grad\(\) is called while the model or the loss runs"):
            engine.step(text(4), 2)
        optimizer.zero_grad()  # between steps it is as ever
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("access", ["cleared", "zeroed", "read"])
def test_the_gradient_of_a_resident_is_refused_in_the_loss(access, device):
    def function(model, batch):
        weight = model.head.weight
        if access == "cleared":
            weight.grad = None
        elif weight.grad is not None:
            weight.grad.zero_() if access == "zeroed" else weight.grad.norm()
        return loss(model, batch)

    model = made(Model, None)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = next(batches(1))
    refused = pytest.raises(ValueError, match=r"the gradient of 'head\.weight' is read or cleared")
    with Engine(model, optimizer, device=device, loss=function, resident=["head.*"]) as engine:
        with refused:
            engine.step((x, y), 2)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        engine.forward_backward((x, y), 1)  # where plain PyTorch has no gradient either
        with refused:  # a later call that adds to gradients, and is not tried
            engine.forward_backward((x, y), 1)


def test_autograd_is_asked_for_the_gradient_of_a_resident_in_a_unit(device):
    def function(model, batch):
        value = loss(model, batch)
        (gradient,) = torch.autograd.grad(value, model.head.weight, retain_graph=True, allow_unused=True)
        return value * (1 if gradient is None else gradient.norm())

    model = made(Model, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        Engine(model, optimizer, device=device, loss=function, resident=["head.*"]) as engine,
        pytest.raises(ValueError, match=r"autograd\.grad was called for 'head\.weight', which the unit 'head' uses"),
    ):
        engine.step(next(batches(1)), 1)


class CheckpointedReentrantly(Model):
    """No unit is finished before the step is: any may be called once more in a backward."""

    def prepare(self):
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = x * self.scale
        for block in (*self.blocks, self.head):
            x = checkpoint(block, x, use_reentrant=True)
        return x


def test_an_update_of_a_resident_that_is_early_is_not_taken_for_an_edit(device, monkeypatch):
    model = made(CheckpointedReentrantly, None)
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=loss) as engine:
        gradients, lanes = engine._parts.relay.gradients, engine._parts.lanes
        flush_all = gradients.flush_all

        def flush_and_wait(end):
            flush_all(end)
            lanes.drain()

        monkeypatch.setattr(gradients, "flush_all", flush_and_wait)
        before = model.scale.detach().clone()
        for batch in batches(2):
            engine.step(batch, 2)
    assert not torch.equal(model.scale, before)
