"""The fused bf16 AdamW kernel against torch's fused AdamW, DeepSpeed's, and the machine's memory.

    python benchmarks/host_optimizer.py [millions of parameters]

A step takes gradients in bfloat16 and leaves weights in bfloat16; moments and master weights have the precision of
float32. The kernel does it in one pass, the others with a cast before and after. All use every CPU. Runs are
interleaved and medians compared, so that a busy machine disturbs all alike.

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
from _bench import machine, medians

from ferryman.server import kernels, rules

ROUNDS = 15
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

# Gradient, weights and low half: 2 bytes each, moments 4 each; all are read, and all but the gradient written.
BYTES = (2 + 2 + 2 + 4 + 4) + (2 + 2 + 4 + 4)
TRIAD_BYTES = 4 + 4 + 4  # as STREAM counts: what an ordinary store reads before it writes is not counted

FASTER = 1.7  # wanted, against each other optimizer
OF_TRIAD = 0.9  # wanted, of the triad's bytes per second

TRIAD_BLOCK = 1 << 22  # what a thread takes at a time

# Its stores pass by the caches: they do not read what they write, which would not be counted.
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


def ours(gradient: torch.Tensor) -> Callable[[], object]:
    count = gradient.numel()
    weights, master = torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.int16)
    states = [torch.zeros(count) for _ in rules.ADAM.states]
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        _, *numbers = rules.ADAM.numbers({**OPTIONS, "decoupled_weight_decay": True}, steps)
        kernels.update(rules.ADAM, [kernels.Piece(gradient, weights, master, states, (1.0, *numbers))])

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
    """Ways to compute a = b + s * c: none is the fastest everywhere."""
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
    optimizers = {"kernel": ours(gradient)} | {name: with_casts(gradient, way) for name, way in others.items()}
    memory = triads(count)
    taken = medians({**optimizers, **memory}, ROUNDS)
    rates = {name: count * (BYTES if name == "kernel" else TRIAD_BYTES) / taken[name] for name in ["kernel", *memory]}
    best = max(memory, key=rates.__getitem__)
    for name, seconds in taken.items():
        line = f"{name:16} {seconds * 1e3:7.1f} ms"
        if name in rates:
            line += f" {rates[name] / 1e9:5.1f} GB/s"
        if name in others:
            line += f"   kernel is {seconds / taken['kernel']:.2f} x as fast (wanted: {FASTER})"
        if name == best:
            line += f"   kernel has {rates['kernel'] / rates[name]:.2f} of its rate (wanted: {OF_TRIAD})"
        print(line)


if __name__ == "__main__":
    main()
