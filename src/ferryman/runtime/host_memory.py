"""Checks that the host has enough memory before it is allocated; otherwise the system would kill the process.

Does not use psutil: it does not know the limits of containers, and would be one more dependency for two lines.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

from ferryman.runtime.sizes import show_bytes


def available() -> int | None:
    """Bytes that this process can still allocate; None if the system does not report it."""
    found = [value for value in (_free_in_system(), _free_in_group()) if value is not None]
    return min(found, default=None)


def total() -> int | None:
    """Bytes that this process could allocate at most; None if the system does not report it."""
    fields = _fields_of_system()
    limit = Path("/sys/fs/cgroup/memory.max")
    group = limit.read_text().strip() if limit.exists() else "max"
    found = [fields.get("MemTotal"), None if group == "max" else int(group)]
    return min((nbytes for nbytes in found if nbytes is not None), default=None)


def check(account: dict[str, int], already: int) -> None:
    """Raises if the host has no room for `account`. `already`: bytes that the process has now and will free."""
    free = available()
    needed = sum(account.values())
    if free is not None and needed - already > free:
        parts = ", ".join(f"{show_bytes(nbytes)} for {part}" for part, nbytes in account.items() if nbytes)
        raise ValueError(
            f"the host cannot hold this: {show_bytes(needed)} are needed ({parts}), and {show_bytes(free)} are free. "
            "A narrower precision ('bf16' takes 12 bytes per parameter with AdamW), an optimizer with less state (SGD, "
            "Lion) or fewer trained parameters need less"
        )


def _free_in_system() -> int | None:
    return _fields_of_system().get("MemAvailable")


def _fields_of_system() -> dict[str, int]:
    """The system's memory, in bytes, by kind."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return {}
    lines = (line.split(":", 1) for line in path.read_text().splitlines())
    return {name: int(amount.split()[0]) * 1024 for name, amount in lines}


def _free_in_group() -> int | None:
    """Bytes left in the control group, which limits a container. Cached pages of files count as free."""
    limit, usage = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not limit.exists() or not usage.exists() or limit.read_text().strip() == "max":
        return None
    stat = Path("/sys/fs/cgroup/memory.stat")
    fields = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    return int(limit.read_text()) - int(usage.read_text()) + int(fields.get("inactive_file", 0))


def trim() -> None:
    """Returns freed memory to the system: the C library keeps some of the memory that weights have used."""
    with contextlib.suppress(OSError, AttributeError):  # only the GNU C library has this function
        ctypes.CDLL(None).malloc_trim(0)
