"""States of optimizers in float32 and in the format that they are kept in, a chunk at a time."""

from __future__ import annotations

import torch

from ferryman.model.units import BLOCK
from ferryman.server import moments
from ferryman.server.rules import STATE

_CHUNK = 1 << 20  # elements that are in float32 at a time


def blocks_of(elements: slice) -> slice:
    """The blocks of a range that begins with a block."""
    return slice(elements.start // BLOCK, -(-elements.stop // BLOCK))


def decoded(codes: torch.Tensor, scales: torch.Tensor | None, root: bool) -> torch.Tensor:
    """A state in float32: the same memory, if it is already."""
    if codes.dtype == STATE:
        return codes
    values = torch.empty(codes.numel(), dtype=STATE, device="cpu")
    for start in range(0, codes.numel(), _CHUNK):
        at = slice(start, min(start + _CHUNK, codes.numel()))
        whole = torch.empty(-(-(at.stop - at.start) // BLOCK) * BLOCK, dtype=torch.float32, device="cpu")
        moments.read(codes[at], None if scales is None else scales[blocks_of(at)], root, whole, torch.empty_like(whole))
        values[at] = whole[: at.stop - at.start]
    return values


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None, root: bool) -> None:
    """Stores a state, rounded to the nearest."""
    if scales is None:
        codes.copy_(values)
        return
    for start in range(0, codes.numel(), _CHUNK):
        at = slice(start, min(start + _CHUNK, codes.numel()))
        whole = torch.zeros(-(-(at.stop - at.start) // BLOCK) * BLOCK, dtype=torch.float32, device="cpu")
        whole[: at.stop - at.start] = values[at]
        moments.write(whole, codes[at], scales[blocks_of(at)], root, torch.empty_like(whole))
