"""A slot: device memory for one unit at a time, at the beginning or at the end of a memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ferryman.model.units import Unit
from ferryman.plan.slot_sizes import SlotSizes


@dataclass(eq=False)
class Slot:
    """Device memory for one unit at a time. See Note [Two ends] in `slot_sizes.py`."""

    memory: torch.Tensor  # bytes; two slots may share it
    number: int = 0
    at_end: bool = False
    unit: Unit | None = None
    taken: int = 0  # bytes of the last unit, which may still be on its way out

    def part(self, nbytes: int) -> torch.Tensor:
        """The part of the memory that a unit of this size takes here."""
        start = self.memory.numel() - nbytes if self.at_end else 0
        return self.memory[start : start + nbytes]


def memories_of(sizes: SlotSizes, memories: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int, bool]]:
    """For each slot its memory, its number, and whether it is at the end of that memory."""
    for number in range(sizes.count):
        yield memories[sizes.memory_of(number)], number, number == 1 and not sizes.is_single


def overlap(slot: Slot, other: Slot, nbytes: int) -> bool:
    """Whether a unit of this size in the slot overlaps with the last unit at the other end of the memory."""
    return nbytes + other.taken > slot.memory.numel()
