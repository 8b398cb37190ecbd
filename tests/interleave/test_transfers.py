"""What crosses the link for updates, byte by byte, and what they take on the device."""

import gc

import pytest
import torch

from ferryman.model.units import overlap
from ferryman.runtime.sizes import parse_bytes
from ferryman.server.stats import Stats
from support.devices import torch_virtual
from support.interleave import BROAD, MIX, SUBGROUPS, Pair, subgroups_of
from support.models import CASES, text
from support.slow import covering, slow
from support.updates import WAYS

relayed_and_held = pytest.mark.parametrize("held", [False, True], ids=["relayed", "held"])

TOY = CASES["toy"]  # of 16 in width: its tensors have no padding between them that would cross with them


class Crossed:
    """What a step has moved, beside what any step moves: its batch, its losses and the residents' weights."""

    def __init__(self, pair, device):
        for seed in range(3):  # in the first steps, checksums of second runs cross as well
            pair.ours(seed)
        pair.engine._parts.lanes.wait()  # also for weights that go to the device by themselves
        fetches = pair.engine.fetches
        with torch_virtual.watch(device) as seen:
            pair.ours(3)
            pair.engine._parts.lanes.wait()
        self.fetches = pair.engine.fetches - fetches
        self.stats = pair.engine.stats()
        residents = pair.engine.plan.residents.nbytes
        self.into = seen.counters.h2d_bytes - sum(value.nbytes for value in text(4).values()) - residents
        self.out = seen.counters.d2h_bytes - 2 * 4
        every, owned = subgroups_of(pair.engine)
        self.device = sum(s.size for s in owned)
        self.host = sum(s.size for s in every) - self.device
        self.on_host_in_units = sum(s.size for s in every if s not in owned and s.unit in pair.engine.units)
        self.resident_on_device = sum(s.size for s in owned if s.unit not in pair.engine.units)
        # A look at a gradient on the device tells the host a double for each tensor.
        self.gradient_checks = 8 * sum(_tensors_in(subgroup) for subgroup in owned)


def _tensors_in(subgroup):
    offsets = subgroup.unit.trained_offsets
    return sum(overlap(item, begin, subgroup.start, subgroup.size) is not None for item, begin in offsets.items())


def fetched(pair):
    """Bytes of weights in a step where units are relayed: both sweeps, of which the second finds two units there."""
    sizes = [unit.nbytes for unit in pair.engine.units]
    return 2 * sum(sizes) - sum(sizes[-2:])


@covering
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("updates", ["host", "static:0.5", "stride:2"])
def test_bytes_of_a_step_that_is_relayed(updates, way, virtual):
    with Pair(virtual, TOY, updates=updates, subgroup=304, held=False, slots=2, **WAYS[way]) as pair:
        seen = Crossed(pair, virtual)
        waits_on_host = way != "eager" and updates.startswith("stride")
        if updates.startswith("static"):  # weights alone, and gradients of the host's
            into, out, looks = 0, 4 * seen.device + 4 * seen.host, seen.gradient_checks
        elif waits_on_host:  # all gradients go to the host, and those of the device's come back
            into, out, looks = (12 + 4) * seen.device, (12 + 4) * seen.device + 4 * seen.host, 0
        else:
            into, out, looks = 12 * seen.device, 12 * seen.device + 4 * seen.host, seen.gradient_checks
        assert seen.into == fetched(pair) + into
        assert seen.out == out + looks
        assert (seen.stats.bytes_in, seen.stats.bytes_out) == (into, out)
        assert seen.stats.device_share == pytest.approx(seen.device / (seen.device + seen.host))


@covering
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("updates", ["host", "static:0.5", "stride:2"])
def test_bytes_of_a_step_that_is_held(updates, way, virtual):
    """Weights that the device updates are there; those of the host's come over once."""
    with Pair(virtual, TOY, updates=updates, subgroup=304, held=True, **WAYS[way]) as pair:
        seen = Crossed(pair, virtual)
        if updates.startswith("static"):
            into, out = 0, 4 * seen.device + 4 * seen.host
        else:  # residents are fetched for a step as ever, so their weights come along
            into = 8 * seen.device + 4 * seen.resident_on_device
            out = 12 * seen.device + 4 * seen.host
        assert seen.fetches == 0
        assert seen.into == into + 4 * seen.on_host_in_units
        assert seen.out == out + seen.gradient_checks
        assert seen.stats.bytes_out == out
        assert seen.stats.bytes_in == into + 4 * seen.on_host_in_units


@covering
@relayed_and_held
@pytest.mark.parametrize(("precision", "gradient", "weights", "rest"), [("bf16", 2, 2, 10), ("fp16", 2, 2, 12)])
def test_narrow_weights_and_gradients_cross_as_they_are(precision, gradient, weights, rest, held, virtual):
    options = {"updates": "stride:2", "subgroup": 304, "held": held, "precision": precision}
    with Pair(virtual, TOY, **options) as pair:
        seen = Crossed(pair, virtual)
        eager = precision == "bf16"
        stays = eager or held
        into = seen.device * (rest + (0 if held else weights) + (0 if stays else gradient))
        out = seen.device * (rest + weights) + gradient * (seen.host + (0 if stays else seen.device))
        assert seen.resident_on_device == 0
        assert seen.stats.bytes_in == into + weights * seen.on_host_in_units * held
        assert seen.stats.bytes_out == out
        assert seen.out == out + (seen.gradient_checks if stays else 0)


def test_state_is_fetched_once_and_again_after_it_was_asked_for(accelerator):
    with Pair(accelerator, TOY, updates="static:0.5", subgroup=304) as pair:
        device = sum(s.size for s in subgroups_of(pair.engine)[1])
        came = []
        for seed in range(5):
            if seed == 3:
                pair.optimizer.state_dict()
            pair.ours(seed)
            came.append(pair.engine.stats().bytes_in)
        assert came == [12 * device, 0, 0, 12 * device, 0]


def test_stats_tell_what_the_step_was(accelerator):
    with Pair(accelerator, TOY, updates="stride:2", subgroup=304) as pair:
        assert pair.engine.stats() is None
        for seed in range(3):
            pair.ours(seed)
            stats = pair.engine.stats()
            assert isinstance(stats, Stats)
            assert (stats.step, stats.updates) == (seed + 1, "stride:2")
        assert 0 <= stats.duplex <= 1
        assert min(stats.host_busy, stats.device_busy, stats.link_in_busy, stats.link_out_busy) > 0
        assert min(stats.host_waited, stats.device_waited) == 0
        assert f"{stats.device_share:.0%} on the device" in str(stats)
        pair.engine.set_updates("host")
        pair.ours(3)
        stats = pair.engine.stats()
        assert (stats.step, stats.updates, stats.device_share, stats.bytes_in) == (4, "host", 0.0, 0)
        assert stats.achieved_rate > 0
        assert pair.engine.plan.achieved_rate > 0


# Memory on the device.


def allocated(device):
    gc.collect()
    torch_virtual.synchronize(device)
    return torch_virtual.memory_allocated(device)


def small_things(engine):
    """Sums of squares, and what is too small to be in the plan."""
    every, _ = subgroups_of(engine)
    return 8 * sum(_tensors_in(subgroup) for subgroup in every) + 64


@pytest.mark.exact
@pytest.mark.parametrize(
    ("updates", "way", "held"),
    [
        ("static:1", "eager", True),
        MIX[3],
        *slow(("host", "clipped", False), *MIX[:3]),
    ],
)
def test_the_plan_has_all_that_is_allocated(updates, way, held, virtual):
    before = allocated(virtual)
    with Pair(virtual, BROAD, updates=updates, held=held, subgroup=4096, **WAYS[way]) as pair:
        engine = pair.engine
        for _ in range(2):
            assert 0 <= allocated(virtual) - before - engine.plan.fixed <= small_things(engine)
            for seed in range(2):
                pair.ours(seed)
            engine.wait()
            assert 0 <= allocated(virtual) - before - engine.plan.fixed <= small_things(engine)
            engine.set_updates("stride:3")
        engine.set_updates("host")
        assert 0 <= allocated(virtual) - before - engine.plan.fixed <= 64


@pytest.mark.parametrize(("way", "held"), [("clipped", True), *slow(("eager", False))])
def test_updates_allocate_nothing_in_the_loop(way, held, virtual):
    peaks, fixed = {}, {}
    for updates in ("host", "stride:2", "static:0.5"):
        before = allocated(virtual)
        with Pair(virtual, BROAD, updates=updates, held=held, subgroup=4096, stash="host", **WAYS[way]) as pair:
            pair.ours(0)
            seen = []
            for seed in range(1, 4):
                pair.engine.wait()
                with torch_virtual.watch(virtual) as watched:
                    pair.ours(seed)
                    pair.engine.wait()
                    torch_virtual.synchronize(virtual)
                seen.append(watched.counters.peak_memory - before)
            peaks[updates], fixed[updates] = min(seen), pair.engine.plan.fixed
    for updates in ("stride:2", "static:0.5"):
        grown = peaks[updates] - peaks["host"]
        assert grown == pytest.approx(fixed[updates] - fixed["host"], abs=16384)  # a copy may come back late


@pytest.mark.parametrize(
    ("updates", "way"), [("auto", "clipped"), ("stride:2", "eager"), *slow(("static:0.5", "clipped"))]
)
def test_a_budget_is_kept(updates, way, virtual):
    budget = parse_bytes("1536KiB", "memory")
    before = allocated(virtual)
    with Pair(virtual, BROAD, updates=updates, memory=budget, **WAYS[way]) as pair:
        assert pair.engine.plan.fixed <= budget
        for seed in range(3):
            with torch_virtual.watch(virtual) as watched:
                pair.step(seed)
                pair.engine.wait()
            assert watched.counters.peak_memory - before <= budget
        if updates != "auto":
            assert pair.engine.stats().device_share > 0
    pair.check()


@pytest.mark.parametrize(
    ("updates", "memory"),
    [("stride:2", "2560KiB"), ("auto", "1600KiB"), *slow(("static:0.5", "2560KiB"), ("auto", "2560KiB"))],
)
def test_a_budget_is_kept_when_the_policy_is_switched(updates, memory, virtual):
    """Also by what micro-batches need, for which something must be left."""
    budget = parse_bytes(memory, "memory")
    before = allocated(virtual)
    with Pair(virtual, BROAD, updates="host", memory=budget) as pair:
        pair.step(0)
        pair.engine.set_updates(updates)
        assert pair.engine.plan.fixed <= budget
        for seed in range(1, 3):
            with torch_virtual.watch(virtual) as watched:
                pair.step(seed)
                pair.engine.wait()
            assert watched.counters.peak_memory - before <= budget
    pair.check()


@pytest.mark.exact
def test_closing_gives_all_memory_back(virtual):
    before = allocated(virtual)
    for updates in ("static:0.5", "stride:2"):
        for held in (False, True):
            with Pair(virtual, updates=updates, held=held, subgroup=SUBGROUPS[2], deferred=True) as pair:
                pair.ours(0)
            del pair
            assert allocated(virtual) == before
    assert torch.accelerator.memory_allocated(virtual) == before
