"""Chooses the number of micro-batches that stays within a budget of device memory.

If not even the smallest micro-batches fit, a smaller plan is needed. Each rank cuts its own batch, but all ranks have
the same plan: a rank whose micro-batches do not fit reports its need, and all ranks use the plan for the largest need.

Note [Without a budget]
Micro-batches are not cut, and nothing is refused. On an accelerator, graphs are kept as if the budget were what
`ferryman train` takes by default: most of the memory that is free when the plan is made. If the device is the host,
its memory is the host's, and plain PyTorch would keep every graph. So does the engine, as long as an eighth of the
host's memory is free. With less, the system might kill the process, so calls recompute, which takes no more memory.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ferryman.plan.batch import Split, bytes_in, parts_of, samples_in
from ferryman.plan.fit import Choice, Fit, Measure, TooLargeError, Trial
from ferryman.plan.keep import EVERYTHING, NOTHING
from ferryman.plan.plan import Need, Plan, PlanTooLargeError
from ferryman.runtime.device_memory import usual_budget
from ferryman.runtime.sizes import show_bytes
from ferryman.training.planner import Planner

_SCALARS = 4096  # bytes: losses and sums that may still be on their way to the host


class MicroBatching:
    """Chooses micro-batches for one plan. `try_out` measures the memory of micro-batches."""

    def __init__(
        self,
        planner: Planner,
        plan: Plan,
        try_out: Measure,
        split: Split | None = None,
    ) -> None:
        self._planner = planner
        self._plan = plan
        self._try_out = try_out
        self._split = split
        self.lasting = 0  # bytes that libraries have taken for good since micro-batches were measured
        self._fit = None
        options = planner.options
        if planner.budget is not None:
            self._fit = Fit(planner.budget, options.stash, self._measure, options.recompute)
        # See Note [Without a budget].
        self._usual_fit: Fit | None = None
        if planner.budget is None and options.recompute == "auto" and planner.device.type != "cpu":
            usual = usual_budget(planner.device) or 0
            self._usual_fit = Fit(plan.fixed + usual, options.stash, self._measure, options.recompute)

    @property
    def needed(self) -> int:
        """Bytes of device memory that the last batch's micro-batches need; 0 if they were not measured."""
        return 0 if self._fit is None else self._fit.needed

    def choose(self, batch: Any, micro_batches: int | None, *, begun: bool) -> Choice:
        """Chooses the number of micro-batches and the place of the stash.

        Raises a PlanTooLargeError if a smaller plan is needed and exists, and a ValueError if no plan is small enough
        or if training has `begun`, when the plan cannot change any more.
        """
        parts = self._cut(batch, micro_batches)  # raises a ValueError if the batch cannot be cut
        if self._fit is None:
            recompute = self._planner.options.recompute
            keeps = recompute == "never" or (recompute == "auto" and self._usual_fit is None)
            keep = replace(EVERYTHING, if_free=recompute == "auto") if keeps else NOTHING
            return Choice(micro_batches or len(parts), self._planner.options.stash == "host", keep=keep)
        sizes, fixed = [samples_in(part) for part in parts], self._fixed
        known = [size for size in sizes if size is not None]
        sample, size, count = batch, sum(known), micro_batches
        if isinstance(batch, list) and known:
            sample, size, count = parts[sizes.index(max(known))], max(known) * len(parts), len(parts)
        try:
            if self._split is not None and not isinstance(batch, list):
                return self._cut_by_user(batch, micro_batches, parts)
            if None in sizes:  # samples cannot be counted, as in graphs: micro-batches cannot be cut
                return self._fit.place(max(parts, key=bytes_in), len(parts), fixed)
            return self._fit.choose(sample, size, count, fixed)
        except TooLargeError as error:
            needed, advice = error.need, error.advice
        gc.collect()  # the exception's traceback keeps the trial's tensors on the device
        if advice is not None:  # the user asked for micro-batches of this size; smaller ones would fit
            if begun or not self._can_leave(needed):
                raise ValueError(advice)
            raise PlanTooLargeError(needed)
        self._check_enough(needed, sample, size)
        if begun:
            raise ValueError(
                f"{needed}, in addition to {show_bytes(self._plan.fixed)} that are always in use; memory="
                f"{show_bytes(self._fit.budget)} is too small for it, and units cannot be cut any more once training "
                "has begun. Begin with the longest batch, or name smaller units (units=), which leave more room"
            )
        raise PlanTooLargeError(needed)

    def with_graphs(self, choice: Choice, parts: Sequence[Any]) -> Choice:
        """Adds to the choice the calls that keep their graphs, if there is no budget; see Note [Without a budget]. The
        step has been checked: a trial that comes before would not know what the user's code changes."""
        if self._usual_fit is None or not parts:
            return choice
        return self._usual_fit.keep(max(parts, key=bytes_in), choice, self._fixed)

    def took(self, nbytes: int) -> bool:
        """Called when the checks of a step have left so many bytes allocated: workspaces of libraries, for threads and
        streams that computed nothing in a trial. Returns whether to choose again, because there is less room."""
        if self._fit is None or nbytes <= _SCALARS:
            return False
        self.lasting += nbytes
        return True

    def ran_out(self) -> bool:
        """Called when a step of the last choice has run out of memory. Returns whether the next choice is another."""
        fit = self._fit or self._usual_fit
        return fit is not None and fit.ran_out()

    @property
    def _fixed(self) -> int:
        return self._plan.fixed + self.lasting

    def _cut(self, batch: Any, micro_batches: int | None) -> list[Any]:
        return [part.content for part in parts_of(batch, micro_batches, own=self._split)]

    def _cut_by_user(self, batch: Any, asked: int | None, parts: list[Any]) -> Choice:
        """Doubles the count until the micro-batches of the user's function fit, or until it does not return more."""
        assert self._fit is not None
        count = asked or 1
        while True:
            try:
                return self._fit.place(max(parts, key=bytes_in), len(parts), self._fixed)._replace(micro_batches=count)
            except TooLargeError:
                more = list[Any]()
                if asked is None:
                    with contextlib.suppress(ValueError):  # the function refuses this count
                        more = self._cut(batch, 2 * count)
                if len(more) <= len(parts):
                    raise
            parts, count = more, 2 * count

    def _can_leave(self, needed: Need) -> bool:
        """Whether there is a smaller plan that leaves this room."""
        try:
            return self._planner.make(needed).fixed < self._plan.fixed
        except ValueError:
            return False

    def _check_enough(self, needed: Need, sample: Any, size: int) -> None:
        """Raises a ValueError if no smaller plan could leave what one sample needs."""
        assert self._fit is not None
        if self._planner.make_smaller(needed).fixed < self._plan.fixed:
            return
        if not needed.is_all:  # one trial without a limit, so that the error can name a sufficient budget
            needed = self._fit.whole_need(sample, size)
        self._planner.make(needed)

    def _measure(self, contents: list[Any], room: int, choice: Choice) -> Trial:
        try:
            return self._try_out(contents, room, choice)
        except torch.OutOfMemoryError:
            pass
        raise TooLargeError(Need(room + 1, f"a trial of {len(contents)} micro-batches", is_all=False))
