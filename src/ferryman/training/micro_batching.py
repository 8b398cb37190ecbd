"""How a batch is cut so that a budget of device memory is kept, and a smaller plan where no cut is enough.

Of several ranks each cuts its own batch, but the plan is one: where no cut is enough, a rank says what it needs, and
all take the plan that is enough for those who need most.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch

from ferryman.plan.batch import Split, bytes_in, parts_of, samples_in
from ferryman.plan.fit import Choice, Fit, TooLargeError, Trial
from ferryman.plan.plan import Need, Plan, PlanTooLargeError
from ferryman.runtime.sizes import show_bytes
from ferryman.training.planner import Planner


class MicroBatching:
    """For one plan; `try_out` runs micro-batches for what memory they take, within so many bytes."""

    def __init__(
        self,
        planner: Planner,
        plan: Plan,
        try_out: Callable[[list[Any], int], Trial],
        split: Split | None = None,
    ) -> None:
        self._planner = planner
        self._plan = plan
        self._try_out = try_out
        self._split = split
        self._fit = None if planner.budget is None else Fit(planner.budget, planner.options.stash, self._measure)

    @property
    def needed(self) -> int:
        """Bytes that the last batch's micro-batches take, as far as it is known."""
        return 0 if self._fit is None else self._fit.last

    def choose(self, batch: Any, micro_batches: int | None, *, begun: bool) -> Choice:
        """How the batch is cut, and where the stash is.

        Raises a PlanTooLargeError if that takes a smaller plan, which there is, and a ValueError if no plan is small
        enough, or if training has `begun`, which is too late for another plan.
        """
        parts = self._cut(batch, micro_batches)  # also to refuse what cannot be cut
        if self._fit is None:
            return Choice(micro_batches or len(parts), self._planner.options.stash == "host")
        sizes, fixed = [samples_in(part) for part in parts], self._plan.fixed
        known = [size for size in sizes if size is not None]
        sample, size, count = batch, sum(known), micro_batches
        if isinstance(batch, list) and known:
            sample, size, count = parts[sizes.index(max(known))], max(known) * len(parts), len(parts)
        try:
            if self._split is not None and not isinstance(batch, list):
                return self._cut_by_user(batch, micro_batches, parts)
            if None in sizes:  # samples cannot be counted, as in graphs: micro-batches stay as they are
                return self._fit.place(max(parts, key=bytes_in), len(parts), fixed)
            return self._fit.choose(sample, size, count, fixed)
        except TooLargeError as error:
            needed, advice = error.need, error.advice
        gc.collect()  # what the trial had is on the device as long as anything of its exception lives
        if advice is not None:  # micro-batches of this size are wished for, not needed
            if begun or not self._can_leave(needed):
                raise ValueError(advice)
            raise PlanTooLargeError(needed)
        self._check_enough(needed, sample, size)
        if begun:
            raise ValueError(
                f"{needed} beside {show_bytes(self._plan.fixed)} that are always there; memory="
                f"{show_bytes(self._fit.budget)} is too small for it, and units cannot be cut any more once training "
                "has begun. Begin with the longest batch, or name smaller units (units=), which leave more room"
            )
        raise PlanTooLargeError(needed)

    def _cut(self, batch: Any, micro_batches: int | None) -> list[Any]:
        return [part.content for part in parts_of(batch, micro_batches, own=self._split)]

    def _cut_by_user(self, batch: Any, asked: int | None, parts: list[Any]) -> Choice:
        """The first count that fits, doubled each time until the user's function makes no more micro-batches of it."""
        assert self._fit is not None
        count = asked or 1
        while True:
            try:
                return self._fit.place(max(parts, key=bytes_in), len(parts), self._plan.fixed)._replace(
                    micro_batches=count
                )
            except TooLargeError:
                more = list[Any]()
                if asked is None:
                    with contextlib.suppress(ValueError):  # it refuses
                        more = self._cut(batch, 2 * count)
                if len(more) <= len(parts):
                    raise
            parts, count = more, 2 * count

    def _can_leave(self, needed: Need) -> bool:
        """Whether a smaller plan than this one has that room."""
        try:
            return self._planner.make(needed).fixed < self._plan.fixed
        except ValueError:
            return False

    def _check_enough(self, needed: Need, sample: Any, size: int) -> None:
        """A ValueError if there is no smaller plan to try, now that it is known what one sample needs."""
        assert self._fit is not None
        if self._planner.make_smaller(needed).fixed < self._plan.fixed:
            return
        if not needed.is_all:  # to be able to say what would do, one trial may take what it takes
            needed = self._fit.whole_need(sample, size)
        self._planner.make(needed)

    def _measure(self, contents: list[Any], room: int) -> Trial:
        try:
            return self._try_out(contents, room)
        except torch.OutOfMemoryError:
            pass
        raise TooLargeError(Need(room + 1, f"a trial of {len(contents)} micro-batches", is_all=False))
