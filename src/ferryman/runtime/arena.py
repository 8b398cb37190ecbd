"""An arena: small pieces of host memory, allocated from a few large regions that are pinned once.

Note [Bounded by the peak]
Pieces are allocated and freed in every step, in sizes that may differ each time. A piece is placed in the smallest hole
that has room for it, and a freed piece is merged with the holes next to it. If no hole is large enough, a region is
added. When all pieces have been freed, several regions are replaced by one that is as large as the peak of memory in
use. If a piece had no room because of fragmentation, the region is larger by that piece. So memory is bounded by the
peak, not by the number of different sizes, and later steps of the same sizes fit into one region. Until then, regions
grow geometrically up to `_LARGEST`, because registering memory is slow.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ferryman.runtime.marks import Mark
from ferryman.runtime.pinned import PinnedMemory

_ALIGNMENT = 64  # bytes: a cache line
_SMALLEST = 1 << 20  # bytes of a region
_LARGEST = 1 << 26  # bytes of a region, unless a piece or the peak needs more


@dataclass(eq=False)
class Allocation:
    """A piece of an arena's memory, in use until it is given back."""

    bytes: torch.Tensor
    after: list[Mark]  # the marks after which it may be used
    region: _Region
    start: int
    end: int


@dataclass
class _Hole:
    start: int
    end: int
    marks: list[Mark] = field(default_factory=list)  # the ends of its last uses

    @property
    def size(self) -> int:
        return self.end - self.start


class _Region:
    """One registered region of memory, and its holes in ascending order."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = PinnedMemory(nbytes, device)
        self.nbytes = nbytes
        self.holes = [_Hole(0, nbytes)]

    @property
    def is_free(self) -> bool:
        return len(self.holes) == 1 and self.holes[0].size == self.nbytes

    def take(self, hole: _Hole, nbytes: int, size: int) -> Allocation:
        """Allocates the first `nbytes` of a hole. The piece occupies `size` bytes."""
        start, end = hole.start, hole.start + size
        if end == hole.end:
            self.holes.remove(hole)
        else:
            hole.start = end
        after = [mark for mark in hole.marks if not mark.failed()]  # failed work no longer uses the memory
        return Allocation(self.memory.bytes[start : start + nbytes], after, self, start, end)

    def give(self, start: int, end: int, marks: Iterable[Mark]) -> None:
        made, at = _Hole(start, end, list(marks)), 0
        while at < len(self.holes) and self.holes[at].start < start:
            at += 1
        self.holes.insert(at, made)
        for left in (at, at - 1):
            if 0 <= left < len(self.holes) - 1 and self.holes[left].end == self.holes[left + 1].start:
                right = self.holes.pop(left + 1)
                both = [*self.holes[left].marks, *right.marks]
                self.holes[left] = _Hole(self.holes[left].start, right.end, latest(both))

    def close(self) -> None:
        """Waits for the last uses of the memory, and frees it."""
        for mark in (mark for hole in self.holes for mark in hole.marks):
            if not mark.failed():
                mark.wait()
        self.memory.close()


class Arena:
    """Allocates pieces of pinned memory; see Note [Bounded by the peak].

    Only one thread at a time may call `take`. Any thread, and any destructor, may call `give`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._regions: list[_Region] = []
        self._given: deque[tuple[Allocation, Sequence[Mark]]] = deque()  # freed, but not merged yet
        self._used = 0
        self.peak = 0  # the peak of bytes in use
        self._needed = 0  # bytes of one region with room for all pieces, fragmentation included

    @property
    def reserved(self) -> int:
        """Bytes of all regions."""
        return sum(region.nbytes for region in self._regions)

    def take(self, nbytes: int) -> Allocation:
        self._merge()
        if not self._used and len(self._regions) > 1:
            self._release_free()
        size = max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
        is_peak = self._used + size > self.peak
        self._used += size
        self.peak = max(self.peak, self._used)
        fitting = [
            (hole.size, number, hole.start, region, hole)
            for number, region in enumerate(self._regions)
            for hole in region.holes
            if hole.size >= size
        ]
        if fitting:
            *_, region, hole = min(fitting, key=lambda found: found[:3])
        else:
            if len(self._regions) == 1 and not is_peak:
                self._needed = self._regions[0].nbytes + size
            region = self._grow(size)
            hole = region.holes[0]
        return region.take(hole, nbytes, size)

    def give(self, piece: Allocation, marks: Sequence[Mark] = ()) -> None:
        """Frees a piece. Its memory may be used again after the marks."""
        self._given.append((piece, marks))  # atomic: the caller may be a destructor that runs during `take`

    def close(self) -> None:
        """Frees all memory. All lanes must be idle."""
        for region in self._regions:
            region.memory.close()
        self._regions.clear()
        self._given.clear()
        self._used = 0

    def _merge(self) -> None:
        while self._given:
            piece, marks = self._given.popleft()
            self._used -= piece.end - piece.start
            piece.region.give(piece.start, piece.end, marks or piece.after)

    def _release_free(self) -> None:
        for region in [region for region in self._regions if region.is_free]:
            self._regions.remove(region)
            region.close()

    def _grow(self, size: int) -> _Region:
        self._release_free()
        there = self.reserved
        nbytes = max(size, max(self.peak, self._needed) - there, min(there, _LARGEST), _SMALLEST)
        region = _Region(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, self._device)
        self._regions.append(region)
        return region


def latest(marks: Iterable[Mark]) -> list[Mark]:
    """The last mark of each lane: when these have passed, all have, because lanes are in order."""
    found: list[Mark] = []
    for mark in marks:
        if mark not in found and not any(other.follows(mark) for other in found):
            found = [other for other in found if not mark.follows(other)]
            found.append(mark)
    return found
