"""Gradients of leaves outside the model that are found in autograd's graph: for example a batch that requires a
gradient, or a leaf that only an object of a library refers to.

Backwards add to their `.grad`, as in plain PyTorch, but backwards of trials and of failed steps must not. A walk from
the model and the loss finds most leaves and all changes of them (`leaves.py`). It does not find a leaf behind a batch:
a batch may be computed from a leaf that is not passed in. Autograd's graph contains such leaves, but it can be searched
only where the engine starts the backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch.autograd.graph import Node

from ferryman.exactness.variables import is_here


class OutsideLeaves:
    """The leaves that the backwards of one step reach, and the gradients that these had before."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = {}

    def note(self, outputs: Iterable[torch.Tensor], own: Collection[int]) -> bool:
        """Called before a backward from these outputs: saves the gradients of the leaves that it may reach, and returns
        whether there are any. `own`: ids of the engine's leaves, which are skipped."""
        found = False
        for node in nodes_behind(outputs):
            # A custom function may have an attribute of that name as well.
            leaf = getattr(node, "variable", None) if "AccumulateGrad" in node.name() else None
            if leaf is None or id(leaf) in own:
                continue
            found = True
            if id(leaf) not in self._before:
                gradient = leaf.grad
                # Copy to the host: a copy on the device would count against the budget.
                values = None if gradient is None else gradient.detach().to("cpu", copy=True)
                self._before[id(leaf)] = leaf, gradient, values
        return found

    def put_back(self) -> None:
        """Resets the gradients of all leaves."""
        for leaf, gradient, values in self._before.values():
            if gradient is not None and values is not None and is_here(gradient):
                gradient.data.copy_(values)
            leaf.grad = gradient
        self._before.clear()

    def hand_over(self, device: torch.device) -> None:
        """After a step that succeeded: lets the caller use the new gradients on its current stream, and drop them at
        once (`optimizer.step()`, then `optimizer.zero_grad()`). They were allocated on the engine's own stream."""
        for leaf, before, _ in self._before.values():
            gradient = leaf.grad
            if gradient is None or gradient is before or gradient.device != device:
                continue
            if gradient.layout is torch.strided:
                gradient.record_stream(torch.accelerator.current_stream(device))

    def forget(self) -> None:
        """Drops the saved gradients after a step that succeeded: the new gradients stay."""
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
