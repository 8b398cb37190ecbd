"""Berths: device memory in which one subgroup is updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ferryman.model.spans import Span
from ferryman.model.units import GRADIENT, Subgroup
from ferryman.runtime.marks import Mark
from ferryman.server.state import SubgroupMemory


@dataclass
class Berth:
    """Bytes on the device, and the mark after which they may be overwritten."""

    memory: torch.Tensor
    free: Mark | None = None  # None: nothing uses it
    # For a berth that belongs to one subgroup, whose state stays on the device:
    has_state: bool = False  # an update has run there, so the host's copy of the state is out of date
    will_have_state: bool = False  # an update was submitted, so the next one need not copy the state in


class BerthAreas(NamedTuple):
    """The parts of a berth, in bytes, while one subgroup is updated there."""

    weights: torch.Tensor
    held: torch.Tensor | None  # the unit's memory, if its weights stay on the device: then they are updated there
    rest: list[torch.Tensor]  # as in `SubgroupMemory`
    gradient: torch.Tensor

    @classmethod
    def of(
        cls, berth: Berth, subgroup: Subgroup, rest: Sequence[torch.Tensor], held: torch.Tensor | None
    ) -> BerthAreas:
        """Lays a subgroup out in a berth: weights, `rest`, gradient."""
        end = subgroup.size * subgroup.unit.weight_itemsize
        weights, areas = berth.memory[:end], []
        for part in rest:
            areas.append(berth.memory[end : end + part.nbytes])
            end += part.nbytes
        return cls(weights, held, areas, berth.memory[end : end + subgroup.size * GRADIENT.itemsize])

    def weights_at(self, at: int, offset: int, nbytes: int) -> torch.Tensor:
        """Weights on the device, by their place as in a `Span`."""
        return self.weights[at : at + nbytes] if self.held is None else self.held[offset : offset + nbytes]

    def weights_of(self, span: Span) -> torch.Tensor:
        return self.weights_at(span.at, span.offset, span.host.nbytes)

    def weights_out(self, memory: SubgroupMemory) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of the weights to the host, each as target and source."""
        return [(span.host, self.weights_of(span)) for span in memory.weights]

    def rest_out(self, memory: SubgroupMemory) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of everything else to the host."""
        return list(zip(memory.rest, self.rest, strict=True))
