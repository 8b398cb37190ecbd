"""What keeping graphs saves: forward and backward against plain PyTorch, on the virtual accelerator and one thread.

    python benchmarks/recompute.py [rounds]

A Llama whose weights are held on the device, with one micro-batch of several samples per sample of the batch. All ways
are run in turn, round after round, and their medians compared: plain PyTorch without checkpointing, which keeps every
graph; plain PyTorch with checkpointing; `recompute="always"`; and `recompute="auto"` with room for everything, with
room for about half of the calls, and with no room.

Wanted: everything fits: at most 1.05 of plain PyTorch. Half of the calls: between the two, and within 10 % of its
forecast, which is the time of `always` without the forwards that do not run again. No room: no slower than `always`.
In every case the peak of what the device reserves stays within the budget.
"""

import copy
import gc
import sys
from collections.abc import Callable

import torch
import torch_virtual
from _bench import machine, medians_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from ferryman.engine import Engine
from ferryman.runtime.sizes import show_bytes
from relay import batch_of, make

DEVICE = torch.device("virtual:0")
LAYERS, MICRO_BATCHES, SAMPLES, CONTEXT, WIDTH = 8, 4, 4, 64, 256


def plain_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    for ids in batch["input_ids"].chunk(MICRO_BATCHES):
        there = ids.to(DEVICE)
        (model(input_ids=there, labels=there).loss / MICRO_BATCHES).backward()
    model.zero_grad()
    torch.accelerator.synchronize()


def step(engine: Engine, batch: dict[str, torch.Tensor]) -> None:
    engine.zero_grad()
    engine.forward_backward(batch, micro_batches=MICRO_BATCHES)
    engine.wait()


def checkpointed(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **named: checkpoint(forward, *args, use_reentrant=False, **named)
    return model


def engine_of(model: nn.Module, memory: int | None, recompute: str) -> Engine:
    return Engine(copy.deepcopy(model), device=DEVICE, memory=memory, recompute=recompute, held=True, stash="device")


def reserved(work: Callable[[], object]) -> int:
    """The most that the device has reserved in addition to what it had before."""
    torch_virtual.synchronize()
    torch_virtual.empty_cache()
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    work()
    return torch.accelerator.max_memory_reserved(DEVICE)


def needed(model: nn.Module, batch: dict[str, torch.Tensor], recompute: str) -> int:
    """The device memory of an engine without a budget."""
    gc.collect()
    torch_virtual.empty_cache()
    before = torch.accelerator.memory_reserved(DEVICE)
    with engine_of(model, None, recompute) as engine:
        step(engine, batch)
        return reserved(lambda: step(engine, batch)) - before


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    torch.set_num_threads(1)
    model, batch = make(LAYERS, WIDTH), batch_of(MICRO_BATCHES * SAMPLES, CONTEXT)
    least, most = (needed(model, batch, recompute) for recompute in ("always", "never"))
    print(f"one thread on {machine()}; {LAYERS} blocks of width {WIDTH}, {MICRO_BATCHES} micro-batches of {SAMPLES} x "
          f"{CONTEXT} tokens; the device reserves {show_bytes(least)} with every call recomputed, {show_bytes(most)} "
          "with every call kept")  # fmt: skip
    budgets = {"room for all": int(1.25 * most), "room for half": (least + most) // 2, "no room": int(1.2 * least)}
    always = engine_of(model, None, "always")
    engines = {"always": always} | {name: engine_of(model, budget, "auto") for name, budget in budgets.items()}
    plains = {"plain": copy.deepcopy(model).to(DEVICE), "checkpointed": checkpointed(copy.deepcopy(model)).to(DEVICE)}
    ways: dict[str, Callable[[], object]] = {n: lambda m=m: plain_step(m, batch) for n, m in plains.items()}
    ways |= {name: lambda engine=engine: step(engine, batch) for name, engine in engines.items()}
    elapsed, processor = medians_of(ways, rounds, warm=2)
    print(f"{'':15}{'elapsed':>10}{'/ plain':>9}{'processor':>11}{'/ plain':>9}  kept  forecast")
    for name in ways:
        row = f"{name:15}{elapsed[name] * 1e3:>7.0f} ms{elapsed[name] / elapsed['plain']:>9.3f}"
        row += f"{processor[name] * 1e3:>8.0f} ms{processor[name] / processor['plain']:>9.3f}"
        if name in engines:
            calls, choice = engines[name]._parts.relay.calls, engines[name].choice
            row += f"{calls.kept:>4}/{calls.kept + calls.recomputed}"
            if choice is not None and choice.keep.seconds is not None:
                forecast = elapsed["always"] - choice.keep.seconds
                row += f"{forecast * 1e3:>7.0f} ms, {elapsed[name] / forecast - 1:+.1%}"
        print(row, flush=True)
    for name, budget in budgets.items():
        peak = engines[name].plan.fixed
        print(f"{name}: budget {show_bytes(budget)}, always there {show_bytes(peak)}, the stash and running "
              f"micro-batches and {show_bytes(engines[name].choice.keep.nbytes or 0)} of graphs beside it")  # fmt: skip
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
