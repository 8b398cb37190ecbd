"""Measures the cost of the exactness checks (docs/exactness.md), on the virtual accelerator.

    python benchmarks/checks.py [compute | exchange]

*compute*: a step of the compute-bound model of relay.py. By default, new objects are looked for before every step, a
guard surveys the user's variables in it, and second runs are compared with first runs, by checksums, in the first steps
and then in every 32nd step. So the cost of the default is a weighted mean of steps with the guard alone and steps with
both checks.

*exchange*: a model of 1,000 modules and 32 micro-batches, whose variables are swapped whenever another micro-batch
continues. No variable changes, or one on the model, or one in each block.

All variants run in turn, round after round, and medians are compared. Processor time is shown as well, since other work
on the machine affects it far less than elapsed time.
"""

import copy
import sys
import time
from collections.abc import Callable

import torch
import torch_virtual  # noqa: F401  # makes the device known
from _bench import machine, medians_of
from torch import nn
from transformers import logging

from ferryman.engine import Engine
from ferryman.exactness.guard import Guard
from ferryman.training import first_steps
from relay import DEVICE, LAYERS, MICRO_BATCHES, ROUNDS, batch_of, make, step

BLOCKS, WIDTH = 100, 8
LAYERS_PER_BLOCK = 8  # with the block itself and its list, 10 modules
EXCHANGED_MICRO_BATCHES = 32


class _NoGuard(Guard):
    """A guard that checks nothing."""

    def begin(self) -> None:
        pass


def checking(engine: Engine, *, checksums: bool, guard: bool) -> None:
    """Enables only these checks, from the next step on."""
    watch = engine._preparation.first_steps
    if guard:
        vars(watch).pop("_survey_new_objects", None)
    else:
        watch._survey_new_objects = lambda: None

    def begin(*_: object, **__: object) -> Guard:
        watch._relay.checksums.begin(on=checksums)
        if watch._survey is None:
            watch._survey = watch.roots.survey(thorough=False)
        return (Guard if guard else _NoGuard)(watch._survey, watch._relay.state)

    watch.begin = begin


def compute() -> None:
    batch = batch_of(MICRO_BATCHES)
    settings = {"none": (False, False), "guard": (False, True), "both": (True, True)}
    with Engine(copy.deepcopy(make(LAYERS)), device=DEVICE, recompute="always") as engine:

        def checked(name: str) -> None:
            checksums, guard = settings[name]
            checking(engine, checksums=checksums, guard=guard)
            step(engine, batch)

        begin = time.process_time(), time.perf_counter()
        checked("both")
        first = time.perf_counter() - begin[1], time.process_time() - begin[0]
        ways: dict[str, Callable[[], object]] = {name: lambda name=name: checked(name) for name in settings}
        found = medians_of(ways, rounds=ROUNDS)
    print(f"\ncompute-bound: {LAYERS} blocks, {MICRO_BATCHES} micro-batches; the default at most 1.02 of none")
    print(f"{'':12}{'none':>10}{'default':>10}{'ratio':>8}{'first steps':>13}{'ratio':>8}{'trial, in steps':>17}")
    often = first_steps._STEP_INTERVAL
    for clock, took, all_of_first in zip(("elapsed", "processor"), found, first, strict=True):
        none, both = took["none"], took["both"]
        default = took["guard"] + (both - took["guard"]) / often
        print(
            f"{clock:12}{none:>8.3f} s{default:>8.3f} s{default / none:>8.3f}{both:>11.3f} s{both / none:>8.3f}"
            f"{(all_of_first - both) / none:>17.2f}"
        )


class Block(nn.Module):
    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) if i < 2 else nn.ReLU() for i in range(LAYERS_PER_BLOCK))
        self._changes = changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        if self._changes:
            self.aux = y.square().mean()
        return x + 0.1 * y


class Model(nn.Module):
    """`changes`: where variables change in each micro-batch, "nowhere", "on the model" or "in each block"."""

    def __init__(self, changes: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(changes=changes == "in each block") for _ in range(BLOCKS))
        self._changes = changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._changes == "on the model":
            self.res = x
        for block in self.blocks:
            x = block(x)
        loss = x.square().mean()
        if self._changes == "on the model":
            loss = loss + (x - self.res).square().mean()
        if self._changes == "in each block":
            loss = loss + sum(block.aux for block in self.blocks)
        return loss


def exchange(device: str, rounds: int) -> None:
    x = torch.randn(EXCHANGED_MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(0))
    engines = {
        name: Engine(Model(name), device=device, loss=lambda model, batch: model(*batch), recompute="always")
        for name in ("nowhere", "on the model", "in each block")
    }

    def one(engine: Engine) -> None:
        engine.zero_grad()
        engine.forward_backward((x,), micro_batches=EXCHANGED_MICRO_BATCHES)

    for engine in engines.values():
        one(engine)
        checking(engine, checksums=False, guard=True)
    elapsed, processor = medians_of({name: lambda e=e: one(e) for name, e in engines.items()}, rounds=rounds, warm=0)
    switches = 2 * BLOCKS * EXCHANGED_MICRO_BATCHES  # each call parks in the forward and in the backward
    for name in engines:
        extra = (processor[name] - processor["nowhere"]) / switches * 1e6
        print(
            f"{device:9}{name:15}{elapsed[name]:>8.2f} s{elapsed[name] / elapsed['nowhere']:>8.2f}"
            f"{processor[name]:>10.2f} s{processor[name] / processor['nowhere']:>8.2f}{extra:>12.0f}",
            flush=True,
        )
    roots = engines["in each block"]._preparation.first_steps.roots
    survey = roots.survey(thorough=False)
    before = survey.capture()
    _, took = medians_of(
        {
            "make": lambda: roots.survey(thorough=False),
            "capture": survey.capture,
            "compare": lambda: survey.changed(before),
        },
        rounds=21,
    )
    modules = sum(1 for _ in engines["in each block"]._model.modules())
    print(
        f"{device:9}a survey of {modules} modules: "
        + ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in took.items()),
        flush=True,
    )
    for engine in engines.values():
        engine.close()


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or ["compute", "exchange"]
    print(f"virtual accelerator on {machine()}")
    if "compute" in wanted:
        compute()
    if "exchange" in wanted:
        print(
            f"\nvariables that are swapped: {BLOCKS} blocks, {EXCHANGED_MICRO_BATCHES} micro-batches; "
            "processor time per switch in us"
        )
        print(f"{'device':9}{'changes':15}{'elapsed':>10}{'ratio':>8}{'processor':>12}{'ratio':>8}{'us/switch':>12}")
        for device in ("cpu", DEVICE):
            exchange(device, ROUNDS)


if __name__ == "__main__":
    main()
