"""Compares the fused bf16 AdamW kernels with torch's fused AdamW, DeepSpeed's, and the bandwidth of host memory.

    python benchmarks/host_optimizer.py [millions of parameters]

A step takes gradients in bfloat16 and leaves weights in bfloat16; master weights have the precision of float32, and so
do moments, except in the kernels for compact state (`Engine(state=...)`). Kernels do it in one pass, the others with a
cast before and after. All use every CPU. Runs are interleaved and medians compared, so that a busy machine disturbs
all alike. Rates of one thread with data in cache show the speed where memory is not the limit.

DeepSpeed takes part where it is installed: `DS_BUILD_OPS=0 pip install deepspeed ninja`. It compiles its kernel at the
first use.
"""

import ctypes
import importlib.util
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from _bench import machine, medians, medians_of

from ferryman.model.units import BLOCK
from ferryman.server import kernels, moments, rules

ROUNDS = 15
CACHED_PARAMETERS = 1 << 17  # few enough to stay in the cache
CACHE_ROUNDS = 200
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


def ours(gradient: torch.Tensor, state: str, threads: int | None = None) -> Callable[[], object]:
    count, dtype = gradient.numel(), moments.FORMATS[state]
    weights, master = torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.int16)
    states = [torch.zeros(count, dtype=dtype) for _ in rules.ADAM.states]
    scales = [torch.zeros(-(-count // BLOCK)) for _ in states] if state == "8bit" else []
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        _, *numbers = rules.ADAM.numbers({**OPTIONS, "decoupled_weight_decay": True}, steps)
        keys = moments.noise_keys(steps)
        piece = kernels.Piece(gradient, weights, master, states, (1.0, *numbers), scales, 0, keys)
        kernels.update(rules.ADAM, [piece], threads=threads)

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


def main() -> None:
    count = int(sys.argv[1] if len(sys.argv) > 1 else 100) * 1_000_000
    torch.set_num_threads(kernels.default_threads())
    print(machine())
    print(f"{count / 1e6:.0f} M parameters, {kernels.default_threads()} threads, path {kernels.paths()[0]}")
    gradient = torch.randn(count).to(torch.bfloat16)
    others = {"torch, fused": lambda masters: torch.optim.AdamW(masters, fused=True, **OPTIONS)}
    if importlib.util.find_spec("deepspeed"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        others["DeepSpeed"] = lambda masters: DeepSpeedCPUAdam(masters, **OPTIONS)
    mine = {state: ours(gradient, state) for state in moments.FORMATS}
    memory = triads(count)
    taken = medians({**mine, **{name: with_casts(gradient, way) for name, way in others.items()}, **memory}, ROUNDS)
    rates = {name: count * BYTES.get(name, TRIAD_BYTES) / taken[name] for name in [*mine, *memory]}
    best = max(memory, key=rates.__getitem__)
    for name, seconds in taken.items():
        line = f"{name:16} {seconds * 1e3:7.1f} ms {count / seconds / 1e6:6.0f} M/s"
        if name in rates:
            line += f" {rates[name] / 1e9:5.1f} GB/s"
        if name in MIN_SPEEDUP_OVER_FP32:
            line += f"   {taken['fp32'] / seconds:.2f} x as fast as fp32 (wanted: {MIN_SPEEDUP_OVER_FP32[name]})"
        if name in others:
            ratios = (f"{state} {seconds / taken[state]:.2f} (wanted: {MIN_SPEEDUP[state]})" for state in mine)
            line += f"   times as fast: {', '.join(ratios)}"
        if name == best:
            line += f"   fp32 has {rates['fp32'] / rates[name]:.2f} of its rate (wanted: {MIN_SHARE_OF_TRIAD})"
        print(line)
    small = gradient[:CACHED_PARAMETERS]
    _, processor = medians_of({state: ours(small, state, threads=1) for state in mine}, CACHE_ROUNDS)
    print(
        "in cache, one thread:",
        ", ".join(f"{name} {CACHED_PARAMETERS / used / 1e6:.0f} M/s" for name, used in processor.items()),
    )


if __name__ == "__main__":
    main()
