"""Objects that come into the user's state between steps: lists made anew, hooks with lists of their own, other modules.

What the first trial has found knows nothing of them.
"""

import pytest
import torch
from torch import nn

import ferryman.training.first_steps as first_steps
from ferryman.engine import Engine
from support.small_models import Block, Model, batches, loss, made


class Keeping(Model):
    """Blocks keep numbers; the loop takes them away after each step, and makes new lists and dicts."""

    class block(Block):  # noqa: N801
        def forward(self, x):
            self.seen.append(float(x.detach().mean()))
            self.counts["calls"] += 1
            return super().forward(x)

    def prepare(self):
        for block in self.blocks:
            block.seen, block.counts = [], {"calls": 0}

    def between(self, step):
        taken = [(block.seen, block.counts) for block in self.blocks]
        self.prepare()
        return taken


class Hooked(Model):
    """The loop hooks a block after each step, with a list that only the hook refers to."""

    def prepare(self):
        self.handle = None

    def between(self, step):
        taken = self.take() if self.handle is not None else []
        if self.handle is not None:
            self.handle.remove()
        seen = []
        self.handle = self.blocks[1].register_forward_hook(
            lambda module, args, output: seen.append(float(args[0][0, 0]))
        )
        object.__setattr__(self, "take", lambda: seen)
        return taken


class Record:
    def __init__(self):
        self.calls = 0


class OtherObjects(Model):
    """From the second step on, blocks count in an object, another one in each step."""

    class block(Block):  # noqa: N801
        record = None

        def forward(self, x):
            if self.record is not None:
                self.record.calls += 1
                x = x * (1 + self.record.calls % 3)
            return super().forward(x)

    def between(self, step):
        taken = [block.record and block.record.calls for block in self.blocks]
        for block in self.blocks:
            block.record = Record()
        return taken


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + self.calls % 3)


class OtherModules(Model):
    """The loop puts a module that counts into blocks."""

    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.scale = nn.Identity()

        def forward(self, x):
            return super().forward(self.scale(x))

    def between(self, step):
        taken = [getattr(block.scale, "calls", 0) for block in self.blocks]
        if step == 1:
            for block in self.blocks:
                block.scale = Growing()
        return taken


COUNTS = (2, 2, 2, 4, 1, 2)


def train_plainly(model, device):
    model.to(device)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step, (batch, count) in enumerate(zip(batches(len(COUNTS)), COUNTS, strict=True)):
        for part in zip(*(tensor.to(device).chunk(count) for tensor in batch), strict=True):
            (loss(model, part) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.between(step))
    return found


def train(model, device):
    found = []
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=loss) as engine:
        for step, (batch, count) in enumerate(zip(batches(len(COUNTS)), COUNTS, strict=True)):
            engine.step(batch, count)
            found.append(model.between(step))
    return found


@pytest.mark.parametrize("make", [Keeping, Hooked, OtherObjects, OtherModules], ids=lambda make: make.__name__)
def test_objects_that_are_new_between_steps_are_followed(make, device):
    model, plain = made(make, None), made(make, None)
    expected, found = train_plainly(plain, device), train(model, device)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.cpu(), atol=1e-6, rtol=1e-5)


def test_lists_that_replace_others_need_no_new_trial(monkeypatch):
    trials = []
    check = first_steps.FirstSteps.check

    def counted(self, parts, *args, **kwargs):
        trials.append(len(parts))
        return check(self, parts, *args, **kwargs)

    monkeypatch.setattr(first_steps.FirstSteps, "check", counted)
    train(made(Keeping, None), torch.device("cpu"))
    assert trials == [2, 4, 1]
