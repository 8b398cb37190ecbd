"""Features of random programs: what the training loop changes on the model between steps, code that looks whether
there is a graph, and code that runs the model with other weights."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from support.programs.model import Block, Feature, Net, Sizes
from support.programs.state import STATEFUL, StateOnBlock


class ReplacedContainer(Feature):
    """Blocks fill a list or a dictionary, and the loop reads it after each step and puts another in its place."""

    cause = "gathered"
    traits = STATEFUL

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.kind = rng.choice([list, dict])
        self.shared, self.used = rng.random() < 0.5, rng.random() < 0.5
        self.variant = f"{self.kind.__name__}{', shared' if self.shared else ''}{', used' if self.used else ''}"

    def build(self, net: Net) -> None:
        self._replace(net)

    def _replace(self, net: Net) -> None:
        common = self.kind()
        for block in net.blocks:
            block.gathered = common if self.shared else self.kind()

    def leave(self, block, x, y):
        mean = y.detach().mean()
        if self.kind is list:
            block.gathered.append(mean)
        else:
            block.gathered[block.number] = mean
        return y

    def after(self, net, x, local):
        gathered = net.blocks[0].gathered
        if not self.used or not gathered:
            return x
        return x + 0.3 * (gathered[-1] if self.kind is list else list(gathered.values())[-1])

    def after_step(self, net):
        found = [sorted(float(value) for value in self._values(block)) for block in net.blocks]
        self._replace(net)
        return found

    def _values(self, block: Any) -> list[torch.Tensor]:
        return block.gathered if self.kind is list else list(block.gathered.values())


class HookBetween(Feature):
    """The loop registers a forward hook between steps, which fills a list of its own; the loop reads it after steps."""

    cause = "hook"
    traits = STATEFUL

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.often, self.number, self.changes = rng.random() < 0.5, rng.randrange(2), rng.random() < 0.4
        self.variant = f"{'every step' if self.often else 'once'}{', changes' if self.changes else ''}"
        self.handle: Any = None
        self.seen: list[float] = []

    def after_step(self, net):
        found = list(self.seen)
        if self.handle is None or self.often:
            if self.handle is not None:
                self.handle.remove()
            self.seen = self._register(net)
        return found

    def _register(self, net: Net) -> list[float]:
        seen: list[float] = []

        def look(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
            seen.append(output.detach().float().mean().item())
            return output * (1 + 0.1 * len(seen)) if self.changes else None

        self.handle = net.blocks[self.number].down.register_forward_hook(look)
        return seen


class Swapped(nn.Module):
    """Has no parameters, and keeps what it has seen."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.latest = scale, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.latest = x.detach().mean()
        return self.scale * x


class SwappedModule(Feature):
    """The loop puts another module in the place of one without parameters."""

    cause = "swapped"
    traits = STATEFUL

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.on_blocks, self.steps = rng.random() < 0.5, 0
        self.variant = "block" if self.on_blocks else "model"

    def build_block(self, block: Block) -> None:
        if self.on_blocks:
            block.swapped = Swapped(1.0)

    def build(self, net: Net) -> None:
        if not self.on_blocks:
            net.swapped = Swapped(1.0)

    def leave(self, block, x, y):
        return block.swapped(y) if self.on_blocks else y

    def after(self, net, x, local):
        return x if self.on_blocks else net.swapped(x) + net.swapped.latest

    def after_step(self, net):
        self.steps += 1
        owners = list(net.blocks) if self.on_blocks else [net]
        found = [owner.swapped.latest.item() for owner in owners if owner.swapped.latest is not None]
        for owner in owners:
            owner.swapped = Swapped(1 + 0.2 * self.steps)
        return found


class GraphLooker(StateOnBlock):
    """A block keeps something only if there is a graph, and it is used outside it."""

    cause = "looked"

    def leave(self, block, x, y):
        return super().leave(block, x, y) if y.requires_grad else y


class AveragedData(Feature):
    """A moving average of the weights, written by hand with `.data`, whose state the loop reads."""

    cause = "average"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.on_model = rng.random() < 0.5
        self.variant = "on the model" if self.on_model else ""
        self.average: dict[str, torch.Tensor] = {}

    def set_up(self, net: Net, device: torch.device) -> None:
        self.average = {name: parameter.data.clone() for name, parameter in net.named_parameters()}
        if self.on_model:
            net.average = self.average

    def after_step(self, net):
        for name, parameter in net.named_parameters():
            self.average[name].mul_(0.9).add_(parameter.data, alpha=0.1)
        return [value.float().norm().item() for value in self.average.values()]


class OtherWeights(Feature):
    """The loss runs the model with other weights, all or those of one block, which are computed from a leaf."""

    cause = "functional_call|replaced|outside"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["all", "all", "one block"])
        self.weights: dict[str, torch.Tensor] = {}
        self.scale = torch.ones(())

    def set_up(self, net: Net, device: torch.device) -> None:
        chosen = "" if self.variant == "all" else "blocks.1."
        tensors = [*net.named_parameters(), *net.named_buffers()]
        self.weights = {name: 0.7 * t.detach().to(device) for name, t in tensors if name.startswith(chosen)}
        self.scale = torch.tensor(0.5, device=device, requires_grad=True)

    def loss(self, net, batch, output, value):
        scaled = {name: t * self.scale if t.is_floating_point() else t.clone() for name, t in self.weights.items()}
        return value + F.mse_loss(output.logits, functional_call(net, scaled, (batch.inputs,)).logits)

    def after_step(self, net):
        return self.scale.grad


class Detached(Feature):
    """Blocks keep tensors without a graph, of which code outside asks whether they have one."""

    cause = "detached"
    traits = STATEFUL

    def leave(self, block, x, y):
        block.detached = y.detach().float().mean()
        return y

    def after(self, net, x, local):
        kept = [block.detached for block in net.blocks if hasattr(block, "detached")]
        return x + sum(float(t.cpu().numpy()) for t in kept) + sum(t.requires_grad for t in kept)


FEATURES = (ReplacedContainer, HookBetween, SwappedModule, GraphLooker, AveragedData, OtherWeights, Detached)
