"""Micro-batches: how a batch is cut, and what each part weighs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree


class Part(NamedTuple):
    """One micro-batch: what the user's code gets, and its share of the samples."""

    content: Any
    weight: float


def split(batch: Any, micro_batches: int | None) -> list[Part]:
    """A dict or tuple of tensors is cut along dimension 0; a list is taken as micro-batches that are ready.

    Micro-batches weigh by their samples, so that a ragged last one does not count too much.
    """
    if isinstance(batch, list):
        if micro_batches is not None and micro_batches != len(batch):
            raise ValueError(f"micro_batches={micro_batches}, but the batch is a list of {len(batch)} micro-batches")
        parts = batch
    else:
        parts = _cut(batch, 1 if micro_batches is None else micro_batches)
    if not parts:
        raise ValueError("the batch has no micro-batches")
    sizes = [_samples(part) for part in parts]
    if 0 in sizes:
        raise ValueError(f"micro-batch {sizes.index(0)} has no samples")
    if any(size is None for size in sizes):
        return [Part(part, 1 / len(parts)) for part in parts]
    total = sum(size for size in sizes if size is not None)
    return [Part(part, (size or 0) / total) for part, size in zip(parts, sizes, strict=True)]


def _cut(batch: Any, count: int) -> list[Any]:
    if not isinstance(batch, Mapping | tuple):
        raise ValueError(
            f"a batch is a dict or a tuple of tensors, to be cut along dimension 0, or a list of micro-batches; "
            f"this is a {type(batch).__name__}"
        )
    size = _samples(batch)
    if size is None:
        raise ValueError("the batch holds no tensor with a dimension to cut it along")
    if size == 0:
        raise ValueError("the batch has no samples")
    if not 1 <= count <= size:
        raise ValueError(f"micro_batches={count}: a batch of {size} samples can be cut into 1 to {size} micro-batches")
    leaves, spec = pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
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
        return [x[start : start + length] if isinstance(x, torch.Tensor) and x.dim() > 0 else x for x in leaves]

    return [pytree.tree_unflatten(part(start), spec) for start in starts]


def _samples(part: Any) -> int | None:
    if isinstance(part, Mapping):
        part = dict(part)
    leaves: Sequence[Any] = pytree.tree_leaves(part)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)
