"""Compares resident memory on `cpu` with `engine.host_account`, and with plain PyTorch: GPT-2 with clipping. Both
recompute.

    python benchmarks/resident.py [layers]

Each variant runs in a process of its own, which prints its peak, and what is left after malloc has returned unused
memory. Wanted: a peak of at most `host_account`, the process itself, and 1 GiB. 12 layers have 124 million
parameters.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import torch
from _bench import machine
from transformers import GPT2Config, GPT2LMHeadModel, logging

from ferryman.engine import Engine

STEPS, SAMPLES, LENGTH, MICRO_BATCHES = 3, 4, 128, 4


def gibibytes(name: str) -> float:
    """VmRSS or VmHWM, the peak, of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(name)).split()[1]) / 2**20


def trim() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def run(way: str, layers: int) -> None:
    logging.set_verbosity_error()
    torch.manual_seed(0)
    begun = gibibytes("VmRSS")
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 50257, (SAMPLES, LENGTH))
    account = 0.0
    if way == "plain":
        model.gradient_checkpointing_enable()
        for _ in range(STEPS):
            for part in ids.chunk(MICRO_BATCHES):
                (model(input_ids=part, labels=part).loss / MICRO_BATCHES).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        peak = gibibytes("VmHWM")
        trim()
        left = gibibytes("VmRSS")
    else:
        with Engine(model, optimizer, device="cpu", recompute="always", max_grad_norm=1.0) as engine:
            for _ in range(STEPS):
                engine.step({"input_ids": ids, "labels": ids}, micro_batches=MICRO_BATCHES)
            engine.wait()
            account, peak = sum(engine.host_account.values()) / 2**30, gibibytes("VmHWM")
            trim()
            left = gibibytes("VmRSS")
    print(f"{way:8}{begun:>9.2f}{account:>14.2f}{peak:>8.2f}{left:>12.2f}{peak - account - begun:>10.2f}", flush=True)


def main() -> None:
    layers = sys.argv[1] if len(sys.argv) > 1 else "12"
    print(f"{machine()}; GPT-2 of {layers} layers, {MICRO_BATCHES} micro-batches of {LENGTH} tokens; GiB")
    print(f"{'':8}{'at first':>9}{'host_account':>14}{'peak':>8}{'after trim':>12}{'not in it':>10}", flush=True)
    for way in ("plain", "ours"):
        subprocess.run([sys.executable, __file__, layers, way], check=True)


if __name__ == "__main__":
    run(sys.argv[2], int(sys.argv[1])) if len(sys.argv) == 3 else main()
