"""Compares the fused bf16 AdamW kernels with torch's fused AdamW, others' optimizers, and the bandwidth of host memory.

    python benchmarks/host_optimizer.py [millions of parameters]

A step takes gradients in bfloat16 and leaves weights in bfloat16; master weights have the precision of float32, and so
do moments, except in the kernels for compact state (`Engine(state=...)`). Kernels do it in one pass, the others with a
cast before and after. All use every CPU. Runs are interleaved, and a ratio is the median of the rounds' ratios, so that
a busy machine disturbs all alike. Rates of one thread with data in cache show the speed where memory is not the limit,
for each instruction set. They are the best of many calls that are too short for other work to interrupt each of them.

DeepSpeed and bitsandbytes take part where they are installed: `DS_BUILD_OPS=0 pip install deepspeed ninja`,
`pip install bitsandbytes`. DeepSpeed compiles its kernel at the first use.
"""

import ctypes
import importlib.util
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from _bench import machine

from ferryman.model.units import BLOCK
from ferryman.server import kernels, moments, rules

ROUNDS = 15
CACHED_PARAMETERS = 1 << 14  # few enough to stay in a core's own cache
CACHED_UPDATES = 16  # in one call, which takes less time than an operating system lets a process run at a stretch
CACHE_ROUNDS = 1000
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

# Gradient, weights and low half: 2 bytes each; they and two moments are read, and all but the gradient written.
BYTES = {name: 10 + 2 * 2 * moments.itemsize(dtype) for name, dtype in moments.FORMATS.items()}
TRIAD_BYTES = 4 + 4 + 4  # as STREAM counts: what an ordinary store reads before it writes is not counted

MIN_SPEEDUP = {"fp32": 1.7, "bf16": 2.0, "8bit": 2.0}  # wanted, over each other optimizer
MIN_SPEEDUP_OVER_FP32 = {"bf16": 1.2, "8bit": 1.0}  # wanted, over our own float32 state
MIN_SHARE_OF_TRIAD = 0.9  # wanted, of the triad's bytes per second

TRIAD_BLOCK = 1 << 22  # elements that a thread processes at a time

# Its stores bypass the caches: ordinary stores would also read the memory, which is not counted.
TRIAD = """
#include <xmmintrin.h>
extern "C" void triad(float* a, const float* b, const float* c, float s, long count) {
  for (long i = 0; i < count; i += 4) {
    __builtin_prefetch(b + i + 256);
    __builtin_prefetch(c + i + 256);
    _mm_stream_ps(a + i, _mm_add_ps(_mm_loadu_ps(b + i), _mm_mul_ps(_mm_set1_ps(s), _mm_loadu_ps(c + i))));
  }
  _mm_sfence();
}
"""


def ours(
    gradient: torch.Tensor, state: str, updates: int = 1, threads: int | None = None, path: str | None = None
) -> Callable[[], object]:
    """A step of our kernel, which updates the same parameters `updates` times."""
    count, dtype = gradient.numel(), moments.FORMATS[state]
    weights, master = torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.int16)
    states = [torch.zeros(count, dtype=dtype) for _ in rules.ADAM.states]
    scales = [torch.zeros(-(-count // BLOCK)) for _ in states] if state == "8bit" else []
    part = kernels.PieceTarget(slice(0, count), weights, master, states, scales, 0)
    table = kernels.Table(rules.ADAM, [part] * updates, gradient)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        _, *numbers = rules.ADAM.numbers({**OPTIONS, "decoupled_weight_decay": True}, steps)
        pieces = table.pieces(gradient, (1.0, *numbers), moments.noise_keys(steps))
        kernels.update(rules.ADAM, pieces, threads=threads, path=path)

    return step


def with_casts(
    gradient: torch.Tensor, optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
) -> Callable[[], object]:
    """A float32 optimizer's step, from a bfloat16 gradient to bfloat16 weights. Nothing is allocated in a step."""
    weights, master = torch.zeros_like(gradient), torch.zeros(gradient.shape)
    master.grad = torch.zeros_like(master)
    stepped = optimizer([master])

    def step() -> None:
        master.grad.copy_(gradient)
        stepped.step()
        weights.copy_(master)

    return step


def triads(count: int) -> dict[str, Callable[[], object]]:
    """Several ways to compute a = b + s * c, since none is the fastest on every machine."""
    a, b, c = torch.zeros(count), torch.ones(count), torch.ones(count)
    ways: dict[str, Callable[[], object]] = {"triad, torch": lambda: torch.add(b, c, alpha=3.0, out=a)}
    if platform.machine() == "x86_64":
        triad, pool = compiled_triad(), ThreadPoolExecutor(kernels.default_threads())
        addresses = [tensor.data_ptr() for tensor in (a, b, c)]

        def stream(start: int) -> None:
            triad(*(address + start * 4 for address in addresses), 3.0, min(TRIAD_BLOCK, count - start))

        ways["triad, streamed"] = lambda: list(pool.map(stream, range(0, count, TRIAD_BLOCK)))
        ways["triad, streamed"]()
        assert (a == 4).all()
    return ways


def compiled_triad() -> Callable[..., None]:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "triad.cpp"), Path(folder, "triad.so")
        source.write_text(TRIAD)
        subprocess.run(["g++", "-O3", "-shared", "-fPIC", source, "-o", library], check=True)
        triad = ctypes.CDLL(str(library)).triad
    triad.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_float, ctypes.c_long]
    triad.restype = None
    return triad


def seconds_of(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """How long each of the functions takes in each round. All run in turn; the first round does not count."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in taken.items()}


def ratio(slow: list[float], fast: list[float]) -> float:
    """How many times as fast the second is: the median over rounds."""
    return statistics.median(one / other for one, other in zip(slow, fast, strict=True))


def others() -> dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]]:
    found = {"torch, fused": lambda masters: torch.optim.AdamW(masters, fused=True, **OPTIONS)}
    for package, named in {"deepspeed": "DeepSpeed", "bitsandbytes": "bitsandbytes 8bit"}.items():
        if importlib.util.find_spec(package) is None:
            print(f"{named}: not compared, because the package {package} is not installed")
        elif package == "deepspeed":
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            found[named] = lambda masters: DeepSpeedCPUAdam(masters, **OPTIONS)
        else:
            from bitsandbytes.optim import AdamW8bit

            found[named] = lambda masters: AdamW8bit(masters, **OPTIONS)
    return found


def main() -> None:
    count = int(sys.argv[1] if len(sys.argv) > 1 else 100) * 1_000_000
    torch.set_num_threads(kernels.default_threads())
    print(machine())
    print(f"{count / 1e6:.0f} M parameters, {kernels.default_threads()} threads, path {kernels.paths()[0]}")
    gradient = torch.randn(count).to(torch.bfloat16)
    mine = {state: ours(gradient, state) for state in moments.FORMATS}
    theirs = {name: with_casts(gradient, way) for name, way in others().items()}
    memory = triads(count)
    rounds = seconds_of({**mine, **theirs, **memory}, ROUNDS)
    taken = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    rates = {name: count * BYTES.get(name, TRIAD_BYTES) / taken[name] for name in [*mine, *memory]}
    best = max(memory, key=rates.__getitem__)
    for name, seconds in taken.items():
        line = f"{name:17} {seconds * 1e3:7.1f} ms {count / seconds / 1e6:6.0f} M/s"
        if name in rates:
            line += f" {rates[name] / 1e9:5.1f} GB/s"
        if name in MIN_SPEEDUP_OVER_FP32:
            faster = ratio(rounds["fp32"], rounds[name])
            line += f"   {faster:.2f} x as fast as fp32 (wanted: {MIN_SPEEDUP_OVER_FP32[name]})"
        if name in theirs:
            ratios = (
                f"{state} {ratio(rounds[name], rounds[state]):.2f} (wanted: {MIN_SPEEDUP[state]})" for state in mine
            )
            line += f"   times as fast: {', '.join(ratios)}"
        if name == best:
            line += f"   fp32 has {rates['fp32'] / rates[name]:.2f} of its rate (wanted: {MIN_SHARE_OF_TRIAD})"
        print(line)
    small = gradient[:CACHED_PARAMETERS].clone()
    for path in kernels.paths()[:-1]:
        ways = {state: ours(small, state, CACHED_UPDATES, 1, path) for state in mine}
        least = {state: min(seconds) for state, seconds in seconds_of(ways, CACHE_ROUNDS).items()}
        cached = (f"{state} {CACHED_UPDATES * CACHED_PARAMETERS / used / 1e6:.0f} M/s" for state, used in least.items())
        print(f"in cache, one thread, {path}: {', '.join(cached)}")


if __name__ == "__main__":
    main()
