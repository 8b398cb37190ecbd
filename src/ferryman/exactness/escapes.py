"""Escapes: tensors that leave a unit neither as a result of its call nor in a variable that the engine knows.

Such a tensor would reach the loss as a constant, or with a graph that has saved nothing, so its gradient would be lost.
The same holds for tensors that reach a unit's code in such a way. Therefore the graph of a loss is searched in one pass
of a trial for nodes that were made inside a unit. Autograd numbers the nodes that each thread makes, so the nodes of a
call form a range of numbers.
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
    """The sequence numbers of the nodes that a call has made, from `start` (included) to `stop` (excluded)."""

    start: int
    stop: int
    unit: Unit


class Escapes:
    """Finds escapes in the micro-batches of one run, each of which has a thread of its own."""

    def __init__(self) -> None:
        self.traced = False  # whether units run with a graph, and losses are searched
        # Of the call that runs: each input as the unit's code has it, and as the code outside has it.
        self.inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._spans: dict[int, list[_Span]] = {}  # by micro-batch, in ascending order
        self._given: dict[int, set[Node]] = {}  # by micro-batch: the graph of its batch, made outside of the step

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        self.traced = True
        self._spans.clear()
        try:
            yield
        finally:
            self.traced = False
            self._given.clear()
            self.inputs = []

    def began(self, micro_batch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Registers the tensors with which a micro-batch begins. If they have a graph, another thread may have made and
        numbered its nodes."""
        self._given[micro_batch] = nodes_behind(tensors)

    def next_number(self) -> int:
        """The sequence number of the next node that this thread makes."""
        number: int = torch._C._autograd._get_sequence_nr()
        return number

    def ran(self, micro_batch: int, unit: Unit, start: int, outputs: Sequence[torch.Tensor]) -> None:
        """Registers a call that has run with a graph. `start`: the next sequence number before the call. Inside the
        unit its inputs are leaves, so that its outputs depend on no earlier node."""
        self.inputs = []
        for node in nodes_behind(outputs):
            if node._sequence_nr() < start:
                raise ValueError(
                    f"the unit {unit.name!r} uses a tensor with a graph (made by {node.name()}) that is neither among "
                    "its arguments nor in a variable that the engine knows. Its gradient would be lost: pass the "
                    "tensor to the unit as an argument, or store it in an attribute, a list or a dict"
                )
        self._spans.setdefault(micro_batch, []).append(_Span(start, self.next_number(), unit))

    def check(self, micro_batch: int, loss: torch.Tensor) -> None:
        """Raises a ValueError if the loss depends on a tensor from inside a unit."""
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
