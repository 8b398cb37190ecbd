"""The optimizers' rules: which numbers each needs of a parameter group, and its arithmetic in torch.

A rule is elementwise. It has a compiled form (`native/update.inl`) and a form in torch, which is used on a device, and
on the host if there is no compiler. Both take the same list of numbers. The form in torch allocates nothing: temporary
values go into two spare tensors, of which the first may be the gradient itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Group = Mapping[str, Any]  # a torch optimizer's parameter group
Numbers = tuple[float, ...]
Spare = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], Numbers, Spare], None]

STATE = torch.float32  # the dtype of all optimizer state

# The length of the list of numbers, as in native/update.inl. The first is the factor of the gradient. The others differ
# between rules: `_adam_numbers` and its like fill them in, and the steps below and the kernels read them by index.
_COUNT = 10


def _numbers(**at: float) -> Numbers:
    """The list of numbers: `n3=x` sets the number with index 3, and all others are 0."""
    values = [0.0] * _COUNT
    for place, value in at.items():
        values[int(place.lstrip("n"))] = float(value)
    return tuple(values)


@dataclass(frozen=True)
class Rule:
    """What one optimizer does to each element."""

    name: str
    states: tuple[str, ...]  # as torch names them
    numbers: Callable[[Group, int], Numbers]  # of a group, for a step counted from 1
    step: Step  # in torch, in place: weight, gradient (already multiplied by its factor), states, numbers, spare
    start: Callable[[Group], float] = lambda group: 0.0  # what the states begin with
    root: str | None = None  # the state of which eight bits hold the root
    fades: bool = True  # states forget: only then may they be rounded


def _adam_numbers(group: Group, step: int) -> Numbers:
    beta1, beta2 = group["betas"]
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    decoupled = group.get("decoupled_weight_decay", False)
    return _numbers(
        n1=1 - rate * decay if decoupled else 1.0,
        n2=0.0 if decoupled else decay,
        n3=1 - beta1,
        n4=beta2,
        n5=1 - beta2,
        n6=-rate / (1 - beta1**step),
        n7=math.sqrt(1 - beta2**step),
        n8=group["eps"],
    )


def _adam_step(
    weight: torch.Tensor, gradient: torch.Tensor, states: Sequence[torch.Tensor], n: Numbers, spare: Spare
) -> None:
    first, second = states
    if n[1] != 1:
        weight.mul_(n[1])
    if n[2] != 0:
        gradient = torch.add(gradient, weight, alpha=n[2], out=spare[0])
    first.lerp_(gradient, n[3])
    second.mul_(n[4]).addcmul_(gradient, gradient, value=n[5])
    weight.addcdiv_(first, torch.sqrt(second, out=spare[1]).div_(n[7]).add_(n[8]), value=n[6])


def _sgd_numbers(group: Group, step: int) -> Numbers:
    return _numbers(
        n2=group["weight_decay"],
        n3=group["momentum"],
        n4=1 - group["dampening"],
        n5=group["nesterov"],
        n6=-float(group["lr"]),
        n7=step == 1,
    )


def _momentum_step(
    weight: torch.Tensor, gradient: torch.Tensor, states: Sequence[torch.Tensor], n: Numbers, spare: Spare
) -> None:
    (momentum,) = states
    if n[2] != 0:
        gradient = torch.add(gradient, weight, alpha=n[2], out=spare[0])
    if n[7]:
        momentum.copy_(gradient)
    else:
        momentum.mul_(n[3]).add_(gradient, alpha=n[4])
    weight.add_(torch.add(gradient, momentum, alpha=n[3], out=spare[1]) if n[5] else momentum, alpha=n[6])


def _descent_step(
    weight: torch.Tensor, gradient: torch.Tensor, states: Sequence[torch.Tensor], n: Numbers, spare: Spare
) -> None:
    if n[2] != 0:
        gradient = torch.add(gradient, weight, alpha=n[2], out=spare[0])
    weight.add_(gradient, alpha=n[6])


def _lion_numbers(group: Group, step: int) -> Numbers:
    beta1, beta2 = group["betas"]
    rate = float(group["lr"])
    decay = 1 - rate * group["weight_decay"]
    return _numbers(n1=decay, n2=beta1, n3=1 - beta1, n4=beta2, n5=1 - beta2, n6=-rate)


def _lion_step(
    weight: torch.Tensor, gradient: torch.Tensor, states: Sequence[torch.Tensor], n: Numbers, spare: Spare
) -> None:
    (momentum,) = states
    direction = torch.mul(momentum, n[2], out=spare[1]).add_(gradient, alpha=n[3]).sign_()
    weight.mul_(n[1]).add_(direction, alpha=n[6])
    momentum.mul_(n[4]).add_(gradient, alpha=n[5])


def _adagrad_numbers(group: Group, step: int) -> Numbers:
    rate = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
    return _numbers(n2=group["weight_decay"], n6=-rate, n8=group["eps"])


def _adagrad_step(
    weight: torch.Tensor, gradient: torch.Tensor, states: Sequence[torch.Tensor], n: Numbers, spare: Spare
) -> None:
    (total,) = states
    if n[2] != 0:
        gradient = torch.add(gradient, weight, alpha=n[2], out=spare[0])
    total.addcmul_(gradient, gradient, value=1)
    weight.addcdiv_(gradient, torch.sqrt(total, out=spare[1]).add_(n[8]), value=n[6])


ADAM = Rule("adam", ("exp_avg", "exp_avg_sq"), _adam_numbers, _adam_step, root="exp_avg_sq")
MOMENTUM = Rule("momentum", ("momentum_buffer",), _sgd_numbers, _momentum_step)
DESCENT = Rule("descent", (), _sgd_numbers, _descent_step)
LION = Rule("lion", ("exp_avg",), _lion_numbers, _lion_step)
ADAGRAD = Rule(
    "adagrad",
    ("sum",),
    _adagrad_numbers,
    _adagrad_step,
    lambda g: float(g["initial_accumulator_value"]),
    fades=False,
)

# Numbers with which any rule can be timed on zeros, which stay zeros.
TIMING_NUMBERS: Numbers = (1.0, 1.0, 0.0, 0.1, 0.9, 0.1, -0.1, 1.0, 1e-8, 0.0)

NATIVE = (ADAM, MOMENTUM, DESCENT, LION, ADAGRAD)  # in the order of native/update.inl


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023), which torch does not have. It also works without an engine."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Lion needs lr >= 0, weight_decay >= 0 and betas in [0, 1); got lr={lr}, weight_decay={weight_decay}, "
                f"betas={betas}"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(parameter)
                    spare = torch.empty_like(parameter), torch.empty_like(parameter)
                    _lion_step(parameter, parameter.grad, [state["exp_avg"]], _lion_numbers(group, 1), spare)
        return result
