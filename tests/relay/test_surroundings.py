"""What a step's code finds around it: a thread, modes of torch, modules of torch with lists of their own; and
what is left behind when the engine is gone."""

import contextlib
import ctypes
import gc
import sqlite3
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

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


MKL = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@pytest.mark.skipif(not hasattr(MKL, "mkl_get_max_threads"), reason="this build of torch multiplies without MKL")
def test_a_loss_multiplies_on_as_many_threads_as_its_caller():
    found = []

    def noting(model, batch):
        found.append(MKL.mkl_get_max_threads())  # of the calling thread; torch.get_num_threads would change it
        return loss(model, batch)

    before, model = torch.get_num_threads(), made(Model, None)
    torch.set_num_threads(before + 1)
    try:
        with Engine(
            model, torch.optim.SGD(model.parameters()), device="cpu", loss=noting, recompute="always"
        ) as engine:
            engine.step(next(batches(1)), micro_batches=2)
    finally:
        torch.set_num_threads(before)
    assert set(found) == {before + 1}


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


class Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["around the step", "in the loss"])
def test_a_dispatch_mode_is_refused_by_name(where):
    model, before = made(Model, None), made(Model, None)

    def function(model, batch):
        with Seeing() if where == "in the loss" else contextlib.nullcontext():
            return loss(model, batch)

    around = Seeing() if where == "around the step" else contextlib.nullcontext()
    with around, pytest.raises(ValueError, match=r"TorchDispatchMode .*test_surroundings.Seeing is on"):
        train(model, function, "cpu", 2)
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)


def coarse():
    """Gradients are computed from rounded activations."""
    return saved_tensors_hooks(lambda x: x.bfloat16().float() if x.is_floating_point() else x, lambda x: x)


def coarsely(model, batch):
    with coarse():
        return loss(model, batch)


@pytest.mark.parametrize("around", [coarse, save_on_cpu, torch.autograd.detect_anomaly])
def test_how_autograd_saves_tensors_around_a_step_holds_in_the_step(around, device):
    model, plain, without = made(Model, None), made(Model, None), made(Model, None)
    with around():
        expected = train_plainly(plain, loss, device, 3)
        losses = train(model, loss, device, 3)
    assert losses == pytest.approx(expected, rel=1e-6)
    if around is coarse:  # it makes a difference that the comparison sees
        assert train_plainly(without, loss, device, 3) != pytest.approx(expected, rel=1e-6)


def test_hooks_for_saved_tensors_in_a_loss_hold_in_units(device):
    model, plain = made(Model, None), made(Model, None)
    expected = train_plainly(plain, coarsely, device, 3)
    assert train(model, coarsely, device, 3) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("where", ["around the step", "in the loss"])
def test_forward_mode_differentiation_through_a_unit_is_refused(where):
    def function(model, batch):
        with forward_ad.dual_level() if where == "in the loss" else contextlib.nullcontext():
            x = forward_ad.make_dual(batch[0], torch.ones_like(batch[0]))
            return loss(model, batch) + forward_ad.unpack_dual(model(x)).tangent.square().mean()

    model, before = made(Model, None), made(Model, None)
    around = forward_ad.dual_level() if where == "around the step" else contextlib.nullcontext()
    with around, pytest.raises(ValueError, match=r"transformation of torch\.autograd\.forward_ad"):
        train(model, function, "cpu", 2)
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
