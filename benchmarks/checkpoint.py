"""Compares `engine.save` and `engine.load` with plain writes and reads of the same bytes.

    python benchmarks/checkpoint.py [megabytes] [directory]

The engine saves and loads a model that takes about `megabytes` with its optimizer state. For comparison, the same
number of bytes is written from and read into one buffer, in files of the same sizes, 16 MiB at a time. All writes end
with fsync. Files are read *cold*, after the system was asked to drop them from its cache, and *warm*, from the cache.
All variants run in turn, round after round, and medians are compared, so that a busy disk affects all of them alike.
Each then runs once more to measure host memory: the peak of the resident size, minus the size before.

`save` and `load` compute checksums on a second core. If no core is free, this slows down reads from the cache.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _bench import machine
from torch import nn

from ferryman.engine import Engine
from ferryman.runtime import host_memory as memory

ROUNDS = 15
CHUNK_BYTES = 16 << 20
WIDTH = 1024


def make_engine(nbytes: int) -> Engine:
    """A model in bf16, with 12 bytes per parameter: weights, the bits that they lack in float32, two moments."""
    blocks = max(2, round(nbytes / 12 / (8 * WIDTH * WIDTH)))
    made = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(blocks))
    model = nn.Sequential(*made)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Engine(model, optimizer, device="cpu", precision="bf16", loss=lambda m, x: m(*x).float().square().mean())


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def forget(directory: Path) -> None:
    """Makes the operating system drop the files from its cache."""
    for path in files_in(directory):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def write_plain(directory: Path, sizes: dict[str, int], source: memoryview) -> None:
    directory.mkdir()
    for name, size in sizes.items():
        with (directory / name).open("wb", buffering=0) as file:
            while size:
                count = file.write(source[: min(size, CHUNK_BYTES)])
                source, size = source[count:], size - count
            os.fsync(file.fileno())


def read_plain(directory: Path, target: memoryview) -> None:
    for path in files_in(directory):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(target[:CHUNK_BYTES]):
                target = target[count:]


def high_water(act: Callable[[], object]) -> int:
    """Peak bytes of memory that `act` needs, in addition to those in use before."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10

    memory.trim()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    act()
    return status("VmHWM") - before


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
    print(machine())
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as place:
        ours, plain = Path(place) / "saved", Path(place) / "plain"
        engine = make_engine(megabytes * 1_000_000)
        engine.save(ours)
        sizes = {str(path.relative_to(ours)).replace("/", "-"): path.stat().st_size for path in files_in(ours)}
        total, unit = sum(sizes.values()), max(unit.nbytes for unit in engine.units)
        buffer = memoryview(bytearray(total))
        read_plain(ours, buffer)  # the same bytes, since a disk or its driver may compress them
        print(
            f"{total / 1e9:.2f} GB in {len(sizes)} files, on {_filesystem(Path(place))}; medians of {ROUNDS} rounds\n"
        )

        def clear(directory: Path) -> None:
            shutil.rmtree(directory, ignore_errors=True)
            os.sync()

        ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {  # what is timed, and what runs before it
            "write": (lambda: write_plain(plain, sizes, buffer), lambda: clear(plain)),
            "save": (lambda: engine.save(ours), lambda: clear(ours)),
            "read, cold": (lambda: read_plain(plain, buffer), lambda: forget(plain)),
            "load, cold": (lambda: engine.load(ours), lambda: forget(ours)),
            "read, warm": (lambda: read_plain(plain, buffer), lambda: None),
            "load, warm": (lambda: engine.load(ours), lambda: None),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            # The order is reversed in every other round, since a write may leave the disk busy for the next one.
            for name, (act, before) in list(ways.items())[:: 1 if number % 2 else -1]:
                before()
                start = time.perf_counter()
                act()
                times[name].append(time.perf_counter() - start)
        taken = {name: statistics.median(some[1:]) for name, some in times.items()}
        for mine, theirs in (("save", "write"), ("load, cold", "read, cold"), ("load, warm", "read, warm")):
            print(
                f"{mine:10} {total / taken[mine] / 1e9:5.2f} GB/s, plain {theirs:10} "
                f"{total / taken[theirs] / 1e9:5.2f} GB/s: ratio {taken[theirs] / taken[mine]:.2f}"
                f" (rounds: {_spread([t / m for t, m in zip(times[theirs][1:], times[mine][1:], strict=True)])})"
            )
        print()
        for what, act in (("save", lambda: engine.save(ours)), ("load", lambda: engine.load(ours))):
            extra = high_water(act) / 1e6
            print(
                f"{what}: {extra:.1f} MB of host memory in addition to the engine's; largest unit: {unit / 1e6:.1f} MB"
            )
        engine.close()


def _spread(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _filesystem(place: Path) -> str:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if place.is_relative_to(mount[1])]
    return max(inside, key=lambda mount: len(mount[1]))[2]


if __name__ == "__main__":
    main()
