"""Gradients of leaves that are not the model's, found in autograd's graph: a batch that requires a gradient, or a leaf
that only an object of a library holds.

Backwards add to their `.grad`, as in plain PyTorch; those of trials, and of steps that fail, must not. A walk from the
model and the loss finds most leaves, and whatever is done to them (`leaves.py`). It does not find those behind a batch,
which may be cut from a leaf that nobody passes in. The graph shows them, but only where the engine starts the backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch.autograd.graph import Node

from ferryman.exactness.variables import is_here


class OutsideLeaves:
    """Of one step: the leaves that its backwards reach, and the gradients that they had before."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = {}

    def note(self, outputs: Iterable[torch.Tensor], own: Collection[int]) -> bool:
        """A backward from these outputs is about to run; returns whether it may reach such leaves. `own`: the
        identities of leaves that are the engine's."""
        found = False
        for node in nodes_behind(outputs):
            leaf = getattr(node, "variable", None)  # of an AccumulateGrad
            if leaf is None or id(leaf) in own:
                continue
            found = True
            if id(leaf) not in self._before:
                gradient = leaf.grad
                # On the host: on the device it would count against the budget.
                values = None if gradient is None else gradient.detach().to("cpu", copy=True)
                self._before[id(leaf)] = leaf, gradient, values
        return found

    def put_back(self) -> None:
        """Gives all leaves the gradients that they had."""
        for leaf, gradient, values in self._before.values():
            if gradient is not None and values is not None and is_here(gradient):
                gradient.data.copy_(values)
            leaf.grad = gradient
        self._before.clear()

    def forget(self) -> None:
        """The step is good: what its backwards have added stays."""
        self._before.clear()


def nodes_behind(outputs: Iterable[torch.Tensor]) -> set[Node]:
    """All nodes of autograd's graph that a backward from these tensors may reach."""
    waiting, seen = [tensor.grad_fn for tensor in outputs], set[Node]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen
