"""A short measurement of host, device and link, at the start. From then on rates follow what is observed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ferryman.model.units import GRADIENT, Unit
from ferryman.plan.rates import Rates
from ferryman.plan.staging import Staging
from ferryman.server import kernels
from ferryman.server.device_updates import DeviceUpdates
from ferryman.server.kernels import Piece
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.rules import TIMING_NUMBERS, Rule

_MAX_ELEMENTS = 1 << 18  # enough to measure a rate, few enough to take milliseconds
_REPEATS = 2  # the first also warms up; the fastest counts


def measure(
    device_updates: DeviceUpdates,
    staging: Staging,
    units: Sequence[Unit],
    optimizer_view: OptimizerView | None,
    threads: int | None,
) -> Rates | None:
    """The rates of host, device and link; None if the device has nothing to update, or no memory for it."""
    able = [unit for unit in units if staging.state_itemsize(unit) is not None and unit.trained_elements]
    if not able or optimizer_view is None:
        return None
    rule = optimizer_view.rule(able[0].trained[0])
    assert rule is not None, "only a rule can be carried out on a device"
    largest = max(unit.trained_elements for unit in able)
    count = min(_MAX_ELEMENTS, staging.subgroup, largest)
    probes = device_updates.probe(rule, count)
    if probes is None:
        return None
    copy_in, update, copy_out = probes
    nbytes = count * (rule.state_itemsize + GRADIENT.itemsize)
    return Rates(
        host=count / _fastest(host_update(rule, count, threads)),
        link_in=nbytes / _fastest(lambda: copy_in().wait()),
        device=count / _fastest(lambda: update().wait()),
        link_out=nbytes / _fastest(lambda: copy_out().wait()),
    )


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def host_update(rule: Rule, count: int, threads: int | None) -> Callable[[], None]:
    """A function that updates `count` parameters on the host and checks their gradients, to be timed."""
    arrays = [torch.zeros(count) for _ in range(len(rule.states) + 2)]
    piece = Piece(arrays[0], arrays[1], None, arrays[2:], TIMING_NUMBERS)

    def work() -> None:
        kernels.sum_of_squares(piece.gradient, threads=threads)
        kernels.update(rule, [piece], threads=threads)

    return work
