"""The job that a process is of, where torchrun has started it; it may start it again, after a failure."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ferryman.distributed.ranks import Ranks


def agents(ranks: Ranks) -> list[str]:
    """Who has started the ranks: torchrun's process on each host. They outlive restarts, and no two jobs have one in
    common. None without torchrun."""
    mine = None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        mine = f"{socket.gethostname()}/{os.getppid()}/{_started(os.getppid())}"
    return sorted({agent for agent in ranks.tell("starting", mine) if agent is not None})


def _started(process: int) -> str:
    """When, in ticks since the machine was: numbers of processes come again."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
