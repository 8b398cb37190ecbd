"""The server: takes gradients in and updates weights, on the host lane, beside the sweeps.

*Eager*: a subgroup of gradients is used as soon as it has landed, beside the backward of the units before; a few small
buffers are enough. *Deferred*: gradients wait until all have landed and their norm is known; then units are
updated in forward order, beside the next forward, each before it is fetched again. Where nothing needs the whole
gradient first, updates are eager.

Gradients may also be *kept*: `forward_backward` by itself leaves them in float32 for the user to read, edit or add to,
and `update` takes them from there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ferryman.lanes import Lanes, Mark
from ferryman.pinned import PinnedMemory
from ferryman.server import kernels
from ferryman.server.panel import Panel
from ferryman.server.precision import Scale
from ferryman.server.state import Order
from ferryman.server.store import RamStore
from ferryman.units import GRADIENT, Item, Unit, landing_dtype, overlap, trained_elements, trained_offsets

# Elements of a subgroup, and how many subgroups may be on their way.
_SUBGROUP, _BUFFERS = 1 << 20, 4


class NonFiniteError(ValueError):
    """A gradient or a loss is inf or NaN."""


@dataclass(frozen=True)
class Settings:
    """What the user has asked for."""

    max_grad_norm: float | None = None
    on_nonfinite: str = "raise"
    deferred: bool = False
    threads: int | None = None


def is_eager(settings: Settings, scale: Scale) -> bool:
    """Whether nothing needs the whole gradient before the first weight changes."""
    waits = settings.deferred or settings.max_grad_norm is not None or settings.on_nonfinite == "skip"
    return not (waits or scale.moves)


class Subgroup(NamedTuple):
    """A stretch of a unit's trained elements."""

    start: int
    stop: int


@dataclass
class _Buffer:
    memory: PinnedMemory
    free: Mark | None = None


@dataclass(frozen=True)
class _Source:
    """The gradients of one unit, on the host."""

    flat: torch.Tensor
    items: tuple[Item, ...]  # those that have a gradient
    scale: float  # by which they are too large


class Server:
    """The host's side of a step."""

    def __init__(
        self, store: RamStore, panel: Panel | None, lanes: Lanes, device: torch.device, settings: Settings, scale: Scale
    ) -> None:
        self.store = store
        self.scale = scale
        self._panel = panel
        self._device = device
        self._host = lanes.host("host")
        self._settings = settings
        self._ready: dict[Unit, Mark] = {}  # the end of the unit's last update
        self._ring: list[_Buffer] = []
        self._turn = 0
        self._loss_memory: list[PinnedMemory] = []
        # Of the step that runs.
        self._orders: dict[Unit, list[Order]] = {}
        self._sources: dict[Unit, _Source] = {}  # gradients that have landed, or are on their way
        self._sums: dict[Item, float] = {}  # squares, as they stand on the host
        self._seen: list[Mark] = []  # the ends of looks at gradients
        self._losses: list[tuple[torch.Tensor, Mark]] = []
        self._begun: set[Unit] = set()  # units whose updates were carried out, or begun
        # Of the last one.
        self._norm: float | None = None
        self.has_stepped = False

    @property
    def updates(self) -> bool:
        """Whether it has an optimizer to follow."""
        return self._panel is not None

    @property
    def is_eager(self) -> bool:
        return self.updates and is_eager(self._settings, self.scale)

    def ready(self, unit: Unit) -> Mark | None:
        """After which the unit's weights are those of the last update."""
        return self._ready.get(unit)

    def settle(self) -> None:
        """Blocks until all updates are done."""
        self._host.wait()

    # Gradients come in.

    def subgroups(self, unit: Unit) -> Iterator[Subgroup]:
        total = trained_elements(unit)
        step = total if self.store.state(unit).is_whole else _SUBGROUP
        for start in range(0, total, max(step, 1)):
            yield Subgroup(start, min(start + step, total))

    def receive(self, unit: Unit, subgroup: Subgroup) -> tuple[torch.Tensor, list[Mark]]:
        """Where a subgroup lands, and what must be over before."""
        dtype = landing_dtype(unit)
        if self.is_eager:
            nbytes = (subgroup.stop - subgroup.start) * dtype.itemsize
            buffer = self._next_buffer(nbytes)
            target = buffer.memory.bytes[:nbytes].view(dtype)
            return target, [buffer.free] if buffer.free is not None else []
        before = self._ready.get(unit)  # the update that used what was there
        flat = self.store.gradients(unit, dtype).view(dtype)
        return flat[subgroup.start : subgroup.stop], [before] if before is not None else []

    def landed(self, unit: Unit, subgroup: Subgroup, target: torch.Tensor, mark: Mark, items: Collection[Item]) -> None:
        """A subgroup is on its way; its copy ends with the mark."""
        if not self.is_eager:
            if subgroup.stop == trained_elements(unit):
                flat = self.store.gradients(unit, target.dtype).view(target.dtype)
                scale = self.scale.value if target.dtype != GRADIENT else 1.0
                self._look_at(unit, _Source(flat, tuple(items), scale), mark)
            return
        self._check_losses()
        if unit not in self._orders:
            self._orders[unit] = self.store.state(unit).order(items)
        orders, buffer = self._orders[unit], self._ring[self._turn]
        look = functools.partial(self._add_squares, unit, target, subgroup.start, items, raises=True)
        self._seen.append(self._host.submit(look, after=[mark], label=f"look at {unit.name}", reads=[target]))
        buffer.free = self._submit_update(unit, orders, target, subgroup.start, 1.0)

    def receive_loss(self) -> torch.Tensor:
        """Where the next micro-batch's loss goes."""
        number = len(self._losses)
        if number == len(self._loss_memory):
            self._loss_memory.append(PinnedMemory(GRADIENT.itemsize, self._device))
        return self._loss_memory[number].bytes.view(GRADIENT)

    def expect_loss(self, loss: torch.Tensor, mark: Mark) -> None:
        """It will be there after the mark."""
        self._losses.append((loss, mark))

    def keep(self, unit: Unit, items: Collection[Item]) -> None:
        """The unit's gradients were added up in float32 and left for the user."""
        self._sources[unit] = _Source(self.store.gradients(unit).view(GRADIENT), tuple(items), 1.0)

    # Updates.

    def finish(self, units: Iterable[Unit], kept: Mapping[Unit, Collection[Item]]) -> None:
        """Gradients are complete: updates what has not been, in the order given.

        `kept`: units whose gradients were left in float32 and are used now.
        """
        self._check_losses()
        for unit, items in kept.items():
            self.keep(unit, items)
            self._look_at(unit, self._sources[unit], None)
        for mark in self._seen:
            mark.wait()
        finite = math.isfinite(sum(self._sums.values()))
        self._norm = self._norm_of_sums()
        if not finite and not self.scale.moves and self._settings.on_nonfinite == "raise":
            broken = next(item.name for item, total in self._sums.items() if not math.isfinite(total))
            raise _non_finite(broken, self.what_has_changed())
        self.scale.went(finite=finite)
        if finite:
            clip = self._clip_factor(self._norm)
            for unit in units:
                if (source := self._sources.get(unit)) is not None:
                    orders = self.store.state(unit).order(source.items)
                    self._submit_update(unit, orders, source.flat, 0, clip / source.scale)
        self.forget_gradients()

    @property
    def grad_norm(self) -> float | None:
        """Of all gradients, before clipping: of those that are kept as they are now, else of the last update."""
        if self._sources:
            self.settle()
            sums = {}
            for unit, source in self._sources.items():
                sums.update(_squares(unit, source.flat, 0, source.items, self._settings.threads))
            return math.sqrt(sum(sums.values())) if math.isfinite(sum(sums.values())) else math.nan
        return self._norm

    def what_has_changed(self) -> str:
        """In the step that runs, for an error that ends it."""
        if not self._begun:
            return "No weight was changed"
        return f"{len(self._begun)} units had been updated already, eagerly; deferred=True waits for all gradients"

    def forget_unit(self, unit: Unit) -> None:
        """It has left the model."""
        self._sources.pop(unit, None)
        self._ready.pop(unit, None)

    def recover(self) -> None:
        """After a failure, when no lane has work any more: what was not done is not waited for, and does not count."""
        for unit, orders in self._orders.items():
            if unit not in self._begun:
                self.store.state(unit).undo(orders)
        self.forget_gradients()
        self._ready.clear()
        for buffer in self._ring:
            buffer.free = None

    def close(self) -> None:
        for memory in (*(buffer.memory for buffer in self._ring), *self._loss_memory):
            memory.close()

    def forget_gradients(self) -> None:
        self._orders.clear()
        self._begun = set()  # another one: updates that are still under way belong to the step that asked for them
        self._sources.clear()
        self._sums.clear()
        self._seen.clear()
        self._losses.clear()

    def _norm_of_sums(self) -> float:
        scales = {item: source.scale for source in self._sources.values() for item in source.items}
        return math.sqrt(sum(total / scales.get(item, 1.0) ** 2 for item, total in self._sums.items()))

    def _clip_factor(self, norm: float) -> float:
        """As torch.nn.utils.clip_grad_norm_ does it."""
        largest = self._settings.max_grad_norm
        return 1.0 if largest is None else min(1.0, largest / (norm + 1e-6))

    def _look_at(self, unit: Unit, source: _Source, mark: Mark | None) -> None:
        self._sources[unit] = source
        look = functools.partial(self._add_squares, unit, source.flat, 0, source.items, raises=False)
        after = [] if mark is None else [mark]
        self._seen.append(self._host.submit(look, after=after, label=f"look at {unit.name}", reads=[source.flat]))

    def _add_squares(
        self, unit: Unit, gradients: torch.Tensor, start: int, items: Collection[Item], *, raises: bool
    ) -> None:
        for item, total in _squares(unit, gradients, start, items, self._settings.threads).items():
            if raises and not math.isfinite(total):
                raise _non_finite(item.name, self.what_has_changed())
            self._sums[item] = self._sums.get(item, 0.0) + total

    def _submit_update(
        self, unit: Unit, orders: Sequence[Order], gradients: torch.Tensor, start: int, factor: float
    ) -> Mark:
        state, threads, begun = self.store.state(unit), self._settings.threads, self._begun
        self.has_stepped = True

        def update() -> None:
            begun.add(unit)
            state.update(orders, gradients, start, factor, threads)

        self._ready[unit] = self._host.submit(
            update,
            label=f"update {unit.name}",
            nbytes=gradients.nbytes,
            reads=[gradients],
            writes=[self.store.weights(unit)],
        )
        return self._ready[unit]

    def _check_losses(self) -> None:
        """Before the first weight changes: gradients of a loss that is not finite are not, either."""
        if not self._losses or self._settings.on_nonfinite != "raise" or self.scale.moves:
            return
        losses, self._losses = self._losses, []
        tensors = [loss for loss, _ in losses]

        def check() -> None:
            values = [float(tensor) for tensor in tensors]
            if not all(math.isfinite(value) for value in values):
                number = next(i for i, value in enumerate(values) if not math.isfinite(value))
                raise NonFiniteError(
                    f"the loss of micro-batch {number} is {values[number]}. No weight was changed; "
                    "on_nonfinite='skip' passes such steps over"
                )

        marks = [mark for _, mark in losses]
        self._seen.append(self._host.submit(check, after=marks, label="look at losses", reads=tensors))

    def _next_buffer(self, nbytes: int) -> _Buffer:
        self._turn = (self._turn + 1) % _BUFFERS
        while len(self._ring) < _BUFFERS:
            self._ring.append(_Buffer(PinnedMemory(nbytes, self._device)))
        buffer = self._ring[self._turn]
        if buffer.memory.bytes.nbytes < nbytes:
            if buffer.free is not None:
                buffer.free.wait()
            buffer.memory.close()
            buffer.memory = PinnedMemory(nbytes, self._device)
        return buffer


def _non_finite(name: str, then: str) -> NonFiniteError:
    return NonFiniteError(
        f"the gradient of {name!r} is not finite (inf or NaN). {then}. Lower the learning rate, look at the data, or "
        "pass such steps over: on_nonfinite='skip'"
    )


def _squares(
    unit: Unit, gradients: torch.Tensor, start: int, items: Collection[Item], threads: int | None
) -> dict[Item, float]:
    """The sum of squares of each tensor's gradient, as far as it is in a stretch that begins at `start`."""
    offsets = trained_offsets(unit)
    shared = {item: overlap(item, offsets[item], start, gradients.numel()) for item in items}
    return {
        item: kernels.sum_of_squares(gradients[both[1]], threads=threads)
        for item, both in shared.items()
        if both is not None
    }
