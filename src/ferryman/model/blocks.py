"""The model's repeated blocks, which can be inserted, removed and skipped between steps.

A position is a number or, if the model has several lists of blocks, the block's name ("decoder.layers.3").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ferryman.model.unit_discovery import block_lists
from ferryman.model.units import Forward
from ferryman.runtime.rng import Randomness

Position = int | str

# Names in transformers. In a configuration: the number of blocks, and a list with the type of each. In the modules of a
# block: its position, also in the key-value cache.
_COUNT, _KINDS, _NUMBER = "num_hidden_layers", "layer_types", "layer_idx"


class _Form(NamedTuple):
    """The structure of a block's result, which contains one tensor of its input's shape."""

    constants: list[Any]
    spec: pytree.TreeSpec
    at: int

    def around(self, hidden: torch.Tensor) -> Any:
        leaves = list(self.constants)
        leaves[self.at] = hidden
        return pytree.tree_unflatten(leaves, self.spec)


class Blocks:
    """Finds blocks and changes the lists that hold them."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.skipped: frozenset[nn.Module] = frozenset()  # in the current step
        self._to_skip: frozenset[nn.Module] = frozenset()  # in the next step
        self._model = model
        self._lists = block_lists(model)  # found once: a list that shrinks to one block is still a list
        self._randomness = Randomness(device)
        self._forms: dict[type[nn.Module], _Form] = {}

    def __iter__(self) -> Iterator[nn.Module]:
        for blocks in self._lists.values():
            yield from blocks.children()

    def list_at(self, position: Position) -> nn.Module:
        """The list that the position is in."""
        return self._find(position)[1]

    def at(self, position: Position) -> nn.Module:
        name, blocks, index = self._find(position)
        if not 0 <= index < len(blocks):
            raise ValueError(f"there is no block {position!r}: {name!r} has blocks 0 to {len(blocks) - 1}")
        return blocks[index]

    def skip(self, positions: Position | Iterable[Position]) -> None:
        """Skips these blocks in the next step."""
        several = [positions] if isinstance(positions, int | str) else positions
        self._to_skip = frozenset(self.at(position) for position in several)

    def begin_step(self) -> None:
        self.skipped, self._to_skip = self._to_skip, frozenset()

    def skip_again(self) -> None:
        """The current step was undone. Skips its blocks in the next step, which repeats it."""
        self._to_skip = self.skipped

    def are_skipped(self, modules: Iterable[nn.Module]) -> bool:
        """Whether all of these modules are in blocks that the current step skips."""
        return {module for block in self.skipped for module in block.modules()}.issuperset(modules)

    def insert(self, position: Position, block: nn.Module) -> None:
        """Inserts the block at this position. The blocks from this position on move by one."""
        name, blocks, index = self._find(position)
        if not 0 <= index <= len(blocks):
            raise ValueError(f"a block cannot be inserted at {position!r}: {name!r} takes positions 0 to {len(blocks)}")
        if [child for child, _ in blocks.named_children()] != [str(number) for number in range(len(blocks))]:
            raise ValueError(f"{name!r} has blocks with names of their own, so none can be inserted between them")
        neighbor = min(index, len(blocks) - 1)
        blocks.insert(index, block)
        self._adjust_config(name, len(blocks) - 1, lambda kinds: kinds.insert(index, kinds[neighbor]))

    def remove(self, block: nn.Module) -> None:
        name, blocks = next(pair for pair in self._lists.items() if block in list(pair[1].children()))
        assert isinstance(blocks, nn.ModuleList | nn.Sequential)
        index = list(blocks).index(block)
        del blocks[index]
        self._adjust_config(name, len(blocks) + 1, lambda kinds: kinds.pop(index))

    def skippable(self, block: nn.Module, forward: Forward) -> Forward:
        """Wraps a block's forward: it returns its input if the block is skipped."""

        def run_or_skip(*args: Any, **kwargs: Any) -> Any:
            kind = type(block)
            if block not in self.skipped and (kind in self._forms or not torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            hidden = next((x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), None)
            if block not in self.skipped:
                result = forward(*args, **kwargs)
                if (form := _form_of(result, hidden)) is not None:
                    self._forms[kind] = form
                return result
            if kind not in self._forms:  # no block of this class has run yet: run this one, to see what it returns
                before = self._randomness.state()
                with torch.no_grad():
                    result = forward(*args, **kwargs)
                self._randomness.restore(before)
                if (form := _form_of(result, hidden)) is None:
                    raise ValueError(_not_skipped(block, result, hidden))
                self._forms[kind] = form
            assert hidden is not None, "an output of its shape was found"
            return self._forms[kind].around(hidden)

        return run_or_skip

    def _find(self, position: Position) -> tuple[str, nn.ModuleList, int]:
        lists = self._lists
        if not lists:
            raise ValueError("the model has no list of repeated blocks (ModuleList or Sequential) to change")
        if isinstance(position, str):
            name, _, number = position.rpartition(".")
            if name not in lists or not number.isdigit():
                known = ", ".join(repr(f"{name}.0".lstrip(".")) for name in lists)
                raise ValueError(f"{position!r} does not name a block; blocks have names such as {known}")
            return name, cast("nn.ModuleList", lists[name]), int(number)
        if type(position) is not int:
            raise ValueError(f"a block's position must be a number or its name; this is {position!r}")
        if len(lists) != 1:
            names = ", ".join(f"'{name}.{position}'" for name in lists)
            raise ValueError(
                f"position {position} is ambiguous: the model has several lists of blocks. Name the block: {names}"
            )
        ((name, blocks),) = lists.items()
        return name, cast("nn.ModuleList", blocks), position

    def _adjust_config(self, name: str, before: int, change: Callable[[list[Any]], object]) -> None:
        """Adjusts the configuration of a transformers model, which sets how many blocks it runs.

        This is the configuration of the closest module around the list: encoder and decoder have one each.
        """
        blocks = list(self._lists[name].children())
        path = name.split(".") if name else []
        around = [self._model.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
        config = next((module.config for module in around if hasattr(module, "config")), None)
        if getattr(config, _COUNT, None) == before:
            kinds = getattr(config, _KINDS, None)
            if isinstance(kinds, list) and len(kinds) == before:
                change(kinds)
            setattr(config, _COUNT, len(blocks))
        for number, block in enumerate(blocks):
            for module in block.modules():
                if type(module.__dict__.get(_NUMBER)) is int:
                    setattr(module, _NUMBER, number)


def _form_of(result: Any, hidden: torch.Tensor | None) -> _Form | None:
    """The structure of a result; None if it does not contain exactly one tensor, of the input's shape."""
    leaves, spec = pytree.tree_flatten(result)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if hidden is None or len(tensors) != 1 or leaves[tensors[0]].shape != hidden.shape:
        return None
    return _Form([None if i in tensors else leaf for i, leaf in enumerate(leaves)], spec, tensors[0])


def _not_skipped(block: nn.Module, result: Any, hidden: torch.Tensor | None) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
    wanted = "its input" if hidden is None else f"the shape {tuple(hidden.shape)}"
    return (
        f"a {type(block).__name__} cannot be skipped by the engine: a skipped block returns its input, so its output "
        f"must be one tensor of {wanted}; it returns tensors of these shapes: {shapes}. Skip it in the model's own "
        "forward"
    )
