"""Measures how close a step comes to its lower bound, and what the relay saves, on the virtual accelerator.

    python benchmarks/relay.py [trace.json]

The bound is per phase (docs/architecture.md): forward max(compute, bytes in, bytes out, host if updates are deferred) +
backward max(compute, bytes in, bytes out, host if they are eager). Compute is measured in the same run, round by round,
with all weights already on the device. The time of a link is the number of bytes that the step moved, divided by the
bandwidth. The column `stash` is what has left the device and come back, in units of all calls' hidden states: 1 out and
1 in is what a stash on the host needs. Compute runs on one thread. Simulated copies are memcpy on the other core, so
sizes and bandwidths (tens of MB/s) are chosen such that they hardly load it. For the same reason, a slow host is
simulated: it updates as usual, and then sleeps for the rest of the time that its rate would need.

All steps recompute (`recompute="always"`); `recompute.py` measures what keeping graphs saves.
"""

import copy
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch_virtual
from _bench import host_of, machine, medians
from transformers import LlamaConfig, LlamaForCausalLM, logging

from ferryman.engine import Engine
from ferryman.observe.trace import Trace, TraceSpan
from ferryman.plan.performance import Phase, step_time
from ferryman.plan.rates import Rates

DEVICE = "virtual"
LAYERS, WIDTH, MICRO_BATCHES, CONTEXT, ROUNDS = 16, 256, 8, 64, 5
LARGE_BUDGET = "48MiB"  # two slots and the boundaries of all micro-batches need less than half of it


def make(layers: int, width: int = WIDTH) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch_of(micro_batches: int, context: int = CONTEXT) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (micro_batches, context), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def step(engine: Engine, batch: dict[str, torch.Tensor], micro_batches: int = MICRO_BATCHES) -> None:
    engine.zero_grad()
    engine.forward_backward(batch, micro_batches=micro_batches)


def visits(trace: Trace, since: float) -> tuple[float, float]:
    """Seconds of compute in the forward and in the backward of the last step: the visit in the middle is the turn."""
    spans: list[TraceSpan] = [s for s in trace.spans() if s.label.startswith("visit") and s.start >= since]
    lengths = [span.end - span.start for span in spans]
    middle = len(lengths) // 2
    # At the turn each call's forward (once) is followed by its backward (twice as long, without a second forward).
    turn = lengths[middle]
    return sum(lengths[:middle]) + turn / 3, sum(lengths[middle + 1 :]) + turn * 2 / 3


def stash_bytes(trace: Trace, since: int) -> dict[str, int]:
    """Bytes of the stash that have left the device and come back, in all spans but the first `since`."""
    spans = trace.spans()[since:]
    return {lane: sum(span.nbytes for span in spans if span.lane == lane) for lane in ("stash out", "stash in")}


def against_the_bound(model: LlamaForCausalLM, path: str) -> None:
    batch = batch_of(MICRO_BATCHES)
    free_trace = Trace()
    free = Engine(copy.deepcopy(model), device=DEVICE, slots=LAYERS + 2, recompute="always", trace=free_trace)
    for _ in range(2):
        step(free, batch)
    start = free_trace.now()
    step(free, batch)
    forward, _ = visits(free_trace, start)
    print(f"\nstep over phase bound: {LAYERS} blocks, {MICRO_BATCHES} micro-batches of 1 x {CONTEXT} tokens")
    print(
        f"{'setting':16}{'link':>12}{'compute':>16}{'in':>16}{'out':>16}{'bound':>10}{'step':>10}{'ratio':>8}{'fetches':>9}"
        f"{'stash':>14}"
    )
    # How long a fetch takes against a visit in the forward; a visit in the backward takes three times as long.
    on_host = {"stash": "host", "memory": LARGE_BUDGET, "slots": 2, "held": False}  # boundaries stay on the device
    for setting, share, options in (
        ("compute-bound", 0.5, {}),
        ("equal", 1.0, {}),
        ("link-bound", 6.0, {}),
        ("stash on host", 0.5, on_host),
    ):
        trace = Trace()
        with Engine(copy.deepcopy(model), device=DEVICE, recompute="always", trace=trace, **options) as engine:
            largest = max(unit.nbytes for unit in engine.units)
            rate = largest / (share * forward / LAYERS)
            bounds, ratios, times = [], [], []
            for round_ in range(ROUNDS + 1):
                start = free_trace.now()
                step(free, batch)
                compute_forward, compute_backward = visits(free_trace, start)
                before, since = engine.fetches, len(trace.spans())
                with torch_virtual.link(DEVICE, h2d=rate, d2h=rate), torch_virtual.watch(DEVICE) as seen:
                    begin = time.perf_counter()
                    step(engine, batch)
                    took = time.perf_counter() - begin
                counters, stashed = seen.counters, stash_bytes(trace, since)
                weights = sum(unit.nbytes for unit in engine.units)
                rest_in, rest_out = counters.h2d_bytes - weights, counters.d2h_bytes - stashed["stash out"]
                bound = step_time(
                    Phase(compute_forward, bytes_in=weights, bytes_out=stashed["stash out"]),
                    Phase(compute_backward, bytes_in=rest_in, bytes_out=rest_out),
                    Rates(host=math.inf, device=math.inf, link_in=rate, link_out=rate),
                )
                if round_:  # in the first, the order of units is not known
                    bounds.append(bound)
                    ratios.append(took / bound)
                    times.append(took)
            calls = MICRO_BATCHES * len(engine.units) * CONTEXT * WIDTH * 4  # bytes of all calls' hidden states
            crossed = "/".join(f"{nbytes / calls:.2f}" for nbytes in stashed.values())
            print(
                f"{setting:16}{rate / 1e6:>7.0f} MB/s{compute_forward:>7.2f} +{compute_backward:>5.2f} s"
                f"{weights / rate:>7.2f} +{rest_in / rate:>5.2f} s{stashed['stash out'] / rate:>7.2f} +"
                f"{rest_out / rate:>5.2f} s{statistics.median(bounds):>8.2f} s"
                f"{statistics.median(times):>8.2f} s{statistics.median(ratios):>8.3f}{engine.fetches - before:>9}"
                f"{crossed:>14}"
            )
            if setting == "equal":
                trace.save(path)
    free.close()
    print(f"trace of the equal setting: {path}")


def updating(model: LlamaForCausalLM, **options: object) -> Engine:
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return Engine(model, optimizer, device=DEVICE, host_threads=1, updates="host", recompute="always", **options)


def against_the_bound_with_a_host(model: LlamaForCausalLM) -> None:
    batch = batch_of(MICRO_BATCHES)
    elements = sum(p.numel() for p in model.parameters())
    free_trace = Trace()
    free = Engine(copy.deepcopy(model), device=DEVICE, slots=LAYERS + 2, recompute="always", trace=free_trace)
    for _ in range(2):
        step(free, batch)
    print("\nhost-bound: step over phase bound, with updates (eager at most 1.20, deferred at most 1.15)")
    print(f"{'updates':16}{'compute':>16}{'host':>9}{'bound':>9}{'step':>9}{'ratio':>8}")
    # Host against compute of the sweep that it runs beside.
    for name, options, share in (("eager", {}, 1.5), ("deferred", {"deferred": True}, 2.0)):
        with updating(model, **options) as engine:
            ratios, bounds, times = [], [], []
            engine.step(batch, MICRO_BATCHES)
            for _ in range(ROUNDS):
                start = free_trace.now()
                step(free, batch)
                forward, backward = visits(free_trace, start)
                host = share * (backward if name == "eager" else forward)
                phases = (
                    Phase(forward, update=host * (name == "deferred")),
                    Phase(backward, update=host * (name == "eager")),
                )
                bound = step_time(*phases, Rates(elements / host, math.inf, math.inf, math.inf))
                with host_of(elements / host):
                    engine.step(batch, MICRO_BATCHES)  # from here on, updates of the previous step run in each step
                    begin = time.perf_counter()
                    for _ in range(3):
                        engine.step(batch, MICRO_BATCHES)
                    took = (time.perf_counter() - begin) / 3
                    engine.wait()
                ratios.append(took / bound)
                bounds.append(bound)
                times.append(took)
            print(
                f"{name:16}{forward:>7.2f} +{backward:>5.2f} s{host:>7.2f} s{statistics.median(bounds):>7.2f} s"
                f"{statistics.median(times):>7.2f} s{statistics.median(ratios):>8.3f}",
                flush=True,
            )
    free.close()
    with updating(model) as eager, updating(model, max_grad_norm=1.0) as clipped:

        def steps(engine: Engine) -> None:
            for _ in range(2):
                engine.step(batch, MICRO_BATCHES)

        took = medians({"eager": lambda: steps(eager), "deferred": lambda: steps(clipped)}, rounds=ROUNDS)
    print("compute-bound, deferred with clipping against eager without (at most 1.05)")
    ratio = took["deferred"] / took["eager"]
    print("   ".join(f"{name} {s / 2:.2f} s" for name, s in took.items()) + f"   {ratio:.3f}")


def against_micro_batch_major(model: LlamaForCausalLM) -> None:
    """The same engine, one micro-batch after the other: each streams all layers again, as in ZeRO-3 offload."""
    batch = batch_of(MICRO_BATCHES)
    parts = [{name: x[i : i + 1] for name, x in batch.items()} for i in range(MICRO_BATCHES)]
    with Engine(copy.deepcopy(model), device=DEVICE, recompute="always") as engine:

        def one_by_one() -> None:
            for part in parts:
                engine.zero_grad()
                engine.forward_backward([part])

        largest = max(unit.nbytes for unit in engine.units)
        step(engine, batch)
        # A fetch takes longer than a visit of all micro-batches in the backward: the link is what both wait for.
        with torch_virtual.link(DEVICE, h2d=largest / 0.15, d2h=largest / 0.15):
            ways: dict[str, Callable[[], object]] = {"L2L": lambda: step(engine, batch), "one by one": one_by_one}
            took = medians(ways, rounds=3, warm=0)
    print("\nlink-bound, layer-major (L2L) against micro-batch-major, 8 micro-batches (at least 4 x)")
    print("   ".join(f"{name} {s:.2f} s" for name, s in took.items()) + f"   {took['one by one'] / took['L2L']:.2f} x")


def against_plain(model: LlamaForCausalLM) -> None:
    """Plain PyTorch with activation checkpointing, everything resident on the device."""
    batch = batch_of(MICRO_BATCHES)
    plain = copy.deepcopy(model).to(DEVICE)
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    plain.train()

    def plain_step() -> None:
        plain.zero_grad()
        for i in range(MICRO_BATCHES):
            part = {name: x[i : i + 1].to(DEVICE) for name, x in batch.items()}
            (plain(**part).loss / MICRO_BATCHES).backward()

    with Engine(copy.deepcopy(model), device=DEVICE, recompute="always") as engine:
        took = medians({"plain": plain_step, "ferryman": lambda: step(engine, batch)}, rounds=ROUNDS, warm=2)
    print("\ncompute-bound, a step against plain PyTorch with activation checkpointing, all resident (at most 1.10)")
    ratio = took["ferryman"] / took["plain"]
    print("   ".join(f"{name} {s:.2f} s" for name, s in took.items()) + f"   {ratio:.3f}")


def peak(layers: int, micro_batches: int, stash: str) -> tuple[int, int, int]:
    """Peak bytes on the device, fetches and units of the second step, whose order of units is known."""
    with Engine(make(layers, width=64), device=DEVICE, stash=stash, recompute="always") as engine:
        batch = batch_of(micro_batches, context=32)
        step(engine, batch, micro_batches)
        before = engine.fetches
        with torch_virtual.watch(DEVICE) as seen:
            step(engine, batch, micro_batches)
        found = seen.counters.peak_memory, engine.fetches - before, len(engine.units)
    gc.collect()
    return found


def memory() -> None:
    print("\npeak device memory, KiB (width 64, micro-batches of 1 x 32 tokens)")
    print(f"{'layers':>8}{'micro-batches':>15}{'stash on device':>17}{'on host':>9}{'fetches':>9}{'2N-1':>6}")
    for layers, micro_batches in ((6, 4), (24, 4), (96, 4), (384, 4), (6, 2), (6, 16), (6, 64)):
        on_device, _, _ = peak(layers, micro_batches, "device")
        on_host, fetches, units = peak(layers, micro_batches, "host")
        print(
            f"{layers:>8}{micro_batches:>15}{on_device / 1024:>17.1f}{on_host / 1024:>9.1f}"
            f"{fetches:>9}{2 * units - 1:>6}",
            flush=True,
        )


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(f"virtual accelerator on {machine()}")
    model = make(LAYERS)
    against_the_bound(model, sys.argv[1] if len(sys.argv) > 1 else "trace.json")
    against_the_bound_with_a_host(model)
    against_micro_batch_major(model)
    against_plain(model)
    memory()


if __name__ == "__main__":
    main()
