"""Writes facts about the run and figures of its steps into the trace, if there is one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import ferryman
from ferryman.distributed.ranks import Share
from ferryman.model.units import DtypeOf
from ferryman.observe.trace import Trace
from ferryman.plan.batch import Part
from ferryman.plan.keep import CallCounts
from ferryman.plan.plan import Plan
from ferryman.runtime.device_name import device_name
from ferryman.server.optimizer_view import OptimizerView


class Recorder:
    """Records the steps of an engine. A step ends with its update or, without an optimizer, with its backward."""

    def __init__(
        self,
        trace: Trace | None,
        model: nn.Module,
        device: torch.device,
        budget: int | None,
        optimizer_view: OptimizerView | None,
        dtype_of: DtypeOf,
        share: Share,
    ) -> None:
        self.trace = trace
        self._updates = optimizer_view is not None
        self._ended = 0
        self._plan: Plan | None = None  # the last plan that was written
        self._parts: list[Any] = []  # micro-batches of the current step
        self._losses: list[torch.Tensor] = []
        self._calls: list[CallCounts] = []
        # An engine that only evaluates beside a training run writes no facts: the trace describes the training run.
        self._writes_facts = trace is not None and (optimizer_view is not None or not trace.facts)
        if trace is not None and self._writes_facts:
            parameters = dict(model.named_parameters())
            trace.add_facts(
                {
                    "version": ferryman.__version__,
                    "rank": share.rank,
                    "ranks": share.size,
                    "device": device_name(device),
                    "virtual": device.type == "virtual",
                    "budget": budget,
                    "model": type(model).__name__,
                    "optimizer": None if optimizer_view is None else optimizer_view.name,
                    "parameters": sum(p.numel() for p in parameters.values()),
                    "trained": sum(p.numel() for p in parameters.values() if p.requires_grad),
                    "precision": sorted({str(dtype_of(name, p))[6:] for name, p in parameters.items()}),
                }
            )

    def begin(self, done: int, plan: Plan) -> None:
        """Begins a step after `done` updates, or continues the current one with more micro-batches."""
        if self.trace is None:
            return
        if plan is not self._plan:
            self._plan = plan
            if self._writes_facts:
                self.trace.add_facts({"plan": _facts_of(plan)})
        if not self._losses:
            self.trace.begin_step(1 + (done if self._updates else self._ended))

    def ran(self, parts: Sequence[Part], loss: torch.Tensor, calls: CallCounts) -> torch.Tensor:
        """Records the forward and backward of these micro-batches, with their calls; returns their loss."""
        if self.trace is not None:
            self._parts += parts
            self._calls.append(calls)
            self._losses.append(loss)
            if not self._updates:
                self.end()
        return loss

    def end(self) -> None:
        """Ends the step, whose update is done or submitted."""
        if self.trace is not None and self._losses:  # without losses, the gradients were the user's own
            self.trace.end_step(
                loss=statistics.fmean(loss.item() for loss in self._losses),
                micro_batches=len(self._parts),
                samples=_sum(part.amount if isinstance(part.amount, int) else None for part in self._parts),
                tokens=_sum(_tokens_in(part.content) for part in self._parts),
                calls=CallCounts(*map(_sum, zip(*self._calls, strict=True))),
            )
            self._ended += 1
            self.abandon()

    def abandon(self) -> None:
        """Drops the current step, whose gradients were dropped."""
        self._parts.clear()
        self._losses.clear()
        self._calls.clear()


def _facts_of(plan: Plan) -> dict[str, Any]:
    return {
        "units": len(plan.units),
        "held": plan.held,
        "weight_slots": plan.weight_slots,
        "gradient_slots": plan.gradient_slots,
        "updates": str(plan.staging.policy) if plan.updates else None,
        "deferred": plan.staging.deferred,
        "account": plan.account,
    }


def _tokens_in(content: Any) -> int | None:
    """The number of tokens in a micro-batch for a transformers model; None for other models."""
    ids = content.get("input_ids") if isinstance(content, Mapping) else None
    return ids.numel() if isinstance(ids, torch.Tensor) else None


def _sum(counts: Iterable[Any]) -> Any:
    """The sum; None if any of the counts is not known."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total
