"""The operators that a micro-batch runs between calls of units, as a stash on the host has to see them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ferryman.relay.micro_batch import MicroBatch


class Operands(Protocol):
    """What is done with the tensors of these operators (`host_stash.py`)."""

    def use(self, batch: MicroBatch, tensor: torch.Tensor) -> None:
        """Called before an operator uses a tensor."""

    def edit(self, tensor: torch.Tensor) -> None:
        """Called before an operator writes to a tensor."""

    def track(self, batch: MicroBatch, tensors: Sequence[torch.Tensor]) -> None:
        """Called with the tensors that an operator has made."""


class BetweenUnits(TorchDispatchMode):
    """Sees every operator that the micro-batch runs between calls, in forward and backward."""

    def __init__(self, stash: Operands, batch: MicroBatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stash, self._batch = stash, batch

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in given:
            self._stash.use(self._batch, tensor)
        if function._schema.is_mutable:
            for tensor in _written(function, args, kwargs or {}):
                self._stash.edit(tensor)
        result = function(*args, **(kwargs or {}))
        storages = {tensor.untyped_storage()._cdata for tensor in given}
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._stash.track(self._batch, [t for t in made if t.untyped_storage()._cdata not in storages])
        return result


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that the operator writes to."""
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(function)]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@functools.cache
def _written_arguments(function: Any) -> list[tuple[int, str]]:
    """Positions and names of the arguments that the operator writes to."""
    arguments = enumerate(function._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
