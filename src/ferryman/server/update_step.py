"""The server's state of one step: made when the step begins, dropped when its gradients are used or discarded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ferryman.model.units import Item, Subgroup, Unit
from ferryman.runtime.marks import Mark
from ferryman.server.berths import Berth
from ferryman.server.state import UpdateArgs
from ferryman.server.stats import StepRecord


class WaitingGradients(NamedTuple):
    """A unit's gradients on the host, which wait for the end of the step.

    Those of some subgroups may wait on the device instead, as `DeviceGradient`.
    """

    flat: torch.Tensor
    items: Collection[Item]  # the tensors that have a gradient
    scale: float  # the factor by which they are too large
    low: int = 0  # the element of the unit at which `flat` begins
    is_left_for_user: bool = False  # in float32, from `forward_backward`

    def of(self, subgroup: Subgroup) -> torch.Tensor:
        return self.flat[subgroup.start - self.low : subgroup.stop - self.low]


class SubgroupUpdate(NamedTuple):
    """One step of a subgroup, on the host or on the device. The gradient is flat, and is multiplied by `factor`.

    `only`: of the tensors in `args`, just those are updated that are listed here when the update runs (on the host).
    """

    subgroup: Subgroup
    args: Sequence[UpdateArgs]
    gradient: torch.Tensor
    factor: float
    after: Sequence[Mark] = ()
    only: Collection[Item] | None = None


class DeviceGradient(NamedTuple):
    """A subgroup's gradient that waits on the device."""

    gradient: torch.Tensor
    berth: Berth  # where it waits; free again after its use


class RequestedUpdates(NamedTuple):
    """The updates that a step has submitted to lanes, for as long as they may fail."""

    args: dict[Unit, list[UpdateArgs]]
    begun: set[Unit]  # units of which some update has begun; the lanes add to it

    @classmethod
    def none(cls) -> RequestedUpdates:
        return cls({}, set())


@dataclass
class UpdateStep:
    """What belongs to one step."""

    record: StepRecord
    requested: RequestedUpdates = field(default_factory=RequestedUpdates.none)
    waiting: dict[Unit, WaitingGradients] = field(default_factory=dict)
    waiting_on_device: dict[Subgroup, DeviceGradient] = field(default_factory=dict)
