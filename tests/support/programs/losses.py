"""Features of random programs: what the loss uses beside the model's output."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from support.programs.model import Block, Feature, Net, Sizes, carried, copy_of, cross_entropy
from support.programs.state import STATEFUL

READS_FORWARD = STATEFUL | {"loss reads forward"}


class AuxiliaryLoss(Feature):
    """Blocks put a loss of their own on themselves, as routers do, and the loss adds them up."""

    weight = 2.0
    cause = "aux"
    traits = READS_FORWARD

    def leave(self, block, x, y):
        block.aux = y.pow(2).mean()
        return y

    def loss(self, net, batch, output, value):
        return value + 0.5 * sum(block.aux for block in net.blocks if hasattr(block, "aux"))


class ListOfLosses(Feature):
    """Blocks append a loss of their own to a list that the model owns."""

    cause = "losses"
    traits = READS_FORWARD

    def build(self, net: Net) -> None:
        net.losses = []
        for block in net.blocks:
            block.losses = net.losses

    def begin_loss(self, net):
        net.losses.clear()

    def leave(self, block, x, y):
        block.losses.append(y.abs().mean())
        return y

    def loss(self, net, batch, output, value):
        return value + 0.5 * sum(net.losses)


class CapturedActivations(Feature):
    """Forward hooks append activations to a list, and the loss uses them."""

    weight = 2.0
    cause = "hook|captured"
    traits = READS_FORWARD

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["blocks", "inside blocks"])

    def set_up(self, net: Net, device: torch.device) -> None:
        net.captured = []
        for block in net.blocks:
            target = block if self.variant == "blocks" else block.down
            target.register_forward_hook(lambda module, args, output: net.captured.append(carried(output)))

    def begin_loss(self, net):
        net.captured.clear()

    def loss(self, net, batch, output, value):
        return value + 0.5 * sum(x.pow(2).mean() for x in net.captured) / len(net.captured)


class LoggingHooks(Feature):
    """Forward hooks that only log numbers."""

    cause = "hook|log"
    traits = STATEFUL

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["blocks", "inside blocks", "head"])

    def set_up(self, net: Net, device: torch.device) -> None:
        targets = {"blocks": net.blocks, "inside blocks": [block.up for block in net.blocks], "head": [net.head]}
        for target in targets[self.variant]:
            target.register_forward_hook(
                lambda module, args, output: self.log.append(carried(output).detach().abs().mean().item())
            )


class GradientOfInput(Feature):
    """`torch.autograd.grad` with respect to the input weighs the loss."""

    weight = 1.5
    cause = "autograd.grad|retain_graph|second time"

    @classmethod
    def suits(cls, sizes: Sizes) -> bool:
        return not sizes.tokens

    def loss(self, net, batch, output, value):
        x = batch.inputs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(net(x).logits.logsumexp(-1).sum(), x)
        return value * (1 + gradient.pow(2).mean())


class GradientPenalty(Feature):
    """The same, and the penalty itself is trained. Needs gradients of gradients."""

    weight = 0.25
    cause = "create_graph"

    @classmethod
    def suits(cls, sizes: Sizes) -> bool:
        return not sizes.tokens

    def loss(self, net, batch, output, value):
        x = batch.inputs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(net(x).logits.logsumexp(-1).sum(), x, create_graph=True)
        return value + gradient.pow(2).mean()


class GradientOfHead(Feature):
    """Weighs a second loss by gradients with respect to the last layer, as VQGAN does."""

    weight = 0.2
    cause = "autograd.grad|retain_graph|second time|head"

    def loss(self, net, batch, output, value):
        second = output.logits.pow(2).mean()
        norms = [torch.autograd.grad(x, net.head.weight, retain_graph=True)[0].norm() for x in (value, second)]
        return value + second * (norms[0] / (norms[1] + 1e-3)).clamp(0, 1)


class Teacher(Feature):
    """The loss compares with a teacher: a frozen copy, an average of the model's weights so far, the model itself, or
    the model without its adapters."""

    weight = 3.0
    cause = "adapter|teacher|no_grad"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.kind = rng.choice(["copy", "average", "itself", "without adapters"])
        self.variant = self.kind
        self.teacher: Net | None = None

    def build_block(self, block: Block) -> None:
        if self.kind == "without adapters":
            block.adapter = nn.Linear(self.sizes.width, self.sizes.width)
            block.use_adapter = True

    def leave(self, block, x, y):
        return y + block.adapter(x) if self.kind == "without adapters" and block.use_adapter else y

    def set_up(self, net: Net, device: torch.device) -> None:
        if self.kind in ("copy", "average"):
            self.teacher = copy_of(net, device)
            with torch.no_grad():
                self.teacher.head.weight.mul_(0.5)

    def loss(self, net, batch, output, value):
        with torch.no_grad():
            if self.teacher is not None:
                theirs = self.teacher(batch.inputs).logits
            elif self.kind == "itself":
                theirs = net(batch.inputs * 2 if batch.inputs.is_floating_point() else batch.inputs.flip(0)).logits
            else:
                self._switch(net, False)
                theirs = net(batch.inputs).logits
                self._switch(net, True)
        return value + 2 * F.mse_loss(output.logits, theirs)

    def after_step(self, net):
        if self.kind == "average":
            assert self.teacher is not None
            with torch.no_grad():
                for theirs, ours in zip(self.teacher.parameters(), net.parameters(), strict=True):
                    theirs.lerp_(ours.to(theirs.device), 0.5)

    def _switch(self, net: Net, use: bool) -> None:
        for block in net.blocks:
            block.use_adapter = use


class TwoHeads(Feature):
    """A second head in the middle, with a loss of its own."""

    def build(self, net: Net) -> None:
        net.early = nn.Linear(self.sizes.width, self.sizes.classes)

    def between(self, net, depth, x, local):
        if depth == 0:
            local["early"].append(net.early(x))
        return x

    def loss(self, net, batch, output, value):
        return value + 0.5 * sum(cross_entropy(logits, batch.labels) for logits in output.early)


class TwoViews(Feature):
    """The loss calls the model a second time, on another view of the batch, and compares the two."""

    def loss(self, net, batch, output, value):
        view = batch.inputs.flip(-1) if batch.inputs.is_floating_point() else batch.inputs.roll(1, -1)
        return value + F.mse_loss(net(view).logits, output.logits)


class LoggedLoss(Feature):
    """The loss logs numbers, into a list of its own or on the model."""

    weight = 1.5
    cause = "log"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.on_model = rng.random() < 0.5
        self.variant = "on the model" if self.on_model else ""

    def build(self, net: Net) -> None:
        if self.on_model:
            net.logged = []
            net.last_loss = None

    def loss(self, net, batch, output, value):
        if self.on_model:
            net.logged.append(value.item())
            net.last_loss = value.detach()
        else:
            self.log.append(value.item())
        return value


class LossState(Feature):
    """The loss keeps a moving average of itself, and weighs a second term by it."""

    weight = 0.7
    cause = "average"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.average: Any = 1.0
        self.on_model = rng.random() < 0.5
        self.variant = "on the model" if self.on_model else "in the loss"

    def build(self, net: Net) -> None:
        net.average = 1.0

    def loss(self, net, batch, output, value):
        owner = net if self.on_model else self
        owner.average = 0.7 * owner.average + 0.3 * value.item()
        return value + output.logits.pow(2).mean() / owner.average


class Regularizer(Feature):
    """The loss reads weights: of residents, or of modules that travel."""

    cause = "norm|head|blocks|weight"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["norm", "norm", "resident head", "resident head", "resident head", "traveling"])

    def options(self):
        return {"resident": ["head.weight"]} if self.variant == "resident head" else {}

    def loss(self, net, batch, output, value):
        weights = {"norm": net.norm.weight, "resident head": net.head.weight, "traveling": net.blocks[-1].up.weight}
        return value + 0.3 * weights[self.variant].pow(2).sum()


class Critic(Feature):
    """The loss trains a critic with an optimizer of its own, on what the model gives or on what it is given."""

    weight = 1.5
    cause = "critic"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["adam", "sgd", "clipped"])

    def set_up(self, net: Net, device: torch.device) -> None:
        self.critic = nn.Linear(self.sizes.classes, 1).to(device)
        with torch.no_grad():
            self.critic.weight.fill_(0.1)
            self.critic.bias.zero_()
        kind = torch.optim.Adam if self.variant == "adam" else torch.optim.SGD
        self.own = kind(self.critic.parameters(), lr=0.01)

    def loss(self, net, batch, output, value):
        logits = output.logits.float()
        self.own.zero_grad()
        (self.critic(logits.detach()) - self.critic(torch.ones_like(logits))).mean().backward()
        self.own.step()
        if self.variant == "clipped":
            for parameter in self.critic.parameters():
                parameter.data.clamp_(-0.2, 0.2)
        self.log.append(self.critic.weight.sum().item())
        return value - 0.3 * self.critic(logits).mean()


class BackwardInside(Feature):
    """A `backward()` in the loss adds to the gradient of a leaf that is not the model's."""

    cause = "leaf"

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        super().__init__(rng, sizes)
        self.variant = rng.choice(["before the model", "after the model"])

    def set_up(self, net: Net, device: torch.device) -> None:
        self.leaf = torch.ones((), device=device, requires_grad=True)

    def begin_loss(self, net):
        if self.variant == "before the model":
            (self.leaf**2).backward()

    def loss(self, net, batch, output, value):
        if self.variant == "after the model":
            (output.logits.detach().float().pow(2).mean() * self.leaf).backward()
            self.log.append(self.leaf.grad.item())
        return value * self.leaf


FEATURES = (
    AuxiliaryLoss, ListOfLosses, CapturedActivations, LoggingHooks, GradientOfInput, GradientPenalty, GradientOfHead,
    Teacher, TwoHeads, TwoViews, LoggedLoss, LossState, Regularizer, Critic, BackwardInside,
)  # fmt: skip
