"""Features of random programs: what is done with the weights, their gradients and their updates."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from support.programs.model import Block, Feature, Net, Sizes

PLACES = ("blocks.0.up.weight", "blocks.1.down.bias", "norm.weight", "inlet.weight", "head.weight")


class ParameterHook(Feature):
    """`register_hook` of a parameter: scales, clamps or masks its gradient."""

    weight = 1.5
    cause = "hook"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.kind, self.place = rng.choice(["scale", "clamp", "mask", "log"]), rng.choice(PLACES)
        self.variant = f"{self.kind}, {self.place}"

    def set_up(self, net: Net, device: torch.device) -> None:
        parameter = net.get_parameter(self.place)
        if parameter.requires_grad:
            parameter.register_hook(self._change)

    def _change(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.kind == "log":
            self.log.append(gradient.norm().item())
            return None
        if self.kind == "mask":
            keep = torch.ones_like(gradient)
            keep[::2] = 0
            return gradient * keep
        return gradient * 0.3 if self.kind == "scale" else gradient.clamp(-1e-3, 1e-3)


class AccumulatedHook(Feature):
    """`register_post_accumulate_grad_hook` of a parameter."""

    weight = 0.25
    cause = "hook"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(PLACES)

    def set_up(self, net: Net, device: torch.device) -> None:
        def clamp(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.clamp_(-1e-3, 1e-3)

        parameter = net.get_parameter(self.variant)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(clamp)


class TiedModule(Feature):
    """Two blocks share a module."""

    traits = conflicts = frozenset({"tied"})

    def build(self, net: Net) -> None:
        net.blocks[1].up = net.blocks[0].up


class TiedParameter(Feature):
    """The head has the weights of the inlet."""

    traits = conflicts = frozenset({"tied"})

    def build(self, net: Net) -> None:
        net.head.weight = net.inlet.weight


class TiedByHand(Feature):
    """The forward multiplies by the inlet's weights itself."""

    cause = "inlet"
    traits = conflicts = frozenset({"tied"})

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.resident = rng.random() < 0.85
        self.variant = "resident" if self.resident else ""

    def options(self):
        return {"resident": ["inlet.weight"]} if self.resident else {}

    def project(self, net, x):
        return x @ net.inlet.weight.T


class TiedData(Feature):
    """Two parameters with the same memory."""

    weight = 0.25
    cause = "memory|share|tie"
    traits = conflicts = frozenset({"tied"})

    def set_up(self, net: Net, device: torch.device) -> None:
        net.head.weight.data = net.inlet.weight.data


class Frozen(Feature):
    """Some parts do not train."""

    weight = 2.0
    traits = frozenset({"frozen"})

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["first", "middle", "last", "biases"])

    def build(self, net: Net) -> None:
        if self.variant == "first":
            net.inlet.requires_grad_(False)
            net.blocks[0].requires_grad_(False)
        elif self.variant == "middle":
            net.blocks[len(net.blocks) // 2].requires_grad_(False)
        elif self.variant == "last":
            net.blocks[-1].requires_grad_(False)
            net.head.requires_grad_(False)
        else:
            for name, parameter in net.named_parameters():
                parameter.requires_grad_(not name.endswith("bias"))


class Resident(Feature):
    """`resident=` names parameters of blocks or the inlet."""

    weight = 2.0
    cause = "resident"

    PATTERNS: ClassVar[dict[str, str]] = {
        "first block": "blocks.0.*",
        "inlet": "inlet.*",
        "a weight": "blocks.1.up.weight",
        "norms": "*norm*",
    }

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(list(self.PATTERNS))

    def options(self):
        return {"resident": [self.PATTERNS[self.variant]]}


class WeightNorm(Feature):
    """A weight that is computed from others, by torch's parametrization."""

    weight = 0.7
    conflicts = frozenset({"tied"})

    def build_block(self, block: Block) -> None:
        if block.number == 1:
            nn.utils.parametrizations.weight_norm(block.down)


class OwnParameters(Feature):
    """Parameters that belong to the model or to a block itself: a learned offset, layer scales."""

    weight = 1.5

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["model", "block"])

    def build(self, net: Net) -> None:
        if self.variant == "model":
            net.offset = nn.Parameter(torch.randn(self.sizes.width))

    def build_block(self, block: Block) -> None:
        if self.variant == "block":
            block.layer_scale = nn.Parameter(torch.full((self.sizes.width,), 0.5))

    def before(self, net, x, inputs, local):
        return x + net.offset if self.variant == "model" else x

    def leave(self, block, x, y):
        return y * block.layer_scale if self.variant == "block" else y


class Unused(Feature):
    """Parameters that nothing uses; torch's optimizers leave them alone, weight decay included."""

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["model", "block", "whole block"])

    def build(self, net: Net) -> None:
        if self.variant == "model":
            net.spare = nn.Linear(self.sizes.width, self.sizes.width)

    def build_block(self, block: Block) -> None:
        if self.variant == "block":
            block.spare = nn.Linear(self.sizes.width, 2)

    def around(self, net, block, call):
        if self.variant == "whole block" and block.number == 0:
            return lambda given, **keywords: given
        return call


class Double(Feature):
    """The whole model is in float64."""

    weight = 0.5
    cause = "float64|dtype"

    @classmethod
    def suits(cls, sizes: Sizes) -> bool:
        return sizes.tokens

    def build(self, net: Net) -> None:
        net.double()


class Averaged(Feature):
    """An average of the weights, updated after each step."""

    weight = 1.5

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.use_buffers = rng.random() < 0.3
        self.average: AveragedModel | None = None

    def set_up(self, net: Net, device: torch.device) -> None:
        self.average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=self.use_buffers)

    def after_step(self, net):
        assert self.average is not None
        self.average.update_parameters(net)
        return [tensor.detach().clone() for tensor in self.average.module.state_dict().values()]


class WeightRead(Feature):
    """A weight's norm is read after each step, in one of several ways."""

    weight = 1.5

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["parameter", "reference", "state_dict", "groups", "data"])
        self.reference: torch.Tensor | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    def set_up(self, net: Net, device: torch.device) -> None:
        self.reference = net.blocks[1].down.bias

    def see_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def after_step(self, net):
        assert self.reference is not None
        assert self.optimizer is not None
        if self.variant == "groups":
            return [p.detach().norm().item() for group in self.optimizer.param_groups for p in group["params"]]
        weight: Any = {
            "parameter": net.blocks[-1].up.bias,
            "data": net.blocks[0].down.bias.data,
            "reference": self.reference,
            "state_dict": net.state_dict()["blocks.1.norm.weight"],
        }[self.variant]
        return weight.detach().norm().item()


class WeightEdit(Feature):
    """Weights are edited after each step: kept on a sphere, or clipped as in the first WGAN."""

    weight = 0.7
    cause = "edit"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["no_grad", "data"])

    def after_step(self, net):
        if self.variant == "data":
            net.blocks[0].down.bias.data.clamp_(-0.05, 0.05)
            return
        with torch.no_grad():
            weight = net.blocks[0].norm.weight
            weight.div_(weight.norm())


class GradientRead(Feature):
    """The user's loop looks at gradients before the update, or edits them."""

    between_calls = True

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["norms", "edit"])

    def after_backward(self, net):
        if self.variant == "edit" and net.norm.bias.grad is not None:
            net.norm.bias.grad.mul_(0.3)
        return [None if p.grad is None else p.grad.norm().item() for p in net.parameters()]


class OptimizerEdit(Feature):
    """The optimizer's settings or its state are edited after a step."""

    weight = 0.7
    cause = "state"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["rate", "rate", "state cleared"])
        self.optimizer: Any = None

    def see_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def after_step(self, net):
        if self.variant == "state cleared":
            self.optimizer.state.clear()
        else:
            self.optimizer.param_groups[0]["lr"] *= 0.5


class Schedule(Feature):
    """A learning rate scheduler."""

    weight = 2.0

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["lambda", "cosine", "cycle"])
        self.scheduler: Any = None

    def see_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        schedulers = torch.optim.lr_scheduler
        if self.variant == "lambda":
            self.scheduler = schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        elif self.variant == "cosine":
            self.scheduler = schedulers.CosineAnnealingLR(optimizer, 4)
        else:
            self.scheduler = schedulers.CyclicLR(optimizer, 1e-3, 2e-2, step_size_up=2, cycle_momentum=False)

    def after_step(self, net):
        self.scheduler.step()
        return self.scheduler.get_last_lr()


class Evaluated(Feature):
    """The model is evaluated after each step."""

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        generator = torch.Generator().manual_seed(rng.randrange(1000))
        if sizes.tokens:
            self.probe = torch.randint(0, sizes.classes, (2, 4), generator=generator)
        else:
            self.probe = torch.randn(2, sizes.width, generator=generator)

    def after_step(self, net):
        net.eval()
        with torch.no_grad():
            logits = net(self.probe.to(net.norm.weight.device)).logits
        net.train()
        return logits


FEATURES = (
    ParameterHook, AccumulatedHook, TiedModule, TiedParameter, TiedByHand, TiedData, Frozen, Resident, WeightNorm,
    OwnParameters, Unused, Double, Averaged, WeightRead, WeightEdit, GradientRead, OptimizerEdit, Schedule, Evaluated,
)  # fmt: skip
