"""Short measurements of the rates of a machine: its host, its device, and the link between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ferryman.runtime.lanes import Lanes
from ferryman.runtime.pinned import PinnedMemory
from ferryman.server.calibration import host_update
from ferryman.server.moments import FORMATS
from ferryman.server.rules import ADAM

_MIN_SECONDS = 0.1  # per measurement
_PARAMETERS = 1 << 22
_LINK_BYTES = 1 << 25
_MESSAGE_BYTES = 1 << 22
_TRIAD_ELEMENTS = 1 << 23
_MIN_SIDE, _MAX_SIDE = 512, 8192  # of square matrices


def host_updates(state: str = "fp32") -> float:
    """Parameters per second that the host updates with AdamW, including the check of their gradients."""
    return _PARAMETERS / _fastest(host_update(ADAM, _PARAMETERS, None, FORMATS[state]))


def triad() -> float:
    """Bytes per second of a = b + s * c on the host: the memory bandwidth of simple arithmetic."""
    a, b, c = (torch.ones(_TRIAD_ELEMENTS, dtype=torch.float32, device="cpu") for _ in range(3))
    return 3 * a.nbytes / _fastest(lambda: torch.add(b, c, alpha=0.5, out=a))


def link(device: torch.device, nbytes: int = _LINK_BYTES) -> tuple[float, float, float]:
    """Bytes per second to the device, from the device, and in total while both directions are busy."""
    hosts = [PinnedMemory(nbytes, device) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    lanes = Lanes(device)
    h2d, d2h = lanes.device("h2d"), lanes.device("d2h")
    try:
        torch.accelerator.synchronize(device)

        def go_in() -> None:
            h2d.copy([(there[0], hosts[0].bytes)], label="measure in").wait()

        def go_out() -> None:
            d2h.copy([(hosts[1].bytes, there[1])], label="measure out").wait()

        def go_both() -> None:
            marks = [
                h2d.copy([(there[0], hosts[0].bytes)], label="measure in"),
                d2h.copy([(hosts[1].bytes, there[1])], label="measure out"),
            ]
            for mark in marks:
                mark.wait()

        return nbytes / _fastest(go_in), nbytes / _fastest(go_out), 2 * nbytes / _fastest(go_both)
    finally:
        lanes.close()
        for memory in hosts:
            memory.close()


def loopback() -> float:
    """Bytes per second that ranks of one node gather from each other, measured between two threads."""
    store, groups = HashStore(), dict[int, Any]()

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sent, into = (
        torch.ones(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu"),
        [torch.empty(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2)],
    )
    options = dist.GatherOptions()
    options.rootRank = 0

    def gather() -> None:
        for work in [groups[rank].gather([] if rank else [into], [sent], options) for rank in range(2)]:
            work.wait()

    return _MESSAGE_BYTES / _fastest(gather)


def operations(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a matrix product that is large enough to keep the device busy."""
    side = _MIN_SIDE
    while True:
        a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))

        def work(a: torch.Tensor = a, b: torch.Tensor = b) -> None:
            torch.mm(a, b)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)

        seconds = _fastest(work)
        if seconds > _MIN_SECONDS / 4 or side == _MAX_SIDE:
            return 2 * side**3 / seconds
        side *= 2


def _fastest(work: Callable[[], object]) -> float:
    """The shortest time of `work` in seconds, after a warm-up; it runs at least twice, for `_MIN_SECONDS`."""
    work()
    best, begin, times = float("inf"), time.perf_counter(), 0
    while times < 2 or time.perf_counter() - begin < _MIN_SECONDS:
        start = time.perf_counter()
        work()
        best, times = min(best, time.perf_counter() - start), times + 1
    return best
