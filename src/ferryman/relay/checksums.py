"""Checksums of the outputs of each call's two runs. They are computed on the device and compared once a step.

A unit that draws from something that the engine does not know (a clock, a file, a generator of its own in C++) gives
other outputs when it runs again in the backward, and so gradients that belong to no forward. The sum of the outputs
tells: where single elements differ by rounding, as they may with atomic additions, it moves by far less than the
outputs' norm; where a mask was drawn anew, it moves by about as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from ferryman.relay.call import Call

# How far the sums of an output may be apart, in norms of it: what rounding does to each element, by itself.
_WIDE = (torch.float32, torch.float64)
_TOLERANCE = 1e-5
_NARROW_TOLERANCE = 3e-2


_ROOM = 256  # numbers that are kept on the device; the calls of a larger step are checked in part, others each time


class _Entry(NamedTuple):
    """Where a call's numbers are: the sum of each output, the norm of each, and the sum of each in the second run."""

    unit: str
    start: int
    tolerances: list[float]  # of each output


class Checksums:
    """The checksums of the calls of one step. When they are off, nothing is computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: torch.Tensor | None = None
        self._used = 0
        self._calls = 0  # so far in this step
        self._steps = 0
        self._every = 1  # one call in so many is checked
        self._first: dict[Call, _Entry] = {}
        self._done: list[_Entry] = []
        self._other: str | None = None  # a unit that returned another number of tensors

    @property
    def is_on(self) -> bool:
        return self._numbers is not None

    def begin(self, *, on: bool) -> None:
        self._numbers = torch.zeros(_ROOM, device=self._device) if on else None
        if self._calls:
            self._every = -(-3 * self._calls // _ROOM)
        self._used = self._calls = 0
        self._other = None
        self._steps += 1
        self._first.clear()
        self._done.clear()

    def first(self, call: Call, outputs: Sequence[torch.Tensor]) -> None:
        if self._numbers is None:
            return
        number, self._calls = self._calls, self._calls + len(outputs)
        count = len(outputs)
        if (number + self._steps) % self._every or not count or self._used + 3 * count > _ROOM:
            return
        tolerances = [_TOLERANCE if t.dtype in _WIDE else _NARROW_TOLERANCE for t in outputs]
        self._first[call] = _Entry(call.unit.name, self._used, tolerances)
        self._numbers[self._used : self._used + 2 * count].copy_(torch.cat([_sums(outputs), _norms(outputs)]))
        self._used += 3 * count

    def second(self, call: Call, outputs: Sequence[torch.Tensor]) -> None:
        if self._numbers is None or (entry := self._first.pop(call, None)) is None:
            return
        if len(outputs) != len(entry.tolerances):
            self._other = entry.unit
            return
        start = entry.start + 2 * len(outputs)
        self._numbers[start : start + len(outputs)].copy_(_sums(outputs))
        self._done.append(entry)

    def disagreement(self) -> str | None:
        """The name of a unit whose second run gave other outputs, or None. Waits for the device; frees its memory."""
        numbers, self._numbers = self._numbers, None
        other, self._other = self._other, None
        self._first.clear()
        if numbers is None or other is not None:
            return other
        found = numbers[: self._used].tolist()
        for unit, start, tolerances in self._done:
            count = len(tolerances)
            for at, tolerance in enumerate(tolerances, start):
                first, norm, second = found[at], found[at + count], found[at + 2 * count]
                # What is not finite shows in the loss and in the gradients.
                if math.isfinite(first - second) and abs(first - second) > tolerance * norm:
                    return unit
        return None


@torch.no_grad()
def _sums(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([_real(t).sum(dtype=torch.float32) for t in outputs])


@torch.no_grad()
def _norms(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(_real(t), dtype=torch.float32) for t in outputs]
    return torch.stack(norms)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach())
    return tensor.detach() if tensor.is_floating_point() else tensor.detach().float()
