"""Measures whether host memory grows over steps of random sequence lengths, with the stash on the host.

    python benchmarks/growth.py [steps]

Prints the resident set size after 100 steps, in between, and after all steps (10,000 by default). It should not grow by
more than 2 %. The model is a small GPT-2 on the virtual accelerator; all lengths from 4 to 64 tokens occur early on.
"""

import random
import sys
from pathlib import Path

import torch
import torch_virtual  # noqa: F401  # makes the device known
from _bench import machine
from transformers import GPT2Config, GPT2LMHeadModel, logging

from ferryman.engine import Engine

FIRST_PRINTED, STEPS, MICRO_BATCHES, CONTEXT = 100, 10_000, 2, 64


def resident_set() -> int:
    """Bytes of this process that are in memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith("VmRSS")).split()[1])


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    lengths = random.Random(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=256, n_positions=CONTEXT, use_cache=False)
    model = GPT2LMHeadModel(config)
    print(f"{machine()}; {MICRO_BATCHES} micro-batches, stash on the host, clipping", flush=True)
    options = {
        "device": "virtual",
        "stash": "host",
        "slots": 2,
        "held": False,
        "recompute": "always",
        "max_grad_norm": 1.0,
    }
    with Engine(model, torch.optim.AdamW(model.parameters()), **options) as engine:
        first = 0
        for number in range(1, steps + 1):
            ids = torch.randint(0, 256, (MICRO_BATCHES, lengths.randrange(4, CONTEXT + 1)))
            engine.step({"input_ids": ids, "labels": ids}, micro_batches=MICRO_BATCHES)
            if number in (FIRST_PRINTED, steps) or number % 1000 == 0:
                engine.wait()
                now = resident_set()
                first = first or now
                print(f"{number:>6} steps: {now / 2**20:8.1f} MiB, {now / first:.3f} of the first", flush=True)


if __name__ == "__main__":
    main()
