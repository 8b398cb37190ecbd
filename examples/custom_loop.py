"""A custom training loop: a scheduler, gradients that are read before the update, evaluation, save and resume.

    python examples/custom_loop.py [--tiny] [--device virtual] [--output DIR]
    torchrun --nproc-per-node 2 examples/custom_loop.py --output DIR [--tiny] [--device virtual]

The model is any `torch.nn.Module`, here one of a few lines that learns to sort; it contains no code for Ferryman.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ferryman

NUMBERS, LENGTH = 32, 16

Batch = tuple[torch.Tensor, torch.Tensor]


class Sorter(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUMBERS, width)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, NUMBERS)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(numbers) + self.place
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def make_batch(size: int) -> Batch:
    numbers = torch.randint(NUMBERS, (size, LENGTH))
    return numbers, numbers.sort(dim=1).values


def share(batch: Batch, engine: ferryman.Engine) -> Batch:
    """This rank's part of a batch that all ranks have drawn alike; a single process takes all of it."""
    return batch[0][engine.share.rank :: engine.share.size], batch[1][engine.share.rank :: engine.share.size]


def sorting_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    numbers, expected = batch
    return cross_entropy(model(numbers).flatten(0, 1), expected.flatten())


def train(options: argparse.Namespace, output: Path, start: int, steps: int) -> None:
    """Runs steps `start` to `steps`; with `start` > 0, it continues from the checkpoint in `output`."""
    torch.manual_seed(0)
    model = Sorter(*((2, 32) if options.tiny else (8, 128)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=options.steps)
    test = make_batch(64)
    with ferryman.Engine(model, optimizer, device=options.device, memory=options.memory, loss=sorting_loss) as engine:
        prints = engine.share.rank == 0
        if start:
            path = engine.load(output, objects={"scheduler": scheduler})
            if prints:
                print(f"continuing from {path.name} with a learning rate of {scheduler.get_last_lr()[0]:.1e}")
        while engine.steps < steps:
            loss = engine.forward_backward(share(make_batch(64), engine), micro_batches=4)
            # Between forward_backward and update, gradients can be read and edited.
            largest = engine.gradient("head.weight").abs().max()
            engine.update()
            scheduler.step()
            if prints and engine.steps % max(1, options.steps // 10) == 0:
                with torch.no_grad():  # outside a step the model is called as usual; its layers stream here, too
                    right = (model(test[0]).argmax(-1) == test[1]).float().mean()
                print(
                    f"step {engine.steps}: loss {loss.item():.3f}, gradient norm {engine.grad_norm:.2f} (of the head "
                    f"at most {largest:.4f}), {right:.0%} in the right place"
                )
        engine.save(output, objects={"scheduler": scheduler})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a small model")
    parser.add_argument("--device", help="by default, the accelerator that PyTorch reports")
    parser.add_argument("--memory", help="budget of device memory, such as 64MiB")
    parser.add_argument("--output", type=Path, help="a new directory for the checkpoint; by default a temporary one")
    options = parser.parse_args()
    options.steps = 20 if options.tiny else 600
    if options.output is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("several ranks write one checkpoint: give a directory that all of them can access, --output DIR")
    if options.device == "virtual":
        import torch_virtual  # noqa: F401 - an accelerator for machines without one
    with tempfile.TemporaryDirectory() as folder:
        output = options.output or Path(folder) / "sorter"
        train(options, output, 0, options.steps // 2)
        train(options, output, options.steps // 2, options.steps)  # as another process would, another day


if __name__ == "__main__":
    main()
