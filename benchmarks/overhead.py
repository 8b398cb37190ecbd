"""What the engine adds to plain PyTorch in microseconds, with blocks so small that little else is left.

    python benchmarks/overhead.py [cpu | virtual] ...

Blocks of width 32 on one thread. A call is one unit, one micro-batch and one sweep. Its figure is what
`forward_backward` takes beyond plain accumulation with activation checkpointing, divided by the number of calls; both
run every forward twice (`recompute="always"`). A subgroup's figure is what `update` and `wait` take beyond the fused
AdamW, divided by the number of subgroups. The ways are run in turn, round after round, and their medians compared.
Wanted: at most 100 us per call, 50 us per subgroup.
"""

import copy
import statistics
import sys
import time

import torch
import torch_virtual  # noqa: F401  # makes the device known
from _bench import machine
from torch import nn
from torch.utils.checkpoint import checkpoint

import ferryman

WIDTH, BATCH, ROUNDS, WARM = 32, 4, 11, 3
CLOCKS = {"elapsed": time.perf_counter, "processor": time.process_time}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 8)
        self.checkpoints = False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return nn.functional.mse_loss(self.head(x), y)


class Plain:
    def __init__(self, model: Model, device: str) -> None:
        self._model = copy.deepcopy(model).to(device)
        self._model.checkpoints = True
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._device = device

    def forward_backward(self, batch: tuple[torch.Tensor, torch.Tensor], micro_batches: int) -> None:
        for x, y in zip(*(whole.to(self._device).chunk(micro_batches) for whole in batch), strict=True):
            (self._model(x, y) / micro_batches).backward()
        self._wait()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._wait()

    def _wait(self) -> None:
        if self._device != "cpu":
            torch.accelerator.synchronize()


class Ours:
    def __init__(self, model: Model, device: str) -> None:
        options = {"recompute": "always"} if device == "cpu" else {"recompute": "always", "slots": 3, "held": False}
        optimizer = torch.optim.AdamW(model.parameters())
        self.engine = ferryman.Engine(
            model, optimizer, device=device, loss=lambda model, batch: model(*batch), **options
        )

    def forward_backward(self, batch: tuple[torch.Tensor, torch.Tensor], micro_batches: int) -> None:
        self.engine.forward_backward(batch, micro_batches=micro_batches)
        self.engine.wait()

    def update(self) -> None:
        self.engine.update()
        self.engine.wait()


def measure(device: str, blocks: int, micro_batches: int) -> None:
    torch.manual_seed(0)
    model = Model(blocks)
    plain, ours = Plain(model, device), Ours(model, device)
    batch = torch.randn(micro_batches * BATCH, WIDTH), torch.randn(micro_batches * BATCH, 8)
    parts = {
        (part, name): work
        for name, way in (("plain", plain), ("ours", ours))
        for part, work in (
            ("call", lambda way=way: way.forward_backward(batch, micro_batches)),
            ("subgroup", way.update),
        )
    }
    took: dict[tuple[str, str], list[list[float]]] = {key: [] for key in parts}
    for _ in range(WARM + ROUNDS):
        for key, work in parts.items():
            begin = [clock() for clock in CLOCKS.values()]
            work()
            took[key].append([clock() - start for clock, start in zip(CLOCKS.values(), begin, strict=True)])
    units = len(ours.engine.units)
    counts = {"call": 2 * micro_batches * units, "subgroup": units}  # a unit is smaller than a subgroup
    for number, clock in enumerate(CLOCKS):
        row = f"{device:9}{blocks:>7}{micro_batches:>15}  {clock:10}"
        for part, count in counts.items():
            plains, ourselves = (
                statistics.median(times[number] for times in took[part, name][WARM:]) for name in ("plain", "ours")
            )
            row += f"{plains * 1e3:>9.2f}{ourselves * 1e3:>9.2f}{(ourselves - plains) / count * 1e6:>10.0f}"
        print(row, flush=True)
    ours.engine.close()


def main() -> None:
    torch.set_num_threads(1)
    print(f"one thread on {machine()}; plain and ours in ms, the difference in us")
    print(f"{'device':9}{'blocks':>7}{'micro-batches':>15}  {'clock':10}", end="")
    print(f"{'plain':>9}{'ours':>9}{'a call':>10}{'plain':>9}{'ours':>9}{'subgroup':>10}")
    for device in sys.argv[1:] or ["cpu", "virtual"]:
        for blocks in (12, 48):
            for micro_batches in (4, 16):
                measure(device, blocks, micro_batches)


if __name__ == "__main__":
    main()
