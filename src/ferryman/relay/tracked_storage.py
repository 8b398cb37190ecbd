"""The storages of micro-batches that the stash moves, and their copies on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ferryman.relay.tensor_identity import version_of
from ferryman.runtime.arena import Allocation, Arena
from ferryman.runtime.lanes import DeviceLane
from ferryman.runtime.marks import Mark


class Level:
    """An amount and its peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, amount: int) -> None:
        self.now += amount
        self.peak = max(self.peak, self.now)


class HostCopy:
    """The host's copy of a storage after a certain number of edits. Returns its memory to the arena when dropped."""

    def __init__(self, piece: Allocation, edits: int, arena: Arena, level: Level) -> None:
        self.memory = piece.bytes
        self.edits = edits
        self.landed: Mark | None = None
        self.fetched: Mark | None = None  # the last fetch from it
        self._piece = piece
        self._arena = arena
        self._level = level
        level.add(self.memory.numel())

    def __del__(self) -> None:
        self._level.add(-self.memory.numel())
        last = self.fetched or self.landed
        self._arena.give(self._piece, () if last is None else (last,))


class TrackedStorage:
    """One storage of a micro-batch, on the device or emptied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.alias = tensor.detach()  # shares the storage, but not the version counter
        self.nbytes = self.storage().nbytes()
        self.edits = 0  # see Note [Edits in place]
        self.on_device = True
        self.copy: HostCopy | None = None
        self.ready: Mark | None = None

    def storage(self) -> torch.UntypedStorage:
        return self.alias.untyped_storage()

    def is_referenced(self) -> bool:
        """Whether anything but the stash refers to this storage."""
        storage = self.storage()
        count: int = torch._C._storage_Use_Count(storage._cdata)
        return count > 2  # the alias, and `storage` here

    def flat(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.alias.device).set_(self.storage())


class Leaving(NamedTuple):
    """A copy in the window. The reference to the storage keeps its device memory alive until the copy has ended."""

    tracked: TrackedStorage
    copy: HostCopy


class Geometry(NamedTuple):
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class Fetched:
    """Bytes of a copy on their way to new device memory."""

    def __init__(self, flat: torch.Tensor, ready: Mark, compute: DeviceLane) -> None:
        self._flat, self._ready, self._compute = flat, ready, compute
        self._version = version_of(flat)
        self._is_used = False

    @property
    def is_edited(self) -> bool:
        return version_of(self._flat) != self._version

    def use(self) -> torch.Tensor:
        """The bytes. Compute waits for them."""
        if not self._is_used:
            self._is_used = True
            self._compute.follow(self._ready)
        return self._flat

    def __del__(self) -> None:
        if not self._is_used:  # the backward was not run
            self._compute.outlast(self._ready)
