"""Features of random programs: state that the forward keeps, on modules, in shared objects and in buffers."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from support.programs.model import Block, Feature, Net, Sizes, carried, tilted

EPSILON = 0.1  # of batch normalization: with so few samples, a small one would make results depend on last bits

STATEFUL = frozenset({"stateful block"})  # plain checkpointing would run it twice, with another result


class StateOnModel(Feature):
    """The input of the first block waits on the model until the last one has run."""

    weight = 2.0
    cause = "residual"

    def before(self, net, x, inputs, local):
        net.residual = x
        return x

    def after(self, net, x, local):
        return x + 0.5 * net.residual


class StateOnBlock(Feature):
    """Something that a block has computed waits on the block, and is used outside it."""

    cause = "kept"  # also the name of the attribute
    traits = STATEFUL

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.detached = rng.random() < 0.5
        self.variant = "detached" if self.detached else "with gradient"

    def leave(self, block, x, y):
        setattr(block, self.cause, torch.tanh(y.detach() if self.detached else y))
        return y

    def after(self, net, x, local):
        used = next((getattr(block, self.cause) for block in net.blocks if hasattr(block, self.cause)), None)
        return x if used is None else x + 0.5 * used


class Counter(Feature):
    """Counts its calls, and may compute something else in every third."""

    cause = "calls"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.on_blocks, self.matters = rng.random() < 0.6, rng.random() < 0.5
        self.variant = f"{'block' if self.on_blocks else 'model'}{', matters' if self.matters else ''}"
        self.traits = STATEFUL if self.on_blocks else frozenset()

    def build_block(self, block: Block) -> None:
        if self.on_blocks:
            block.calls = 0

    def build(self, net: Net) -> None:
        if not self.on_blocks:
            net.calls = 0

    def enter(self, block, x, given, keywords):
        return self._count(block, x) if self.on_blocks else x

    def before(self, net, x, inputs, local):
        return x if self.on_blocks else self._count(net, x)

    def _count(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        module.calls += 1
        return tilted(x, 0.3 * (module.calls % 3)) if self.matters else x


class Holder:
    """A shared object of the user's own."""

    def __init__(self) -> None:
        self.scale: Any = None


class SharedContext(Feature):
    """The model writes into an object that its blocks read."""

    weight = 2.0
    cause = "context|scale"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.kind = rng.choice(["dict", "dict", "list", "object"])
        self.detached = rng.random() < 0.75
        self.variant = self.kind + ("" if self.detached else ", with gradient")

    def build(self, net: Net) -> None:
        net.context = {"dict": {}, "list": [None], "object": Holder()}[self.kind]
        for block in net.blocks:
            block.context = net.context

    def before(self, net, x, inputs, local):
        scale = 1 + torch.tanh(3 * (x.detach() if self.detached else x).mean())
        if self.kind == "object":
            net.context.scale = scale
        else:
            net.context[0 if self.kind == "list" else "scale"] = scale
        return x

    def leave(self, block, x, y):
        if self.kind == "object":
            return y * block.context.scale
        return y * block.context[0 if self.kind == "list" else "scale"]


class OutsideContext(Feature):
    """The same, where the dictionary is a global variable of the user's program."""

    weight = 0.3
    cause = "context|input"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.context: dict[str, torch.Tensor] = {}

    def before(self, net, x, inputs, local):
        self.context["scale"] = 1 + torch.tanh(3 * x.detach().mean())
        return x

    def leave(self, block, x, y):
        return y * self.context["scale"]


class ReplacedForward(Feature):
    """Blocks whose forward was replaced by a closure over the model, as libraries that patch models do."""

    weight = 0.5
    cause = "scale|forward"

    def set_up(self, net: Net, device: torch.device) -> None:
        def replace(block: Block) -> None:
            forward = block.forward

            def scaled(given: Any, **keywords: Any) -> Any:
                if isinstance(given, torch.Tensor):
                    given = given * net.scale
                return forward(given, **keywords)

            block.forward = scaled

        for block in net.blocks:
            replace(block)

    def build(self, net: Net) -> None:
        net.scale = 1.0

    def before(self, net, x, inputs, local):
        net.scale = 1 + torch.tanh(3 * x.detach().mean())
        return x


class History(Feature):
    """Blocks keep numbers or tensors of what they have seen, in a list or a dictionary."""

    weight = 1.5
    cause = "history"
    traits = STATEFUL

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.kind = rng.choice(["floats", "tensors", "last", "attribute"])
        self.variant = self.kind

    def build_block(self, block: Block) -> None:
        block.history = {} if self.kind == "last" else []

    def leave(self, block, x, y):
        mean = y.detach().mean()
        if self.kind == "attribute":
            block.history = mean
        elif self.kind == "last":
            block.history["mean"] = mean
        else:
            block.history.append(mean.item() if self.kind == "floats" else mean)
        return y


class LazyTable(Feature):
    """A table that the first call makes and keeps, as rotary embeddings do."""

    cause = "table"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.on_blocks = rng.random() < 0.6
        self.variant = "block" if self.on_blocks else "model"

    def build_block(self, block: Block) -> None:
        block.table = None

    def build(self, net: Net) -> None:
        net.table = None

    def enter(self, block, x, given, keywords):
        return self._use(block, x) if self.on_blocks else x

    def before(self, net, x, inputs, local):
        return x if self.on_blocks else self._use(net, x)

    def _use(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        if module.table is None:
            module.table = torch.linspace(-0.5, 0.5, x.shape[-1], device=x.device)
        return x + module.table


class RunningMean(Feature):
    """A buffer that follows the mean of what passes, and is used."""

    weight = 3.0
    cause = "mean"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.on_blocks = rng.random() < 0.4
        self.way = rng.choice(["assigned", "assigned", "in place", "in place", "data"])
        self.used = rng.random() < 0.5
        self.variant = f"{'block' if self.on_blocks else 'model'}, {self.way}{', used' if self.used else ''}"
        self.traits = STATEFUL if self.on_blocks else frozenset()

    def build_block(self, block: Block) -> None:
        if self.on_blocks:
            block.register_buffer("mean", torch.zeros(self.sizes.width))

    def build(self, net: Net) -> None:
        if not self.on_blocks:
            net.register_buffer("mean", torch.zeros(self.sizes.width))

    def enter(self, block, x, given, keywords):
        return self._follow(block, x) if self.on_blocks else x

    def before(self, net, x, inputs, local):
        return x if self.on_blocks else self._follow(net, x)

    def _follow(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        seen = x.detach().flatten(0, -2).mean(0)
        if self.way == "assigned":
            module.mean = 0.8 * module.mean + 0.2 * seen
        elif self.way == "in place":
            module.mean.mul_(0.8).add_(seen, alpha=0.2)
        else:
            module.mean.data.mul_(0.8).add_(seen, alpha=0.2)
        return x - 0.5 * module.mean.clone() if self.used else x


class BatchNorm(Feature):
    """Batch normalization: a function that edits running statistics, or torch's own module."""

    cause = "running|batch"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.kind = rng.choice(["model"] * 5 + ["block"] * 2 + ["module"])
        self.variant = self.kind
        self.traits = STATEFUL if self.kind == "block" else frozenset()

    def build_block(self, block: Block) -> None:
        if self.kind == "block":
            self._add_statistics(block)

    def build(self, net: Net) -> None:
        if self.kind == "model":
            self._add_statistics(net)
        elif self.kind == "module":
            net.batch_norm = nn.BatchNorm1d(self.sizes.width, eps=EPSILON)

    def _add_statistics(self, module: nn.Module) -> None:
        module.register_buffer("running_mean", torch.zeros(self.sizes.width))
        module.register_buffer("running_var", torch.ones(self.sizes.width))

    def enter(self, block, x, given, keywords):
        return self._normalize(block, x) if self.kind == "block" else x

    def before(self, net, x, inputs, local):
        if self.kind == "module":
            return net.batch_norm(x.flatten(0, -2)).view_as(x)
        return self._normalize(net, x) if self.kind == "model" else x

    def _normalize(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        mean, variance = module.running_mean, module.running_var
        return F.batch_norm(flat, mean, variance, training=module.training, eps=EPSILON).view_as(x)


class BatchCount(Feature):
    """An integer buffer that counts the calls of a module."""

    cause = "seen"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.on_blocks = rng.random() < 0.3
        self.variant = "block" if self.on_blocks else "model"
        self.traits = STATEFUL if self.on_blocks else frozenset()

    def build_block(self, block: Block) -> None:
        if self.on_blocks:
            block.register_buffer("seen", torch.tensor(0))

    def build(self, net: Net) -> None:
        if not self.on_blocks:
            net.register_buffer("seen", torch.tensor(0))

    def enter(self, block, x, given, keywords):
        if self.on_blocks:
            block.seen += 1
        return x

    def after(self, net, x, local):
        if not self.on_blocks:
            net.seen += len(x)
        return x


class MemoryOfBatches(Feature):
    """A queue of earlier activations, as in MoCo, that the next micro-batch uses; it is a buffer of the model."""

    weight = 0.7
    cause = "queue"

    def build(self, net: Net) -> None:
        net.register_buffer("queue", torch.zeros(3, self.sizes.width))

    def after(self, net, x, local):
        used = x + 0.3 * net.queue.mean(0)
        net.queue = torch.cat([x.detach().flatten(0, -2).mean(0, keepdim=True), net.queue[:-1]])
        return used


class FirstInputOfBlock(Feature):
    """A block keeps the input of its first call ever, and compares every later one with it."""

    weight = 0.5
    cause = "first"
    traits = STATEFUL

    def build_block(self, block: Block) -> None:
        block.first = None

    def enter(self, block, x, given, keywords):
        if block.first is None:
            block.first = carried(given).detach().mean().item()
        return tilted(x, block.first)


FEATURES = (
    StateOnModel, StateOnBlock, Counter, SharedContext, OutsideContext, ReplacedForward, History, LazyTable,
    RunningMean, BatchNorm, BatchCount, MemoryOfBatches, FirstInputOfBlock,
)  # fmt: skip
