"""Lists that units append to: a call copies what is new, and results stay those of plain PyTorch."""

import pytest
import torch

from ferryman.engine import Engine
from ferryman.exactness import snapshot
from support.slow import covering, cpu_is_slow
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
    """The second micro-batch of the second step empties it, and it is short when the third one runs."""

    class block(Logging.block):  # noqa: N801
        def keep(self, value):
            self.log.append(value)
            if len(self.log) > self.full:
                self.log.clear()

        def forward(self, x):
            y = Block.forward(self, x)
            self.keep(y.detach().mean())
            return y * 2 if len(self.log) < 50 else y  # which no trial sees

    def prepare(self):
        super().prepare()
        for block in self.blocks:
            block.full = self.history + 4


class ReadLate(Logging):
    """The loss reads what blocks have appended for the same micro-batch."""

    def forward(self, x):
        return super().forward(x) * (1 + sum(block.log[-1] for block in self.blocks))


class OfNumbers(Logging):
    class block(Logging.block):  # noqa: N801
        def keep(self, value):
            self.log.append(float(value))

    def prepare(self):
        for block in self.blocks:
            block.log = [float(number) for number in range(self.history)]


@covering
@pytest.mark.parametrize("device", cpu_is_slow(), indirect=True)
@pytest.mark.parametrize("micro_batches", [3, 1])
@pytest.mark.parametrize(
    "make", [Logging, Windowed, Replacing, Emptied, ReadLate, OfNumbers], ids=lambda make: make.__name__
)
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


def test_what_was_learned_of_three_micro_batches_holds_after_a_step_of_one():
    plain, model = made(Emptied, None), made(Emptied, None)
    for block in (*plain.blocks, *model.blocks):
        block.full = 105  # the second micro-batch of the third step empties it
    counts = (3, 1, 3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch, count in zip(batches(3), counts, strict=True):
        for part in zip(*(t.chunk(count) for t in batch), strict=True):
            (loss(plain, part) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", loss=loss) as engine:
        for batch, count in zip(batches(3), counts, strict=True):
            engine.step(batch, count)
    for mine, theirs in zip(model.blocks, plain.blocks, strict=True):
        torch.testing.assert_close(mine.log, theirs.log, atol=1e-5, rtol=1e-4)
