"""Trains a byte-level GPT on the virtual accelerator, with its batches fetched beside the compute.

    python examples/train.py [steps]

The text is the Python standard library's own sources. The model is small enough to be held on the device whole; what
is shown is the device, its link and the lanes: while one batch is trained on, the host lane cuts the next one out of
the text and the h2d lane carries it over. The trace it writes shows them side by side.
"""

import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch_virtual
from transformers import GPT2Config, GPT2LMHeadModel, logging

from ferryman.lanes import Lane, Lanes, Mark
from ferryman.trace import Trace

DEVICE = "virtual"
BATCH, CONTEXT = 8, 128


def text() -> torch.Tensor:
    """The bytes of the standard library's top-level modules."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


class Feed:
    """Two batches on the device and two on the host: one in use, one on its way."""

    def __init__(self, data: torch.Tensor, host: Lane, h2d: Lane) -> None:
        self.data, self.host, self.h2d = data, host, h2d
        self.random = torch.Generator().manual_seed(0)
        self.pinned = [torch.zeros(BATCH, CONTEXT, dtype=torch.long, pin_memory=True) for _ in range(2)]
        self.slots = [torch.zeros(BATCH, CONTEXT, dtype=torch.long, device=DEVICE) for _ in range(2)]
        self.fetched: list[Mark | None] = [None, None]

    def fetch(self, step: int, used: Mark | None) -> tuple[torch.Tensor, Mark]:
        """The batch of a step, and the mark after which it is there. `used`: when its slot is free again."""
        pinned, slot, before = self.pinned[step % 2], self.slots[step % 2], self.fetched[step % 2]
        cut = self.host.submit(
            lambda: self.cut_into(pinned), after=[before] if before else [], label=f"cut batch {step}", writes=[pinned]
        )
        fetched = self.h2d.submit(
            lambda: slot.copy_(pinned, non_blocking=True),
            after=[cut, used] if used else [cut],
            label=f"fetch batch {step}",
            nbytes=pinned.nbytes,
        )
        self.fetched[step % 2] = fetched
        return slot, fetched

    def cut_into(self, batch: torch.Tensor) -> None:
        starts = torch.randint(0, len(self.data) - CONTEXT, (BATCH,), generator=self.random)
        for row, start in zip(batch, starts.tolist(), strict=True):
            row.copy_(self.data[start : start + CONTEXT])


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    logging.set_verbosity_error()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=128, n_layer=4, n_head=4)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = text()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {len(data) / 1e6:.1f} MB of text, on a virtual accelerator (no GPU)")

    losses: list[torch.Tensor] = []

    def train(batch: torch.Tensor) -> None:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    trace = Trace()
    trained: list[Mark] = []
    torch.accelerator.synchronize()  # the model's weights are there before another stream uses them
    with torch_virtual.watch(DEVICE) as seen, Lanes(DEVICE, trace=trace) as lanes:
        compute = lanes.device("compute")
        feed = Feed(data, lanes.host("host"), lanes.device("h2d"))
        torch.accelerator.synchronize()
        upcoming = feed.fetch(0, None)
        start = time.perf_counter()
        for step in range(steps):
            batch, fetched = upcoming
            upcoming = feed.fetch(step + 1, trained[-1] if trained else None)
            trained.append(compute.submit(lambda b=batch: train(b), after=[fetched], label=f"step {step}"))
            if step % 20 == 0 or step == steps - 1:
                trained[-1].wait()
                rate = (step + 1) * BATCH * CONTEXT / (time.perf_counter() - start)
                print(f"step {step:4}   loss {losses[-1].item():.3f}   {rate:6.0f} tokens/s")
    trace.save("trace.json")
    counters = seen.counters
    print(
        f"device memory: peak {counters.peak_memory / 2**20:.1f} MiB; over the link: {counters.h2d_bytes / 1e6:.2f} MB"
    )
    print(f"races: {counters.races}; lanes over time: trace.json (open it in https://ui.perfetto.dev)")


if __name__ == "__main__":
    main()
