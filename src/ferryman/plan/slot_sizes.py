"""How large the slots are in which gradients are summed on the device.

A unit with one module needs its slot for one visit, so such units share two slots, as large as the largest of them:
one is filled while the other is emptied. A unit whose modules are used in several places, such as an embedding and the
head tied to it, keeps its slot from its first backward to its last. It has one of its own, so that the shared ones need
not be as large as an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ferryman.model.units import Unit, gradient_bytes, narrow_bytes

SHARED = 2  # slots for units with one module


class SlotGroup(NamedTuple):
    """Slots of one size, and the units that share them."""

    units: tuple[Unit, ...]
    slots: int


def slot_groups(units: Sequence[Unit], count: int) -> list[SlotGroup]:
    """Divides `count` slots among the units. With too few for slots of their own, the smallest units share."""
    if count >= len(units):
        return [SlotGroup((unit,), 1) for unit in units]
    lasting = sorted((unit for unit in units if len(unit.modules) > 1), key=gradient_bytes, reverse=True)
    alone = lasting[: max(0, count - SHARED)]
    rest = tuple(unit for unit in units if unit not in alone)
    groups = [SlotGroup((unit,), 1) for unit in alone]
    return [*groups, SlotGroup(rest, count - len(alone))] if rest else groups


def slot_bytes(units: Sequence[Unit], updates: bool) -> int:
    """Bytes of a slot for the gradients of any of these units, in float32 and in the dtype in which they cross."""
    wide = max(gradient_bytes(unit) for unit in units)
    return wide + (max(narrow_bytes(unit) for unit in units) if updates else 0)
