"""Where each tensor's optimizer state is in the flat memory of a unit: tensors of one unit may differ in format."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import torch

from ferryman.model.units import BLOCK, GRAIN, Item, Unit
from ferryman.server.moments import SCALE
from ferryman.server.optimizer_view import OptimizerView


class StateLayout:
    """One array for each state, with tensors of any format one after the other; and one for the scales of each state.

    A range of a unit's trained elements is a range of each array. In a tensor in eight bits it begins with a block.
    """

    def __init__(self, unit: Unit, optimizer_view: OptimizerView) -> None:
        self.dtypes: dict[Item, torch.dtype] = {}
        ruled = [rule for item in unit.trained if (rule := optimizer_view.rule(item)) is not None]
        self.count = max((len(rule.states) for rule in ruled), default=0)  # of arrays
        self._begins: list[int] = []
        self._lengths: list[int] = []
        self._widths: list[int] = []
        self._codes, self._scales = [0], [0]  # bytes before each tensor
        for item, begin in unit.trained_offsets.items():
            dtype = self.dtypes[item] = optimizer_view.state_dtype(item)
            is_coded = dtype == torch.uint8
            grain = BLOCK if is_coded else GRAIN
            length = -(-item.tensor.numel() // grain) * grain
            self._begins.append(begin)
            self._lengths.append(length)
            width = 0 if optimizer_view.rule(item) is None else dtype.itemsize  # an own step keeps its state elsewhere
            self._widths.append(width)
            self._codes.append(self._codes[-1] + length * width)
            self._scales.append(self._scales[-1] + (length // BLOCK * SCALE.itemsize if is_coded else 0))

    def codes_at(self, element: int) -> int:
        """The place of an element in each array of states, in bytes."""
        return self._at(element, self._codes, lambda tensor, within: within * self._widths[tensor])

    def scales_at(self, element: int) -> int:
        """The place of the scale of an element's block, or of the next one, in bytes."""
        return self._at(
            element,
            self._scales,
            lambda tensor, within: (
                -(-within // BLOCK) * SCALE.itemsize if self._scales[tensor + 1] > self._scales[tensor] else 0
            ),
        )

    def sizes(self, low: int, high: int) -> list[int]:
        """Bytes of each array, for the elements from `low` to `high`: states, then scales."""
        codes, scales = self.codes_at(high) - self.codes_at(low), self.scales_at(high) - self.scales_at(low)
        return [codes] * self.count + ([scales] * self.count if self._scales[-1] else [])

    def nbytes(self, low: int, high: int) -> int:
        return sum(self.sizes(low, high))

    def _at(self, element: int, starts: list[int], inside: Callable[[int, int], int]) -> int:
        tensor = bisect.bisect_right(self._begins, element) - 1
        if tensor < 0:
            return 0
        return starts[tensor] + inside(tensor, min(element - self._begins[tensor], self._lengths[tensor]))
