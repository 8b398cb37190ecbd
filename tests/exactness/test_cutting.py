"""Before a batch is cut to keep a budget, it is checked that cutting it does not change its loss."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from ferryman.engine import Engine
from support.models import CASES, Block, assert_same, build, cut, gradients, on, plain_step, step
from support.slow import covering, slow

WIDTH, SAMPLES = 32, 8


class Net(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


class Counting(Net):
    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class TimeMajor(Net):
    """Its first dimension is time: each step adds what the one before has left."""

    def forward(self, x):
        states = []
        for now in x:
            states.append(now + 0.5 * states[-1] if states else now)
        return super().forward(torch.stack(states))


def mean_loss(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())


def contrastive_loss(model, batch):
    z = F.normalize(model(batch["x"]).mean(1), dim=-1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))


def in_training_only_loss(model, batch):
    loss = mean_loss(model, batch)
    return loss + model(batch["x"]).mean((0, 1)).square().sum() if model.training else loss


def with_regularizer(model, batch):
    return mean_loss(model, batch) + 1e-2 * model.head.weight.square().sum()


def by_parts(model, batch):
    """Calls modules of the model, not the model."""
    x = batch["x"]
    for block in model.blocks:
        x = block(x)
    return F.cross_entropy(model.head(x).flatten(0, 1), batch["y"].flatten())


def with_gradients_only(model, batch):
    loss = mean_loss(model, batch)
    if not loss.requires_grad:
        raise RuntimeError("a gradient penalty needs gradients")
    return loss


def in_training_mode_only(model, batch):
    if not model.training:
        raise RuntimeError("in evaluation mode this model has no loss")
    return mean_loss(model, batch)


def noisy_loss(model, batch):
    return mean_loss(model, {**batch, "x": batch["x"] + torch.randn_like(batch["x"])})


def numbers(samples=SAMPLES, length=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, length, WIDTH, generator=generator)
    return {"x": x, "y": torch.randint(0, 5, (samples, length), generator=generator)}


def net(kind=Net, **options):
    torch.manual_seed(0)
    return kind(**options).train()


BUDGET = "400KiB"
REFUSED = r"memory=400\.00KiB makes \d micro-batches of this batch, but the loss of a batch is not the mean of its samp"


def state(model):
    return copy.deepcopy(model.state_dict()), [m.training for m in model.modules()], torch.get_rng_state()


def assert_unchanged(model, before):
    weights, flags, generator = before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize(
    ("kind", "loss", "options"),
    [
        (Net, contrastive_loss, {}),
        (Net, contrastive_loss, {"dropout": 0.0}),
        (TimeMajor, mean_loss, {}),
        (Net, in_training_only_loss, {"dropout": 0.0}),
    ],
)
def test_a_loss_that_cutting_would_change_is_refused(kind, loss, options, virtual):
    model = net(kind, **options)
    with Engine(model, torch.optim.SGD(model.parameters(), 0.1), device=virtual, memory=BUDGET, loss=loss) as engine:
        before, generator = state(model), torch.get_device_module(virtual).get_rng_state(virtual)
        with pytest.raises(ValueError, match=rf"{REFUSED}.*micro_batches=.*split=.*reduction=.sum."):
            engine.step(numbers())
        assert_unchanged(model, before)
        assert torch.equal(torch.get_device_module(virtual).get_rng_state(virtual), generator)
        engine.step(numbers(), micro_batches=8)  # as it is asked for
        engine.step(cut(numbers(), 8))


@pytest.mark.exact
@covering
@pytest.mark.parametrize("loss", [mean_loss, with_regularizer, by_parts, with_gradients_only], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_mean_over_samples_is_cut_and_the_check_leaves_no_trace(loss, dropout, virtual):
    model = net(Counting, dropout=dropout)
    plain = on(virtual, model)
    with Engine(model, device=virtual, memory=BUDGET, loss=loss) as engine:
        torch.manual_seed(1)
        result = step(engine, model, numbers(), None)
        count = engine.choice.micro_batches
    assert count > 1
    torch.manual_seed(1)
    assert_same(result, plain_step(plain, cut(numbers(), count), loss), loose=("head.*",))
    assert model.calls == (0 if loss is by_parts else count)


def test_a_loss_that_exists_in_training_mode_alone_is_checked_there(virtual):
    for dropout in (0.0, 0.1):
        with Engine(net(dropout=dropout), device=virtual, memory=BUDGET, loss=in_training_mode_only) as engine:
            if dropout:  # and there it has no definite value
                with pytest.raises(ValueError, match=r"could not be checked: .*evaluation mode this model has no"):
                    engine.forward_backward(numbers())
                engine.forward_backward(numbers(), micro_batches=8)
            else:
                engine.forward_backward(numbers())
                assert engine.choice.micro_batches > 1


def test_a_loss_without_a_definite_value_is_refused(virtual):
    with Engine(net(), device=virtual, memory=BUDGET, loss=noisy_loss) as engine:
        with pytest.raises(ValueError, match="could not be checked: its loss draws random numbers even in evaluation"):
            engine.forward_backward(numbers())
        engine.forward_backward(numbers(), micro_batches=8)


# Means over tokens.


def padded(lengths, total=64, seed=0):
    batch = numbers(len(lengths), total, seed)
    for row, length in enumerate(lengths):
        batch["y"][row, length:] = -100
    return batch


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_mean_over_tokens_is_refused_once_samples_have_different_numbers_of_them(precision, virtual):
    model = net()
    model.head.weight.data *= 20  # losses of tokens differ by more than rounding, also in bf16
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Engine(model, optimizer, device=virtual, memory="300KiB", loss=mean_loss, precision=precision) as engine:
        engine.step(numbers())
        engine.step(padded([60] * SAMPLES))
        assert engine.choice.micro_batches > 1
        with pytest.raises(ValueError, match=r"samples 2 and 1 it is .*mean over tokens"):
            engine.step(padded([60, 7, 64, 60, 60, 30, 60, 60]))


def test_a_sum_over_tokens_may_be_cut(virtual):
    def sum_loss(model, batch):
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum") / batch["count"]

    model, batch = net().eval(), padded([60, 7, 64, 60, 60, 30, 60, 60])
    batch["count"] = int((batch["y"] != -100).sum())
    plain = on(virtual, model)
    sum_loss(plain, {name: v.to(virtual) if isinstance(v, torch.Tensor) else v for name, v in batch.items()}).backward()
    options = {"device": virtual, "memory": BUDGET, "reduction": "sum"}
    with Engine(model, loss=sum_loss, **options) as engine:
        engine.forward_backward(batch)
        assert engine.choice.micro_batches > 1
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, gradients(plain)[name], rtol=1e-4, atol=1e-7)
    with Engine(net(), loss=mean_loss, **options) as engine, pytest.raises(ValueError, match="is not the sum of its"):
        engine.forward_backward(numbers())


def test_a_sample_without_tokens_of_its_own_is_refused(virtual):
    engine = Engine(net(), device=virtual, memory=BUDGET, loss=mean_loss)
    with engine, pytest.raises(ValueError, match="the mean of their own is nan"):
        engine.forward_backward(padded([60, 60, 0, 60, 60, 60, 60, 60]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_found_by_a_mask_or_by_its_runs(side, virtual):
    """Also where the loss knows of it and no label is -100."""

    def loss(model, batch):
        counts = batch.get("mask", batch["ids"] != 3)
        x = F.one_hot(batch["ids"], WIDTH).float()
        losses = F.cross_entropy(model(x).transpose(1, 2), batch["ids"] % 5, reduction="none")
        return (losses * counts).sum() / counts.sum()

    ids = torch.randint(4, WIDTH, (SAMPLES, 64), generator=torch.Generator().manual_seed(0))
    keep = torch.ones(SAMPLES, 64, dtype=torch.bool)
    keep[3, 10:] = False
    if side == "left":
        keep = keep.flip(1)
    for batch in ({"ids": ids, "mask": keep}, {"ids": ids.masked_fill(~keep, 3)}):
        model = net()
        with Engine(model, device=virtual, memory=BUDGET, loss=loss) as engine:
            engine.forward_backward({name: torch.ones_like(v) if name == "mask" else ids for name, v in batch.items()})
            with pytest.raises(ValueError, match="is not the mean"):
                engine.forward_backward(batch)


# How often, and for what.


def test_each_shape_is_checked_once(virtual):
    def loss(model, batch):
        return (model(batch["x"]).mean(-1) - batch["y"]).square().mean()

    def numbers(length=64, samples=SAMPLES, seed=0):
        """No two values in a row are the same, as padding would be."""
        x = torch.randn(samples, length, WIDTH, generator=torch.Generator().manual_seed(seed))
        return {"x": x, "y": torch.arange(length).repeat(samples, 1)}

    with Engine(net(), device=virtual, memory=BUDGET, loss=loss, held=False) as engine:

        def fetches(batch, micro_batches=None):
            before = engine.fetches
            engine.forward_backward(batch, micro_batches)
            return engine.fetches - before

        assert fetches(numbers(), 8) > 0  # with the trial
        usual = fetches(numbers(), 8)
        assert fetches(numbers()) > usual, "cut by the engine's choice, so it is checked"
        assert fetches(numbers(seed=1)) == usual
        assert fetches(numbers(length=32)) == usual, "it is within what was checked"
        assert fetches(numbers(length=72)) > usual


FEW = ("llama", "two losses")


@covering
@pytest.mark.parametrize("name", [*FEW, *slow(*(sorted(CASES.keys() - {*FEW, "skipping"})))])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_ordinary_models_are_cut(name, precision, virtual):
    case = CASES[name]
    model = build(case)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Engine(model, optimizer, device=virtual, memory="256KiB", precision=precision) as engine:
        engine.step(case.batch(256))
        engine.step(case.batch(256, seed=2))
        assert engine.choice.micro_batches > 1
