"""Checks of losses and gradients before they change weights: are they finite, and what is their global norm?"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from ferryman.model.units import GRADIENT, Item, Subgroup, Unit, label_of, overlap
from ferryman.runtime.arena import Allocation, Arena
from ferryman.runtime.lanes import Lane
from ferryman.runtime.marks import Mark
from ferryman.server import kernels
from ferryman.server.device_updates import SquaredSums


class NonFiniteError(ValueError):
    """A gradient or a loss is inf or NaN. `agreed`: all ranks have raised this together, and can go on."""

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


class HostGradient(NamedTuple):
    """A subgroup's gradient on the host."""

    subgroup: Subgroup
    gradient: torch.Tensor  # flat
    items: Collection[Item]  # the tensors that have a gradient


DescribeChanges = Callable[[], str]  # which weights this step has changed already, for an error


class GradientChecks:
    """Checks of the current step.

    Gradients on the host are checked on the host lane, before they are used there. Sums that the device has computed
    are checked on a lane of their own: the host lane may be far behind.
    """

    def __init__(self, host: Lane, checks: Lane, arena: Arena, threads: int | None) -> None:
        self._host, self._checks = host, checks
        self._arena = arena
        self._threads = threads
        self._loss_memory: list[Allocation] = []
        self._sums: dict[Subgroup, dict[Item, float]] = {}  # sums of squares
        self._parts: dict[Subgroup, tuple[list[Item], GradientParts]] = {}  # for the last check of each, and its items
        self._marks: list[Mark] = []
        self._losses: list[tuple[torch.Tensor, Mark]] = []
        self.losses_checked: list[Mark] = []

    def receive_loss(self) -> torch.Tensor:
        """Pinned memory for the next micro-batch's loss."""
        number = len(self._losses)
        if number == len(self._loss_memory):
            self._loss_memory.append(self._arena.take(GRADIENT.itemsize))
        return self._loss_memory[number].bytes.view(GRADIENT)

    def expect_loss(self, loss: torch.Tensor, mark: Mark) -> None:
        """The loss will be in `receive_loss`'s memory after the mark."""
        self._losses.append((loss, mark))

    def check_losses(self) -> None:
        """Checks the losses received since the last call, before the first weight changes.

        If a loss is not finite, neither are its gradients, and the error should name the loss.
        """
        if not self._losses:
            return
        losses, self._losses = self._losses, []
        tensors = [loss for loss, _ in losses]

        def check() -> None:
            values = [float(tensor) for tensor in tensors]
            if not all(math.isfinite(value) for value in values):
                number = next(i for i, value in enumerate(values) if not math.isfinite(value))
                raise NonFiniteError(
                    f"the loss of micro-batch {number} is {values[number]}. No weight was changed. "
                    "on_nonfinite='skip' skips such steps"
                )

        marks = [mark for _, mark in losses]
        self.losses_checked = [self._host.submit(check, after=marks, label="check losses", reads=tensors)]
        self._marks += self.losses_checked

    def check_on_host(
        self,
        gradients: Sequence[HostGradient],
        after: Collection[Mark],
        describe_changes: DescribeChanges | None = None,
    ) -> Mark:
        """Sums the squares of gradients on the host, after the marks. Returns the mark of the sums.

        With `describe_changes`, a gradient that is not finite raises an error, which cancels work after that mark.
        """

        def check() -> None:
            for subgroup, gradient, items in gradients:
                wanted = list(items)
                known, parts = self._parts.get(subgroup, ((), None))
                if parts is None or known != wanted:
                    parts = GradientParts.of(subgroup.unit, wanted, subgroup.start, subgroup.size)
                    self._parts[subgroup] = wanted, parts
                self._add(subgroup, parts.squares(gradient, self._threads), describe_changes)

        label = f"check {label_of([gradient.subgroup for gradient in gradients])}"
        mark = self._host.submit(check, after=after, label=label, reads=[each.gradient for each in gradients])
        self._marks.append(mark)
        return mark

    def check_sums(
        self, subgroup: Subgroup, squared: SquaredSums, describe_changes: DescribeChanges | None = None
    ) -> Mark:
        """As `check_on_host`, for a gradient whose squares the device has summed."""

        def check() -> None:
            found = dict(zip(squared.items, squared.sums.tolist(), strict=True))
            self._add(subgroup, found, describe_changes)

        label = f"check {subgroup.unit.name}"
        mark = self._checks.submit(check, after=[squared.landed], label=label, reads=[squared.sums])
        self._marks.append(mark)
        return mark

    def wait(self) -> None:
        """Blocks until all checks are done."""
        for mark in self._marks:
            mark.wait()

    def nonfinite_item(self) -> Item | None:
        """A tensor whose gradient is not finite; None if all are."""
        found = (item for sums in self._sums.values() for item, part in sums.items() if not math.isfinite(part))
        return next(found, None)

    def norm(self, scales: Mapping[Item, float]) -> float:
        """The global norm, whatever the order of checks. `scales`: the factors by which gradients are too large."""
        sums = self._sums.values()
        parts = [part / scales.get(item, 1.0) ** 2 for found in sums for item, part in found.items()]
        return math.sqrt(math.fsum(parts)) if all(map(math.isfinite, parts)) else math.nan

    def serve(self) -> None:
        """Called when the subgroups have changed."""
        self._parts.clear()

    def forget(self) -> None:
        """Drops the results of the last step."""
        self._sums.clear()
        self._marks.clear()
        self._losses.clear()
        self.losses_checked.clear()

    def _add(self, subgroup: Subgroup, found: dict[Item, float], describe_changes: DescribeChanges | None) -> None:
        if describe_changes is not None and not all(map(math.isfinite, found.values())):
            item = next(item for item, total in found.items() if not math.isfinite(total))
            raise nonfinite_error(item, describe_changes())
        self._sums[subgroup] = found


def nonfinite_error(item: Item | None, changes: str, *, agreed: bool = False) -> NonFiniteError:
    """`item`: the tensor whose gradient is not finite; None if only another rank knows which one it is."""
    which = "a parameter, which another rank names," if item is None else repr(item.name)
    return NonFiniteError(
        f"the gradient of {which} is not finite (inf or NaN). {changes}. Lower the learning rate, check the data, "
        "or skip such steps: on_nonfinite='skip'",
        agreed=agreed,
    )


class GradientParts(NamedTuple):
    """The parts of tensors in a flat gradient."""

    items: list[Item]
    ranges: kernels.Ranges

    @classmethod
    def of(cls, unit: Unit, items: Collection[Item], start: int, size: int) -> GradientParts:
        """Of the elements of a unit from `start` on."""
        offsets = unit.trained_offsets
        found = {item: overlap(item, offsets[item], start, size) for item in items}
        shared = {item: both[1] for item, both in found.items() if both is not None}
        return cls(list(shared), kernels.Ranges(list(shared.values())))

    def squares(self, gradient: torch.Tensor, threads: int | None) -> dict[Item, float]:
        """The sum of squares of each part."""
        return dict(zip(self.items, kernels.sums_of_squares(gradient, self.ranges, threads=threads), strict=True))
