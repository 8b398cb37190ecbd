"""Refuses parameters and buffers that share memory without being the same tensor.

The engine moves each tensor into memory of its own, so they would no longer share it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy


class _Member(NamedTuple):
    """A tensor of the model, and where its bytes lie in its storage."""

    name: str
    tensor: torch.Tensor
    begin: int
    end: int


def refuse_overlaps(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises a ValueError if two tensors share memory and one of them trains."""
    tensors = {id(tensor): (name, tensor) for name, tensor in reversed(list(named))}  # the first name of each
    for first, second in _overlapping(reversed(tensors.values())):
        if not (first.tensor.requires_grad or second.tensor.requires_grad):
            continue
        one, two = sorted((first, second), key=lambda member: not isinstance(member.tensor, nn.Parameter))
        raise ValueError(
            f"{one.name!r} and {two.name!r} are two tensors in the same memory. The engine would give each its own "
            f"memory, and training one would no longer change the other. {_way_out(one, two)}"
        )


def _way_out(one: _Member, two: _Member) -> str:
    if not isinstance(two.tensor, nn.Parameter):
        return f"Read {one.name!r} itself in the forward, or give the buffer its own memory (clone())"
    same = one.tensor.shape == two.tensor.shape and one.tensor.stride() == two.tensor.stride()
    if same and one.begin == two.begin:
        return f"Tie them by using one parameter in both places: model.{two.name} = model.{one.name}"
    return "Use one parameter and slice it in the forward, or give each its own memory (clone())"


def _overlapping(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[_Member, _Member]]:
    by_storage = defaultdict[int, list[_Member]](list)
    for name, tensor in named:
        if not (is_lazy(tensor) or tensor.is_meta or tensor.is_sparse) and tensor.numel():
            begin, end = _extent(tensor)
            by_storage[tensor.untyped_storage().data_ptr()].append(_Member(name, tensor, begin, end))
    for members in by_storage.values():
        open_ones: list[_Member] = []  # members that end after the current one begins
        for member in sorted(members, key=lambda member: member.begin):
            open_ones = [other for other in open_ones if other.end > member.begin]
            for other in open_ones:
                if _share_elements(other.tensor, member.tensor):
                    yield other, member
            open_ones.append(member)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of the tensor's bytes in its storage, from the first to one past the last."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _share_elements(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors with overlapping extents share elements. Columns of a matrix, for example, do not."""
    if one.dtype != two.dtype or (one.is_contiguous() and two.is_contiguous()):
        return True
    touched = torch.zeros(one.untyped_storage().nbytes() // one.itemsize, dtype=torch.bool, device="cpu")
    touched.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(touched.as_strided(two.shape, two.stride(), two.storage_offset()).any())
