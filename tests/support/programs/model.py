"""The model of a random program: blocks between an inlet and a head, with points at which features act on it."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

LENGTH = 4  # of a sequence of tokens


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int
    blocks: int
    classes: int  # for tokens, also the size of the vocabulary
    kind: str  # of block: "mlp", "gated" or "attention"
    tokens: bool  # whether the inputs are sequences of token numbers, or else vectors


class Feature:
    """Something that ordinary training code does. A subclass overrides the points at which it acts.

    A feature is made anew for each run of its program, with the same random numbers. What it draws is settled in
    `__init__`; state that the user's code would keep on the model is kept on the model.
    """

    weight = 1.0  # how often it is drawn, compared to others
    cause = ""  # a regular expression: what the message of a refusal says if this feature is its cause
    traits: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()  # traits of features that it cannot be combined with

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        self.sizes = sizes
        self.variant = ""
        self.log: list[Any] = []  # compared after the run

    @classmethod
    def suits(cls, sizes: Sizes) -> bool:
        return True

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.variant})" if self.variant else type(self).__name__

    # Building.

    def build_block(self, block: Block) -> None:
        """In the constructor of a block."""

    def build(self, net: Net) -> None:
        """In the constructor of the model."""

    def set_up(self, net: Net, device: torch.device) -> None:
        """Before training; the model of the plain loop is on the device, that of the engine on the host."""

    def see_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Once the optimizer exists."""

    def options(self) -> dict[str, Any]:
        """Arguments of the engine."""
        return {}

    # In the model's forward. `local` is a dictionary of this one call.

    def before(self, net: Net, x: torch.Tensor, inputs: torch.Tensor, local: dict[str, Any]) -> torch.Tensor:
        return x

    def order(self, net: Net, inputs: torch.Tensor) -> list[int] | None:
        """Which blocks run, one after the other; None for all of them."""
        return None

    def carry(self, x: torch.Tensor) -> Any:
        """What is passed from block to block."""
        return x

    def arguments(self, net: Net, block: Block) -> dict[str, Any]:
        """Keyword arguments of a block."""
        return {}

    def around(self, net: Net, block: Block, call: Callable[..., Any]) -> Callable[..., Any]:
        """How the block is called."""
        return call

    def between(self, net: Net, depth: int, x: torch.Tensor, local: dict[str, Any]) -> torch.Tensor:
        """After the block at this depth."""
        return x

    def after(self, net: Net, x: torch.Tensor, local: dict[str, Any]) -> torch.Tensor:
        return x

    def project(self, net: Net, x: torch.Tensor) -> torch.Tensor | None:
        """The logits, if not those of the head."""
        return None

    # In a block's forward.

    def enter(self, block: Block, x: torch.Tensor, given: Any, keywords: dict[str, Any]) -> torch.Tensor:
        return x

    def inside(self, block: Block, compute: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        """How the block computes."""
        return compute

    def leave(self, block: Block, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The block's input and what it is about to add to it."""
        return y

    # In the loss.

    def begin_loss(self, net: Net) -> None:
        pass

    def loss(self, net: Net, batch: Batch, output: Output, value: torch.Tensor) -> torch.Tensor:
        return value

    # Between backward and update, and after a step.

    between_calls = False  # whether the user's loop calls `forward_backward` and `update`, with something between them

    def after_backward(self, net: Net) -> Any:
        """What the user reads then."""

    def after_step(self, net: Net) -> Any:
        """What the user reads then."""


class Output(NamedTuple):
    logits: torch.Tensor
    early: list[torch.Tensor]  # logits of other heads


class Batch(NamedTuple):
    inputs: torch.Tensor
    labels: torch.Tensor


class Block(nn.Module):
    features: tuple[Feature, ...] = ()

    def __init__(self, sizes: Sizes, number: int) -> None:
        super().__init__()
        self.number = number
        self.kind = sizes.kind
        width, inner = sizes.width, {"mlp": 2, "gated": 1, "attention": 3}[sizes.kind] * sizes.width
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        if self.kind == "gated":
            self.gate = nn.Linear(width, inner)
        self.down = nn.Linear(2 * width if self.kind == "mlp" else width, width)
        for feature in self.features:
            feature.build_block(self)

    def forward(self, given: Any, **keywords: Any) -> Any:
        x = carried(given)
        for feature in self.features:
            x = feature.enter(self, x, given, keywords)
        compute = self.compute
        for feature in self.features:
            compute = feature.inside(self, compute)
        y = compute(x)
        for feature in self.features:
            y = feature.leave(self, x, y)
        return passed_on(given, x + y)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        if self.kind == "gated":
            h = torch.tanh(h) * self.gate(x)
        elif self.kind == "attention":
            h = F.scaled_dot_product_attention(*h.chunk(3, dim=-1))
        else:
            h = F.gelu(h)
        return self.down(h)


class Net(nn.Module):
    features: tuple[Feature, ...] = ()
    block_class: type[Block] = Block

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.inlet = nn.Embedding(sizes.classes, sizes.width) if sizes.tokens else nn.Linear(sizes.width, sizes.width)
        self.blocks = nn.ModuleList(self.block_class(sizes, number) for number in range(sizes.blocks))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.classes)
        for feature in self.features:
            feature.build(self)

    def forward(self, inputs: torch.Tensor) -> Output:
        local: dict[str, Any] = {"early": []}
        x = self.inlet(inputs)
        for feature in self.features:
            x = feature.before(self, x, inputs, local)
        x = self.through_blocks(x, inputs, local)
        for feature in self.features:
            x = feature.after(self, x, local)
        x = self.norm(x)
        projected = [feature.project(self, x) for feature in self.features]
        logits = next((logits for logits in projected if logits is not None), None)
        return Output(self.head(x) if logits is None else logits, local["early"])

    def through_blocks(self, x: torch.Tensor, inputs: torch.Tensor, local: dict[str, Any]) -> torch.Tensor:
        orders = [feature.order(self, inputs) for feature in self.features]
        order = next((order for order in orders if order is not None), range(len(self.blocks)))
        given: Any = x
        for feature in self.features:
            given = feature.carry(given)
        for depth, number in enumerate(order):
            block = self.blocks[number]
            call, keywords = block, {}
            for feature in self.features:
                call = feature.around(self, block, call)
                keywords.update(feature.arguments(self, block))
            given = call(given, **keywords)
            x = carried(given)
            for feature in self.features:
                x = feature.between(self, depth, x, local)
            if x is not carried(given):
                given = passed_on(given, x)
        return carried(given)


def make_net(sizes: Sizes, features: tuple[Feature, ...]) -> Net:
    """The features belong to the classes, as code does, so that none is an attribute of a module."""
    block_class = type("Block", (Block,), {"features": features})
    return type("Net", (Net,), {"features": features, "block_class": block_class})(sizes)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def make_loss(features: tuple[Feature, ...]) -> Callable[[Net, Any], torch.Tensor]:
    def loss(net: Net, part: Any) -> torch.Tensor:
        batch = Batch(part["inputs"], part["labels"]) if isinstance(part, dict) else Batch(*part)
        for feature in features:
            feature.begin_loss(net)
        output = net(batch.inputs)
        value = cross_entropy(output.logits, batch.labels)
        for feature in features:
            value = feature.loss(net, batch, output, value)
        return value

    return loss


# What is passed from block to block: a tensor, or something that holds it.


class CarriedTuple(NamedTuple):
    x: torch.Tensor
    bias: torch.Tensor
    depth: int


@dataclasses.dataclass
class CarriedData:
    x: torch.Tensor
    bias: torch.Tensor
    depth: int


@dataclasses.dataclass(frozen=True)
class FrozenData:
    x: torch.Tensor
    bias: torch.Tensor
    depth: int


class CarriedObject:
    """Blocks edit it and return it."""

    def __init__(self, x: torch.Tensor, bias: torch.Tensor, depth: int) -> None:
        self.x, self.bias, self.depth = x, bias, depth


def carried(given: Any) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return given
    return given["x"] if isinstance(given, dict) else given.x


def passed_on(given: Any, x: torch.Tensor) -> Any:
    """The same with another `x`."""
    if isinstance(given, torch.Tensor):
        return x
    if isinstance(given, dict):
        return {**given, "x": x, "depth": given["depth"] + 1}
    if isinstance(given, CarriedTuple):
        return given._replace(x=x, depth=given.depth + 1)
    if dataclasses.is_dataclass(given):
        return dataclasses.replace(given, x=x, depth=given.depth + 1)
    given.x = x
    given.depth += 1
    return given


def tilted(x: torch.Tensor, amount: float) -> torch.Tensor:
    """A change that no normalization takes back, as it would if all elements were scaled or moved alike."""
    return x + amount * torch.linspace(-1, 1, x.shape[-1], device=x.device)


def copy_of(net: Net, device: torch.device) -> Net:
    """A frozen copy on the device."""
    return copy.deepcopy(net).requires_grad_(False).to(device)
