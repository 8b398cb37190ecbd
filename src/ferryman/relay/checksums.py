"""Checksums of the outputs of each call's two runs, computed on the device and compared once per step.

A unit that reads something that the engine does not know (a clock, a file, a C++ generator of its own) returns
different outputs when it runs again in the backward, and its gradients belong to no forward. The sum of the outputs
reveals this. If elements differ by rounding only, as they may with atomic additions, the sum changes by far less than
the norm of the outputs. If a mask was drawn anew, the sum changes by about as much as the norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from ferryman.relay.call import Call

# The largest difference between the two sums of an output, relative to its norm, that rounding can explain.
_TOLERANCE = 1e-5
_NARROW_TOLERANCE = 3e-2
_WIDE = (torch.float32, torch.float64)  # other dtypes are narrow

_ROOM = 256  # numbers kept on the device; of a step with more calls, each step checks a different part


class _Entry(NamedTuple):
    """Where a call's numbers are: the sums of all outputs, then their norms, then their sums in the second run."""

    unit: str
    start: int
    tolerances: list[float]  # one for each output


class Checksums:
    """The checksums of the calls of one step. When they are off, nothing is computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: torch.Tensor | None = None
        self._used = 0
        self._calls = 0  # so far in this step
        self._steps = 0
        self._every = 1  # about one call in this many is checked
        self._first: dict[Call, _Entry] = {}
        self._done: list[_Entry] = []
        self._other: str | None = None  # a unit whose second run returned a different number of tensors

    @property
    def is_on(self) -> bool:
        return self._numbers is not None

    def begin(self, *, on: bool) -> None:
        self._numbers = torch.zeros(_ROOM, device=self._device, dtype=torch.float32) if on else None
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
        self._numbers[self._used : self._used + 2 * count].copy_(torch.cat([self._sums(outputs), self._norms(outputs)]))
        self._used += 3 * count

    def second(self, call: Call, outputs: Sequence[torch.Tensor]) -> None:
        if self._numbers is None or (entry := self._first.pop(call, None)) is None:
            return
        if len(outputs) != len(entry.tolerances):
            self._other = entry.unit
            return
        start = entry.start + 2 * len(outputs)
        self._numbers[start : start + len(outputs)].copy_(self._sums(outputs))
        self._done.append(entry)

    def disagreement(self) -> str | None:
        """The name of a unit whose second run returned different outputs, or None. Waits for the device."""
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
                # Values that are not finite show in the loss and in the gradients.
                if math.isfinite(first - second) and abs(first - second) > tolerance * norm:
                    return unit
        return None

    # A unit may also return tensors that are on the host.

    @torch.no_grad()
    def _sums(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([_real(t).sum(dtype=torch.float32).to(self._device) for t in outputs])

    @torch.no_grad()
    def _norms(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        norms = [torch.linalg.vector_norm(_real(t), dtype=torch.float32) for t in outputs]
        return torch.stack([norm.to(self._device) for norm in norms])


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.detach()
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach())
    return tensor.detach() if tensor.is_floating_point() else tensor.detach().float()
