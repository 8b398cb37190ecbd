"""Features of random programs: code that uses gradients by itself, and functions, locks and context variables."""

from __future__ import annotations

import contextvars
import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from support.programs.model import Block, Feature, Net, Sizes
from support.programs.state import STATEFUL


class HooksInside(Feature):
    """The code of blocks hooks its inputs, what it returns or what it stores, or keeps their gradients."""

    weight = 1.5
    cause = "hook|retain_grad"
    traits = STATEFUL

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.place, self.keeps = rng.choice(["input", "output", "stored"]), rng.random() < 0.5
        self.variant = f"{self.place}, {'kept' if self.keeps else 'hooked'}"

    def enter(self, block, x, given, keywords):
        if self.place == "input":
            x = x * 1.0 if self.keeps else x  # a leaf keeps its gradient anyway
            self._watch(block, x)
        return x

    def leave(self, block, x, y):
        if self.place == "stored":
            block.stored = torch.tanh(y)
            self._watch(block, block.stored)
            return y + block.stored
        if self.place == "output":
            self._watch(block, y)
        return y

    def _watch(self, block: Any, tensor: torch.Tensor) -> None:
        if not tensor.requires_grad:
            return
        if self.keeps:
            tensor.retain_grad()
            block.kept = tensor
        else:
            tensor.register_hook(_halve)

    def after_step(self, net):
        return [None if (kept := getattr(block, "kept", None)) is None else kept.grad for block in net.blocks]


def _halve(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


class LeafOutside(Feature):
    """Blocks, of which the first may be frozen, use a leaf that is not the model's."""

    cause = "leaf"
    traits = frozenset({"frozen"})

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.freezes = rng.random() < 0.6
        self.variant = "frozen" if self.freezes else ""

    def build(self, net: Net) -> None:
        if self.freezes:
            net.inlet.requires_grad_(False)
            net.blocks[0].requires_grad_(False)

    def set_up(self, net: Net, device: torch.device) -> None:
        self.leaf = torch.full((), 0.7, device=device, requires_grad=True)

    def leave(self, block, x, y):
        return y * self.leaf

    def after_step(self, net):
        return self.leaf.grad


class GradientInside(Feature):
    """The code of blocks differentiates something by itself; with `create_graph`, the gradient is trained."""

    cause = "autograd.grad|create_graph"
    traits = conflicts = frozenset({"checkpoint"})

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.creates_graph = rng.random() < 0.5
        self.variant = "create_graph" if self.creates_graph else ""

    def leave(self, block, x, y):
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = torch.tanh(block.up(at).float()).square().sum()
            (gradient,) = torch.autograd.grad(energy, at, create_graph=self.creates_graph)
        return y - 0.1 * gradient


class TransformedInside(Feature):
    """`torch.func` in the code of blocks."""

    conflicts = frozenset({"checkpoint"})

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["vmap", "grad", "jvp"])

    def leave(self, block, x, y):
        if self.variant == "vmap":
            return torch.func.vmap(lambda row: torch.tanh(row) * 1.5)(y)
        if self.variant == "grad":
            return y + 0.1 * torch.func.grad(lambda h: F.softplus(h).sum())(x)
        return y + 0.1 * torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),))[1]


class Functions(Feature):
    """Blocks get a function that holds a tensor."""

    weight = 1.5

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["closure", "default", "partial", "method"])

    def arguments(self, net, block):
        bias = net.norm.weight * 0.3
        if self.variant == "closure":
            return {"function": lambda x: x + bias}
        if self.variant == "default":
            return {"function": lambda x, bias=bias: x + bias}
        return {"function": functools.partial(torch.add, bias) if self.variant == "partial" else _Adder(bias).add}

    def enter(self, block, x, given, keywords):
        return keywords["function"](x)


class _Adder:
    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Context(Feature):
    """Blocks read what the one before them has left in a context variable, or collect tensors there."""

    cause = "context"
    traits = STATEFUL

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["tensor", "list"])
        self.values: contextvars.ContextVar[Any] = contextvars.ContextVar("values")

    def before(self, net, x, inputs, local):
        self.values.set(x * 0.3 if self.variant == "tensor" else [])
        return x

    def leave(self, block, x, y):
        if self.variant == "tensor":
            y = y + 0.3 * self.values.get()
            self.values.set(y)
        else:
            self.values.get().append(y)
        return y

    def after(self, net, x, local):
        found = self.values.get()
        return x + 0.2 * (found if self.variant == "tensor" else sum(found))


_LOCK = threading.RLock()


class Locked(Feature):
    """A lock is held around blocks and inside them."""

    weight = 0.7
    cause = "lock"

    def around(self, net, block, call):
        def locked(*args: Any, **kwargs: Any) -> Any:
            with _LOCK:
                return call(*args, **kwargs)

        return locked

    def inside(self, block: Block, compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def locked(x: torch.Tensor) -> torch.Tensor:
            with _LOCK:
                return compute(x)

        return locked


class SparseMatrix(Feature):
    """Blocks store a sparse matrix, and the model multiplies by it."""

    weight = 0.7
    traits = STATEFUL

    def leave(self, block, x, y):
        matrix = torch.eye(self.sizes.width, device=x.device) * 0.3
        block.matrix = matrix.to_sparse() if x.device.type == "cpu" else matrix  # the virtual device has no sparse ones
        return y

    def between(self, net, depth, x, local):
        flat = x.float().flatten(0, -2)
        return x + (net.blocks[0].matrix @ flat.T).T.view_as(x) if hasattr(net.blocks[0], "matrix") else x


class NodeHooks(Feature):
    """Hooks on nodes of autograd's graph, of which a unit has only one, and on several parameters: refused."""

    weight = 0.15
    cause = "hook"
    conflicts = frozenset({"checkpoint"})

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["module", "node", "parameters"])

    def set_up(self, net: Net, device: torch.device) -> None:
        if self.variant == "module":
            net.blocks[1].register_backward_hook(lambda module, given, received: None)
        elif self.variant == "parameters":
            trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
            torch.autograd.graph.register_multi_grad_hook(trained, lambda gradients: None)

    def between(self, net, depth, x, local):
        if self.variant == "node" and x.grad_fn is not None:
            x.grad_fn.register_hook(lambda given, received: None)
        return x


class GradientOfStored(Feature):
    """`torch.autograd.grad` for a tensor that a block has stored: refused if the block goes on to use it."""

    weight = 0.3
    cause = "autograd.grad"
    traits = STATEFUL

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.uses = rng.random() < 0.3
        self.variant = "used" if self.uses else ""

    def leave(self, block, x, y):
        block.seen = torch.tanh(block.up(x))
        return y + block.seen.mean() if self.uses else y

    def loss(self, net, batch, output, value):
        stored = getattr(net.blocks[-1], "seen", None)
        if stored is None or not stored.requires_grad:
            return value
        value = value + stored.square().mean()
        (gradient,) = torch.autograd.grad(value, stored, retain_graph=True)
        return value * (1 + gradient.norm().detach())


class Reversal(Feature):
    """A custom autograd function, as for domain adaptation: the gradient is reversed for a second head."""

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["model", "block"])

    def build(self, net: Net) -> None:
        net.domain = nn.Linear(self.sizes.width, 2)

    def leave(self, block, x, y):
        return y + 0.3 * _Reverse.apply(x, 0.5) if self.variant == "block" else y

    def after(self, net, x, local):
        local["early"].append(net.head(net.norm(_Reverse.apply(x, 0.3)))) if self.variant == "model" else None
        return x

    def loss(self, net, batch, output, value):
        return value + sum(early.square().mean() for early in output.early) if self.variant == "model" else value


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


FEATURES = (
    HooksInside, LeafOutside, GradientInside, TransformedInside, Functions, Context, Locked, SparseMatrix, NodeHooks,
    GradientOfStored, Reversal,
)  # fmt: skip
