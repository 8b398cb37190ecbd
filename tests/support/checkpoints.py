"""Helpers for tests of checkpoints: a training run that can be resumed, and all the state of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ferryman.engine import Engine
from support.models import CASES, build
from support.updates import OPTIMIZERS

BATCHES = [CASES["toy"].batch(4, seed) for seed in range(1, 9)]


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    wide = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return torch.optim.AdamW([{"params": wide}, {"params": rest, "weight_decay": 0.0, "lr": 5e-4}], lr=1e-3)


def one_group(name: str = "AdamW") -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: OPTIMIZERS[name](p for p in model.parameters() if p.requires_grad)


@dataclass
class Run:
    """A context manager with a model, its optimizer and its engine."""

    name: str = "toy"
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = two_groups
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    dtype: torch.dtype | None = None  # of the model itself
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Run:
        self.model = build(CASES[self.name], self.seed)
        if self.dtype is not None:
            self.model.to(self.dtype)
        optimizer = self.optimizer(self.model)
        schedules = None if self.scheduler is None else self.scheduler(optimizer)
        self.objects = {} if schedules is None else {"scheduler": schedules}
        self.engine = Engine(self.model, optimizer, **{"device": "cpu", **self.options})
        return self

    def __exit__(self, *error: Any) -> None:
        self.engine.close()

    def step(self, first: int = 0, last: int = 2, micro_batches: int = 2) -> list[float]:
        """One step on each of the batches from `first` to `last`."""
        losses = []
        for number in range(first, last):
            losses.append(self.engine.step(CASES[self.name].batch(4, number + 1), micro_batches).item())
            for scheduler in self.objects.values():
                plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(losses[-1]) if plateau else scheduler.step()
        return losses


def everything(engine: Engine) -> dict[str, Any]:
    """All weights (the float32 master where there is one) and the optimizer's whole state."""
    contents = engine._contents()
    found: dict[str, Any] = {"steps": engine.steps, "scale": contents.server.scale.state()}
    for unit in contents.units:
        for item in unit.items:
            found[item.name] = item.tensor.detach().clone()
            if contents.optimizer_view is None or not item.trains:
                continue
            state = contents.store.state(unit)
            found[item.name] = state.in_float32(item).detach().clone()
            found[f"{item.name}: steps"] = state.steps(item)
            kept = {key: value for key, value in state.tensors_of(item).items() if key != "master"}
            for path, value in pytree.tree_leaves_with_path([kept, state.own_state(item) or {}]):
                where = f"{item.name}: {pytree.keystr(path)}"
                found[where] = value.clone() if isinstance(value, torch.Tensor) else value
    if contents.optimizer_view is not None:
        for number, group in enumerate(contents.optimizer_view.groups.values()):
            found[f"group {number}"] = {key: value for key, value in group.items() if key != "params"}
    return found


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value.reshape(-1), other[name].reshape(-1)), f"{name} differs"
        else:
            assert value == other[name], name


def assert_resumes(tmp_path: Any, run: Run, again: Run | None = None, *, first: int = 2, last: int = 4) -> None:
    """Asserts that training after a checkpoint is bitwise equal in the engine that saved it and in a new one."""
    with run:
        run.step(0, first)
        saved = everything(run.engine)
        run.engine.save(tmp_path / "saved", objects=run.objects)
        assert_equal(everything(run.engine), saved)  # saving changes nothing
        expected, end = run.step(first, last), everything(run.engine)
    with again or Run(run.name, run.optimizer, run.scheduler, run.dtype, 5, run.options) as new:
        torch.manual_seed(77)
        assert new.engine.load(tmp_path / "saved", objects=new.objects) == tmp_path / "saved"
        if again is None:
            assert_equal(everything(new.engine), saved)
        assert new.engine.steps == first
        assert new.step(first, last) == expected
        assert_equal(everything(new.engine), end)
