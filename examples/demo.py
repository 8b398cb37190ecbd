"""Trains a byte-level GPT on an accelerator that cannot hold it: plain PyTorch first, then Ferryman.

    python examples/demo.py [--tiny] [--steps N] [--output DIR]

The device is a virtual accelerator with a small memory of its own, so no GPU is needed; the text is the Python standard
library's sources. `make train` runs this.
"""

import argparse
import dataclasses
import itertools
import statistics
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch_virtual
import transformers
from rich.console import Console
from rich.table import Table

import ferryman
from ferryman.cli.corpus import open_corpus
from ferryman.cli.display import open_display
from ferryman.cli.model_argument import parse_model
from ferryman.cli.optimizer import make_optimizer
from ferryman.cli.run_directory import new_run
from ferryman.cli.train_options import TrainOptions
from ferryman.cli.training_run import TrainingRun
from ferryman.distributed.ranks import Ranks
from ferryman.runtime.sizes import parse_bytes, show_bytes

SMALL_DEVICE, LARGE_DEVICE = "virtual:0", "virtual:1"  # one with little memory, one with plenty
LIBRARY_BYTES = 1 << 18  # of the small device, for libraries
COMPARED_STEPS = 8
TRAINING_SECONDS = 140  # about as long as the training itself takes
STDLIB = Path(sysconfig.get_path("stdlib"))

Batch = dict[str, torch.Tensor]


class Plain:
    """An ordinary training loop on one device."""

    def __init__(self, options: TrainOptions, device: str) -> None:
        torch.manual_seed(options.seed)
        self._options, self._device = options, device
        self._model = parse_model(options.model).on_host()
        self._optimizer = make_optimizer(self._model, options)
        self.doing = "moving the weights to the device"

    def step(self, batch: Batch) -> float:
        self._model.to(self._device)
        count, total = self._options.micro_batches, 0.0
        for number, ids in enumerate(batch["input_ids"].to(self._device).chunk(count), start=1):
            self.doing = f"the forward of micro-batch {number} of {count}"
            loss = self._model(input_ids=ids, labels=ids).loss / count
            self.doing = f"the backward of micro-batch {number} of {count}"
            loss.backward()
            total += loss.item()
        self.doing = "clipping the gradients"
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._options.max_grad_norm)
        self.doing = "the optimizer's step"
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


def run_out_of_memory(options: TrainOptions, batch: Batch, console: Console) -> str:
    """Plain PyTorch on the small device; returns what it was doing when memory ran out."""
    plain = Plain(options, SMALL_DEVICE)
    try:
        plain.step(batch)
    except torch.OutOfMemoryError as error:
        console.print(f"in {plain.doing}:\n  [red]torch.OutOfMemoryError: {error}[/red]", soft_wrap=True)
        return plain.doing
    raise SystemExit("plain PyTorch fits, so there is nothing to show: the device is too large for this model")


@dataclass
class Compared:
    """The results of the same steps with plain PyTorch, on a device that is large enough, and with Ferryman."""

    plain_seconds: float
    ferryman_seconds: float
    plain_peak: int
    difference: float  # of the losses, at most


def compare(options: TrainOptions, batches: list[Batch]) -> Compared:
    """Runs both in turn, from the same weights and on the same batches, under the same load of the machine."""
    plain = Plain(options, LARGE_DEVICE)
    torch.manual_seed(options.seed)
    model = parse_model(options.model).on_host()
    plain_times, ferryman_times, differences = [], [], []
    with ferryman.Engine(model, make_optimizer(model, options), **options.for_engine()) as engine:
        for batch in batches:
            start = time.perf_counter()
            expected = plain.step(batch)
            middle = time.perf_counter()
            loss = engine.step(batch, options.micro_batches).item()
            engine.wait()  # otherwise its updates would run during the step of plain PyTorch
            ferryman_times.append(time.perf_counter() - middle)
            plain_times.append(middle - start)
            differences.append(abs(loss - expected))
    return Compared(
        # Without the first steps, in which Ferryman measures what fits, and memory is touched for the first time.
        statistics.median(plain_times[2:]),
        statistics.median(ferryman_times[2:]),
        torch.accelerator.max_memory_allocated(LARGE_DEVICE),
        max(differences),
    )


def table(options: TrainOptions, where: str, compared: Compared, events: list[dict]) -> Table:
    tokens = options.batch * options.sequence
    steps, evaluations = ([event for event in events if event["event"] == kind] for kind in ("step", "eval"))
    bits = [f"{event['bits_per_byte']:.2f}" for event in (evaluations[0], evaluations[-1])]
    peak = max(event["device_peak"] for event in steps)
    same = "the same to the last bit" if compared.difference == 0 else f"differ by at most {compared.difference:.0e}"
    rows = Table("", "plain PyTorch", "Ferryman", title="On a virtual accelerator (this CPU)", title_justify="left")
    rows.add_row(f"trains in {options.memory}", f"[red]no[/red]: out of memory in {where}", "[green]yes[/green]")
    rows.add_row(
        "device memory, at its peak", f"{show_bytes(compared.plain_peak)}, on a larger device", show_bytes(peak)
    )
    rows.add_row("step time", f"{compared.plain_seconds:.2f} s", f"{compared.ferryman_seconds:.2f} s")
    rows.add_row(
        "tokens per second", *(f"{tokens / s:,.0f}" for s in (compared.plain_seconds, compared.ferryman_seconds))
    )
    rows.add_row(f"losses of {COMPARED_STEPS} steps", "", same)
    rows.add_row(f"bits per byte, after {options.steps} steps", "", f"{bits[0]}, then {bits[1]}")
    return rows


def free_name(path: Path) -> Path:
    """A new directory, `runs/demo`, `runs/demo-2`, ...: nothing is overwritten."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2)))
    return next(name for name in names if not name.exists())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model that trains in seconds")
    parser.add_argument("--steps", type=int, help="by default, as many as take somewhat more than a minute")
    parser.add_argument("--output", type=Path, help="a new directory; by default runs/demo, or runs/demo-2, ...")
    given = parser.parse_args()
    began = time.monotonic()
    console = Console(highlight=False)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # the model is small; the other core is for the host's part

    options = TrainOptions(
        model="gpt:tiny" if given.tiny else "gpt:layers=8,width=160,heads=4,context=128",
        data=[STDLIB / "json"] if given.tiny else sorted(STDLIB.glob("*.py")),
        output=given.output or free_name(Path("runs") / "demo"),
        batch=4,
        micro_batches=4 if given.tiny else 2,
        sequence=128,
        lr=2e-3,
        warmup=10,
        device=SMALL_DEVICE,
        memory="3MiB" if given.tiny else "12MiB",
        max_grad_norm=1.0,
        sample=32 if given.tiny else 96,
        eval_windows=16 if given.tiny else 64,
    )
    torch_virtual.set_capacity(parse_bytes(options.memory, "memory") + LIBRARY_BYTES, SMALL_DEVICE)
    options, run = new_run(options)
    windows = open_corpus(options, parse_model(options.model), run).training
    batches = [windows.batch(options.batch) for _ in range(COMPARED_STEPS)]

    console.rule(f"1. Plain PyTorch, on a device of {options.memory}", align="left")
    parameters = sum(parameter.numel() for parameter in parse_model(options.model).on_meta().parameters())
    console.print(
        f"{parameters / 1e6:.1f} M parameters: {show_bytes(4 * parameters)} of weights, {show_bytes(16 * parameters)} "
        "with gradients and the optimizer's state, without activations",
        soft_wrap=True,
    )
    where = run_out_of_memory(options, batches[0], console)

    console.rule("2. Both, in turn, with plain PyTorch on a larger device", align="left")
    compared = compare(options, batches)
    console.print(f"the losses of {COMPARED_STEPS} steps differ by at most {compared.difference:.0e}")

    console.rule(f"3. Ferryman, on the device of {options.memory}", align="left")
    steps = given.steps or min(500, max(80, int(TRAINING_SECONDS / compared.ferryman_seconds)))
    options = dataclasses.replace(options, steps=steps, eval_every=-(-steps // 3))
    events: list[dict] = []
    with open_display(console=console) as display:
        TrainingRun(options, run, lambda event: (events.append(dict(event)), display.show(event)), Ranks()).train()

    console.print("", table(options, where, compared, events))
    console.print(
        f"{time.monotonic() - began:.0f} s in all. In {run.directory}: checkpoints, metrics, trace and report"
    )


if __name__ == "__main__":
    main()
