"""When a step is checked before it is made, and what is watched while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ferryman.exactness.guard import Guard
from ferryman.exactness.survey import Survey
from ferryman.model.units import Unit
from ferryman.plan.batch import Part
from ferryman.relay.driver import Relay
from ferryman.relay.observer import Roots
from ferryman.training.crosscheck import TRIED, CrossCheck, Work, second_run_differs

_ALWAYS = 3  # steps in which the second runs of all calls are compared with the first
_NOW_AND_AGAIN = 32  # after those, every so many steps


class FirstSteps:
    """Of one relay: which kinds of steps have been checked."""

    def __init__(self, relay: Relay, model: nn.Module, loss: Callable[..., Any], units: Sequence[Unit]) -> None:
        self._relay = relay
        inside = frozenset(module for unit in units for top in unit.modules for module in top.modules())
        self.roots = Roots([(model, "model"), (loss, "the loss")], inside)
        self._units = units
        self._checked: set[Any] = set()
        self._survey: Survey | None = None
        self._tried: tuple[int, list[float]] | None = None  # the seed and the losses of the trial that has just run
        self._steps = 0

    def is_new(self, parts: Sequence[Part]) -> bool:
        return bool(parts) and _kind_of(parts) not in self._checked

    def check(self, parts: Sequence[Part], works: Sequence[Work], seed: int, *, stash_on_host: bool) -> None:
        """Runs the cross-check for a kind of step."""
        losses = CrossCheck(self._relay, self.roots, self._units).run(works, seed, stash_on_host=stash_on_host)
        self._tried = seed, [loss / part.weight for loss, part in zip(losses, parts, strict=False)]
        self._checked.add(_kind_of(parts))
        self._survey = None

    def forget(self) -> None:
        """Something has changed that no check has seen."""
        self._checked.clear()

    def begin(self, parts: Sequence[Part], seed: int, *, skips: bool) -> Guard:
        """A step begins; it `skips` blocks, which a trial does not."""
        self._relay.checksums.begin(on=self._steps < _ALWAYS or self._steps % _NOW_AND_AGAIN == 0)
        self._steps += 1
        if self._survey is None:
            self._survey = Survey(*self.roots, thorough=False)
        expected: list[float] = []
        if self._tried is not None and self._tried[0] == seed and not skips:
            expected = [loss * part.weight for loss, part in zip(self._tried[1], parts, strict=False)]
        self._tried = None
        return Guard(self._survey, self._relay.state, expected)

    def end(self) -> None:
        """The step has run: a ValueError if a unit's second run gave something else."""
        if (unit := self._relay.checksums.disagreement()) is not None:
            raise ValueError(second_run_differs(unit, self._relay.state.variables))


def _kind_of(parts: Sequence[Part]) -> Any:
    """Steps of the same kind do the same work: as many micro-batches, with tensors of the same kinds."""
    leaves, spec = pytree.tree_flatten(parts[0].content)
    kinds = tuple((leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves)
    return min(len(parts), TRIED), str(spec), kinds
