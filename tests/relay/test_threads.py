"""Units that are called in threads of the user's own: refused by name, before any weight changes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ferryman.engine import Engine
from support.small_models import Model, assert_equal_to_plain, batches, loss


def in_a_thread(model, batch):
    """The thread's error is not handed on."""
    found = []
    thread = threading.Thread(target=lambda: found.append(loss(model, batch)), name="of-the-user")
    thread.start()
    thread.join()
    return found[0]


def in_a_pool(model, batch):
    with ThreadPoolExecutor(1, thread_name_prefix="of-the-user") as pool:
        return pool.submit(loss, model, batch).result()


def backward_in_a_thread(model, batch):
    batch[0].requires_grad_()
    value, found = loss(model, batch), []  # on an accelerator, autograd goes backward in yet another thread

    def backward():
        try:
            found.append(torch.autograd.grad(value, batch[0], retain_graph=True))
        except ValueError:
            found.append(None)  # the loss goes on, as if nothing had been

    thread = threading.Thread(target=backward, name="of-the-user")
    thread.start()
    thread.join()
    assert found == [None]
    return value


class AddsInThreads(Model):
    def forward(self, x):
        total = torch.zeros_like(x)
        for block in self.blocks:
            y = block(x)
            thread = threading.Thread(target=lambda y=y: total.data.add_(y.detach()), name="of-the-user")
            thread.start()
            thread.join()
        return self.head(x + total)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stash", ["host", "device"])
def test_tensors_of_an_accelerator_in_another_thread_are_refused(stash, accelerator):
    model = AddsInThreads()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer, start = torch.optim.SGD(model.parameters(), lr=0.1), threading.Thread.start
    with Engine(model, optimizer, device=accelerator, loss=loss, stash=stash) as engine:
        with pytest.raises(ValueError, match=r"a tensor on .* is used in the thread 'of-the-user'"):
            engine.step(next(batches(1)), 2)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert threading.Thread.start is start


def test_on_the_host_tensors_may_be_used_in_another_thread():
    assert_equal_to_plain(AddsInThreads, loss, None, 2, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("function", [in_a_thread, in_a_pool, backward_in_a_thread])
def test_a_unit_in_another_thread_is_refused_before_a_weight_changes(function, device):
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrong = threading.Event()

    def switched(model, batch):
        return function(model, batch) if wrong.is_set() else loss(model, batch)

    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=switched) as engine:
        for batch in batches(2):  # in the trial, and in a step of a kind that was tried
            wrong.set()
            with pytest.raises(
                ValueError, match=r"(the model|the unit .*|a tensor on .*) is used in the thread '(of-the-user|Dummy)"
            ):
                engine.step(batch, 2)
            for name, tensor in model.state_dict().items():
                torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
            wrong.clear()
            engine.step(batch, 2)
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
