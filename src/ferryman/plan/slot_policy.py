"""Which unit is fetched into which slot: a pure function of what the slots hold and of the upcoming visits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Generic, NamedTuple, TypeVar

from ferryman.model.units import Unit
from ferryman.plan.slot_sizes import SlotSizes

T = TypeVar("T")

LOOK_AHEAD = 64  # visits


class Fetch(NamedTuple, Generic[T]):
    """A unit to fetch, its slot, and the slots whose units it overwrites: its own, and perhaps the other end."""

    unit: T
    slot: int
    overwrites: tuple[int, ...]

    def put_into(self, loaded: list[T | None]) -> None:
        for slot in self.overwrites:
            loaded[slot] = None
        loaded[self.slot] = self.unit


class SlotPolicy(Generic[T]):
    """The policy for slots of these sizes. `size`: the bytes of a unit."""

    def __init__(self, sizes: SlotSizes, size: Callable[[T], int]) -> None:
        self.sizes = sizes
        self._size = size
        slots = range(sizes.count)
        self._slots = [(slot, sizes.memories[sizes.memory_of(slot)], sizes.other_end(slot)) for slot in slots]

    def choose(self, loaded: Sequence[T | None], busy: Collection[int], upcoming: Sequence[T]) -> Fetch[T] | None:
        """The next fetch; None if it is too early for any. `busy`: slots whose units are in use.

        The unit is the first of `upcoming` that is in no slot. It overwrites what is needed last after its visit
        (Belady's rule), but not the unit of the visit before it; of several such slots, it takes one of the smallest.
        The fetch can begin when what it overwrites is not in use, and not needed before the visit.
        """
        for distance, unit in enumerate(upcoming):
            if unit not in loaded:
                staying = busy if distance == 0 else (loaded.index(upcoming[distance - 1]),)
                fetch = self._place(unit, loaded, staying, upcoming[distance:])
                if fetch is None:
                    return None
                before = upcoming[:distance]
                can_begin = all(slot not in busy and loaded[slot] not in before for slot in fetch.overwrites)
                return fetch if can_begin else None
        return None

    def _place(
        self, unit: T, loaded: Sequence[T | None], staying: Collection[int], upcoming: Sequence[T]
    ) -> Fetch[T] | None:
        def next_use(other: T | None) -> int:
            return upcoming.index(other) if other in upcoming else len(upcoming)

        nbytes = self._size(unit)
        best: Fetch[T] | None = None
        best_rank = (-1, 0, 0)
        for slot, room, end in self._slots:
            if nbytes > room or slot in staying:
                continue
            needed = next_use(loaded[slot])
            overwrites: tuple[int, ...] = (slot,)
            if end is not None and (beside := loaded[end]) is not None and nbytes + self._size(beside) > room:
                if end in staying:
                    continue
                needed, overwrites = min(needed, next_use(beside)), (slot, end)
            if (rank := (needed, -len(overwrites), -room)) > best_rank:
                best, best_rank = Fetch(unit, slot, overwrites), rank
        return best

    def fetched_visits(self, order: Sequence[T]) -> list[int]:
        """Indices of the visits in `order` whose unit must be fetched, if all slots are empty at the start."""
        loaded: list[T | None] = [None] * self.sizes.count
        found: list[int] = []
        for at, unit in enumerate(order):
            if unit not in loaded:
                fetch = self.choose(loaded, (), order[at : at + LOOK_AHEAD])
                assert fetch is not None, "the unit that is needed now can always be fetched"
                fetch.put_into(loaded)
                found.append(at)
            upcoming = order[at + 1 : at + 1 + LOOK_AHEAD]
            while (fetch := self.choose(loaded, (loaded.index(unit),), upcoming)) is not None:
                fetch.put_into(loaded)
                found.append(at + 1 + upcoming.index(fetch.unit))
        return found


def weight_slot_policy(sizes: SlotSizes) -> SlotPolicy[Unit]:
    """The policy for slots for weights."""
    return SlotPolicy(sizes, lambda unit: unit.nbytes)
