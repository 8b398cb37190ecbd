"""The scheduler: who updates a subgroup, as a pure function of queues and rates.

An update on the host: its gradient crosses out, the host updates, the weights cross in. On the device: the state
crosses in, the device updates, the state crosses out. What does not need to cross has no bytes in `Traffic`. Each of
the six parts is a lane, in order; the four that cross share the two directions of the link.

There are two views of the same thing. The *estimate* (`on_host`, `on_device`) sees one subgroup behind queues, which is
all that is known when a gradient has just been made. `makespan` simulates a whole list, event by event.

**Note: weights that come back.** They are ready only when the host is done, which may be late. Meanwhile the link is
not theirs: state that is ready before them goes before them. So the simulation serves a direction of the link in the
order in which lanes are ready, and the estimate adds to the link's queue what they take, but not the time they wait.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ferryman.plan.rates import Rates

SAMPLE = 256  # subgroups; of more, the first tell how it goes on

_MANY = 128  # subgroups; of more, not every rhythm is simulated
_TRIES = 400  # schedules that `best_discrete` tries beyond the regular ones


@dataclass(frozen=True)
class Traffic:
    """Bytes per parameter that cross the link for an update."""

    host_out: float  # the gradient of what the host updates
    host_in: float  # the weights that the host updated; none where a later fetch brings them anyway
    device_in: float  # the state of what the device updates, and the gradient if it lies on the host
    device_out: float  # that state, and the weights if the host wants them


@dataclass(frozen=True)
class Queues:
    """Seconds from now until each has done what it was given."""

    host: float
    link_in: float
    device: float
    link_out: float
    berths: tuple[float, ...]  # staging on the device, at least one; taken from the copy in to the end of the copy out


def idle(berths: int) -> Queues:
    """Nothing is queued, and all berths are free."""
    return Queues(0.0, 0.0, 0.0, 0.0, (0.0,) * berths)


def lane_seconds(on_host: float, on_device: float, traffic: Traffic, rates: Rates) -> dict[str, float]:
    """How long each is busy in all with so many parameters on either side."""
    link_in = (on_host * traffic.host_in + on_device * traffic.device_in) / rates.link_in
    link_out = (on_host * traffic.host_out + on_device * traffic.device_out) / rates.link_out
    if not rates.duplex:
        link_in = link_out = link_in + link_out
    return {"host": on_host / rates.host, "link in": link_in, "link out": link_out, "device": on_device / rates.device}


def on_host(queues: Queues, size: int, traffic: Traffic, rates: Rates) -> tuple[float, Queues]:
    """When the host would have updated a subgroup of `size` parameters, and the queues then."""
    out, alone, back = (
        size * traffic.host_out / rates.link_out,
        size / rates.host,
        size * traffic.host_in / rates.link_in,
    )
    # The gradient is ready now, and what is queued to go out mostly is not: it waits for the gradients before it alone,
    # which are crossing at their pace while the host updates at its own.
    updated = max(queues.host + max(alone, out), out + alone)
    link_in, link_out = _after(queues.link_in, queues.link_out, rates, out=out)
    finish = max(updated, link_in) + back if back else updated
    link_in, link_out = _after(link_in, link_out, rates, into=back)
    return finish, replace(queues, host=updated, link_in=link_in, link_out=link_out)


def on_device(queues: Queues, size: int, traffic: Traffic, rates: Rates) -> tuple[float, Queues]:
    """When the device would have updated a subgroup of `size` parameters, and the queues then."""
    into, out = size * traffic.device_in / rates.link_in, size * traffic.device_out / rates.link_out
    berth, *others = sorted(queues.berths)
    link_in, link_out = queues.link_in, queues.link_out
    if into:
        waited = max(0.0, berth - link_in)  # that counts, unlike the wait of weights: the next state is behind this one
        link_in, link_out = _after(link_in, link_out, rates, into=waited + into)
    updated = max(queues.device, link_in if into else berth) + size / rates.device
    finish = max(updated, link_out, *queues.berths) + out if out else updated  # copies out are in order, too
    link_in, link_out = _after(link_in, link_out, rates, out=out)
    return finish, replace(queues, device=updated, link_in=link_in, link_out=link_out, berths=(*others, finish))


def _after(
    link_in: float, link_out: float, rates: Rates, *, into: float = 0.0, out: float = 0.0
) -> tuple[float, float]:
    """The link's queues with more in them; one queue if it is used one way at a time."""
    return (link_in + into, link_out + out) if rates.duplex else (link_in + into + out, link_out + into + out)


def choose(queues: Queues, size: int, traffic: Traffic, rates: Rates) -> bool:
    """Whether the device would be done with a subgroup before the host."""
    return on_device(queues, size, traffic, rates)[0] < on_host(queues, size, traffic, rates)[0]


def assign(sizes: Sequence[int], traffic: Traffic, rates: Rates, queues: Queues) -> list[bool]:
    """Which subgroups go to the device, where all are known at once.

    Whoever is done first takes the next one. That does not look ahead, so what it gives is compared with the host
    alone, with every share spread evenly and with every stride, and the best is taken: no fixed rhythm is better. Of
    many subgroups the first rule is as good as any, and only what is near it is compared; a large model has tens of
    thousands, and there the first are assigned and the others follow their pattern.
    """
    if len(sizes) > SAMPLE:
        return list(itertools.islice(itertools.cycle(assign(sizes[:SAMPLE], traffic, rates, queues)), len(sizes)))
    one_by_one = []
    ahead = queues
    for size in sizes:
        one_by_one.append(choose(ahead, size, traffic, rates))
        ahead = (on_device if one_by_one[-1] else on_host)(ahead, size, traffic, rates)[1]
    search = _Search(sizes, traffic, rates, queues)
    search.consider([False] * len(sizes))
    search.consider(one_by_one)
    count, most = len(sizes), sum(one_by_one)
    few = count <= _MANY
    for some in range(1, count + 1) if few else range(max(1, most - 8), min(count, most + 8) + 1):
        search.consider(_spread(count, some))
    for stride in range(2, (count if few else 16) + 1):
        search.consider([(index + 1) % stride == 0 for index in range(count)])
    return search.best


def _spread(count: int, some: int) -> list[bool]:
    """Some of so many, evenly."""
    return [(index + 1) * some // count > index * some // count for index in range(count)]


def best_discrete(sizes: Sequence[int], traffic: Traffic, rates: Rates, queues: Queues) -> tuple[float, list[bool]]:
    """The best schedule that a search finds, and its seconds: what benchmarks hold `assign` against.

    Beside what `assign` tries, it puts any number of subgroups on the device first, and last; then it changes one
    subgroup or exchanges two of the best schedule, as long as that helps and a bounded number of times.
    """
    count = len(sizes)
    search = _Search(sizes, traffic, rates, queues)
    search.consider(assign(sizes, traffic, rates, queues))
    for some in range(count + 1):
        search.consider([index < some for index in range(count)])
        search.consider([index >= count - some for index in range(count)])
    until = search.simulated + _TRIES
    improved = True
    while improved:
        improved = False
        for neighbour in _neighbours(search.best):
            if search.simulated == until:
                return search.seconds, search.best
            if search.consider(neighbour):
                improved = True
                break
    return search.seconds, search.best


class _Search:
    """The best schedule so far; of equals, the one with fewer parameters on the device."""

    def __init__(self, sizes: Sequence[int], traffic: Traffic, rates: Rates, queues: Queues) -> None:
        self.best: list[bool] = []
        self.seconds = math.inf
        self.simulated = 0
        self._moved = sum(sizes)
        self._sizes, self._traffic, self._rates, self._queues = sizes, traffic, rates, queues

    def consider(self, choices: list[bool]) -> bool:
        """Whether this one is better. It is simulated only if its busiest lane leaves that open."""
        sizes = [size for size, crosses in zip(self._sizes, choices, strict=True) if crosses]
        moved = sum(sizes)
        if (self._least(sizes), moved) >= (self.seconds, self._moved):
            return False
        seconds = makespan(choices, self._sizes, self._traffic, self._rates, self._queues)
        self.simulated += 1
        if (seconds, moved) >= (self.seconds, self._moved):
            return False
        self.best, self.seconds, self._moved = choices, seconds, moved
        return True

    def _least(self, sizes: list[int]) -> float:
        """No schedule with these on the device takes less: lanes do their work, and berths are held all the way."""
        traffic, rates, queues = self._traffic, self._rates, self._queues
        moved = sum(sizes)
        busy = lane_seconds(sum(self._sizes) - moved, moved, traffic, rates)
        waits = {"host": queues.host, "link in": queues.link_in, "link out": queues.link_out, "device": queues.device}
        passage = traffic.device_in / rates.link_in + 1 / rates.device + traffic.device_out / rates.link_out
        return max(
            *(waits[lane] + seconds for lane, seconds in busy.items() if seconds),
            max(sizes, default=0) * passage,
            moved / len(queues.berths) * passage,
        )


def _neighbours(choices: Sequence[bool]) -> Iterator[list[bool]]:
    """Schedules that differ in one subgroup, or in two that are exchanged, near ones first."""
    for index in range(len(choices)):
        yield [*choices[:index], not choices[index], *choices[index + 1 :]]
    for distance in range(1, len(choices)):
        for left in range(len(choices) - distance):
            right = left + distance
            if choices[left] != choices[right]:
                changed = list(choices)
                changed[left], changed[right] = changed[right], changed[left]
                yield changed


class _Lane:
    """Parts of updates that follow one another, on something that other lanes may use, too."""

    def __init__(self, resource: str, seconds: list[float], before: _Lane | None, berths: list[float] | None) -> None:
        self.resource = resource
        self.seconds = seconds
        self.before = before  # of the same subgroups, the part before this one
        self.berths = berths  # of which each part takes one when it begins
        self.ends: list[float] = []
        self.end = 0.0

    def ready(self) -> float:
        """When the next part could begin; never, for all that is known yet, if something must be done before."""
        at = len(self.ends)
        if at == len(self.seconds):
            return math.inf
        after = 0.0
        if self.before is not None:
            if at == len(self.before.ends):
                return math.inf
            after = self.before.ends[at]
        elif self.berths is not None:
            if not self.berths:
                return math.inf
            after = self.berths[0]
        return after if after > self.end else self.end


def makespan(choices: Sequence[bool], sizes: Sequence[int], traffic: Traffic, rates: Rates, queues: Queues) -> float:
    """Seconds from now until all are updated and everything has crossed; `choices`: True for the device.

    A simulation: again and again, of the parts that are next in their lanes, the one that can begin first does so.
    Parts that become ready later do so after that, and could not have come before it.
    """
    stay = [size for size, crosses in zip(sizes, choices, strict=True) if not crosses]
    cross = [size for size, crosses in zip(sizes, choices, strict=True) if crosses]
    out = "link out" if rates.duplex else "link in"
    berths = sorted(queues.berths)
    on_device = _chain(
        berths,
        ("link in", [size * traffic.device_in / rates.link_in for size in cross]),
        ("device", [size / rates.device for size in cross]),
        (out, [size * traffic.device_out / rates.link_out for size in cross]),
    )
    on_host = _chain(
        None,
        (out, [size * traffic.host_out / rates.link_out for size in stay]),
        ("host", [size / rates.host for size in stay]),
        ("link in", [size * traffic.host_in / rates.link_in for size in stay]),
    )
    lanes = on_device + on_host
    free = {"host": queues.host, "device": queues.device, "link in": queues.link_in, "link out": queues.link_out}
    for _ in range(sum(len(lane.seconds) for lane in lanes)):
        start = since = math.inf
        for lane in lanes:
            ready = lane.ready()
            begin = max(ready, free[lane.resource])
            if begin < start or (begin == start and ready < since):
                start, since, first = begin, ready, lane
        end = start + first.seconds[len(first.ends)]
        if first.before is None and first.berths is not None:
            heapq.heappop(berths)
        if on_device and first is on_device[-1]:
            heapq.heappush(berths, end)
        first.ends.append(end)
        first.end = free[first.resource] = end
    return max((lane.end for lane in lanes), default=0.0)


def _chain(berths: list[float] | None, *parts: tuple[str, list[float]]) -> list[_Lane]:
    """Lanes that the same subgroups go through; none for parts that take no time."""
    lanes: list[_Lane] = []
    for resource, seconds in parts:
        if any(seconds):
            lanes.append(_Lane(resource, seconds, lanes[-1] if lanes else None, berths))
    return lanes
