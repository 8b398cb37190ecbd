"""Updates on the host: a subgroup at a time, on the host lane."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ferryman.model.units import label_of
from ferryman.runtime.lanes import Lane
from ferryman.runtime.marks import Mark
from ferryman.server.store import RamStore
from ferryman.server.update_log import UpdateLog
from ferryman.server.update_step import SubgroupUpdate

T = TypeVar("T")

_TOGETHER = 1 << 18  # elements: less than half a millisecond of work, so nobody waits long for the others


def grouped(work: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups neighbors that are so small that one piece of work for all of them is better than one for each.
    `size_of`: elements."""
    group, size = list[T](), 0
    for each in work:
        more = size_of(each)
        if group and size + more > _TOGETHER:
            yield group
            group, size = [], 0
        group.append(each)
        size += more
    if group:
        yield group


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

    def update(self, updates: Sequence[SubgroupUpdate]) -> Mark:
        """Makes these updates as one piece of work; returns its end."""
        log, store = self._log, self._store
        begun = log.step.requested.begun
        states = [store.state(each.subgroup.unit) for each in updates]
        memories = [
            state.memory_of(each.subgroup, store.weights(each.subgroup.unit))
            for each, state in zip(updates, states, strict=True)
        ]

        def update() -> None:
            for each, state in zip(updates, states, strict=True):
                begun.add(each.subgroup.unit)
                state.update(each.args, each.gradient, each.subgroup.start, each.factor, self._threads, each.only)

        mark = self._lane.submit(
            update,
            after=[mark for each in updates for mark in (*each.after, *log.before_update(each.subgroup))],
            label=f"update {label_of([each.subgroup for each in updates])}",
            nbytes=sum(each.gradient.nbytes for each in updates),
            reads=[each.gradient for each in updates],
            writes=[tensor for memory in memories for tensor in memory.tensors()],
        )
        log.add_host_updates([each.subgroup for each in updates], mark)
        if self._returns_weights and log.weights is not None:
            for each, memory in zip(updates, memories, strict=True):
                returned = log.weights.refresh(each.subgroup.unit, memory.weights, mark)
                if returned is not None:
                    log.add_return(each.subgroup, returned, sum(span.host.nbytes for span in memory.weights))
        return mark
