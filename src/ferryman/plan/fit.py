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
taken as a whole, and what is left over in them depends on the order of sizes. Libraries also choose other kernels for
other sizes, some of which need memory of their own. So the peaks of stretches, which are allocated, choose a size, with
the most that the allocator added in the trials so far. Another trial then measures what micro-batches of that size
reserve. If that is too much, a smaller size is tried. A stash on the device is part of that trial, because long-lived
tensors between short-lived ones are what keeps an allocator from using its segments again.

Note [Boundaries that stay]
With the stash on the host, the inputs of the call that a parked micro-batch waits for (its *boundary*) would leave the
device between any two visits: in a step, the stash would cross twice out and three times in. A boundary that stays
needs only the one copy that the backward reads: once out, once in. So the rest of the room is for boundaries, of as
many micro-batches as it has room for. Each takes the place of the largest inputs of any call. In the backward, these
are the gradients of its outputs, and those of its saved inputs that the call before it has brought back already.

Note [Graphs that are kept]
What is left of the room after that is for graphs that are kept from the forward to the backward, so that their calls do
not run again. Those that save the most seconds per byte come first (`keep.py`). Trials measure both. A trial of all
micro-batches, with these graphs, then measures what is reserved; if it is too much, fewer are kept. With the stash on
the device, that trial takes the place of the one without them.

Note [More micro-batches]
The smallest number of micro-batches that fits leaves little room for graphs. More and smaller ones keep more of them,
since what one micro-batch needs while it runs (its logits above all) shrinks, while the graphs of a step take the same.
Each additional one costs time for each of its calls, which is known only roughly. So there are at most twice as many,
and only if they keep at least a quarter more of all graphs, which saves a sixteenth of the compute. A batch that fits
as a whole is not cut, since its loss may not be the mean of its samples' losses. Graphs are counted by their bytes: the
number of micro-batches changes random numbers and the last bits of sums, so it must not depend on measured times.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ferryman.plan.batch import Shape, bytes_in, shape_of, take
from ferryman.plan.keep import EVERYTHING, NOTHING, Costs, Keep, bytes_of, extrapolate, fill, is_all, seconds_of
from ferryman.plan.plan import Need, Plan
from ferryman.runtime.sizes import show_bytes

IN_FLIGHT = 2  # copies of the stash to the host that are in flight at a time
# While one micro-batch runs, another comes back to the device and others leave it.
TRIAL_MICRO_BATCHES = 2 + IN_FLIGHT

_KEEP_ATTEMPTS = 4  # trials of fewer and fewer kept calls
_MOST_MORE, _LEAST_GAIN = 2, 1 / 4  # see Note [More micro-batches]

_ALLOCATOR_SLACK = 0.04  # fraction of memory that an allocator may round up or return late


class Stretch(NamedTuple):
    """The execution of a micro-batch from one park to the next."""

    where: str  # the unit in which it begins
    peak: int  # bytes, in addition to those that are always on the device


class Trial(NamedTuple):
    """The device memory that a trial has measured."""

    stretches: Sequence[Stretch]
    stash: int  # bytes of a micro-batch's stash between its forward and its backward
    boundary: int  # bytes of the largest inputs for which a micro-batch has waited
    reserved: int = 0  # the peak of bytes reserved, in addition to those that are always reserved
    costs: Costs = MappingProxyType({})  # of the calls whose forward ran again, for one micro-batch

    @property
    def added(self) -> int:
        """How much the allocator has added to the bytes of tensors."""
        return max(0, self.reserved - _highest(self.stretches).peak)


class Choice(NamedTuple):
    """How a batch runs within the budget."""

    micro_batches: int
    stash_on_host: bool
    staying: int = 0  # the micro-batches whose boundary stays on the device, if the stash is on the host
    keep: Keep = NOTHING  # the calls that keep their graphs


_TRIAL = Choice(TRIAL_MICRO_BATCHES, stash_on_host=True)

_NO_TRIAL = Trial([Stretch("", 0)], 0, 0)

# Runs micro-batches with these contents and returns what they needed; raises a TooLargeError as soon as that is more
# than a number of bytes. Of the choice, the place of the stash and of boundaries counts.
Measure = Callable[[list[Any], int, Choice], Trial]


class TooLargeError(Exception):
    """Not even one sample fits into the budget; or, if there is `advice`, not as many as were requested."""

    def __init__(self, need: Need, advice: str | None = None) -> None:
        super().__init__(str(need))
        self.need = need
        self.advice = advice


@dataclass
class Needs:
    """The device memory that running micro-batches of one shape need, as a function of their number of samples."""

    one: Trial
    two: Trial
    checks: list[_Check] = field(default_factory=list)  # what other sizes have reserved
    must_move: bool = False  # whether all that a parked micro-batch has must leave the device

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
        return _highest([Stretch(a.where, _extrapolate(a.peak, b.peak, samples)) for a, b in pairs])

    def stash(self, samples: int) -> int:
        return _extrapolate(self.one.stash, self.two.stash, samples)

    def boundary(self, samples: int) -> int:
        return _extrapolate(self.one.boundary, self.two.boundary, samples)

    def costs(self, samples: int) -> Costs:
        return self.one.costs if samples == 1 else extrapolate(self.one.costs, self.two.costs, samples)


def _highest(stretches: Sequence[Stretch]) -> Stretch:
    return max(stretches, key=lambda stretch: stretch.peak)


def _extrapolate(one: int, two: int, samples: int) -> int:
    return one + max(0, two - one) * (samples - 1)


class _Check(NamedTuple):
    """What micro-batches of one size have reserved: a trial that was more than a forecast."""

    shape: Shape
    samples: int
    choice: Choice
    reserved: int  # the peak, in addition to the bytes that are always reserved
    added: int  # by the allocator

    def covers(self, other: _Check) -> bool:
        """Whether the other one needs no trial, since it is not larger."""
        mine, theirs = self.choice, other.choice
        return (
            mine.stash_on_host == theirs.stash_on_host
            and theirs.staying <= mine.staying
            and mine.keep.covers(theirs.keep)
            and ((theirs.stash_on_host and not theirs.keep) or theirs.micro_batches <= mine.micro_batches)
            and other.samples <= self.samples
            and other.shape.within(self.shape)
        )


class Fit:
    """Chooses the number of micro-batches, the stash's place and the calls that keep their graphs. `stash` is "auto",
    "device" or "host", `recompute` is "auto", "always" or "never"."""

    def __init__(self, budget: int, stash: str, measure: Measure, recompute: str = "always") -> None:
        self.budget = budget
        self._stash, self._recompute = stash, recompute
        self._measure = measure
        self._known: dict[Shape, Needs] = {}
        # For ready-made micro-batches, by their structure: the size in bytes of the largest one measured, with its
        # needs, and that of the smallest one found too large, with its need.
        self._measured: dict[Any, tuple[int, Needs]] = {}
        self._refused: dict[Any, tuple[int, Need]] = {}
        self._chosen: tuple[Needs, _Check] | None = None  # what the last choice was made of; None: it was not measured
        self.needed = 0  # bytes that the micro-batches of the last choice need

    def choose(self, batch: Any, size: int, count: int | None, fixed: int) -> Choice:
        """Cuts `size` samples into `count` micro-batches, or into as few as fit beside `fixed` bytes on the device. See
        also Note [More micro-batches]."""
        self._chosen, room = None, self.budget - fixed
        needs = self._needs_of(batch, room)
        if self._recompute == "never":
            return self._keep_all(needs, batch, size, count, fixed)
        if count is not None:
            per_part = -(-size // count)
            choice = self._place(needs, batch, per_part, count, room)
            if choice is None:
                best, most = self._largest(needs, batch, size, room), needs.most(per_part)
                raise TooLargeError(
                    Need(_padded(most.peak), most.where),
                    f"micro_batches={count} makes micro-batches of {per_part} samples, which need "
                    f"{show_bytes(fixed + _padded(most.peak))} where memory={show_bytes(self.budget)}; use "
                    f"micro_batches={best.micro_batches}, or leave it out to let the engine choose",
                )
            return choice
        least, chosen = self._largest(needs, batch, size, room), self._chosen
        count = least.micro_batches
        if self._recompute == "auto" and count > 1:
            count = count_to_keep(needs, size, count, room, stash_on_host=least.stash_on_host)
        more = None if count == least.micro_batches else self._place(needs, batch, -(-size // count), count, room)
        if more is not None and more.keep:
            return more
        self._chosen = chosen
        return least

    def place(self, part: Any, count: int, fixed: int) -> Choice:
        """Chooses the place of the stash for `count` ready-made micro-batches, of which `part` is the largest."""
        self._chosen, room, nbytes = None, self.budget - fixed, bytes_in(part)
        kinds = shape_of(part).kinds if nbytes else count  # without tensors, only the count tells sizes apart
        smallest, need = self._refused.get(kinds, (sys.maxsize, None))
        if nbytes < smallest:
            try:
                return self._place_measured(part, nbytes, kinds, count, room)
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

    def _place_measured(self, part: Any, nbytes: int, kinds: Any, count: int, room: int) -> Choice:
        largest, needs = self._measured.get(kinds, (-1, None))
        if needs is None or nbytes > largest:
            trial = self._measure([part] * TRIAL_MICRO_BATCHES, room, _TRIAL)
            needs = Needs(trial, trial)
            self._measured[kinds] = nbytes, needs
        choice = self._place(needs, part, None, count, room)
        if choice is None and self._recompute == "never":
            raise self._too_large_to_keep(needs, 1, count, self.budget - room)
        if choice is None:
            raise TooLargeError(self._need_of_one(needs.one, count))
        return choice

    def _keep_all(self, needs: Needs, batch: Any, size: int, count: int | None, fixed: int) -> Choice:
        """Like `choose`, where all graphs must be kept."""
        room, most = self.budget - fixed, count or 1
        while True:
            samples = -(-size // most)
            if (choice := self._place(needs, batch, samples, most, room)) is not None:
                return choice
            if samples == 1 or count is not None:
                raise self._too_large_to_keep(needs, samples, most, fixed)
            most = -(-size // (samples - 1))

    def _too_large_to_keep(self, needs: Needs, samples: int, count: int, fixed: int) -> TooLargeError:
        most = needs.most(samples)
        on_host = self._stash == "host"
        kept = bytes_of(EVERYTHING, needs.costs(samples), micro_batches=count, stash_on_host=on_host)
        kept += 0 if on_host else count * needs.stash(samples)
        whole = _padded(most.peak + kept)
        return TooLargeError(
            Need(whole, most.where),
            f"recompute='never' keeps the activations of all calls until their backward: {show_bytes(kept)} for "
            f"{count} micro-batches of {samples} samples, in addition to {show_bytes(fixed + most.peak)} for all else, "
            f"where memory={show_bytes(self.budget)}. memory={show_bytes(fixed + whole)} would be enough, or "
            "fewer samples in a step; recompute='auto' keeps those for which there is room",
        )

    def _largest(self, needs: Needs, batch: Any, size: int, room: int) -> Choice:
        """The largest micro-batches that fit, in the smallest number that makes micro-batches of that size."""
        count = 1
        while True:
            samples = -(-size // count)
            if (choice := self._place(needs, batch, samples, count, room)) is not None:
                return choice
            if samples == 1:
                break
            count = -(-size // (samples - 1))  # the next that makes them smaller
        raise TooLargeError(self._need_of_one(needs.one, size))

    def keep(self, part: Any, choice: Choice, fixed: int) -> Choice:
        """Adds to a choice, of which `part` is the largest micro-batch, the graphs for which there is room. For engines
        without a budget, which run in any case."""
        self._chosen, room = None, self.budget - fixed
        nbytes, kinds = bytes_in(part), shape_of(part).kinds
        largest, needs = self._measured.get(kinds, (-1, None))
        if needs is None or nbytes > largest:
            needs = Needs(_NO_TRIAL, _NO_TRIAL)
            self._measured[kinds] = nbytes, needs
        whole = choice._replace(keep=EVERYTHING)
        if self._fits(needs, part, None, whole, 0, room):
            return whole
        try:
            if needs.one is _NO_TRIAL:
                trial = self._measure([part] * TRIAL_MICRO_BATCHES, room, _TRIAL)
                needs = Needs(trial, trial, needs.checks, needs.must_move)
                self._measured[kinds] = nbytes, needs
        except TooLargeError:
            return choice
        taken = 0 if choice.stash_on_host else choice.micro_batches * needs.stash(1)
        return self._with_graphs(needs, part, None, choice, taken, room) or choice

    def ran_out(self) -> bool:
        """Called when a step of the last choice has run out of memory, though trials had found room: other samples may
        need more, and an allocator leaves other gaps. The first time, nothing of a parked micro-batch stays on the
        device from now on; after that, micro-batches have at most half the samples. Returns whether there was a choice.
        """
        if self._chosen is None:
            return False
        needs, chosen = self._chosen
        if not _moves(chosen.choice) and self._stash != "device":
            needs.must_move = True
        else:
            choice, samples = chosen.choice._replace(keep=NOTHING), chosen.samples // 2 + 1
            needs.checks.append(chosen._replace(choice=choice, samples=samples, reserved=sys.maxsize))
        return True

    def whole_need(self, batch: Any, size: int) -> Need:
        """The need of micro-batches of one sample, measured without a limit; the budget if the device has no more."""
        try:
            return self._need_of_one(self._measure([take(batch, 1)] * TRIAL_MICRO_BATCHES, sys.maxsize, _TRIAL), size)
        except TooLargeError:
            return Need(self.budget, "a trial", is_all=False)

    def _need_of_one(self, one: Trial, size: int) -> Need:
        most = _highest(one.stretches)
        stashed = size * one.stash if self._stash == "device" else 0
        return Need(_padded(most.peak + one.added + stashed), most.where)

    def _place(self, needs: Needs, batch: Any, samples: int | None, count: int, room: int) -> Choice | None:
        """The place of the stash and of boundaries for `count` micro-batches; None if nothing fits.

        `samples`: None if `batch` is a ready-made micro-batch.
        """
        size = samples or 1
        self.needed = _padded(needs.peak(size))
        on_device, on_host = Choice(count, stash_on_host=False), Choice(count, stash_on_host=True)
        if self._stash != "host":
            stashed = count * needs.stash(size)
            if (keeps := self._with_graphs(needs, batch, samples, on_device, stashed, room)) is not None:
                return keeps
            if self._recompute != "never" and self._fits(needs, batch, samples, on_device, stashed, room):
                return on_device
        if self._stash == "device":
            return None
        if self._recompute == "never":
            return self._with_graphs(needs, batch, samples, on_host, 0, room)
        if not self._fits(needs, batch, samples, on_host, 0, room):
            return None
        some = staying(count, needs.peak(size), needs.boundary(size), room)
        while some and not self._fits(needs, batch, samples, on_host._replace(staying=some), 0, room):
            some //= 2
        choice = on_host._replace(staying=some)
        stayed = some * needs.boundary(size)
        return self._with_graphs(needs, batch, samples, choice, stayed, room) or choice

    def _with_graphs(
        self, needs: Needs, batch: Any, samples: int | None, choice: Choice, taken: int, room: int
    ) -> Choice | None:
        """The choice with the calls that keep their graphs. None: there is room for none; or not for all, if all must
        be kept. `taken`: bytes of the stash."""
        if self._recompute == "always":
            return None
        size, on_host, count = samples or 1, choice.stash_on_host, choice.micro_batches
        costs, left = needs.costs(size), room - _padded(needs.peak(size) + taken)
        for _ in range(_KEEP_ATTEMPTS):
            keep = fill(costs, count, int(left / (1 + _ALLOCATOR_SLACK)), stash_on_host=on_host)
            whole = is_all(keep, costs, count)
            if not (keep or whole) or (self._recompute == "never" and not whole):
                return None
            kept = bytes_of(keep, costs, micro_batches=count, stash_on_host=on_host)
            wanted = choice._replace(
                keep=replace(keep, nbytes=kept, seconds=seconds_of(keep, costs, micro_batches=count), whole=whole)
            )
            if self._fits(needs, batch, samples, wanted, taken + kept, room):
                return wanted
            left = min(left, kept) * 3 // 4
        return None

    def _fits(self, needs: Needs, batch: Any, samples: int | None, choice: Choice, stashed: int, room: int) -> bool:
        """Whether micro-batches of this size fit, with `stashed` bytes. See Note [What is reserved]."""
        if _padded(needs.peak(samples or 1) + stashed) > room or (needs.must_move and not _moves(choice)):
            return False
        wanted = _Check(shape_of(batch), samples or 1, choice, 0, 0)
        if any(check.reserved > room and wanted.covers(check) for check in needs.checks):
            return False
        known = next((check for check in needs.checks if check.reserved <= room and check.covers(wanted)), None)
        if known is None and not (_moves(choice) and samples in (None, 1, 2)):  # those were in the trials of `needs`
            known = self._try_out(batch if samples is None else take(batch, samples), needs, wanted, room)
            if known.reserved > room:
                return False
        if known is not None:
            self._remember(known)
        self._chosen = needs, wanted
        return True

    def _try_out(self, content: Any, needs: Needs, wanted: _Check, room: int) -> _Check:
        """Measures what micro-batches of this content reserve, and adds it to the needs."""
        choice, parts = wanted.choice, wanted.choice.micro_batches
        if choice.stash_on_host and not choice.keep:
            parts = min(parts, choice.staying + TRIAL_MICRO_BATCHES) if choice.staying else TRIAL_MICRO_BATCHES
        try:
            trial = self._measure([content] * parts, room, choice)
        except TooLargeError as error:
            check = wanted._replace(reserved=max(error.need.nbytes, room + 1))
            gc.collect()  # the exception's traceback keeps the trial's tensors on the device
        else:
            added = max(0, trial.reserved - needs.allocated(wanted.samples).peak) if _moves(choice) else 0
            # What is reserved differs a little from step to step, with what the allocator finds in its cache.
            check = wanted._replace(reserved=_padded(trial.reserved), added=added)
        needs.checks.append(check)
        return check

    def _remember(self, check: _Check) -> None:
        """Remembers what a choice needs at least, without boundaries that stay and graphs that are kept: there could be
        fewer of them."""
        if not check.choice.staying and not check.choice.keep:
            self.needed = max(self.needed, check.reserved)

    def _needs_of(self, batch: Any, room: int) -> Needs:
        shape = shape_of(batch)
        for known, needs in self._known.items():
            if shape.within(known):
                return needs
        one = self._measure([take(batch, 1)] * TRIAL_MICRO_BATCHES, room, _TRIAL)
        try:
            two = self._measure([take(batch, 2)] * TRIAL_MICRO_BATCHES, room, _TRIAL)
        except TooLargeError:
            # More than the room, and at most twice what one sample needs.
            two = Trial(
                [Stretch(where, max(2 * peak, room + 1)) for where, peak in one.stretches],
                2 * one.stash,
                2 * one.boundary,
            )
            gc.collect()  # the exception's traceback keeps the trial's tensors on the device
        self._known[shape] = Needs(one, two)
        return self._known[shape]


def count_to_keep(needs: Needs, size: int, least: int, room: int, *, stash_on_host: bool) -> int:
    """The number of micro-batches for so many samples, of which `least` fit. See Note [More micro-batches]."""

    def kept(count: int) -> float:
        """The share of all graphs for which there is room."""
        samples = -(-size // count)
        whole = bytes_of(EVERYTHING, needs.costs(samples), micro_batches=count, stash_on_host=stash_on_host)
        stash = 0 if stash_on_host else count * needs.stash(samples)
        left = (room - _padded(needs.peak(samples) + stash)) / (1 + _ALLOCATOR_SLACK)
        return min(1.0, max(0.0, left / whole)) if whole else 1.0

    enough, most = kept(least) + _LEAST_GAIN, _MOST_MORE * least
    # The numbers of which each gives other sizes, so that the last micro-batch has samples.
    counts = dict.fromkeys(-(-size // samples) for samples in range(-(-size // least), 0, -1))
    return next((count for count in counts if least < count <= most and kept(count) >= enough), least)


def staying(count: int, peak: int, boundary: int, room: int) -> int:
    """How many of `count` micro-batches can leave their boundary on the device, beside a `peak` without any."""
    return max((some for some in range(count + 1) if _padded(peak + some * boundary) <= room), default=0)


def _moves(choice: Choice) -> bool:
    """Whether everything that a parked micro-batch has leaves the device."""
    return choice.stash_on_host and not choice.staying and not choice.keep


def _padded(nbytes: int) -> int:
    return int(nbytes * (1 + _ALLOCATOR_SLACK))


def out_of_memory_advice(plan: Plan, choice: Choice) -> str:
    """Advice for a user whose device ran out of memory."""
    place = "host" if choice.stash_on_host else "device"
    fewer = "recompute='always', " if choice.keep else ""
    return (
        f"ferryman always uses {show_bytes(plan.fixed)} on the device, {plan.explain()}; the stash is on the {place}, "
        f"micro-batches: {choice.micro_batches}. Set a budget with memory='...', or reduce the need with {fewer}"
        "stash='host' or more micro_batches"
    )
