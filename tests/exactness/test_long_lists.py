"""Lists that units append to: a call copies what is new, and results stay those of plain PyTorch."""

import pytest
import torch

from ferryman.engine import Engine
from ferryman.exactness import snapshot
from support.small_models import Block, Model, assert_equal_to_plain, batches, loss, made


class Logging(Model):
    """Blocks append to their logs, which have a history already, and use it."""

    history = 100

    class block(Block):  # noqa: N801 - as the model names it
        def forward(self, x):
            y = super().forward(x)
            self.keep(y.detach().mean())
            return y * (1 + 0.01 * self.log[-1])

        def keep(self, value):
            self.log.append(value)

    def prepare(self):
        for block in self.blocks:
            block.log = [torch.tensor(float(number)) for number in range(self.history)]


class Windowed(Logging):
    class block(Logging.block):  # noqa: N801
        def keep(self, value):
            self.log.append(value)
            self.log.pop(0)


class Replacing(Logging):
    """From the second step on, it writes into the middle of its history."""

    class block(Logging.block):  # noqa: N801
        def keep(self, value):
            self.log.append(value)
            if len(self.log) > 103:
                self.log[50] = self.log[50] + value

        def forward(self, x):
            return super().forward(x) + 1e-3 * self.log[50]


class Emptied(Logging):
    """The first micro-batch of the second step empties it, which no trial has seen."""

    class block(Logging.block):  # noqa: N801
        def keep(self, value):
            if len(self.log) == self.full:
                self.log.clear()
            self.log.append(value)

    def prepare(self):
        super().prepare()
        for block in self.blocks:
            block.full = self.history + 3


class OfNumbers(Logging):
    class block(Logging.block):  # noqa: N801
        def keep(self, value):
            self.log.append(float(value))

    def prepare(self):
        for block in self.blocks:
            block.log = [float(number) for number in range(self.history)]


@pytest.mark.parametrize("micro_batches", [3])
@pytest.mark.parametrize("make", [Logging, Windowed, Replacing, Emptied, OfNumbers], ids=lambda make: make.__name__)
def test_lists_with_a_history_are_those_of_plain_pytorch(make, micro_batches, device):
    assert_equal_to_plain(make, loss, None, micro_batches, device)


def elements_copied(history, monkeypatch):
    """In the second step."""
    count, take = 0, snapshot.Snapshot._take

    def counted(self, value, depth):
        nonlocal count
        count += 1
        return take(self, value, depth)

    model = made(type("Long", (Logging,), {"history": history}), None)
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", loss=loss) as engine:
        first, second = batches(2)
        engine.step(first, 3)
        with monkeypatch.context() as patch:
            patch.setattr(snapshot.Snapshot, "_take", counted)
            engine.step(second, 3)
    return count


def test_what_a_step_copies_does_not_grow_with_a_list(monkeypatch):
    assert elements_copied(50, monkeypatch) == elements_copied(2000, monkeypatch)
