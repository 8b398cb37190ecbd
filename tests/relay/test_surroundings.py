"""What a step's code finds around it: a thread, modes of torch, modules of torch with lists of their own; and
what is left behind when the engine is gone."""

import gc
import sqlite3
import threading
import weakref

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from support.small_models import WIDTH, Block, Model, assert_equal_to_plain, batches, loss, made, train, train_plainly

LOCAL = threading.local()


class Recurrent(Model):
    class block(nn.Module):  # noqa: N801 - as the model names it
        kind = nn.LSTM

        def __init__(self):
            super().__init__()
            self.layer = self.kind(WIDTH, WIDTH, num_layers=2, bidirectional=True)
            self.out = nn.Linear(2 * WIDTH, WIDTH, bias=False)

        def forward(self, x):
            return x + self.out(self.layer(x)[0])


class Gated(Recurrent):
    class block(Recurrent.block):  # noqa: N801
        kind = nn.GRU


@pytest.mark.parametrize("make", [Recurrent, Gated], ids=lambda make: make.__name__)
def test_recurrent_layers_train_in_units(make):
    assert_equal_to_plain(make, loss, None, 3, torch.device("cpu"))


def test_a_recurrent_layer_has_its_own_weights_again_after_a_step():
    model = made(Recurrent, None)
    train(model, loss, "cpu", 2, steps=1)
    layer = model.blocks[0].layer
    own = [getattr(layer, name) for name in layer._flat_weights_names]
    assert all(flat is weight for flat, weight in zip(layer._flat_weights, own, strict=True))


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is torch.tanh else result


def test_a_function_mode_around_a_step_holds_in_the_step(device):
    model, plain = made(Model, None), made(Model, None)
    with Doubling():
        expected = train_plainly(plain, loss, device, 3)
        losses = train(model, loss, device, 3)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("where", ["a thread-local variable", "a closure"])
def test_an_sqlite_connection_of_the_caller_is_refused_by_name(where):
    own = sqlite3.connect(":memory:")
    if where == "a thread-local variable":
        LOCAL.database = own

    def function(model, batch):
        database = LOCAL.database if where == "a thread-local variable" else own
        return loss(model, batch) * database.execute("select 2").fetchone()[0]

    model, before = made(Model, None), made(Model, None)
    with pytest.raises(ValueError, match=r"test_surroundings.py:\d+ .*check_same_thread=False") as caught:
        train(model, function, "cpu", 2)
    assert where == "a closure" or "that hold such objects: database" in str(caught.value)
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
    own.close()


def test_an_sqlite_connection_for_all_threads_works():
    with sqlite3.connect(":memory:", check_same_thread=False) as database:
        assert_equal_to_plain(
            Model,
            lambda *given: loss(*given) * database.execute("select 2").fetchone()[0],
            None,
            2,
            torch.device("cpu"),
        )


@pytest.mark.parametrize("trains", [True, False])
def test_a_parameter_that_is_frozen_or_unfrozen_between_steps_is_refused_by_name(trains):
    model = made(Model, None)
    weight = model.blocks[1].linear.weight.requires_grad_(trains)
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", loss=loss) as engine:
        first, second = batches(2)
        engine.step(first, 2)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        weight.requires_grad_(not trains)
        with pytest.raises(ValueError, match=r"'blocks.1.linear.weight' has been (un)?frozen since"):
            engine.step(second, 2)
        torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


class Keeping(Block):
    """Keeps its last output, with its graph."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def keeps_losses(model, batch):
    value = loss(model, batch)
    model.blocks[0].kept.append(value)
    return value * 1


def keeps_outputs(model, batch):
    value = loss(model, batch)
    model.blocks[0].kept.append(model.blocks[1].last)
    return value


@pytest.mark.parametrize("function", [keeps_losses, keeps_outputs])
def test_tensors_with_a_graph_that_a_block_keeps_do_not_keep_the_engine(function):
    model = made(type("Kept", (Model,), {"block": Keeping}), None)
    model.blocks[0].kept = []
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", loss=function)
    with engine:
        for batch in batches(2):
            engine.step(batch, 2)
        gone = [weakref.ref(engine._parts.relay), weakref.ref(model)]
    del engine, model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
