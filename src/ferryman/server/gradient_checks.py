"""Looks at losses and gradients before they change anything: are they finite, and what is the norm of all?"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import torch

from ferryman.model.units import GRADIENT, Item, Subgroup, Unit, overlap, trained_offsets
from ferryman.runtime.lanes import Lane
from ferryman.runtime.marks import Mark
from ferryman.runtime.pinned import PinnedMemory
from ferryman.server import kernels
from ferryman.server.device_updates import Look


class NonFiniteError(ValueError):
    """A gradient or a loss is inf or NaN. `agreed`: all ranks have found it together, and can go on."""

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


Consequence = Callable[[], str]  # what has changed already, for an error


class GradientChecks:
    """Of one step at a time. Gradients on the host are looked at in the host's lane, before their update there.

    What is found on the device comes over a lane of its own: the host's may be far behind.
    """

    def __init__(self, host: Lane, checks: Lane, device: torch.device, threads: int | None) -> None:
        self._host, self._checks = host, checks
        self._device = device
        self._threads = threads
        self._loss_memory: list[PinnedMemory] = []
        self._sums: dict[tuple[Item, int], float] = {}  # squares, as they stand, by tensor and stretch of its unit
        self._marks: list[Mark] = []
        self._losses: list[tuple[torch.Tensor, Mark]] = []
        self.losses_checked: list[Mark] = []

    def receive_loss(self) -> torch.Tensor:
        """Where the next micro-batch's loss goes."""
        number = len(self._losses)
        if number == len(self._loss_memory):
            self._loss_memory.append(PinnedMemory(GRADIENT.itemsize, self._device))
        return self._loss_memory[number].bytes.view(GRADIENT)

    def expect_loss(self, loss: torch.Tensor, mark: Mark) -> None:
        """It will be there after the mark."""
        self._losses.append((loss, mark))

    def check_losses(self) -> None:
        """Before the first weight changes: gradients of a loss that is not finite are not, either."""
        if not self._losses:
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
        self.losses_checked = [self._host.submit(check, after=marks, label="look at losses", reads=tensors)]
        self._marks += self.losses_checked

    def on_host(
        self,
        subgroup: Subgroup,
        gradient: torch.Tensor,
        items: Collection[Item],
        after: Collection[Mark],
        consequence: Consequence | None = None,
    ) -> Mark:
        """At a gradient on the host. With a consequence, it raises if that is not finite."""

        def look() -> None:
            found = squares(subgroup.unit, gradient, subgroup.start, items, self._threads)
            self._take(subgroup, found, consequence)

        mark = self._host.submit(look, after=after, label=f"look at {subgroup.unit.name}", reads=[gradient])
        self._marks.append(mark)
        return mark

    def on_device(self, subgroup: Subgroup, look: Look, consequence: Consequence | None = None) -> Mark:
        """At what a look on the device has found."""

        def check() -> None:
            self._take(subgroup, dict(zip(look.items, look.sums.tolist(), strict=True)), consequence)

        label = f"check {subgroup.unit.name}"
        mark = self._checks.submit(check, after=[look.landed], label=label, reads=[look.sums])
        self._marks.append(mark)
        return mark

    def wait(self) -> None:
        """Blocks until all has been looked at."""
        for mark in self._marks:
            mark.wait()

    def broken(self) -> Item | None:
        """A tensor whose gradient is not finite."""
        return next((item for (item, _), part in self._sums.items() if not math.isfinite(part)), None)

    def norm(self, scales: Mapping[Item, float]) -> float:
        """Of all gradients, of which some are too large by a factor; the same in whatever order they were seen."""
        parts = [part / scales.get(item, 1.0) ** 2 for (item, _), part in self._sums.items()]
        return math.sqrt(math.fsum(parts)) if all(map(math.isfinite, parts)) else math.nan

    def forget(self) -> None:
        self._sums.clear()
        self._marks.clear()
        self._losses.clear()
        self.losses_checked.clear()

    def close(self) -> None:
        for memory in self._loss_memory:
            memory.close()

    def _take(self, subgroup: Subgroup, found: Mapping[Item, float], consequence: Consequence | None) -> None:
        for item, total in found.items():
            if consequence is not None and not math.isfinite(total):
                raise non_finite(item, consequence())
            self._sums[item, subgroup.start] = total


def non_finite(item: Item | None, then: str, *, agreed: bool = False) -> NonFiniteError:
    """None: another rank knows which it is."""
    which = "a parameter, which another rank names," if item is None else repr(item.name)
    return NonFiniteError(
        f"the gradient of {which} is not finite (inf or NaN). {then}. Lower the learning rate, look at the data, "
        "or pass such steps over: on_nonfinite='skip'",
        agreed=agreed,
    )


def squares(
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
