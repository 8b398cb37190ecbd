"""Compares the norm kernel, one pass that also finds inf and NaN, with torch's norm and a separate check.

    python benchmarks/host_norm.py [millions of elements]

Both sides use every CPU. Runs are interleaved and medians compared, so that a busy machine disturbs both alike.
"""

import functools
import sys
from collections.abc import Callable

import torch
from _bench import machine, medians

from ferryman.server import kernels

ROUNDS = 15


def with_torch(tensor: torch.Tensor) -> float:
    """The usual code: `clip_grad_norm_` computes this norm, and `GradScaler` checks for inf and NaN."""
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float32).item()
    return norm * norm if torch.isfinite(tensor).all() else float("nan")


def with_torch_from_norm(tensor: torch.Tensor) -> float:
    """The norm alone: it is not finite if an element is not, or if the sum overflows float32."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).item() ** 2


def main() -> None:
    count = int(sys.argv[1] if len(sys.argv) > 1 else 32) * 1_000_000
    ways: dict[str, Callable[[torch.Tensor], float]] = {
        "kernel": kernels.sum_of_squares,
        "torch, norm": with_torch_from_norm,
        "torch, norm and check": with_torch,
    }
    print(machine())
    print(f"{count / 1e6:.0f} M elements, {kernels.default_threads()} threads, path {kernels.paths()[0]}")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(count).to(dtype)
        taken = medians({name: functools.partial(way, tensor) for name, way in ways.items()}, ROUNDS)
        for name, seconds in taken.items():
            rate = f"{tensor.nbytes / seconds / 1e9:5.1f} GB/s"
            print(f"{dtype!s:15} {name:22} {seconds * 1e3:7.1f} ms {rate} {seconds / taken['kernel']:6.1f} x kernel")


if __name__ == "__main__":
    main()
