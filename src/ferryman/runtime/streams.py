"""All lanes of an engine are made here.

A lane is made when it is first used, so an engine has only the lanes that its settings need: a trace shows one row per
lane.

Note [Eight streams]
A GPU has eight hardware queues, unless its driver is told otherwise. With more streams, some share a queue, and work in
one waits for unrelated work in another. So an engine has at most eight streams, and `norms` shares that of `update`.
Lanes on the host are threads and do not count. While a step runs, the caller's own stream has no work.

Note [Priorities]
Priorities of streams apply to kernels, not to copies, so only `compute` is urgent: updates on the device take what
it leaves. Copies are served in the order in which they become ready; fetches are cut into pieces, so that no other copy
waits for long (`relay/weight_slots.py`, Note [Pieces]).
"""

from __future__ import annotations

import functools

from ferryman.runtime.lanes import Lane, Lanes


class Streams:
    """The lanes of one engine. Lanes overlap with each other, except where a mark orders them."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes

    # The relay's lanes.

    @functools.cached_property
    def compute(self) -> Lane:
        """Forward and backward of units, and the user's code between them. Every other lane overlaps with this one."""
        return self.lanes.device("compute", urgent=True)

    @functools.cached_property
    def h2d(self) -> Lane:
        """Weights to the device: the next unit is fetched while `compute` serves the current one."""
        return self.lanes.device("h2d")

    @functools.cached_property
    def d2h(self) -> Lane:
        """Gradients to the host: a unit's are flushed while `compute` serves the next one and `h2d` fetches."""
        return self.lanes.device("d2h")

    # The stash has its own lanes: `h2d` and `d2h` sometimes wait for the host, and `compute` must not wait for that.

    @functools.cached_property
    def stash_in(self) -> Lane:
        """Activations of the next micro-batch to the device, while `compute` serves the current one."""
        return self.lanes.device("stash in")

    @functools.cached_property
    def stash_out(self) -> Lane:
        """Activations of the last micro-batch to the host, while `compute` serves the current one."""
        return self.lanes.device("stash out")

    # The server's lanes.

    @functools.cached_property
    def host(self) -> Lane:
        """Updates and checks of gradients on the host, while the device runs forward and backward."""
        return self.lanes.host("host")

    @functools.cached_property
    def checks(self) -> Lane:
        """Results of checks on the device. Separate from `host`, which may have a long queue."""
        return self.lanes.host("checks")

    @functools.cached_property
    def state_in(self) -> Lane:
        """Optimizer state to the device, while `update` works on another subgroup and `state_out` returns a third."""
        return self.lanes.device("state in")

    @functools.cached_property
    def update(self) -> Lane:
        """Updates on the device, in parallel with `host`. `apart`: launching them would block the submitting thread."""
        return self.lanes.device("update", apart=True)

    @functools.cached_property
    def state_out(self) -> Lane:
        """Updated weights and optimizer state to the host, while `state_in` brings the next subgroup."""
        return self.lanes.device("state out")

    @functools.cached_property
    def norms(self) -> Lane:
        """Norms of gradients on the device, while `compute` serves the next unit. A lane of its own, because `update`
        waits until the host has checked the norms; on the same stream, because both are kernels for updates."""
        return self.lanes.device("norms", apart=True, beside=self.update)

    @functools.cached_property
    def exchange(self) -> Lane:
        """Gradients to the ranks that own them, in parallel with the backward and the updates on `host`."""
        return self.lanes.host("exchange")

    @functools.cached_property
    def share(self) -> Lane:
        """Updated weights from their owners to all ranks, while `exchange` sends gradients of other units."""
        return self.lanes.host("share")
