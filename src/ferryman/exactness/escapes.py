"""Tensors that leave a unit neither as a result of its call nor in a variable that the engine knows.

Units run without a graph, so such a tensor would reach the loss as a constant, and its gradient would be lost without a
word. In one pass of a trial units therefore run with a graph, and the graph of the loss is searched for nodes that were
made inside a unit. Autograd numbers its nodes in the order in which a thread makes them, so those of a call
are the ones between two numbers.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from ferryman.exactness.outside_leaves import nodes_behind
from ferryman.model.units import Unit


class _Span(NamedTuple):
    """The numbers of the nodes that a call has made: from `start` on, below `stop`."""

    start: int
    stop: int
    unit: Unit


class Escapes:
    """Of the micro-batches of one run, each of which has a thread of its own."""

    def __init__(self) -> None:
        self.traced = False  # whether units run with a graph, and losses are searched
        self._spans: dict[int, list[_Span]] = {}  # by micro-batch, in ascending order
        self._given: dict[int, set[Node]] = {}  # by micro-batch, the graph that its batch has from outside

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        self.traced = True
        self._spans.clear()
        try:
            yield
        finally:
            self.traced = False
            self._given.clear()

    def began(self, micro_batch: int, tensors: Sequence[torch.Tensor]) -> None:
        """A micro-batch begins with these. Their graph, if they require gradients, may be of another thread, which
        numbers its nodes by itself."""
        self._given[micro_batch] = nodes_behind(tensors)

    def next_number(self) -> int:
        """Of the node that this thread makes next."""
        number: int = torch._C._autograd._get_sequence_nr()
        return number

    def ran(self, micro_batch: int, unit: Unit, start: int) -> None:
        """A call has run with a graph, whose first node may have the number `start`."""
        self._spans.setdefault(micro_batch, []).append(_Span(start, self.next_number(), unit))

    def check(self, micro_batch: int, loss: torch.Tensor) -> None:
        """A ValueError if the loss depends on a tensor from inside a unit."""
        spans = self._spans.get(micro_batch, [])
        starts = [span.start for span in spans]
        for node in nodes_behind([loss]) - self._given.get(micro_batch, set()):
            number = node._sequence_nr()
            at = bisect.bisect_right(starts, number) - 1
            if at >= 0 and number < spans[at].stop:
                raise ValueError(
                    f"the loss uses a tensor from inside the unit {spans[at].unit.name!r} (made by {node.name()}) that "
                    "the unit does not return. Its gradient would be lost, because the engine cannot see how it got "
                    "out: through a queue, a thread or a library, for example. Return it from the unit, or store it "
                    "in an attribute, a list, a dict or a context variable"
                )
