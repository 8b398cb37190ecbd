"""Updates on the host: a subgroup at a time, on the host lane."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ferryman.model.units import Item, Subgroup
from ferryman.runtime.lanes import Lane
from ferryman.runtime.marks import Mark
from ferryman.server.state import UpdateArgs
from ferryman.server.store import RamStore
from ferryman.server.update_log import UpdateLog


class HostUpdates:
    """The host's part of the optimizer.

    `returns_weights`: where weights stay on the device, each update is copied there at once. With several ranks they
    are fetched instead, when all ranks have updated their parts.
    """

    def __init__(
        self, store: RamStore, lane: Lane, log: UpdateLog, threads: int | None, *, returns_weights: bool
    ) -> None:
        self._store, self._lane, self._log, self._threads = store, lane, log, threads
        self._returns_weights = returns_weights

    def update(
        self,
        subgroup: Subgroup,
        args: Sequence[UpdateArgs],
        gradient: torch.Tensor,
        factor: float,
        only: Collection[Item] | None = None,
    ) -> Mark:
        """One step of a subgroup; returns its end. The gradient is multiplied by `factor`.

        `only`: of the tensors in `args`, just those are updated that are listed here when the update runs.
        """
        unit, log = subgroup.unit, self._log
        state, begun = self._store.state(unit), log.step.requested.begun
        memory = state.memory_of(subgroup, self._store.weights(unit))

        def update() -> None:
            begun.add(unit)
            state.update(args, gradient, subgroup.start, factor, self._threads, only)

        mark = self._lane.submit(
            update,
            after=log.before_update(subgroup),
            label=f"update {unit.name}",
            nbytes=gradient.nbytes,
            reads=[gradient],
            writes=memory.tensors(),
        )
        log.add_host_update(subgroup, mark)
        if self._returns_weights and log.weights is not None:
            returned = log.weights.refresh(unit, memory.weights, mark)
            if returned is not None:
                log.add_return(subgroup, returned, sum(span.host.nbytes for span in memory.weights))
        return mark
