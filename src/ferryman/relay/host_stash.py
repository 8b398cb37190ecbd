"""The stash on the host: pinned memory for what parked micro-batches have.

No tensors of a parked micro-batch stay on the device. Its boundary tensors are *stowed*: copied to pinned memory, and
their device memory freed. They are *restored* before it runs again. Device memory then depends neither on depth nor on
the number of micro-batches. Tensors that the requested call needs are restored ahead of time. Others, such as those
that autograd has saved between units, are restored when an operator uses them. Where the budget has room, the tensors
that the requested call needs stay on the device instead (`plan/fit.py`, Note [Boundaries that stay]).

Note [Emptied storages]
The user's code holds tensors while its micro-batch is parked, and they must be the same tensors when it continues. So
their storage is emptied and filled again in place: every tensor, view and saved variable that shares the storage is
stowed and restored with it. A micro-batch owns the storages that are created while it runs: its batch, the results of
calls, and the results of operators between calls, which a dispatch mode sees. The mode also sees the arguments of these
operators. If one micro-batch has made a tensor and another one uses it (a table that a module has cached), it is
restored in time, and not stowed again. Within units the mode is off, because it costs microseconds per operator.

Note [Edits in place]
A storage that was copied to the host and then edited must be copied again. The version counters of tensors miss some
edits: a tensor that the dispatch mode makes has a counter of its own, an edit through `.data` is not counted, and
inference tensors have no counter. So each storage has its own count, which increases with every operator that writes to
any tensor in the storage. The mode sees these operators between calls. In units, where the mode is off, `Call` reports
the tensors whose versions have changed. An edit that neither of them sees is refused in the trial, which compares the
bytes (`checking`).

Note [The window]
A storage can be emptied only when its copy to the host has ended, and copies over a slow link end late. If storages
were emptied as soon as their copies end, the peak of device memory would depend on the link. So at most `IN_FLIGHT`
copies are in the *window*, in the order in which they were submitted, and a storage is emptied when its copy leaves the
window, never before. Device memory is then a function of the program alone, and a trial measures what every later step
needs.

Note [Memory of compute]
All device memory of the stash is allocated for the stream of the lane `compute`, and freed when that stream has been
told to wait for the copies that use it. So the allocator may give it to later work of that stream at once: no memory
has to wait for another stream's event (`record_stream`), and how much is reserved does not depend on how far the host
runs ahead of the device. In return, a copy to the device waits for the work that `compute` had when the copy was
submitted, which may use the same memory. That is why copies are submitted one micro-batch ahead.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from ferryman.plan.fit import IN_FLIGHT
from ferryman.relay.between_units import BetweenUnits
from ferryman.relay.kept_graph import Hold
from ferryman.relay.micro_batch import MicroBatch
from ferryman.relay.stash import OnDevice, Stash, Stashed
from ferryman.relay.tensor_identity import storages_of, version_of
from ferryman.relay.tracked_storage import Fetched, Geometry, HostCopy, Leaving, Level, TrackedStorage
from ferryman.runtime.arena import Arena
from ferryman.runtime.lanes import DeviceLane, Lane
from ferryman.runtime.marks import Mark

_SMALL = 64  # bytes; less is not worth a copy


class _OnHost:
    """A saved input of which the host has a copy."""

    def __init__(self, stash: HostStash, batch: MicroBatch, copy: HostCopy, geometry: Geometry) -> None:
        self.copy = copy
        self._stash, self._batch, self._geometry = stash, batch, geometry
        self._fetched: Fetched | None = None  # on its way to the device, for the next recall

    @property
    def source(self) -> tuple[int, int]:
        return id(self.copy), self.copy.memory.numel()

    def prefetch(self) -> None:
        if self._fetched is None:
            self._fetched = self._stash.fetch(self._batch, self.copy)

    def is_edited(self) -> bool:
        return False  # the copy was made before

    def recall(self) -> torch.Tensor | None:
        self.prefetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None
        self._stash.recalled(self._batch, self.copy, fetched)
        return self._geometry.view(fetched.use())


class _Held:
    """Storages that stay on the device while this object exists. `edits`: the count of each one's edits so far."""

    def __init__(self, stash: HostStash, edits: dict[int, int]) -> None:
        self._stash, self._edits = stash, edits
        stash.held.update(edits.keys())

    def is_edited(self) -> bool:
        return any(self._stash.edits_of(key) != edits for key, edits in self._edits.items())

    def __del__(self) -> None:
        self._stash.held.subtract(self._edits.keys())


class _HeldInput:
    """An input of a call whose graph is kept. It leaves the device only if it is edited: then the call runs again."""

    def __init__(self, on_device: OnDevice, held: _Held) -> None:
        self._on_device, self._held = on_device, held
        self._copy: _OnHost | None = None

    @property
    def source(self) -> tuple[int, int]:
        return self._on_device.source if self._copy is None else self._copy.source

    def save(self, copy: _OnHost) -> None:
        """Called before an edit."""
        self._copy = self._copy or copy

    def prefetch(self) -> None:
        if self._copy is not None:
            self._copy.prefetch()

    def is_edited(self) -> bool:
        return self._held.is_edited() or self._on_device.is_edited()

    def recall(self) -> torch.Tensor | None:
        if self._copy is not None:
            return self._copy.recall()
        return None if self.is_edited() else self._on_device.alias


class HostStash(Stash):
    """Keeps the tensors of parked micro-batches on the host, except for those that kept graphs have saved."""

    moves = True

    def __init__(self, device: torch.device, compute: Lane, h2d: Lane, d2h: Lane) -> None:
        assert isinstance(compute, DeviceLane)
        assert isinstance(h2d, DeviceLane)
        assert isinstance(d2h, DeviceLane)
        self._device = device
        self._compute, self._h2d, self._d2h = compute, h2d, d2h
        self._tracked: dict[MicroBatch, dict[int, TrackedStorage]] = {}  # by owner and by storage
        self._owners: dict[int, MicroBatch] = {}
        self._shared: dict[int, TrackedStorage] = {}  # shared by several micro-batches
        self.arena = Arena(device)  # for the copies
        self._window: deque[Leaving] = deque()  # see Note [The window]
        self._copied = Level()
        self._checks = False  # whether to compare bytes if no edit was seen
        self.held = Counter[int]()  # storages that kept graphs need on the device, and how many of them
        self._held_inputs: dict[int, list[tuple[weakref.ref[_HeldInput], Geometry]]] = {}  # by storage
        self.staying = 0  # the first micro-batches of the step, whose calls' inputs stay on the device
        # For these micro-batches, the saved inputs that the last backward used: the next one may use the same, such as
        # a mask that all blocks share.
        self._recalled: dict[MicroBatch, dict[HostCopy, Fetched]] = {}

    @property
    def peak(self) -> int:
        """The peak of bytes in copies since `reset_peak`."""
        return self._copied.peak

    def reset_peak(self) -> None:
        self._copied.peak = self._copied.now

    def track(self, batch: MicroBatch, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device != self._device:
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() >= _SMALL and storage._cdata not in self._owners and storage._cdata not in self._shared:
                tracked = TrackedStorage(tensor)  # runs an operator, which the watch sees too
                self._tracked.setdefault(batch, {})[storage._cdata] = tracked
                self._owners[storage._cdata] = batch

    def use(self, batch: MicroBatch, tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        owner = self._owners.get(key)
        if owner is None:
            return
        if owner is batch:
            tracked = self._tracked[batch][key]
            if tracked.on_device and tracked.ready is None:
                return
        else:
            tracked = self._drop(owner, key)
            self._shared[key] = tracked  # it has no owner for the rest of the step
        if not tracked.on_device:
            self._fill(tracked)
        self._follow(tracked)

    def edit(self, tensor: torch.Tensor) -> None:
        """Called before the micro-batch edits a tensor in place. A copy to the host may still be reading it."""
        key = tensor.untyped_storage()._cdata
        for held, geometry in self._held_inputs.get(key, ()):
            if (saved := held()) is not None and (owner := self._owners.get(key)) is not None:
                saved.save(_OnHost(self, owner, self._copy_of(self._tracked[owner][key]), geometry))
        self._count_edit(key)
        for tracked, copy in self._window:
            if tracked.storage()._cdata == key and copy.landed is not None:
                self._compute.follow(copy.landed)

    def edited(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._count_edit(tensor.untyped_storage()._cdata)

    def _count_edit(self, key: int) -> None:
        if (owner := self._owners.get(key)) is not None:
            self._tracked[owner][key].edits += 1
        elif key in self._shared:
            self._shared[key].edits += 1

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        self._checks = True
        try:
            yield
        finally:
            self._checks = False

    def save(self, batch: MicroBatch, tensor: torch.Tensor) -> Stashed:
        tracked = self._tracked.get(batch, {}).get(tensor.untyped_storage()._cdata)
        if tracked is None:  # the tensor is small, or on another device
            alias = tensor.detach()
            return OnDevice(alias, version_of(alias))
        return _OnHost(self, batch, self._copy_of(tracked), Geometry.of(tensor))

    def hold(self, batch: MicroBatch, tensor: torch.Tensor) -> Stashed:
        alias, key = tensor.detach(), tensor.untyped_storage()._cdata
        on_device = OnDevice(alias, version_of(alias))
        if key not in self._owners:
            return on_device
        held = _HeldInput(on_device, _Held(self, {key: self.edits_of(key)}))
        self._held_inputs.setdefault(key, []).append((weakref.ref(held), Geometry.of(tensor)))
        return held

    def hold_saved(self, storages: Collection[int]) -> Hold | None:
        return _Held(self, {key: self.edits_of(key) for key in storages})

    def edits_of(self, key: int) -> int:
        owner = self._owners.get(key)
        tracked = self._shared.get(key) if owner is None else self._tracked[owner][key]
        return 0 if tracked is None else tracked.edits

    def watch(self, batch: MicroBatch) -> contextlib.AbstractContextManager[Any]:
        return BetweenUnits(self, batch)

    def stow(self, batch: MicroBatch) -> None:
        stay = storages_of(batch.needs) if batch.number < self.staying else ()
        if (recalled := self._recalled.get(batch)) is not None:
            again = {saved.copy for saved in batch.recalls if isinstance(saved, _OnHost)}
            self._recalled[batch] = {copy: fetched for copy, fetched in recalled.items() if copy in again}
        for key, tracked in list(self._tracked.get(batch, {}).items()):
            if not tracked.is_referenced() or (batch.done and tracked.on_device):
                self._follow(self._drop(batch, key))
            elif tracked.on_device and key not in stay and not self.held[key]:
                tracked.on_device = False
                if not self._is_leaving(self._copy_of(tracked)):
                    tracked.storage().resize_(0)

    def restore(self, batch: MicroBatch) -> None:
        mine = self._tracked.get(batch, {})
        for key in storages_of(batch.needs):
            if key in mine and not mine[key].on_device:
                self._fill(mine[key])
        for saved in batch.recalls:
            saved.prefetch()

    def follow(self, batch: MicroBatch) -> None:
        for tensor in batch.needs:
            self.use(batch, tensor)  # another micro-batch may have made it: a table that a module has cached
        for tracked in self._tracked.get(batch, {}).values():
            self._follow(tracked)

    def bring_back(self) -> None:
        for tracked in [tracked for owned in self._tracked.values() for tracked in owned.values()]:
            if tracked.is_referenced() and not tracked.on_device:
                self._fill(tracked)
            self._follow(tracked)

    def _follow(self, tracked: TrackedStorage) -> None:
        """Makes compute wait for a storage that is being restored."""
        if tracked.ready is not None:
            self._compute.follow(tracked.ready)
            tracked.ready = None

    def forget(self) -> None:
        # Copies may still use memory that is freed here: see Note [Memory of compute].
        for tracked in [tracked for owned in self._tracked.values() for tracked in owned.values()]:
            if tracked.ready is not None:
                self._compute.outlast(tracked.ready)
        for _, copy in self._window:
            if copy.landed is not None:
                self._compute.outlast(copy.landed)
        self._window.clear()
        self._recalled.clear()
        self._tracked.clear()
        self._owners.clear()
        self._shared.clear()
        self._held_inputs.clear()

    def close(self) -> None:
        self.forget()
        self.arena.close()

    def _drop(self, batch: MicroBatch, key: int) -> TrackedStorage:
        del self._owners[key]
        return self._tracked[batch].pop(key)

    def recalled(self, batch: MicroBatch, copy: HostCopy, fetched: Fetched) -> None:
        """Called when a backward uses a saved input."""
        if batch.number < self.staying:
            self._recalled.setdefault(batch, {})[copy] = fetched

    def fetch(self, batch: MicroBatch, copy: HostCopy) -> Fetched:
        """Starts to bring the bytes of a copy to new device memory, if the micro-batch has not kept them there."""
        kept = self._recalled.get(batch, {}).get(copy)
        if kept is not None and not kept.is_edited:
            return kept
        flat = torch.empty(copy.memory.numel(), dtype=torch.uint8, device=self._device)
        return Fetched(flat, self._submit_fetch(copy, flat), self._compute)

    def _fill(self, tracked: TrackedStorage) -> None:
        copy = tracked.copy
        assert copy is not None, "a stowed storage has a copy"
        tracked.on_device = True
        if self._is_leaving(copy):  # the bytes are still on the device
            tracked.ready = copy.landed
            return
        tracked.storage().resize_(tracked.nbytes)
        tracked.ready = self._submit_fetch(copy, tracked.flat())

    def _submit_fetch(self, copy: HostCopy, target: torch.Tensor) -> Mark:
        """The stream of compute is current, so that `target` is memory of compute: see the note of that name."""
        assert copy.landed is not None
        copy.fetched = self._h2d.submit(
            lambda: target.copy_(copy.memory, non_blocking=True),
            after=[copy.landed, self._compute.here()],
            label="restore stash",
            nbytes=copy.memory.numel(),
        )
        return copy.fetched

    def _is_leaving(self, copy: HostCopy) -> bool:
        return any(leaving.copy is copy for leaving in self._window)

    def _leave_window(self, leaving: Leaving) -> None:
        """Waits for a copy that leaves the window, and empties the storage if the micro-batch is still parked."""
        tracked, copy = leaving
        assert copy.landed is not None
        copy.landed.wait()
        if not tracked.on_device and tracked.copy is copy:
            tracked.storage().resize_(0)

    def _copy_of(self, tracked: TrackedStorage) -> HostCopy:
        """The host's copy of the storage's current contents, which is made if there is none."""
        if tracked.copy is not None and tracked.copy.edits == tracked.edits:
            if self._checks:
                self._check_unedited(tracked, tracked.copy)
            return tracked.copy
        tracked.nbytes = tracked.storage().nbytes()  # an edit may have resized it
        piece = self.arena.take(tracked.nbytes)
        copy = tracked.copy = HostCopy(piece, tracked.edits, self.arena, self._copied)
        memory, flat = piece.bytes, tracked.flat()
        copy.landed = self._d2h.submit(
            lambda: memory.copy_(flat, non_blocking=True),
            after=[self._compute.here(), *piece.after],
            label="stow stash",
            nbytes=tracked.nbytes,
        )
        self._window.append(Leaving(tracked, copy))
        while len(self._window) > IN_FLIGHT:
            self._leave_window(self._window.popleft())
        return copy

    def _check_unedited(self, tracked: TrackedStorage, copy: HostCopy) -> None:
        assert copy.landed is not None
        copy.landed.wait()
        with self._compute.current():
            now = tracked.flat().cpu()
        if not torch.equal(now, copy.memory):
            shape, dtype = tuple(tracked.alias.shape), str(tracked.alias.dtype).removeprefix("torch.")
            raise ValueError(
                f"a tensor that the model or the loss holds between units (shape {shape}, {dtype}) is edited in a way "
                "that the engine cannot see: through .data in a unit, or by another library. With the stash on the "
                "host the edit would be lost. Edit it with torch's operators between units, or specify stash='device'"
            )
