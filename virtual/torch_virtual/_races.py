"""The race detector's Python side.

The detector knows what streams, events and the host's own waiting order, and reports accesses to device memory or
pinned memory that nothing orders, whether or not the timing would have shown it. It is always on.

Kernels and copies are seen by themselves. What the host does with pinned memory is not, so code that shares a buffer
with copies says so with `host_reads` and `host_writes`.

All threads of the host count as one: what one has waited for, the others know. That is right for threads that hand
work to one another, and blind to threads that forget to. A thread that wants to be held to what it has waited for
itself takes a clock of its own (`own_clock`), and passes its knowledge on by `now` and `learn`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_virtual import _C
from torch_virtual._C import Instant

__all__ = [
    "Instant",
    "clear_races",
    "host_reads",
    "host_writes",
    "label",
    "learn",
    "now",
    "own_clock",
    "race_count",
    "races",
    "strict",
]


def races() -> list[str]:
    """What was found, each with both operations, their streams and the tensor's label; at most the first thousand."""
    return _C.races()


def race_count() -> int:
    return _C.race_count()


def clear_races() -> None:
    _C.clear_races()


@contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Within the block a race raises RuntimeError at the operation that completes it, which then does not run.

    A tensor freed too early is reported by the next operation, or at the block's end: nothing can be raised from a
    destructor.
    """
    before = _C.is_strict()
    _C.set_strict(enabled)
    try:
        yield
    finally:
        pending = _C.set_strict(before)
    if pending:
        raise RuntimeError(pending)


def label(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Names a tensor's memory, on the device or pinned, in reports. Returns the tensor."""
    _C.label(tensor, name)
    return tensor


def host_reads(tensor: torch.Tensor, what: str = "host read") -> None:
    """The host is about to read a tensor. Memory that is not pinned is never copied behind its back: no check."""
    _C.host_use(tensor, False, what)


def host_writes(tensor: torch.Tensor, what: str = "host write") -> None:
    """The host is about to write a tensor."""
    _C.host_use(tensor, True, what)


@contextmanager
def own_clock(name: str = "a host thread") -> Iterator[None]:
    """Within the block this thread knows only what it knew before, what it waits for itself and what it learns."""
    _C.push_host_clock(name)
    try:
        yield
    finally:
        _C.pop_host_clock()


def now() -> Instant:
    """What this thread knows to be over, to be handed to another thread."""
    return _C.now()


def learn(instant: Instant) -> None:
    """This thread comes after `instant`: it was told by whoever took it."""
    _C.learn(instant)
