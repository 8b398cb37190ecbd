"""Code whose results depend on the order of micro-batches: they do not take turns, and a warning says so."""

from collections import deque

import pytest
import torch
from torch import nn

from ferryman import Engine
from support.small_models import WIDTH, Block, Model, assert_equal_to_plain, batches, loss, made, train, train_plainly

ONE_BY_ONE = "micro-batches run one after the other"


class Queue(Model):
    """What one micro-batch leaves at its end, the next one reads in its middle."""

    def prepare(self):
        self.queue = deque([torch.zeros(())], maxlen=2)

    def forward(self, x):
        x = self.blocks[0](x)
        logits = self.head(self.blocks[1](x * (1 + self.queue[0].to(x.device))))
        self.queue.append(logits.detach().mean())
        return logits


class Following(Model):
    """A buffer of a block that each call reads and assigns; the loss calls the model twice."""

    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x):
            self.mean = 0.5 * self.mean + x.detach().mean()
            return super().forward(x) * (1 + self.mean.clone())


class Drawing(Model):
    """A generator of its own, from which it draws before and after its blocks."""

    def prepare(self):
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        x = x * torch.rand((), generator=self.generator).to(x.device)
        for block in self.blocks:
            x = block(x)
        return self.head(x * torch.rand((), generator=self.generator).to(x.device))


class QueueInBuffer(Model):
    """The queue is a buffer, which is used and assigned after the blocks."""

    def prepare(self):
        self.register_buffer("queue", torch.zeros(3, WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        used = x + 0.3 * self.queue.mean(0)
        self.queue = torch.cat([x.detach().mean(0, keepdim=True), self.queue[:-1]])
        return self.head(used)


def twice(model, batch):
    return loss(model, batch) + loss(model, batch)


CASES = {"queue": (Queue, loss), "two calls": (Following, twice), "generator": (Drawing, loss)}


@pytest.mark.parametrize("name", CASES)
def test_what_depends_on_the_order_runs_one_by_one(name, device):
    make, function = CASES[name]
    with pytest.warns(UserWarning, match=ONE_BY_ONE):
        assert_equal_to_plain(make, function, None, 4, device)


@pytest.mark.filterwarnings("ignore:micro-batches give other results")
def test_a_queue_that_the_stash_has_sent_to_the_host(accelerator):
    """Trials that measure memory let micro-batches take turns, before it is known that they cannot."""
    model, plain = made(QueueInBuffer, None), made(QueueInBuffer, None)
    expected = train_plainly(plain, loss, accelerator, 4)
    assert train(model, loss, accelerator, 4, memory="64MiB") == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(model.queue, plain.queue.cpu())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 16), None

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) * self.scale


class SetsAttributes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.head, self.maker = nn.Linear(16, 5), nn.Linear(WIDTH, 16 * 4)

    def forward(self, x):
        scales = self.maker(x.mean(0)).chunk(4)
        x = self.inlet(x)
        for block, scale in zip(self.blocks, scales, strict=True):
            block.scale = scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_attributes_of_units_that_the_stash_has_sent_to_the_host(accelerator):
    """Trials that measure memory begin before it is known which variables change."""
    model, plain = made(SetsAttributes, None), made(SetsAttributes, None)
    expected = train_plainly(plain, loss, accelerator, 4)
    losses = train(model, loss, accelerator, 4, memory="64MiB", stash="host", recompute="auto")
    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_warning_names_the_variable_and_the_line_of_the_step(device):
    model = made(Queue, None)
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=loss) as engine:
        with pytest.warns(UserWarning, match=r"model\.queue") as warned:
            engine.step(next(batches(1)), 4)
        assert warned[0].filename == __file__
        engine.step(next(batches(1)), 1)  # a single micro-batch has nobody to wait for


class Counting(Model):
    """Counts calls, and reads the count when other micro-batches have counted, too."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return self.head(x) * (1 + self.calls)


def test_a_counter_that_is_read_late_does_not_prevent_turns(device):
    assert_equal_to_plain(Counting, loss, None, 4, device)


def test_units_are_fetched_for_each_micro_batch(accelerator):
    fetches = []
    for make in (Model, Queue):
        model = made(make, None)
        optimizer, options = torch.optim.SGD(model.parameters(), lr=0.1), {"slots": 2, "held": False}
        with Engine(model, optimizer, device=accelerator, loss=loss, **options) as engine:
            if make is Queue:
                with pytest.warns(UserWarning, match=ONE_BY_ONE):
                    engine.step(next(batches(1)), 4)
            else:
                engine.step(next(batches(1)), 4)
            before = engine.fetches
            engine.step(next(batches(1)), 4)
            fetches.append(engine.fetches - before)
    taking_turns, one_by_one = fetches
    assert taking_turns < one_by_one <= 4 * taking_turns


def test_gradients_are_summed_over_micro_batches_and_calls(device):
    plain, model = made(Queue, None), made(Queue, None)
    batch, other = batches(2)
    for x, y in [*zip(*(t.chunk(4) for t in batch), strict=True), *zip(*(t.chunk(4) for t in other), strict=True)]:
        (loss(plain, (x, y)) / 4).backward()
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=loss) as engine:
        with pytest.warns(UserWarning, match=ONE_BY_ONE):
            engine.forward_backward(batch, 4)
        engine.forward_backward(other, 4)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(engine.gradient(name), parameter.grad, atol=1e-6, rtol=1e-4, msg=name)
