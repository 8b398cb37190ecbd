"""Compares several ranks with one: samples per second per rank, total host memory, and bytes over each link.

    python benchmarks/scaling.py [rounds]

Every rank is a process with a virtual accelerator and a throttled link of its own, and gets the same number of
micro-batches. Steps are bound by the links. Compute is kept small, because all ranks share the cores of this machine,
while real ranks have a device each. One, two and four ranks run in turn, round after round; medians are compared.

Host memory is the total of all ranks after two steps: proportional set sizes, in which shared memory counts once,
without the memory of the virtual devices. It is measured for two models that differ only in depth. The difference is
divided by the difference in parameters, so memory that does not grow with the model does not count.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch_virtual
from _bench import machine
from transformers import LlamaConfig, LlamaForCausalLM

from ferryman.engine import Engine
from ferryman.runtime.host_memory import trim

RANKS = (1, 2, 4)
LINK_RATE = 20e6  # bytes per second, each way
MICRO_BATCHES = 2
CONTEXT = 8
STEPS = 4  # the first is not counted
MEMORY_DEPTHS = (4, 12)  # blocks of the models whose memory is compared
MEMORY_WIDTH = 1024  # of these models
VIRTUAL = torch.device("virtual", 0)


def make(layers: int, width: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=layers, **sizes))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (MICRO_BATCHES, CONTEXT))
    return {"input_ids": ids, "labels": ids}


def proportional() -> int:
    """Bytes of this process; of shared memory, its proportional part."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(lines["Pss"].split()[0]) * 1024


def engine_of(model: LlamaForCausalLM) -> Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Engine(model, optimizer, device=VIRTUAL, updates="host", stash="host", recompute="always")


def steps() -> dict[str, float]:
    """Seconds per step, and bytes per step over this rank's link."""
    torch_virtual.set_link(VIRTUAL, h2d=LINK_RATE, d2h=LINK_RATE)
    seconds = []
    with engine_of(make(layers=12, width=192)) as engine:
        torch.manual_seed(engine.share.rank)  # each has its own data
        for _ in range(STEPS):
            with torch_virtual.watch(VIRTUAL) as seen:
                started = time.perf_counter()
                engine.step(batch(), MICRO_BATCHES)
                engine.wait()
                seconds.append(time.perf_counter() - started)
    counters = seen.counters
    return {"seconds": statistics.median(seconds[1:]), "in": counters.h2d_bytes, "out": counters.d2h_bytes}


def memory(weights: Path) -> dict[str, float]:
    """Bytes of this process on the host, including the model, and the number of the model's parameters."""
    layers = int(weights.name)
    with torch.device("meta"):
        model = make(layers, MEMORY_WIDTH)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with engine_of(model) as engine:
        torch.manual_seed(engine.share.rank)
        engine.load_weights(weights)
        for _ in range(2):
            engine.step(batch(), MICRO_BATCHES)
        engine.wait()
        trim()
        found = proportional() - torch.accelerator.memory_allocated(VIRTUAL)
    return {"bytes": found, "parameters": parameters}


def work(what: str, weights: Path, place: Path) -> None:
    """Runs one measurement as a rank, and writes its result into a file."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    found = steps() if what == "steps" else memory(weights)
    (place / os.environ.get("RANK", "0")).write_text(json.dumps(found))


def run(what: str, weights: str, ranks: int) -> list[dict[str, float]]:
    """Runs a measurement on this many ranks, each in its own process; returns their results."""
    with tempfile.TemporaryDirectory() as place:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *launch, __file__, what, weights, place]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return [json.loads((Path(place) / str(rank)).read_text()) for rank in range(ranks)]


def slope(small: list[dict[str, float]], large: list[dict[str, float]]) -> float:
    """Bytes per additional parameter."""
    more = sum(rank["bytes"] for rank in large) - sum(rank["bytes"] for rank in small)
    return more / (large[0]["parameters"] - small[0]["parameters"])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(machine())
    print(f"{MICRO_BATCHES} micro-batches per rank, links of {LINK_RATE / 1e6:.0f} MB/s each way, virtual accelerators")
    found: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in RANKS}
    for _ in range(rounds):
        for ranks in RANKS:
            found[ranks] += run("steps", "", ranks)
    held: dict[int, list[list[dict[str, float]]]] = {ranks: [] for ranks in RANKS}
    with tempfile.TemporaryDirectory() as place:
        for layers in MEMORY_DEPTHS:
            make(layers, MEMORY_WIDTH).save_pretrained(f"{place}/{layers}")
            for ranks in RANKS:
                held[ranks].append(run("memory", f"{place}/{layers}", ranks))
    per_parameter = {ranks: slope(*held[ranks]) for ranks in RANKS}
    one = statistics.median(rank["seconds"] for rank in found[1])
    print(f"{'ranks':>5} {'seconds per step':>16} {'samples/s per rank':>18} {'to one rank':>12} {'wanted':>7}", end="")
    print(f" {'link in':>9} {'out':>8} {'host bytes per parameter':>24} {'to one rank':>12} {'wanted':>7}")
    for ranks in RANKS:
        seconds = statistics.median(rank["seconds"] for rank in found[ranks])
        over_link = [max(rank[way] for rank in found[ranks]) / 1e6 for way in ("in", "out")]
        print(f"{ranks:>5} {seconds:>16.3f} {MICRO_BATCHES / seconds:>18.2f} {one / seconds:>12.3f} {'0.9':>7}", end="")
        print(f" {over_link[0]:>6.1f} MB {over_link[1]:>5.1f} MB", end="")
        print(f" {per_parameter[ranks]:>24.2f} {per_parameter[ranks] / per_parameter[1]:>12.3f} {'1.05':>7}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        work(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
