"""Shared by the benchmarks: the machine's description, interleaved timing, and a slow host."""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ferryman.server import kernels
from ferryman.server.rules import Rule


def machine() -> str:
    """The CPU, its cores and memory, and the version of torch, without which a figure means nothing."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cpu}, {cores} cores, {memory:.0f} GiB, torch {torch.__version__}"


def medians(ways: dict[str, Callable[[], object]], rounds: int, warm: int = 1) -> dict[str, float]:
    """Median seconds of each function. All run in turn, in every round; the first `warm` rounds do not count."""
    return medians_of(ways, rounds, warm)[0]


def medians_of(
    ways: dict[str, Callable[[], object]], rounds: int, warm: int = 1
) -> tuple[dict[str, float], dict[str, float]]:
    """Like `medians`, together with the medians of the processor time of all threads of this process."""
    elapsed: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(warm + rounds):
        for name, way in ways.items():
            start, used = time.perf_counter(), time.process_time()
            way()
            elapsed[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - used)
    found = [{name: statistics.median(t[warm:]) for name, t in times.items()} for times in (elapsed, processor)]
    return found[0], found[1]


@contextlib.contextmanager
def host_of(rate: float) -> Iterator[None]:
    """Context in which the host updates this many elements per second."""
    real = kernels.update

    def throttled(rule: Rule, pieces: Sequence[kernels.Piece], **options: int | None) -> None:
        end = time.perf_counter() + sum(piece.gradient.numel() for piece in pieces) / rate
        real(rule, pieces, **options)
        time.sleep(max(0.0, end - time.perf_counter()))

    kernels.update = throttled
    try:
        yield
    finally:
        kernels.update = real
