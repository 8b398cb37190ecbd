"""Micro-batches: how a batch is cut, and what each part weighs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

REDUCTIONS = ("mean", "sum")  # how the losses of micro-batches make up the batch's


class Part(NamedTuple):
    """One micro-batch: what the user's code gets, and by what its loss counts."""

    content: Any
    weight: float


def split(batch: Any, micro_batches: int | None, reduction: str = "mean") -> list[Part]:
    """A dict or tuple of tensors is cut along dimension 0; a list is taken as micro-batches that are ready.

    In the mean, micro-batches weigh by their samples, so that a ragged last one does not count too much. In the sum
    each counts as it is.
    """
    if micro_batches is not None and type(micro_batches) is not int:
        raise ValueError(f"micro_batches={micro_batches!r}: a whole number of them is required")
    if isinstance(batch, list):
        if micro_batches is not None and micro_batches != len(batch):
            raise ValueError(f"micro_batches={micro_batches}, but the batch is a list of {len(batch)} micro-batches")
        if batch and all(isinstance(part, torch.Tensor) for part in batch):
            raise ValueError(
                f"the batch is a list of {len(batch)} tensors, and a list is taken as micro-batches that are ready. If "
                "these are the parts of one batch (inputs, labels), give a tuple: engine.step((inputs, labels))"
            )
        # A mapping that is not a dict, as tokenizers make, would be one leaf to all that looks for tensors in it.
        parts = [dict(x) if isinstance(x, Mapping) and not isinstance(x, dict) else x for x in batch]
    else:
        parts = _cut(batch, 1 if micro_batches is None else micro_batches)
    if not parts:
        raise ValueError("the batch has no micro-batches")
    sizes = [samples_in(part) for part in parts]
    if 0 in sizes:
        raise ValueError(f"micro-batch {sizes.index(0)} has no samples")
    if reduction == "sum":
        return [Part(part, 1.0) for part in parts]
    if any(size is None for size in sizes):
        return [Part(part, 1 / len(parts)) for part in parts]
    total = sum(size for size in sizes if size is not None)
    return [Part(part, (size or 0) / total) for part, size in zip(parts, sizes, strict=True)]


def portion(samples: int, micro_batches: int | None, rank: int, size: int) -> tuple[slice, int | None]:
    """Which samples of a batch are a rank's, and into how many micro-batches it cuts them, if that is settled.

    As in one process that has all of them: `micro_batches` is of the whole batch, and each rank has some of those.
    """
    if size == 1 or micro_batches is None:
        return slice(samples * rank // size, samples * (rank + 1) // size), micro_batches
    count = max(micro_batches, min(size, samples))  # no rank is idle while another has two
    length = -(-samples // count)
    first, after = count * rank // size, count * (rank + 1) // size
    return slice(first * length, after * length), after - first


def _cut(batch: Any, count: int) -> list[Any]:
    if not isinstance(batch, Mapping | tuple):
        raise ValueError(
            f"a batch is a dict or a tuple of tensors, to be cut along dimension 0, or a list of micro-batches; "
            f"this is a {type(batch).__name__}"
        )
    size = samples_in(batch)
    if size is None:
        raise ValueError("the batch holds no tensor with a dimension to cut it along")
    if size == 0:
        raise ValueError("the batch has no samples")
    if not 1 <= count <= size:
        raise ValueError(f"micro_batches={count}: a batch of {size} samples can be cut into 1 to {size} micro-batches")
    leaves, spec = _flatten(batch)
    length = -(-size // count)
    starts = range(0, size, length)
    if len(starts) != count:
        raise ValueError(
            f"micro_batches={count}: {size} samples in parts of {length} make {len(starts)} micro-batches; choose "
            f"micro_batches={len(starts)} or another batch size"
        )
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) != size:
            raise ValueError(f"the batch's tensors have {size} and {len(leaf)} samples in dimension 0; they must agree")

    def part(start: int) -> list[Any]:
        return [x[start : start + length] if _is_per_sample(x, size) else x for x in leaves]

    return [pytree.tree_unflatten(part(start), spec) for start in starts]


class Shape(NamedTuple):
    """What a batch looks like but for its number of samples."""

    kinds: tuple[Any, ...]
    sizes: tuple[tuple[int, ...], ...]

    def within(self, other: Shape) -> bool:
        """Whether nothing in it is longer than in the other."""
        return self.kinds == other.kinds and all(
            a <= b
            for mine, theirs in zip(self.sizes, other.sizes, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )


def shape_of(batch: Any) -> Shape:
    leaves, spec = _flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return Shape((spec, tuple((t.dtype, t.dim()) for t in tensors)), tuple(tuple(t.shape[1:]) for t in tensors))


def take(batch: Any, samples: int) -> Any:
    """A batch of the first samples, again from the start if there are too few."""

    size = samples_in(batch) or 1

    def part(leaf: Any) -> Any:
        if not _is_per_sample(leaf, size):
            return leaf
        chosen = [i % size for i in range(samples)]
        return [leaf[i] for i in chosen] if isinstance(leaf, list) else leaf[chosen]

    leaves, spec = _flatten(batch)
    return pytree.tree_unflatten([part(leaf) for leaf in leaves], spec)


def _flatten(batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Lists without tensors (texts, names) are leaves."""

    def is_plain_list(value: Any) -> bool:
        return isinstance(value, list) and not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(value))

    return pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch, is_leaf=is_plain_list)


def _is_per_sample(leaf: Any, size: int) -> bool:
    """Whether it has something for each of the samples, and so is cut with them."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dim() > 0
    return isinstance(leaf, list) and len(leaf) == size


def samples_in(part: Any) -> int | None:
    if isinstance(part, Mapping):
        part = dict(part)
    leaves: Sequence[Any] = pytree.tree_leaves(part)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)
