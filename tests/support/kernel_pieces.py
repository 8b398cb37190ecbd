"""Helpers for tests of the update kernels: optimizers by name, the tensors of a piece, distances between floats."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ferryman import Lion
from ferryman.model.units import master_dtype
from ferryman.server import kernels, rules
from ferryman.server.kernels import Piece
from ferryman.server.rules import Numbers, Rule

DTYPES = [torch.float32, torch.bfloat16, torch.float16]  # of gradients, and of weights


class Case(NamedTuple):
    """An optimizer of torch or of Ferryman, and the rule that implements it."""

    optimizer: type[torch.optim.Optimizer]
    rule: Rule
    options: dict[str, Any]

    @property
    def has_root(self) -> bool:
        """torch's square root is not always correctly rounded; that of the kernels is."""
        return self.rule in (rules.ADAM, rules.ADAGRAD)


CASES = {
    "adamw": Case(torch.optim.AdamW, rules.ADAM, {"lr": 1e-3, "weight_decay": 0.1}),
    "adam": Case(torch.optim.Adam, rules.ADAM, {"lr": 1e-3, "weight_decay": 0.1}),
    "adam, short memory": Case(torch.optim.Adam, rules.ADAM, {"lr": 1e-3, "betas": (0.3, 0.9)}),
    "momentum": Case(
        torch.optim.SGD, rules.MOMENTUM, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}
    ),
    "nesterov": Case(
        torch.optim.SGD, rules.MOMENTUM, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    ),
    "descent": Case(torch.optim.SGD, rules.DESCENT, {"lr": 1e-2, "weight_decay": 0.1}),
    "lion": Case(Lion, rules.LION, {"lr": 1e-3, "weight_decay": 0.1}),
    "adagrad": Case(
        torch.optim.Adagrad,
        rules.ADAGRAD,
        {"lr": 1e-2, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random gradients of magnitudes from 1e-6 to 100."""
    source = generator(seed)
    return (torch.randn(count, generator=source) * 10 ** (torch.rand(count, generator=source) * 8 - 6)).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are bitwise equal where they are not NaN."""
    return one.dtype == other.dtype and bool(((bits(one) == bits(other)) | (one.isnan() & other.isnan())).all())


def ulp(tensor: torch.Tensor) -> torch.Tensor:
    """The distance to the next number in float32."""
    mantissa, exponent = torch.frexp(tensor.double().abs().clamp(2.0**-126, 2.0**127))
    return torch.ldexp(torch.ones_like(mantissa), exponent - 24)


def ulps(one: torch.Tensor, other: torch.Tensor, size: torch.Tensor | None = None) -> float:
    """The largest difference in units of the last place of float32, at `other` or at `size`."""
    if not one.numel():
        return 0.0
    return ((one.double() - other.double()).abs() / ulp(other if size is None else size)).max().item()


def group(case: Case) -> dict[str, Any]:
    return case.optimizer([torch.nn.Parameter(torch.zeros(1))], **case.options).param_groups[0]


def numbers(case: Case, step: int, factor: float = 1.0) -> Numbers:
    return (factor, *case.rule.numbers(group(case), step)[1:])


class Tensors(NamedTuple):
    """The tensors of a piece, without its scalar arguments."""

    gradient: torch.Tensor
    weights: torch.Tensor
    master: torch.Tensor | None
    states: list[torch.Tensor]

    @classmethod
    def make(cls, case: Case, values: torch.Tensor, form: torch.dtype, gradient: torch.Tensor) -> Tensors:
        """Random weights, stored in the format of a dtype, and optimizer states of realistic magnitude."""
        weights, lacking = torch.empty(values.shape, dtype=form), master_dtype(form)
        master = None if lacking is None else torch.empty(values.shape, dtype=lacking)
        kernels.narrow(values, weights, master)
        states = [torch.rand(values.shape, generator=generator(7 + i)) + 0.01 for i in range(len(case.rule.states))]
        return cls(gradient, weights, master, states)

    @property
    def written(self) -> list[torch.Tensor]:
        return [self.weights, *self.states, *([] if self.master is None else [self.master])]

    @property
    def values(self) -> torch.Tensor:
        return kernels.widen(self.weights, self.master)

    def clone(self) -> Tensors:
        master = None if self.master is None else self.master.clone()
        return Tensors(self.gradient.clone(), self.weights.clone(), master, [state.clone() for state in self.states])

    def cut(self, at: slice) -> Tensors:
        master = None if self.master is None else self.master[at]
        return Tensors(self.gradient[at], self.weights[at], master, [state[at] for state in self.states])

    def piece(self, with_numbers: Numbers) -> Piece:
        return Piece(*self, with_numbers)
