"""One engine, one caller at a time: any other is refused, and told who is there."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ferryman.engine import Engine
from support.slow import few
from support.small_models import Block, Model, batches, loss


class Gate:
    """Holds one thread where it passes, until `open`."""

    def __init__(self):
        self.reached, self._opened = threading.Event(), threading.Event()

    def open(self):
        self._opened.set()

    def pass_through(self):
        if not self._opened.is_set():
            self.reached.set()
            assert self._opened.wait(60)


class Passing(Block):
    gate = None

    def forward(self, x):
        if self.gate is not None:
            self.gate.pass_through()
        return super().forward(x)


class Passed(Model):
    block = Passing


def made(device, loss=loss):
    torch.manual_seed(0)
    model = Passed()
    return model, Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=loss)


def trained(device):
    """The weights after a step that nobody disturbs."""
    model, engine = made(device)
    with engine:
        engine.step(next(batches(1)), 2)
    return model.state_dict()


BATCH = next(batches(1))
CALLS = {
    "step": lambda engine, path: engine.step(BATCH, 2),
    "forward_backward": lambda engine, path: engine.forward_backward(BATCH, 2),
    "update": lambda engine, path: engine.update(),
    "zero_grad": lambda engine, path: engine.zero_grad(),
    "save": lambda engine, path: engine.save(path / "checkpoint"),
    "load": lambda engine, path: engine.load(path / "checkpoint"),
    "load_weights": lambda engine, path: engine.load_weights(path),
    "set_updates": lambda engine, path: engine.set_updates("host"),
    "skip": lambda engine, path: engine.skip(1),
    "insert": lambda engine, path: engine.insert(1, Passing()),
    "remove": lambda engine, path: engine.remove(1),
    "agree": lambda engine, path: engine.agree(steps=1),
    "total": lambda engine, path: engine.total(1),
    "close": lambda engine, path: engine.close(),
}


def test_no_other_thread_enters_during_a_step(device, tmp_path):
    gate = Gate()

    def held(model, batch):
        gate.pass_through()
        return loss(model, batch)

    model, engine = made(device, held)
    with engine, ThreadPoolExecutor(1, thread_name_prefix="first") as pool:
        step = pool.submit(engine.step, BATCH, 2)
        try:
            assert gate.reached.wait(60)
            for name, call in CALLS.items():
                with pytest.raises(
                    ValueError, match=rf"engine\.{name}\(\) .* 'MainThread' while .* 'first_0' is in engine\.step\(\)"
                ):
                    call(engine, tmp_path)
        finally:
            gate.open()
        step.result()
    assert list(tmp_path.iterdir()) == []
    for name, tensor in trained(device).items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_thread_that_calls_the_model_during_a_step_is_refused(device):
    """In the step it might as well be a thread of the loss, whose work would be missing: the step fails, too."""
    gate = Gate()

    def held(model, batch):
        gate.pass_through()
        return loss(model, batch)

    model, engine = made(device, held)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with engine, ThreadPoolExecutor(1, thread_name_prefix="first") as pool:
        step = pool.submit(engine.step, BATCH, 2)
        try:
            assert gate.reached.wait(60)
            with torch.no_grad(), pytest.raises(ValueError, match="the model is used in the thread 'MainThread'"):
                model(BATCH[0])
        finally:
            gate.open()
        with pytest.raises(ValueError, match="the model is used in the thread 'MainThread'"):
            step.result()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
        engine.step(BATCH, 2)


def test_no_other_thread_enters_during_an_evaluation(device):
    gate = Gate()
    model, engine = made(device)

    @torch.no_grad()
    def evaluate():
        return model(BATCH[0])

    with engine, ThreadPoolExecutor(1, thread_name_prefix="first") as pool:
        expected = evaluate()
        model.blocks[2].gate = gate
        evaluation = pool.submit(evaluate)
        try:
            assert gate.reached.wait(60)
            where = r"in the thread 'MainThread' while the thread 'first_0' is in a call of the model"
            with pytest.raises(ValueError, match=rf"engine\.step\(\) was called {where}"):
                engine.step(BATCH, 2)
            with pytest.raises(ValueError, match=f"a call of the model was called {where}"):
                evaluate()
        finally:
            gate.open()
        assert torch.equal(evaluation.result(), expected)
        del model.blocks[2].gate
        engine.step(BATCH, 2)


@pytest.mark.parametrize("name", few(CALLS, 6))
def test_a_loss_does_not_call_the_engine(name, device, tmp_path):
    armed = []

    def calls(model, batch):
        if armed:
            CALLS[name](engine, tmp_path)
        return loss(model, batch)

    model, engine = made(device, calls)
    with engine:
        armed.append(True)
        with pytest.raises(ValueError, match=rf"engine\.{name}\(\) was called inside engine\.step\(\), by the model"):
            engine.step(BATCH, 2)
        armed.clear()
        engine.step(BATCH, 2)
    for name, tensor in trained(device).items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=0)


class Twice(Passed):
    """Calls itself, as models with self-conditioning do."""

    def forward(self, x, *, again=True):
        return self(x, again=False) + super().forward(x) if again else super().forward(x)


def test_a_model_may_call_itself(device):
    torch.manual_seed(0)
    model = Twice()
    with torch.no_grad():
        expected = model(BATCH[0])
        with Engine(model, device=device, loss=loss):
            torch.testing.assert_close(model(BATCH[0]), expected)
