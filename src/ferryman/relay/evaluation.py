"""The model outside steps, without gradients: units come to the device as the model calls them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ferryman.model.binding import adopt_assigned, bind, is_buffer
from ferryman.model.units import Unit

if TYPE_CHECKING:
    from ferryman.relay.driver import Relay


class Evaluation:
    """Runs on the caller's own stream: what the model returns or caches is used there."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._visited: list[Unit] | None = None  # while one runs
        self._order: list[Unit] = []  # of the last one

    @property
    def runs(self) -> bool:
        return self._visited is not None

    def expect(self, units: Sequence[Unit]) -> None:
        """The first guess at the visits to come."""
        self._order = list(units)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within, the model can be called."""
        self._visited = []
        try:
            with self._relay.bound():
                self._relay.compute.here().precede_caller()
                try:
                    yield
                    self._relay.adopt_residents()
                finally:
                    self._relay.compute.follow(self._relay.lanes.here())
        finally:
            self._order, self._visited = self._visited, None

    def call(self, unit: Unit, work: Callable[[], Any]) -> Any:
        """One unit's module."""
        assert self._visited is not None
        relay, lanes = self._relay, self._relay.lanes
        self._visited.append(unit)
        slot, ready = relay.weights.enter(unit, upcoming(self._order, self._visited))
        for mark in ready:
            mark.precede_caller()
        tensors = relay.weights.tensors(unit, slot)
        buffers = [(item, tensor) for item, tensor in tensors if is_buffer(item)]
        versions = [tensor._version for _, tensor in buffers]
        bind(tensors)
        try:
            result = work()
            for item, tensor in buffers:
                adopt_assigned(item, tensor)
            edited = [pair for pair, version in zip(buffers, versions, strict=True) if pair[1]._version != version]
            relay.write_back(edited, lanes.here())
            return result
        finally:
            bind(relay.absent[unit])
            relay.weights.leave(slot, lanes.here())


def upcoming(order: Sequence[Unit], visited: Sequence[Unit]) -> Sequence[Unit]:
    """What was visited last time after the point where this time stands."""
    at = len(visited)
    if at > len(order) or order[at - 1] is not visited[-1]:
        # Another way than last time: go on from the next visit to this unit, if there is one.
        later = [i for i in range(at - 1, len(order)) if order[i] is visited[-1]]
        at = later[0] + 1 if later else len(order)
    return order[at:]
