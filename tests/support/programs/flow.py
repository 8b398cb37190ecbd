"""Features of random programs: how data flows through the blocks, and random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.checkpoint import checkpoint

from support.programs.model import (
    Block,
    CarriedData,
    CarriedObject,
    CarriedTuple,
    Feature,
    FrozenData,
    Net,
    Sizes,
    carried,
    passed_on,
    tilted,
)
from support.programs.state import STATEFUL


class Skips(Feature):
    """As a U-net: outputs of the first half are added on the way up."""

    weight = 1.5

    def between(self, net, depth, x, local):
        held, half = local.setdefault("held", []), len(net.blocks) // 2
        if depth < half:
            held.append(x)
        elif held:
            x = x + 0.5 * held.pop()
        return x


class Accumulator(Feature):
    """What blocks return is added up in place between them, as in loops over experts."""

    weight = 1.5

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["+=", "index_add_", "slices", "data"])

    def between(self, net, depth, x, local):
        if "total" not in local:
            local["total"] = torch.zeros_like(x)
        total = local["total"]
        if self.variant == "+=":
            total += x
        elif self.variant == "index_add_":
            total.index_add_(0, torch.arange(len(x), device=x.device), x.to(total.dtype))
        elif self.variant == "slices":
            total[depth % 2 :: 2] += x[depth % 2 :: 2]
        else:
            total.data.add_(x.detach())
        return x

    def after(self, net, x, local):
        return x + 0.3 * local["total"] if "total" in local else x


class InThreads(Feature):
    """Blocks are called in a thread of the user's own, which is refused."""

    weight = 0.3
    cause = "is used in the thread"
    traits = conflicts = frozenset({"checkpoint"})

    def around(self, net, block, call):
        def elsewhere(*args: Any, **kwargs: Any) -> Any:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(call, *args, **kwargs).result()

        return elsewhere


class Reuse(Feature):
    """Blocks run at several depths."""

    weight = 1.5
    traits = conflicts = frozenset({"order"})

    def order(self, net, inputs):
        return [*range(len(net.blocks))] * 2


class Skipping(Feature):
    """The data decides which blocks run."""

    weight = 1.5
    traits = conflicts = frozenset({"order"})

    def order(self, net, inputs):
        skipped = int(inputs.flatten()[0].item() * 3) % len(net.blocks)
        return [number for number in range(len(net.blocks)) if number != skipped]


class Carried(Feature):
    """Blocks pass on something that holds several tensors."""

    weight = 1.5
    cause = "Carried|Frozen"
    traits = conflicts = frozenset({"carry"})

    KINDS: ClassVar[dict[str, Any]] = {
        "tuple": CarriedTuple,
        "dataclass": CarriedData,
        "frozen dataclass": FrozenData,
        "dict": dict,
    }

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(list(self.KINDS))

    def carry(self, x):
        return self.KINDS[self.variant](x=x, bias=0.3 * x, depth=0)

    def enter(self, block, x, given, keywords):
        bias, depth = (given["bias"], given["depth"]) if self.variant == "dict" else (given.bias, given.depth)
        return x + bias / (1 + depth)


class CarriedAndEdited(Carried):
    """The same with an object that blocks edit and return."""

    weight = 0.3
    KINDS: ClassVar[dict[str, Any]] = {"object": CarriedObject}
    conflicts = frozenset({"carry", "checkpoint"})


class Keywords(Feature):
    """Blocks get a tensor and a number by keyword."""

    def arguments(self, net, block):
        return {"scale": 1.0 / (1 + block.number), "bias": net.norm.weight * 0.1}

    def enter(self, block, x, given, keywords):
        return x * (1 + keywords["scale"]) + keywords["bias"]


class NoGradIsland(Feature):
    """One block runs without gradients, and what it gives is added."""

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.number = rng.randrange(sizes.blocks)
        self.within = rng.random() < 0.4
        self.variant = "inside" if self.within else "around"

    def around(self, net, block, call):
        if self.within or block.number != self.number:
            return call

        def without_gradients(given: Any, **keywords: Any) -> Any:
            with torch.no_grad():
                found = carried(call(given, **keywords))
            return passed_on(given, carried(given) + 0.3 * found)

        return without_gradients

    def leave(self, block, x, y):
        if not self.within:
            return y
        with torch.no_grad():
            largest = y.abs().amax(-1, keepdim=True)
        return y / (1 + largest)


class Autocast(Feature):
    """bfloat16 in all blocks, or within each of them."""

    traits = conflicts = frozenset({"autocast"})

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["around", "inside"])

    def around(self, net, block, call):
        return self._cast(call) if self.variant == "around" else call

    def inside(self, block, compute):
        return self._cast(compute) if self.variant == "inside" else compute

    def _cast(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def cast(given: Any, **keywords: Any) -> Any:
            with torch.autocast(carried(given).device.type, dtype=torch.bfloat16):
                return call(given, **keywords)

        return cast


class Checkpointed(Feature):
    """Activation checkpointing that the user has switched on."""

    weight = 2.0
    cause = "checkpoint"
    traits = frozenset({"checkpoint"})
    conflicts = frozenset({"checkpoint", "stateful block"})

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.around_blocks, self.reentrant = rng.random() < 0.5, rng.random() < 0.3
        self.variant = f"{'around' if self.around_blocks else 'inside'}{', reentrant' if self.reentrant else ''}"
        if self.reentrant:  # where no input requires a gradient, plain PyTorch loses the gradients of the weights
            self.conflicts |= {"frozen", "loss reads forward"}

    def around(self, net, block, call):
        return self._checkpoint(call) if self.around_blocks else call

    def inside(self, block, compute):
        return compute if self.around_blocks else self._checkpoint(compute)

    def _checkpoint(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda given, **keywords: checkpoint(lambda x: call(x, **keywords), given, use_reentrant=self.reentrant)


class EditsInPlace(Feature):
    """A block edits its input, the model edits a block's output, or the input of a block that has used it."""

    cause = "in place"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["output"] * 4 + ["input of model"] * 2 + ["input", "after use"])
        self.conflicts = frozenset({"checkpoint"}) if self.variant in ("input", "after use") else frozenset()

    def before(self, net, x, inputs, local):
        if self.variant == "input of model":
            x = x * 1.0
            x.add_(0.3)
        return x

    def enter(self, block, x, given, keywords):
        if self.variant == "input" and block.number > 0:
            x.mul_(1.2)
        return x * 1.0

    def between(self, net, depth, x, local):
        if self.variant == "output":
            x.mul_(1.2)
        if self.variant == "after use":
            if (earlier := local.get("earlier")) is not None:
                earlier.add_(0.3)
                x = x + 0.3 * earlier
            local["earlier"] = x
        return x


class ActivationHook(Feature):
    """`register_hook` of an activation: scales its gradient."""

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["inside", "outside"])

    def leave(self, block, x, y):
        if self.variant == "inside" and y.requires_grad:
            y.register_hook(self._scale)
        return y

    def between(self, net, depth, x, local):
        if self.variant == "outside" and depth == 1 and x.requires_grad:
            x.register_hook(self._scale)
        return x

    def _scale(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


class ModuleHooks(Feature):
    """Hooks of blocks that change their inputs or outputs, or the gradients that pass."""

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["pre", "output", "backward"])

    def set_up(self, net: Net, device: torch.device) -> None:
        for block in net.blocks:
            target = block.down
            if self.variant == "pre":
                target.register_forward_pre_hook(lambda module, args: (args[0] * 1.3,))
            elif self.variant == "output":
                target.register_forward_hook(lambda module, args, output: torch.tanh(output))
            else:
                target.register_full_backward_hook(lambda module, inputs, outputs: tuple(g * 0.5 for g in inputs))


# Random numbers.


class Dropout(Feature):
    weight = 2.0

    def build_block(self, block: Block) -> None:
        block.dropout = nn.Dropout(0.2)

    def leave(self, block, x, y):
        return block.dropout(y)


class OutsideDropout(Feature):
    def after(self, net, x, local):
        return F.dropout(x, 0.2, net.training)


class GlobalRandom(Feature):
    """Draws from the global generator of Python or of numpy, as for stochastic depth or masks."""

    weight = 2.0
    cause = "random|numpy"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.numpy, self.in_blocks = rng.random() < 0.5, rng.random() < 0.7
        self.variant = f"{'numpy' if self.numpy else 'python'}, {'block' if self.in_blocks else 'model'}"
        self.traits = STATEFUL if self.in_blocks else frozenset()

    def leave(self, block, x, y):
        return y * self._draw() if self.in_blocks else y

    def after(self, net, x, local):
        return x if self.in_blocks else tilted(x, self._draw())

    def _draw(self) -> float:
        return 0.5 + float(np.random.rand() if self.numpy else random.random())


class OwnRandom(Feature):
    """Draws from a generator that the model or its blocks own."""

    weight = 1.5
    cause = "random|own|generator"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.kind = rng.choice(["python", "numpy", "torch"])
        self.place = rng.choice(["model", "block", "shared"])
        self.variant = f"{self.kind}, {self.place}"
        self.traits = frozenset() if self.place == "model" else STATEFUL

    def build(self, net: Net) -> None:
        if self.place != "block":
            net.own = self._make()
        for block in net.blocks:
            if self.place != "model":
                block.own = net.own if self.place == "shared" else self._make()

    def _make(self) -> Any:
        if self.kind == "torch":
            return torch.Generator().manual_seed(3)
        return random.Random(3) if self.kind == "python" else np.random.default_rng(3)

    def leave(self, block, x, y):
        return y if self.place == "model" else self._scale(block, y)

    def after(self, net, x, local):
        return self._scale(net, x) if self.place == "model" else x

    def _scale(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "torch":
            return x * (0.5 + torch.rand(x.shape[-1], generator=module.own).to(x.device))
        return tilted(x, float(module.own.random()))


class DataRandom(Feature):
    """A generator that is made anew and seeded by the data."""

    weight = 0.7

    def leave(self, block, x, y):
        # Coarse, so that a difference in the last bit does not change the seed.
        return y * (0.5 + random.Random(int(x.detach().float().mean() * 4)).random())


FEATURES = (
    Skips, Accumulator, InThreads, Reuse, Skipping, Carried, CarriedAndEdited, Keywords, NoGradIsland, Autocast,
    Checkpointed, EditsInPlace, ActivationHook, ModuleHooks, Dropout, OutsideDropout, GlobalRandom, OwnRandom,
    DataRandom,
)  # fmt: skip
