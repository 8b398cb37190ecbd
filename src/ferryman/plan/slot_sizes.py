"""How large slots are: as large as the units that pass through them.

Note [Two ends]
The first two slots are the ends of one memory: one slot begins where it begins, the other ends where it ends. While a
unit is in use at one end, the next one comes to the other, or the last one leaves it. So the memory is as large as any
two units that follow each other, and not twice as large as the largest: an embedding or a head is large, but its
neighbors are blocks. A unit that is too large to be beside the one at the other end takes the place of both.

Note [Neighbors]
Which units follow each other is not known before the first step. It is taken from the model: the neighbors of a unit
are those before and after it, and a unit with several modules, such as an embedding and the head tied to it, may have
any other as its neighbor. A model that calls its units in another order is served, too. If two large ones follow each
other in it, the fetch of the second one waits for the end of the visit to the first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ferryman.model.units import Unit, aligned, gradient_bytes, narrow_bytes

SHARED = 2  # slots that share a memory


@dataclass(frozen=True)
class SlotSizes:
    """The sizes of slots in bytes. The first two share a memory; see Note [Two ends]."""

    shared: int
    others: tuple[int, ...] = ()
    is_single: bool = False  # whether the first slot has the shared memory for itself

    @property
    def count(self) -> int:
        return len(self.others) + (1 if self.is_single else SHARED)

    @property
    def memories(self) -> tuple[int, ...]:
        """The sizes of the memories that the slots are in."""
        return (self.shared, *self.others)

    @property
    def nbytes(self) -> int:
        return sum(self.memories)

    def memory_of(self, slot: int) -> int:
        """The index of the memory that the slot is in."""
        return slot if self.is_single else max(0, slot - 1)

    def other_end(self, slot: int) -> int | None:
        """The slot with which this one shares its memory."""
        return 1 - slot if slot < SHARED and not self.is_single else None


def slot_sizes(units: Sequence[Unit], count: int, size: Callable[[Unit], int]) -> SlotSizes:
    """Sizes of `count` slots for units in the order of the model; of fewer, if there are fewer units.

    The two that share a memory take any two neighbors. The others take the units that are left, beginning with the
    last, since the last units can stay on the device from the forward to the backward.
    """
    sizes = [size(unit) for unit in units]
    if min(count, len(sizes)) < SHARED:
        return SlotSizes(max(sizes, default=0), is_single=True)
    largest = heapq.nlargest(2, range(len(sizes)), key=sizes.__getitem__)
    anywhere = [(at, largest[largest[0] == at]) for at, unit in enumerate(units) if len(unit.modules) > 1]
    pairs = [*anywhere, *itertools.pairwise(range(len(sizes)))]
    pair = max(reversed(pairs), key=lambda pair: sizes[pair[0]] + sizes[pair[1]])
    rest = [size for at, size in enumerate(sizes) if at not in pair]
    return SlotSizes(sum(sizes[at] for at in pair), tuple(reversed(rest))[: count - SHARED])


def weight_slot_sizes(units: Sequence[Unit], count: int) -> SlotSizes:
    """Sizes of `count` slots for weights."""
    return slot_sizes(units, count, lambda unit: unit.nbytes)


class GradientSlotSizes(NamedTuple):
    """Sizes of slots for gradients, and the units that each of them serves."""

    sizes: SlotSizes
    serves: list[tuple[Unit, ...]]


def gradient_slot_sizes(units: Sequence[Unit], count: int, updates: bool) -> GradientSlotSizes:
    """Divides `count` slots for gradients among the units.

    A unit with one module needs its slot for one visit, so such units share two: one is filled while the other is
    emptied. A unit whose modules are used in several places, such as an embedding and the head tied to it, keeps its
    slot from its first backward to its last, and has one of its own. With too few of those, the smallest units share.
    With enough slots, each unit has one of its own.
    """

    def size(unit: Unit) -> int:
        return gradient_slot_bytes(unit, updates)

    if count >= len(units) > 0:
        first, *others = map(size, units)
        return GradientSlotSizes(SlotSizes(first, tuple(others), is_single=True), [(unit,) for unit in units])
    trained = [unit for unit in units if unit.trained]
    lasting = sorted((unit for unit in trained if len(unit.modules) > 1), key=size, reverse=True)
    alone = lasting[: min(max(0, count - SHARED), len(trained) - 1)]
    rest = tuple(unit for unit in trained if unit not in alone)
    sizes = slot_sizes(rest, min(count, SHARED), size)
    serves = [rest] * sizes.count + [(unit,) for unit in alone]
    return GradientSlotSizes(SlotSizes(sizes.shared, tuple(map(size, alone)), sizes.is_single), serves)


def gradient_slot_bytes(unit: Unit, updates: bool) -> int:
    """Bytes of a unit's gradients in a slot: in float32 and, if the dtype in which they cross is another, in that."""
    return aligned(gradient_bytes(unit)) + (aligned(narrow_bytes(unit)) if updates else 0)
