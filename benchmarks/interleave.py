"""Measures updates shared by host and device, on the virtual accelerator, over a wide range of link rates.

    python benchmarks/interleave.py [--quick] [--trace trace.json]

First, all weights are held on the device and updates are deferred, which isolates the update phase (bf16, AdamW). Then
whole steps of a relayed model run, with eager and with deferred updates. There is one host thread and one compute
thread. Simulated copies are memcpy on a core, and the device's own updates run on a core as well, so all rates are
scaled down: the host updates one million parameters per second (it updates as usual and then sleeps), and the link has
some MB/s. Then 48 subgroups take 0.8 s on the host, while the real computation and copies take a few hundredths of
that. At the break-even rate, a device that is always supplied by the link would be as fast as the host.

Measured times are shown with two bounds from `ferryman.plan.performance` and `ferryman.plan.schedule`: the *fluid* time
(host and device share perfectly, limited by the link) and the best *discrete* schedule that a search finds (the
pipeline fills and drains, and berths are few). Both use the configured rates and the device's rate as measured in the
same run. `auto` has five steps to find its rates, which were calibrated at another rate of the link.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch_virtual
from _bench import host_of, machine
from torch import nn

from ferryman.engine import Engine
from ferryman.observe.trace import Trace
from ferryman.plan.performance import fluid_time, predict, smallest_useful_stride, stride_time
from ferryman.plan.policy import parse_policy
from ferryman.plan.rates import Rates
from ferryman.plan.schedule import Traffic, best_discrete, idle
from ferryman.plan.staging import BERTHS

DEVICE = "virtual"
SUBGROUP, UNITS, WIDTH = 1 << 14, 12, 256  # a unit is four subgroups
HOST_RATE = 1e6  # parameters per second
STRIDES = (2, 3, 4, 6, 8)
LEARNING_STEPS = 5  # of `auto`, before the measurement
LINK_SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # multiples of the break-even rate

# With bf16 and held weights: those that the host has updated cross to the device, the device's own are already there.
TRAFFIC = Traffic(host_out=0, host_in=2, device_in=10, device_out=12)
RESIDENT = Traffic(host_out=0, host_in=2, device_in=0, device_out=2)
BREAK_EVEN_RATE = 12 * HOST_RATE  # bytes per second


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.line(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Times(NamedTuple):
    """Seconds."""

    update: float
    step: float


@dataclass
class Way:
    """One policy, with an engine of its own."""

    policy: str
    engine: Engine
    trace: Trace

    def run(self, batch: dict[str, torch.Tensor]) -> Times:
        since, start = self.trace.now(), time.perf_counter()
        self.engine.step(batch, 2)
        self.engine.wait()
        torch_virtual.synchronize()
        whole = time.perf_counter() - start
        spans = [s for s in self.trace.spans() if s.start >= since]
        updates = [s for s in spans if s.label.startswith(("update ", "state "))]
        begin = min(s.start for s in updates)
        end = max(s.end for s in spans if s.label.startswith(("update ", "state ", "fetch ")))
        return Times(end - begin, whole)


def loss(model: nn.Module, part: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(part["x"].to(torch.bfloat16)).float().square().mean()


def engine_of(policy: str, trace: Trace | None = None, *, held: bool = True, deferred: bool = True) -> Engine:
    torch.manual_seed(0)
    model = Stack()
    return Engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        device=DEVICE,
        precision="bf16",
        deferred=deferred,
        held=held,
        host_threads=1,
        recompute="always",
        updates=policy,
        subgroup=SUBGROUP,
        loss=loss,
        trace=trace,
    )


def static_of_equal_memory() -> str:
    """The largest share whose state needs no more device memory than `auto` does."""
    with engine_of("auto") as auto:
        room, count = auto.plan.fixed, 4 * UNITS
    for some in range(count, 0, -1):
        with engine_of(f"static:{some / count:.6f}") as engine:
            if engine.plan.fixed <= room:
                return str(engine.plan.staging.policy)
    return "static:0"


def bounds(rates: Rates, policies: Sequence[str], sizes: Sequence[int]) -> tuple[float, float, dict[str, float]]:
    """The fluid and the discrete bound, and the model's prediction for each policy."""
    predicted = {
        name: predict(parse_policy(name), sizes, TRAFFIC, rates, BERTHS, RESIDENT).seconds for name in policies
    }
    discrete, _ = best_discrete(sizes, TRAFFIC, rates, idle(BERTHS))
    return fluid_time(sum(sizes), TRAFFIC, rates), discrete, predicted


def device_rate(engine: Engine) -> float:
    """Parameters per second of the device in the last steps."""
    stats = engine.stats()
    assert stats is not None
    return stats.device_share * sum(p.numel() for p in engine._model.parameters()) / stats.device_busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, two speeds: to see that it runs")
    parser.add_argument("--trace", help="where to save a trace of auto at twice the break-even")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds, speeds = (1, (0.5, 2.0)) if options.quick else (5, LINK_SPEEDS)
    static = static_of_equal_memory()
    policies = ["host", static, *(f"stride:{k}" for k in STRIDES), "auto"]
    batch = {"x": torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))}
    sizes = [SUBGROUP] * (4 * UNITS)
    print(f"{machine()}; virtual accelerator, one host thread, one compute thread; medians of {rounds}")
    print(f"{len(sizes)} subgroups of {SUBGROUP} parameters, host {HOST_RATE / 1e6:.1f} Mparam/s, break-even", end=" ")
    print(f"{BREAK_EVEN_RATE / 1e6:.0f} MB/s each way; {static} takes as much device memory as auto")
    with host_of(HOST_RATE):
        for speed in speeds:
            path = options.trace if speed == 2.0 else None
            update_phase(speed * BREAK_EVEN_RATE, policies, static, batch, sizes, rounds, path)
            gc.collect()
        for deferred in (False, True):
            for speed in (0.5, 2.0):
                relayed_steps(speed * BREAK_EVEN_RATE, batch, rounds, deferred=deferred)
                gc.collect()


def turns(ways: Sequence[Way], batch: dict[str, torch.Tensor], link: float, rounds: int) -> dict[str, list[Times]]:
    """Median seconds of each way, measured in turn."""
    for way in ways:
        way.run(batch)  # at full speed, to copy all weights to the device
    found: dict[str, list[Times]] = {way.policy: [] for way in ways}
    with torch_virtual.link(DEVICE, h2d=link, d2h=link):
        for round_ in range(-LEARNING_STEPS, rounds):
            for way in ways:
                if round_ >= 0 or way.policy == "auto":  # fixed policies have nothing to learn
                    times = way.run(batch)
                    if round_ >= 0:
                        found[way.policy].append(times)
    return found


def update_phase(
    link: float,
    policies: Sequence[str],
    static: str,
    batch: dict[str, torch.Tensor],
    sizes: Sequence[int],
    rounds: int,
    path: str | None,
) -> None:
    ways = [Way(policy, engine_of(policy, trace := Trace()), trace) for policy in policies]
    found = turns(ways, batch, link, rounds)
    stats = {way.policy: way.engine.stats() for way in ways}
    rate = device_rate(next(way.engine for way in ways if way.policy == "stride:2"))
    fluid, discrete, predicted = bounds(Rates(HOST_RATE, rate, link, link), policies, sizes)
    print(f"\nheld, deferred: link {link / 1e6:.1f} MB/s ({link / BREAK_EVEN_RATE:.2f} of break-even), device", end=" ")
    print(f"{rate / 1e6:.0f} Mparam/s: fluid bound {fluid:.3f} s, best discrete {discrete:.3f} s;", end=" ")
    rates = Rates(HOST_RATE, rate, link, link)
    long_run = min(range(2, 49), key=lambda k: stride_time(k, 1.0, TRAFFIC, rates))
    print(f"in the long run stride:{long_run} is the best, k* = {smallest_useful_stride(TRAFFIC, rates)}")
    titles = ("update", "predicted", "of discrete", "whole step", "on device", "duplex")
    print(f"{'policy':16}{''.join(f'{title:>13}' for title in titles)}")
    medians = {name: statistics.median(times.update for times in all_) for name, all_ in found.items()}
    for name in policies:
        seen = stats[name]
        assert seen is not None
        step = statistics.median(times.step for times in found[name])
        print(f"{name:16}{medians[name]:>11.3f} s{predicted[name]:>11.3f} s{medians[name] / discrete:>13.3f}", end="")
        print(f"{step:>11.3f} s{seen.device_share:>13.0%}{seen.duplex:>13.2f}")
    strides = [name for name in policies if parse_policy(name).kind == "stride"]
    auto, fixed = medians["auto"], min(medians[name] for name in ("host", *strides))
    first = min(strides, key=lambda name: predicted[name])
    print(f"auto: {auto / discrete:.3f} of the best discrete (wanted 1.10), {auto / fixed:.3f} of the best of", end=" ")
    print(f"host and strides (1.03), {medians['host'] / auto:.2f} x host", end=" ")
    print(f"(discrete: {predicted['host'] / discrete:.2f}), {medians[static] / auto:.2f} x {static};", end=" ")
    print(
        f"{first}, predicted best, at {medians[first] / min(medians[name] for name in strides):.3f} of the best (1.03)"
    )
    for way in ways:
        if path is not None and way.policy == "auto":
            way.trace.save(path)
        way.engine.close()


def relayed_steps(link: float, batch: dict[str, torch.Tensor], rounds: int, *, deferred: bool) -> None:
    policies = ["host", *(f"stride:{k}" for k in STRIDES), "auto"]
    ways = []
    for policy in policies:
        trace = Trace()
        ways.append(Way(policy, engine_of(policy, trace, held=False, deferred=deferred), trace))
    found = turns(ways, batch, link, rounds)
    medians = {name: statistics.median(times.step for times in all_) for name, all_ in found.items()}
    how = "deferred" if deferred else "eager"
    print(f"\nrelayed, {how}, whole steps: link {link / 1e6:.1f} MB/s ({link / BREAK_EVEN_RATE:.2f} of break-even)")
    for way in ways:
        seen = way.engine.stats()
        assert seen is not None
        print(f"{way.policy:16}{medians[way.policy]:>11.3f} s{seen.device_share:>13.0%} on the device")
        way.engine.close()
    auto, fixed = medians.pop("auto"), min(medians.values())
    print(f"auto: {auto / fixed:.3f} of the best of host and strides, {medians['host'] / auto:.2f} x host")


if __name__ == "__main__":
    main()
