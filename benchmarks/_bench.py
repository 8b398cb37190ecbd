"""What the benchmarks share: the machine's name, and times that a busy machine disturbs alike."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def machine() -> str:
    """The CPU, its cores and memory, and the version of torch: what a figure means nothing without."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cpu}, {cores} cores, {memory:.0f} GiB, torch {torch.__version__}"


def medians(ways: dict[str, Callable[[], object]], rounds: int, warm: int = 1) -> dict[str, float]:
    """Median seconds of each way, all run in turn, round after round; the first `warm` rounds do not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(warm + rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[warm:]) for name, taken in times.items()}
