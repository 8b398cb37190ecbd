"""Measures the virtual accelerator: the rate of its link, both directions at once, and the overhead of its compute.

    python benchmarks/virtual_device.py

Simulated copies are memcpy on a core and compute is on the CPU, so bandwidths are chosen well below what memory can
do. Compute runs on one thread, so that the copies have the other core to themselves.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch_virtual
from _bench import machine, medians
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, logging

DEVICE = "virtual"
MIB = 2**20


def pinned(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)


def on_device(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)


def timed_copy(direction: str, rate: float, nbytes: int) -> tuple[float, float]:
    """Median seconds of a copy: wall-clock time, and the time between the device's own events."""
    host, slot = pinned(nbytes), on_device(nbytes)
    begin, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    events: list[float] = []

    def copy() -> None:
        begin.record()
        if direction == "h2d":
            slot.copy_(host, non_blocking=True)
        else:
            host.copy_(slot, non_blocking=True)
        end.record()
        end.synchronize()
        events.append(begin.elapsed_time(end) / 1e3)

    with torch_virtual.link(DEVICE, **{direction: rate}):
        wall = medians({"copy": copy}, rounds=5, warm=2)["copy"]
    return wall, statistics.median(events[2:])


def copy_accuracy() -> None:
    print("\nthrottled copies: time taken against bytes / bandwidth (wanted: at most 5 % off, after a warm-up)")
    print(f"{'direction':10}{'bandwidth':>12}{'size':>10}{'due':>10}{'wall':>10}{'off':>8}{'events':>10}{'off':>8}")
    for direction in ("h2d", "d2h"):
        for rate in (0.25e9, 1e9, 3e9):
            for mib in (4, 16, 64):
                due = mib * MIB / rate
                wall, events = timed_copy(direction, rate, mib * MIB)
                print(
                    f"{direction:10}{rate / 1e9:>7.2f} GB/s{mib:>6} MiB{due * 1e3:>7.1f} ms{wall * 1e3:>7.1f} ms"
                    f"{wall / due - 1:>8.1%}{events * 1e3:>7.1f} ms{events / due - 1:>8.1%}"
                )


def idle_while_waiting() -> None:
    """CPU seconds of the whole process during a copy that takes half a second."""
    host, slot = pinned(50 * MIB), on_device(50 * MIB)
    with torch_virtual.link(DEVICE, h2d=100 * MIB):
        slot.copy_(host, non_blocking=True)
        torch_virtual.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        slot.copy_(host, non_blocking=True)
        torch_virtual.synchronize()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"\na copy of {wall:.2f} s at 100 MiB/s used {cpu / wall:.1%} of a core")


def duplex() -> None:
    """The time of both directions together, relative to the longer one alone (at most 1.1)."""
    rates = {"h2d": 1.0e9, "d2h": 0.8e9}
    size = 32 * MIB
    up, down = torch.Stream(DEVICE), torch.Stream(DEVICE)
    source, landing, slot, grad = pinned(size), pinned(size), on_device(size), on_device(size)
    torch_virtual.synchronize()

    def fetch() -> None:
        with up:
            slot.copy_(source, non_blocking=True)

    def flush() -> None:
        with down:
            landing.copy_(grad, non_blocking=True)

    def both() -> None:
        fetch()
        flush()

    def finished(work: Callable[[], None]) -> Callable[[], None]:
        return lambda: (work(), torch_virtual.synchronize())[0]

    with torch_virtual.link(DEVICE, **rates):
        took = medians({"h2d": finished(fetch), "d2h": finished(flush), "both": finished(both)}, rounds=7)
    ratio = took["both"] / max(took["h2d"], took["d2h"])
    print("\nduplex, 32 MiB each way at 1.0 and 0.8 GB/s (both: at most 1.1 of the longer one)")
    print("   ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in took.items()) + f"   {ratio:.3f}")


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=1024, n_embd=256, n_layer=4, n_head=4, n_positions=256))


def llama() -> PreTrainedModel:
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1024, num_hidden_layers=4, max_position_embeddings=256, **shape))


def training_step(make: Callable[[], PreTrainedModel], device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 1024, (4, 128)).to(device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compute() -> None:
    """The time of a training step (forward, backward, fused AdamW) on `virtual`, relative to `cpu` (at most 1.5)."""
    print("\ncompute, 4 blocks of width 256, 4 x 128 tokens, one thread: step on virtual over step on cpu")
    for name, make in (("GPT-2", gpt2), ("Llama", llama)):
        took = medians({device: training_step(make, device) for device in ("cpu", DEVICE)}, rounds=9, warm=2)
        print(
            f"{name:8} cpu {took['cpu'] * 1e3:6.1f} ms   virtual {took[DEVICE] * 1e3:6.1f} ms   "
            f"{took[DEVICE] / took['cpu']:.3f}"
        )


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(f"virtual accelerator on {machine()}")
    copy_accuracy()
    idle_while_waiting()
    duplex()
    compute()
    print(f"\nraces reported meanwhile: {torch_virtual.race_count()}")


if __name__ == "__main__":
    main()
