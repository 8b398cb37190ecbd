"""The scheduler: who updates a subgroup, as a pure function of queues and rates.

An update on the host has three parts: the gradient crosses to the host, the host updates, the weights cross to the
device. So has an update on the device: the state crosses to the device, the device updates, the state crosses to the
host. Parts that are not needed have zero bytes in `Traffic`. Each of the six parts is a lane, which works in order; the
four that cross share the two directions of the link.

There are two methods. The *estimate* (`on_host`, `on_device`) places one subgroup behind the queues, which is all that
is known when a gradient has just been computed. `makespan` simulates a whole list, event by event.

Note [Weights that come back]
Weights are ready to cross back only when the host has updated them, which may be late. They do not occupy the link
while they wait: state that is ready earlier crosses earlier. So the simulation serves each direction of the link in the
order in which lanes become ready, and the estimate adds to the link's queue the time that weights need to cross, but
not the time that they wait.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ferryman.plan.rates import Rates

MAX_SIMULATED = 256  # subgroups; longer lists are extrapolated from the first ones

_MAX_EXHAUSTIVE = 128  # subgroups; for more, only some patterns are simulated
_MAX_NEIGHBORS = 400  # schedules that `best_discrete` tries in addition to regular patterns


@dataclass(frozen=True)
class Traffic:
    """Bytes per parameter that cross the link for an update."""

    host_out: float  # the gradient, for an update on the host
    host_in: float  # the weights that the host has updated; 0 if a later fetch brings them anyway
    device_in: float  # the state, for an update on the device; and the gradient if it is on the host
    device_out: float  # that state, and the weights if the host needs them


@dataclass(frozen=True)
class Queues:
    """Seconds from now until each resource has finished its queued work."""

    host: float
    link_in: float
    device: float
    link_out: float
    berths: tuple[float, ...]  # at least one; occupied from the start of the copy in to the end of the copy out


def idle(berths: int) -> Queues:
    """Queues without work, and with all berths free."""
    return Queues(0.0, 0.0, 0.0, 0.0, (0.0,) * berths)


def lane_seconds(on_host: float, on_device: float, traffic: Traffic, rates: Rates) -> dict[str, float]:
    """Seconds that each lane is busy if the host and the device update so many parameters."""
    link_in = (on_host * traffic.host_in + on_device * traffic.device_in) / rates.link_in
    link_out = (on_host * traffic.host_out + on_device * traffic.device_out) / rates.link_out
    if not rates.duplex:
        link_in = link_out = link_in + link_out
    return {"host": on_host / rates.host, "link in": link_in, "link out": link_out, "device": on_device / rates.device}


def on_host(queues: Queues, size: int, traffic: Traffic, rates: Rates) -> tuple[float, Queues]:
    """The time at which the host would finish a subgroup of `size` parameters, and the queues with it added."""
    out, alone, back = (
        size * traffic.host_out / rates.link_out,
        size / rates.host,
        size * traffic.host_in / rates.link_in,
    )
    # The gradient is ready now, and most of the queued copies to the host are not. So it waits only for the gradients
    # before it, which cross while the host updates.
    updated = max(queues.host + max(alone, out), out + alone)
    link_in, link_out = _after(queues.link_in, queues.link_out, rates, out=out)
    finish = max(updated, link_in) + back if back else updated
    link_in, link_out = _after(link_in, link_out, rates, into=back)
    return finish, replace(queues, host=updated, link_in=link_in, link_out=link_out)


def on_device(queues: Queues, size: int, traffic: Traffic, rates: Rates) -> tuple[float, Queues]:
    """The time at which the device would finish a subgroup of `size` parameters, and the queues with it added."""
    into, out = size * traffic.device_in / rates.link_in, size * traffic.device_out / rates.link_out
    berth, *others = sorted(queues.berths)
    link_in, link_out = queues.link_in, queues.link_out
    if into:
        waited = max(0.0, berth - link_in)  # it blocks the link, unlike a wait of weights: the next state comes after
        link_in, link_out = _after(link_in, link_out, rates, into=waited + into)
    updated = max(queues.device, link_in if into else berth) + size / rates.device
    finish = max(updated, link_out, *queues.berths) + out if out else updated  # copies out are in order as well
    link_in, link_out = _after(link_in, link_out, rates, out=out)
    return finish, replace(queues, device=updated, link_in=link_in, link_out=link_out, berths=(*others, finish))


def _after(
    link_in: float, link_out: float, rates: Rates, *, into: float = 0.0, out: float = 0.0
) -> tuple[float, float]:
    """The link's queues with these seconds added; to both if the link is used in one direction at a time."""
    return (link_in + into, link_out + out) if rates.duplex else (link_in + into + out, link_out + into + out)


def choose(queues: Queues, size: int, traffic: Traffic, rates: Rates) -> bool:
    """Whether the device would finish a subgroup before the host."""
    return on_device(queues, size, traffic, rates)[0] < on_host(queues, size, traffic, rates)[0]


def assign(sizes: Sequence[int], traffic: Traffic, rates: Rates, queues: Queues) -> list[bool]:
    """Chooses the subgroups that the device updates, when all subgroups are known at once.

    A greedy schedule gives each subgroup to whichever side would finish it first. Since that does not look ahead, it is
    compared with the host alone, with every share spread evenly and with every stride, and the best one is used: no
    fixed pattern is better. With many subgroups the greedy schedule is as good as any, and only similar ones are
    compared. With tens of thousands, as in a large model, the first ones are assigned and the others repeat their
    pattern.
    """
    if len(sizes) > MAX_SIMULATED:
        return list(
            itertools.islice(itertools.cycle(assign(sizes[:MAX_SIMULATED], traffic, rates, queues)), len(sizes))
        )
    one_by_one = []
    ahead = queues
    for size in sizes:
        one_by_one.append(choose(ahead, size, traffic, rates))
        ahead = (on_device if one_by_one[-1] else on_host)(ahead, size, traffic, rates)[1]
    search = _Search(sizes, traffic, rates, queues)
    search.consider([False] * len(sizes))
    search.consider(one_by_one)
    count, most = len(sizes), sum(one_by_one)
    few = count <= _MAX_EXHAUSTIVE
    for some in range(1, count + 1) if few else range(max(1, most - 8), min(count, most + 8) + 1):
        search.consider(_spread(count, some))
    for stride in range(2, (count if few else 16) + 1):
        search.consider([(index + 1) % stride == 0 for index in range(count)])
    return search.best


def _spread(count: int, some: int) -> list[bool]:
    """Selects `some` of `count` subgroups, spread evenly."""
    return [(index + 1) * some // count > index * some // count for index in range(count)]


def best_discrete(sizes: Sequence[int], traffic: Traffic, rates: Rates, queues: Queues) -> tuple[float, list[bool]]:
    """The seconds of the best schedule that a search finds, and that schedule. Benchmarks compare `assign` with it.

    In addition to the schedules of `assign`, it tries the first and the last n subgroups on the device, for every n.
    Then it moves one subgroup or exchanges two of the best schedule while that helps, a bounded number of times.
    """
    count = len(sizes)
    search = _Search(sizes, traffic, rates, queues)
    search.consider(assign(sizes, traffic, rates, queues))
    for some in range(count + 1):
        search.consider([index < some for index in range(count)])
        search.consider([index >= count - some for index in range(count)])
    until = search.simulated + _MAX_NEIGHBORS
    improved = True
    while improved:
        improved = False
        for neighbor in _neighbors(search.best):
            if search.simulated == until:
                return search.seconds, search.best
            if search.consider(neighbor):
                improved = True
                break
    return search.seconds, search.best


class _Search:
    """The best schedule so far; of equal ones, the one with fewer parameters on the device."""

    def __init__(self, sizes: Sequence[int], traffic: Traffic, rates: Rates, queues: Queues) -> None:
        self.best: list[bool] = []
        self.seconds = math.inf
        self.simulated = 0
        self._moved = sum(sizes)
        self._sizes, self._traffic, self._rates, self._queues = sizes, traffic, rates, queues

    def consider(self, choices: list[bool]) -> bool:
        """Whether this schedule is better. It is simulated only if its lower bound is."""
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
        """A lower bound with these subgroups on the device, from the work of each lane and the occupation of berths."""
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


def _neighbors(choices: Sequence[bool]) -> Iterator[list[bool]]:
    """Schedules that differ in one subgroup, or in two that are exchanged, the closest ones first."""
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
    """Parts of updates that run in order, on a resource that other lanes may use as well."""

    def __init__(self, resource: str, seconds: list[float], before: _Lane | None, berths: list[float] | None) -> None:
        self.resource = resource
        self.seconds = seconds
        self.before = before  # the lane of the preceding part of the same subgroups
        self.berths = berths  # each part takes one when it begins
        self.ends: list[float] = []
        self.end = 0.0

    def ready(self) -> float:
        """When the next part could begin; infinity while it has to wait for a part that has not been scheduled."""
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
    """Simulates the seconds until all subgroups are updated and all copies are done. `choices`: True for the device.

    Repeatedly, of the parts that are next in their lanes, the one that can begin first is scheduled. Parts that become
    ready later could not have begun before it.
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
    """Lanes that the same subgroups pass through; parts that take no time have none."""
    lanes: list[_Lane] = []
    for resource, seconds in parts:
        if any(seconds):
            lanes.append(_Lane(resource, seconds, lanes[-1] if lanes else None, berths))
    return lanes
