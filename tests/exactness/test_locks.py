"""Locks that the user's code holds while it calls units: micro-batches take turns, and run in several threads."""

import functools
import threading

import pytest
import torch

from support.slow import covering
from support.small_models import WIDTH, Block, Model, assert_equal_to_plain, loss, made, train


class Locked(Model):
    """The model takes a lock twice, and so do its blocks."""

    kind = threading.RLock

    class block(Block):  # noqa: N801
        def forward(self, x):
            with self.lock:
                return super().forward(x)

    def prepare(self):
        self.lock = self.kind()
        for block in self.blocks:
            block.lock = self.lock

    def forward(self, x):
        with self.lock, self.lock:
            return super().forward(x)


class Conditions(Locked):
    kind = threading.Condition


class Cached(Model):
    """Before Python 3.12, a cached property holds a lock while it is computed."""

    @functools.cached_property
    def table(self):
        with torch.no_grad():
            return self.blocks[0](torch.ones(1, WIDTH, device=self.place))

    def forward(self, x):
        self.place = x.device
        return super().forward(x + self.table)


@covering
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("make", [Locked, Conditions, Cached])
def test_locks_that_are_held_around_units(make, micro_batches, device):
    assert_equal_to_plain(make, loss, None, micro_batches, device)


LOCK = threading.RLock()


def locked(model, batch):
    with LOCK:
        return loss(model, batch)


def test_locks_that_the_caller_holds(device):
    with LOCK:
        assert_equal_to_plain(Locked, locked, None, 2, device)
        assert LOCK._is_owned()
    assert not LOCK._is_owned()


def fail(model, batch):
    with LOCK:
        model(batch[0])
        raise KeyError("of the user")


def test_locks_after_an_error(device):
    with LOCK:
        with pytest.raises(KeyError, match="of the user"):
            train(made(Locked, None), fail, device, 2)
        assert LOCK._is_owned()
    assert not LOCK._is_owned()


class Simple(Model):
    kind = threading.Lock

    def prepare(self):
        self.lock = self.kind()

    def forward(self, x):
        with self.lock:
            return super().forward(x)


class Semaphores(Simple):
    kind = threading.Semaphore


@pytest.mark.parametrize("make", [Simple, Semaphores])
def test_locks_without_an_owner(make, device):
    assert_equal_to_plain(make, loss, None, 1, device)
    model = made(make, None)
    with pytest.raises(ValueError, match=r"the lock 'model\.lock' is held while the unit 'blocks\.0' is called"):
        train(model, loss, device, 2)
    assert model.lock.acquire(blocking=False)
