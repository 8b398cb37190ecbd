"""A short measurement of host, device and link, at the start. From then on rates follow what is observed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ferryman.model.units import BLOCK, Unit
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
    count, dtype = min(_MAX_ELEMENTS, staging.subgroup, largest), optimizer_view.format
    if optimizer_view.is_compact:
        count = count // BLOCK * BLOCK
    probes = device_updates.probe(rule, count, dtype) if count else None
    if probes is None:
        return None
    (copy_in, update, copy_out), nbytes = probes
    return Rates(
        host=count / _fastest(host_update(rule, count, threads, dtype)),
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


def host_update(rule: Rule, count: int, threads: int | None, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """A function that updates `count` parameters on the host and checks their gradients, to be timed.

    `dtype`: the format of the state; in eight bits there are whole blocks.
    """
    states = [torch.zeros(count, dtype=dtype, device="cpu") for _ in rule.states]
    scales = (
        [torch.zeros(count // BLOCK, dtype=torch.float32, device="cpu") for _ in rule.states]
        if dtype == torch.uint8
        else []
    )
    piece = Piece(
        torch.zeros(count, dtype=torch.float32, device="cpu"),
        torch.zeros(count, dtype=torch.float32, device="cpu"),
        None,
        states,
        TIMING_NUMBERS,
        scales,
    )

    def work() -> None:
        kernels.sum_of_squares(piece.gradient, threads=threads)
        kernels.update(rule, [piece], threads=threads)

    return work
