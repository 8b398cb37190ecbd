"""Fits micro-batches into a budget of device memory.

What a micro-batch needs while it runs cannot be read off a model, so it is measured: a trial, whose gradients are
thrown away, runs micro-batches of one sample and of two, and notes the peak of each stretch between two parks. Each
stretch's peak grows by the same amount with each sample, so the largest micro-batch that fits follows. Two samples are
tried even if twice what one needs is too much: a part of it, such as the dense gradient of an embedding, does not grow
with samples. A trial that needs more than the room is given up, and then micro-batches are of one sample. This happens
once for each shape of batch; a batch that is no longer in any dimension than one seen before needs no trial.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ferryman.plan.batch import Shape, bytes_in, shape_of, take
from ferryman.plan.plan import Need, Plan
from ferryman.runtime.sizes import show_bytes

# A trial has this many micro-batches: while one runs, another comes back to the device and others leave it.
IN_FLIGHT = 2  # copies of the stash that leave the device at a time, at most
TRIAL = 2 + IN_FLIGHT

# For memory that a device's allocator gives back late, or rounds up.
_SLACK = 0.04


class Stretch(NamedTuple):
    """A micro-batch's run from one park to the next."""

    where: str
    peak: int  # bytes, beyond what is always on the device


class Trial(NamedTuple):
    stretches: Sequence[Stretch]
    stash: int  # bytes that a micro-batch keeps between its forward and its backward


class Choice(NamedTuple):
    micro_batches: int
    stash_on_host: bool


class TooLargeError(Exception):
    """Not even one sample fits into the budget; or, where `advice` says what would, not so many as were asked for."""

    def __init__(self, need: Need, advice: str | None = None) -> None:
        super().__init__(str(need))
        self.need = need
        self.advice = advice


@dataclass(frozen=True)
class Needs:
    """What micro-batches of one shape take on the device while they run, by their number of samples."""

    one: Trial
    two: Trial

    def peak(self, samples: int) -> int:
        return self.most(samples).peak

    def most(self, samples: int) -> Stretch:
        """The stretch that needs most."""
        if len(self.one.stretches) != len(self.two.stretches):  # the model's way depends on its data
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


class Fit:
    """Chooses the number of micro-batches and the stash's place. `stash` is "auto", "device" or "host"."""

    def __init__(self, budget: int, stash: str, measure: Callable[[list[Any], int], Trial]) -> None:
        self.budget = budget
        self._stash = stash
        self._measure = measure
        self._known: dict[Shape, Needs] = {}
        # Of micro-batches that stay as they are, by what they consist of: the largest that were measured and the
        # smallest that were found too large, each with its bytes.
        self._measured: dict[Any, tuple[int, Trial]] = {}
        self._refused: dict[Any, tuple[int, Need]] = {}
        self.last = 0  # bytes that the micro-batches of the last choice need

    def choose(self, batch: Any, size: int, count: int | None, fixed: int) -> Choice:
        """For `size` samples in `count` micro-batches, or as few as will do; `fixed` bytes are always on the device."""
        room = self.budget - fixed
        needs = self._needs_of(batch, room)
        if count is not None:
            per_part = -(-size // count)
            on_host = self._place(needs, per_part, count, room)
            if on_host is None:
                best, most = self._largest(needs, size, room), needs.most(per_part)
                raise TooLargeError(
                    Need(_padded(most.peak), most.where),
                    f"micro_batches={count} makes micro-batches of {per_part} samples, which need "
                    f"{show_bytes(fixed + _padded(most.peak))} where memory={show_bytes(self.budget)}; use "
                    f"micro_batches={best.micro_batches}, or leave it out and the engine chooses",
                )
            return Choice(count, on_host)
        return self._largest(needs, size, room)

    def place(self, part: Any, count: int, fixed: int) -> Choice:
        """For `count` micro-batches that are not to be cut, of which `part` has most bytes: where the stash is."""
        room, nbytes = self.budget - fixed, bytes_in(part)
        kinds = shape_of(part).kinds if nbytes else count  # where no tensors are seen, the count must tell sizes apart
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
            "give smaller micro-batches (in a list, or by split=), or a larger budget",
        )

    def _place_measured(self, part: Any, nbytes: int, kinds: Any, count: int, room: int) -> bool:
        largest, trial = self._measured.get(kinds, (-1, None))
        if trial is None or nbytes > largest:
            trial = self._measure([part] * TRIAL, room)
            self._measured[kinds] = nbytes, trial
        on_host = self._place(Needs(trial, trial), 1, count, room)
        if on_host is None:
            raise TooLargeError(self._need_of_one(trial, count))
        return on_host

    def _largest(self, needs: Needs, size: int, room: int) -> Choice:
        """The largest micro-batches that fit: of a given size there is a smallest count."""
        count = 1
        while True:
            samples = -(-size // count)
            if (on_host := self._place(needs, samples, count, room)) is not None:
                return Choice(count, on_host)
            if samples == 1:
                break
            count = -(-size // (samples - 1))  # the next that makes them smaller
        raise TooLargeError(self._need_of_one(needs.one, size))

    def whole_need(self, batch: Any, size: int) -> Need:
        """What micro-batches of one sample need, measured to the end; more than the device has if there is no end."""
        try:
            return self._need_of_one(self._measure([take(batch, 1)] * TRIAL, sys.maxsize), size)
        except TooLargeError:
            return Need(self.budget, "a trial", is_all=False)

    def _need_of_one(self, one: Trial, size: int) -> Need:
        most = _highest(one.stretches)
        stashed = size * one.stash if self._stash == "device" else 0
        return Need(_padded(most.peak + stashed), most.where)

    def _place(self, needs: Needs, samples: int, count: int, room: int) -> bool | None:
        """Whether the stash is on the host; None if it does not fit either way."""
        peak = needs.peak(samples)
        self.last = _padded(peak)
        if self._stash != "host" and _padded(peak + count * needs.stash(samples)) <= room:
            return False
        return True if self._stash != "device" and _padded(peak) <= room else None

    def _needs_of(self, batch: Any, room: int) -> Needs:
        shape = shape_of(batch)
        for known, needs in self._known.items():
            if shape.within(known):
                return needs
        one = self._measure([take(batch, 1)] * TRIAL, room)
        try:
            two = self._measure([take(batch, 2)] * TRIAL, room)
        except TooLargeError:
            # More than the room, and at most twice what one sample needs.
            two = Trial([Stretch(where, max(2 * peak, room + 1)) for where, peak in one.stretches], 2 * one.stash)
            gc.collect()  # what the trial had is on the device as long as anything of its exception lives
        self._known[shape] = Needs(one, two)
        return self._known[shape]


def _padded(nbytes: int) -> int:
    return int(nbytes * (1 + _SLACK))


def advice(plan: Plan, choice: Choice) -> str:
    """For who has run out of device memory."""
    place = "host" if choice.stash_on_host else "device"
    return (
        f"ferryman has {show_bytes(plan.fixed)} on the device all the time, {plan.explain()}; the stash is on the "
        f"{place}, micro-batches: {choice.micro_batches}. memory='...' gives the engine a budget to keep; stash='host' "
        "and more micro_batches need less"
    )
