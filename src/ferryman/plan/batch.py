"""Micro-batches: how a batch is cut, and the weight of each part in the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

Split = Callable[[Any, int], list[Any]]  # the user's own way to cut a batch; see `Engine`


class Part(NamedTuple):
    """One micro-batch."""

    content: Any  # what the user's code is called with
    weight: float  # the factor of its loss
    amount: float | None = None  # what the weight is proportional to, usually samples; None: they cannot be counted


def parts_of(batch: Any, micro_batches: int | None, reduction: str = "mean", own: Split | None = None) -> list[Part]:
    """Cuts a tensor, or a dict or tuple of tensors, along dimension 0. A list contains ready-made micro-batches.

    `own` is the user's function: it cuts anything that is not a list, and may return a weight for each micro-batch.

    With reduction "mean", micro-batches are weighted by their numbers of samples, so that a smaller last one does not
    count too much. If samples cannot be counted, as in graphs, all weights are equal. With "sum", all weights are 1.
    """
    if micro_batches is not None and type(micro_batches) is not int:
        raise ValueError(f"micro_batches={micro_batches!r}: it must be an integer")
    if isinstance(batch, list):
        if micro_batches is not None and micro_batches != len(batch):
            raise ValueError(f"micro_batches={micro_batches}, but the batch is a list of {len(batch)} micro-batches")
        if batch and all(isinstance(part, torch.Tensor) for part in batch):
            raise ValueError(
                f"the batch is a list of {len(batch)} tensors, and a list means ready-made micro-batches. If these are "
                "the parts of one batch (inputs, labels), pass a tuple: engine.step((inputs, labels))"
            )
        parts = [_as_dict(x) for x in batch]
    elif own is not None:
        return _weighted(*_cut_by(own, batch, 1 if micro_batches is None else micro_batches), reduction)
    else:
        parts = _cut(batch, 1 if micro_batches is None else micro_batches)
    if not parts:
        raise ValueError("the batch has no micro-batches")
    sizes = [samples_in(part) for part in parts]
    if 0 in sizes:
        raise ValueError(f"micro-batch {sizes.index(0)} has no samples")
    return _weighted(parts, sizes, reduction)


def _weighted(parts: Sequence[Any], amounts: Sequence[float | None], reduction: str) -> list[Part]:
    """Weights for the reduction "mean" are proportional to the amounts; if one amount is not known, they are equal."""
    known = [amount for amount in amounts if amount is not None]
    if reduction == "sum":
        weights = [1.0] * len(parts)
    elif len(known) < len(parts):
        weights = [1 / len(parts)] * len(parts)
    else:
        weights = [amount / sum(known) for amount in known]
    return [Part(part, weight, amount) for part, weight, amount in zip(parts, weights, amounts, strict=True)]


def _cut_by(own: Split, batch: Any, count: int) -> tuple[list[Any], list[float | None]]:
    """The micro-batches that the user's function returns, and their weights; None if it returns none."""
    if count < 1:
        raise ValueError(f"micro_batches={count}: at least one is required")
    found = own(batch, count)
    if not isinstance(found, list):
        raise ValueError(f"split= must return a list of micro-batches; this is a {type(found).__name__}")
    if not 1 <= len(found) <= count:
        raise ValueError(
            f"split= was asked for {count} micro-batches and returned {len(found)}; it must return as many or fewer, "
            "and at least one"
        )
    pairs = [isinstance(part, tuple) and len(part) == 2 and type(part[0]) in (int, float) for part in found]
    if not all(pairs):
        if any(pairs):
            raise ValueError(
                f"split= returned pairs (weight, micro_batch) and others: micro-batch {pairs.index(False)} has no "
                "weight. Return a weight with all of them, or with none"
            )
        return [_as_dict(part) for part in found], [None] * len(found)
    for number, (weight, _) in enumerate(found):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"split= returned the weight {weight} for micro-batch {number}; it must be above 0")
    return [_as_dict(part) for _, part in found], [weight for weight, _ in found]


def portion(samples: int, micro_batches: int | None, rank: int, size: int) -> tuple[slice, int | None]:
    """The samples of a batch that belong to a rank, and the number of micro-batches that it cuts them into, if known.

    `micro_batches` counts those of the whole batch, as a single process would cut it; each rank gets some of them.
    """
    if size == 1 or micro_batches is None:
        return slice(samples * rank // size, samples * (rank + 1) // size), micro_batches
    count = max(micro_batches, min(size, samples))  # no rank is idle while another has two
    length = -(-samples // count)
    first, after = count * rank // size, count * (rank + 1) // size
    return slice(first * length, after * length), after - first


def _cut(batch: Any, count: int) -> list[Any]:
    if not isinstance(batch, Mapping | tuple | torch.Tensor):
        raise ValueError(
            "a batch must be a tensor, or a dict or tuple of tensors, which is cut along dimension 0, or a list of "
            f"micro-batches; this is a {type(batch).__name__}. Engine(split=...) can cut other types"
        )
    lengths = _lengths(batch)
    if lengths == [0]:
        raise ValueError("the batch has no samples")
    if count == 1:
        return [_as_dict(batch)]
    if not lengths:
        raise ValueError("the batch has no tensor with a dimension along which it can be cut")
    if len(lengths) > 1:
        *most, last = map(str, lengths)
        raise ValueError(
            f"micro_batches={count}: the batch's tensors have {', '.join(most)} and {last} samples in dimension 0, so "
            "they cannot be cut along it. Pass a list of ready-made micro-batches, use micro_batches=1, or cut them "
            "with your own function: Engine(split=...)"
        )
    (size,) = lengths
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

    def part(start: int) -> list[Any]:
        return [x[start : start + length] if _is_per_sample(x, size) else x for x in leaves]

    return [pytree.tree_unflatten(part(start), spec) for start in starts]


class Shape(NamedTuple):
    """The structure and shapes of a batch, without its number of samples."""

    kinds: tuple[Any, ...]
    sizes: tuple[tuple[int, ...], ...]

    def within(self, other: Shape) -> bool:
        """Whether no dimension is longer than in the other shape."""
        return self.kinds == other.kinds and all(
            a <= b
            for mine, theirs in zip(self.sizes, other.sizes, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )


def shape_of(batch: Any) -> Shape:
    leaves, spec = _flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return Shape((spec, tuple((t.dtype, t.dim()) for t in tensors)), tuple(tuple(t.shape[1:]) for t in tensors))


def bytes_in(part: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(_as_dict(part)) if isinstance(leaf, torch.Tensor))


def take(batch: Any, samples: int) -> Any:
    """A batch of the first `samples` samples, which repeat if there are too few."""
    size = samples_in(batch) or 1
    return pick(batch, [i % size for i in range(samples)])


def pick(batch: Any, samples: list[int]) -> Any:
    """A batch of these samples, by number."""
    size = samples_in(batch) or 1

    def part(leaf: Any) -> Any:
        if not _is_per_sample(leaf, size):
            return leaf
        return [leaf[i] for i in samples] if isinstance(leaf, list) else leaf[samples]

    leaves, spec = _flatten(batch)
    return pytree.tree_unflatten([part(leaf) for leaf in leaves], spec)


def per_sample(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch that have an entry for each sample."""
    return [leaf for leaf in _flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]


def _flatten(batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Flattens a batch; lists without tensors (texts, names) are leaves."""

    def is_plain_list(value: Any) -> bool:
        return isinstance(value, list) and not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(value))

    return pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch, is_leaf=is_plain_list)


def _is_per_sample(leaf: Any, size: int) -> bool:
    """Whether a leaf has an entry for each sample, and therefore is cut with the batch."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dim() > 0
    return isinstance(leaf, list) and len(leaf) == size


def samples_in(part: Any) -> int | None:
    """The number of samples; None if no tensor has a dimension, or if their first dimensions differ, as in graphs."""
    lengths = _lengths(part)
    return lengths[0] if len(lengths) == 1 else None


def _lengths(part: Any) -> list[int]:
    """The different lengths of the tensors' first dimensions."""
    leaves: Sequence[Any] = pytree.tree_leaves(_as_dict(part))
    return list(dict.fromkeys(len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0))


def _as_dict(part: Any) -> Any:
    """Converts other mappings, such as a tokenizer's output, to a dict: pytree would treat them as single leaves."""
    return dict(part) if isinstance(part, Mapping) and not isinstance(part, dict) else part
