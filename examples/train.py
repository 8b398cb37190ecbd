"""Trains a byte-level GPT, layer by layer, on a virtual accelerator that could not hold it.

    python examples/train.py [steps]

The text is the Python standard library's own sources. The device gets a third of the memory that the model's weights,
gradients and optimizer state would take; the model stays on the host and its blocks cross over, each serving all
micro-batches while it is there. The optimizer's state never leaves the host, which updates each block beside the rest.
The trace it writes shows the lanes side by side.
"""

import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch_virtual
from transformers import GPT2Config, GPT2LMHeadModel, logging

import ferryman
from ferryman.trace import Trace

DEVICE = "virtual"
BATCH, CONTEXT = 8, 128


def text() -> torch.Tensor:
    """The bytes of the standard library's top-level modules."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def batch_from(data: torch.Tensor, random: torch.Generator) -> dict[str, torch.Tensor]:
    starts = torch.randint(0, len(data) - CONTEXT, (BATCH,), generator=random).tolist()
    ids = torch.stack([data[start : start + CONTEXT].long() for start in starts])
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    logging.set_verbosity_error()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=128, n_layer=12, n_head=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, random = text(), torch.Generator().manual_seed(0)

    parameters = sum(p.numel() for p in model.parameters())
    whole = 16 * parameters  # bytes: weights, gradients and two moments, in float32
    torch_virtual.set_capacity(whole // 3, DEVICE)
    print(f"{parameters / 1e6:.1f} M parameters, {len(data) / 1e6:.1f} MB of text, on a virtual accelerator (no GPU)")
    print(f"training state {whole / 2**20:.1f} MiB, device {whole / 3 / 2**20:.1f} MiB")

    trace = Trace()
    start = time.perf_counter()
    with (
        torch_virtual.watch(DEVICE) as seen,
        ferryman.Engine(model, optimizer, device=DEVICE, memory=whole // 3, max_grad_norm=1.0, trace=trace) as engine,
    ):
        for step in range(steps):
            loss = engine.step(batch_from(data, random))  # forward, backward, and the update on the host
            if step % 10 == 0 or step == steps - 1:
                rate = (step + 1) * BATCH * CONTEXT / (time.perf_counter() - start)
                print(f"step {step:4}   loss {loss.item():.3f}   {rate:6.0f} tokens/s", flush=True)
    trace.save("trace.json")
    counters = seen.counters
    print(
        f"device memory: peak {counters.peak_memory / 2**20:.1f} MiB; over the link each step: "
        f"{counters.h2d_bytes / steps / 1e6:.1f} MB in, {counters.d2h_bytes / steps / 1e6:.1f} MB out"
    )
    print(f"races: {counters.races}; lanes over time: trace.json (open it in https://ui.perfetto.dev)")


if __name__ == "__main__":
    main()
