"""Fits micro-batches into a budget of device memory.

The memory that a micro-batch needs while it runs cannot be derived from the model, so it is measured. A trial, whose
gradients are discarded, runs micro-batches of one sample and of two samples, and records the peak of each stretch
between two parks. The peak of a stretch grows by the same amount with each sample, which gives the largest micro-batch
that fits. Two samples are tried even if twice the memory of one is too much, because some memory, such as the dense
gradient of an embedding, does not grow with samples. A trial that exceeds the available room is stopped, and
micro-batches have one sample then. There is one trial for each shape of batch; a batch that is not longer in any
dimension than an earlier one needs no trial.

Note [What is reserved]
The budget bounds what the allocator reserves, and only what tensors allocate grows evenly with samples: segments are
taken as a whole, and what is left over in them depends on the order of sizes. So the peaks of stretches, which are
allocated, choose a size, with the most that the allocator added in the trials so far. Another trial then measures what
micro-batches of that size reserve. If that is too much, a smaller size is tried. A stash on the device is part of that
trial, because long-lived tensors between short-lived ones are what keeps an allocator from using its segments again. An
allocator that reserves only what is allocated needs no such trial.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ferryman.plan.batch import Shape, bytes_in, shape_of, take
from ferryman.plan.plan import Need, Plan
from ferryman.runtime.sizes import show_bytes

IN_FLIGHT = 2  # copies of the stash to the host that are in flight at a time
# While one micro-batch runs, another comes back to the device and others leave it.
TRIAL_MICRO_BATCHES = 2 + IN_FLIGHT

_ALLOCATOR_SLACK = 0.04  # fraction of memory that an allocator may round up or return late


class Stretch(NamedTuple):
    """The execution of a micro-batch from one park to the next."""

    where: str  # the unit in which it begins
    peak: int  # bytes, in addition to those that are always on the device


class Trial(NamedTuple):
    """The device memory that a trial has measured."""

    stretches: Sequence[Stretch]
    stash: int  # bytes of a micro-batch's stash between its forward and its backward
    reserved: int = 0  # the peak of bytes reserved, in addition to those that are always reserved

    @property
    def added(self) -> int:
        """How much the allocator has added to the bytes of tensors."""
        return max(0, self.reserved - _highest(self.stretches).peak)


# Runs micro-batches with these contents and returns what they needed; raises a TooLargeError as soon as that is more
# than a number of bytes. The last argument: whether the stash is on the host.
Measure = Callable[[list[Any], int, bool], Trial]


class Choice(NamedTuple):
    """How a batch runs within the budget."""

    micro_batches: int
    stash_on_host: bool


class TooLargeError(Exception):
    """Not even one sample fits into the budget; or, if there is `advice`, not as many as were requested."""

    def __init__(self, need: Need, advice: str | None = None) -> None:
        super().__init__(str(need))
        self.need = need
        self.advice = advice


@dataclass(frozen=True)
class Needs:
    """The device memory that running micro-batches of one shape need, as a function of their number of samples."""

    one: Trial
    two: Trial
    checks: list[_Check] = field(default_factory=list)  # what other sizes have reserved

    def peak(self, samples: int) -> int:
        return self.most(samples).peak

    def most(self, samples: int) -> Stretch:
        """The stretch that needs the most memory, with what the allocator adds."""
        added = [self.one.added, self.two.added, *(check.added for check in self.checks)]
        highest = self.allocated(samples)
        return highest._replace(peak=highest.peak + (self.one.added if samples == 1 else max(added)))

    def allocated(self, samples: int) -> Stretch:
        """The stretch that allocates the most."""
        if len(self.one.stretches) != len(self.two.stretches):  # the model's control flow depends on its data
            pairs = [(_highest(self.one.stretches), _highest(self.two.stretches))]
        else:
            pairs = list(zip(self.one.stretches, self.two.stretches, strict=True))
        return _highest([Stretch(a.where, _line(a.peak, b.peak, samples)) for a, b in pairs])

    def stash(self, samples: int) -> int:
        return _line(self.one.stash, self.two.stash, samples)


def _highest(stretches: Sequence[Stretch]) -> Stretch:
    return max(stretches, key=lambda stretch: stretch.peak)


def _line(one: int, two: int, samples: int) -> int:
    return one + max(0, two - one) * (samples - 1)


class _Check(NamedTuple):
    """What micro-batches of one size have reserved: a trial that was more than a forecast."""

    shape: Shape
    samples: int
    parts: int
    stash_on_host: bool
    reserved: int  # the peak, in addition to the bytes that are always reserved
    added: int  # by the allocator

    def covers(self, other: _Check) -> bool:
        """Whether the other one needs no trial, since it is not larger."""
        return (
            self.stash_on_host == other.stash_on_host
            and other.samples <= self.samples
            and (other.stash_on_host or other.parts <= self.parts)
            and other.shape.within(self.shape)
        )


class Fit:
    """Chooses the number of micro-batches and the stash's place. `stash` is "auto", "device" or "host"."""

    def __init__(self, budget: int, stash: str, measure: Measure, *, is_exact: bool = True) -> None:
        self.budget = budget
        self._is_exact = is_exact  # the allocator reserves what is allocated
        self._stash = stash
        self._measure = measure
        self._known: dict[Shape, Needs] = {}
        # For ready-made micro-batches, by their structure: the size in bytes of the largest one measured, with its
        # trial, and that of the smallest one found too large, with its need.
        self._measured: dict[Any, tuple[int, Trial]] = {}
        self._refused: dict[Any, tuple[int, Need]] = {}
        self.last = 0  # bytes that the micro-batches of the last choice need

    def choose(self, batch: Any, size: int, count: int | None, fixed: int) -> Choice:
        """Cuts `size` samples into `count` micro-batches, or into as few as fit beside `fixed` bytes on the device."""
        room = self.budget - fixed
        needs = self._needs_of(batch, room)
        if count is not None:
            per_part = -(-size // count)
            on_host = self._place(needs, batch, per_part, count, room)
            if on_host is None:
                best, most = self._largest(needs, batch, size, room), needs.most(per_part)
                raise TooLargeError(
                    Need(_padded(most.peak), most.where),
                    f"micro_batches={count} makes micro-batches of {per_part} samples, which need "
                    f"{show_bytes(fixed + _padded(most.peak))} where memory={show_bytes(self.budget)}; use "
                    f"micro_batches={best.micro_batches}, or leave it out to let the engine choose",
                )
            return Choice(count, on_host)
        return self._largest(needs, batch, size, room)

    def place(self, part: Any, count: int, fixed: int) -> Choice:
        """Chooses the place of the stash for `count` ready-made micro-batches, of which `part` is the largest."""
        room, nbytes = self.budget - fixed, bytes_in(part)
        kinds = shape_of(part).kinds if nbytes else count  # without tensors, only the count tells sizes apart
        smallest, need = self._refused.get(kinds, (sys.maxsize, None))
        if nbytes < smallest:
            try:
                return Choice(count, self._place_measured(part, nbytes, kinds, count, room))
            except TooLargeError as error:
                need = error.need
                self._refused[kinds] = nbytes, need
        assert need is not None
        raise TooLargeError(
            need,
            f"micro-batches of {show_bytes(nbytes)} need {'' if need.is_all else 'more than '}"
            f"{show_bytes(fixed + need.nbytes)} (the most in {need.where!r}) where memory={show_bytes(self.budget)}; "
            "pass smaller micro-batches (in a list, or from split=), or a larger budget",
        )

    def _place_measured(self, part: Any, nbytes: int, kinds: Any, count: int, room: int) -> bool:
        largest, trial = self._measured.get(kinds, (-1, None))
        if trial is None or nbytes > largest:
            trial = self._measure([part] * TRIAL_MICRO_BATCHES, room, True)
            self._measured[kinds] = nbytes, trial
        on_host = self._place(Needs(trial, trial), part, None, count, room)
        if on_host is None:
            raise TooLargeError(self._need_of_one(trial, count))
        return on_host

    def _largest(self, needs: Needs, batch: Any, size: int, room: int) -> Choice:
        """The largest micro-batches that fit, in the smallest number that makes micro-batches of that size."""
        count = 1
        while True:
            samples = -(-size // count)
            if (on_host := self._place(needs, batch, samples, count, room)) is not None:
                return Choice(count, on_host)
            if samples == 1:
                break
            count = -(-size // (samples - 1))  # the next that makes them smaller
        raise TooLargeError(self._need_of_one(needs.one, size))

    def whole_need(self, batch: Any, size: int) -> Need:
        """The need of micro-batches of one sample, measured without a limit; the budget if the device has no more."""
        try:
            return self._need_of_one(self._measure([take(batch, 1)] * TRIAL_MICRO_BATCHES, sys.maxsize, True), size)
        except TooLargeError:
            return Need(self.budget, "a trial", is_all=False)

    def _need_of_one(self, one: Trial, size: int) -> Need:
        most = _highest(one.stretches)
        stashed = size * one.stash if self._stash == "device" else 0
        return Need(_padded(most.peak + one.added + stashed), most.where)

    def _place(self, needs: Needs, batch: Any, samples: int | None, count: int, room: int) -> bool | None:
        """Whether the stash is on the host; None if it does not fit either way.

        `samples`: None if `batch` is a ready-made micro-batch.
        """
        for on_host in (False, True):
            if self._stash == ("device" if on_host else "host"):
                continue
            self.last = _padded(needs.peak(samples or 1))
            stashed = 0 if on_host else count * needs.stash(samples or 1)
            if _padded(needs.peak(samples or 1) + stashed) > room:
                continue
            if self._is_exact or self._is_checked(needs, batch, samples, count, room, on_host=on_host):
                return on_host
        return None

    def _is_checked(
        self, needs: Needs, batch: Any, samples: int | None, count: int, room: int, *, on_host: bool
    ) -> bool:
        """Whether micro-batches of this size fit in a trial. See Note [What is reserved]."""
        if on_host and samples in (None, 1, 2):
            return True  # they were in the trials of `needs`
        wanted = _Check(shape_of(batch), samples or 1, count, on_host, 0, 0)
        for check in needs.checks:
            if check.reserved <= room and check.covers(wanted):
                self.last = max(self.last, check.reserved)
                return True
            if check.reserved > room and wanted.covers(check):
                return False
        content = batch if samples is None else take(batch, samples)
        try:
            trial = self._measure([content] * (TRIAL_MICRO_BATCHES if on_host else count), room, on_host)
        except TooLargeError as error:
            needs.checks.append(wanted._replace(reserved=max(error.need.nbytes, room + 1)))
            gc.collect()  # the exception's traceback keeps the trial's tensors on the device
            return False
        stashed = 0 if on_host else count * needs.stash(samples or 1)
        expected = needs.allocated(samples or 1).peak + stashed
        needs.checks.append(
            wanted._replace(reserved=trial.reserved, added=max(0, trial.reserved - expected) if on_host else 0)
        )
        self.last = max(self.last, trial.reserved)
        return trial.reserved <= room

    def _needs_of(self, batch: Any, room: int) -> Needs:
        shape = shape_of(batch)
        for known, needs in self._known.items():
            if shape.within(known):
                return needs
        one = self._measure([take(batch, 1)] * TRIAL_MICRO_BATCHES, room, True)
        try:
            two = self._measure([take(batch, 2)] * TRIAL_MICRO_BATCHES, room, True)
        except TooLargeError:
            # More than the room, and at most twice what one sample needs.
            two = Trial([Stretch(where, max(2 * peak, room + 1)) for where, peak in one.stretches], 2 * one.stash)
            gc.collect()  # the exception's traceback keeps the trial's tensors on the device
        self._known[shape] = Needs(one, two)
        return self._known[shape]


def _padded(nbytes: int) -> int:
    return int(nbytes * (1 + _ALLOCATOR_SLACK))


def advice(plan: Plan, choice: Choice) -> str:
    """Advice for a user whose device ran out of memory."""
    place = "host" if choice.stash_on_host else "device"
    return (
        f"ferryman always uses {show_bytes(plan.fixed)} on the device, {plan.explain()}; the stash is on the {place}, "
        f"micro-batches: {choice.micro_batches}. Set a budget with memory='...', or reduce the need with stash='host' "
        "or more micro_batches"
    )
