"""Which unit goes into which slot: a pure function, compared with the best that is possible."""

import functools
import itertools
import random
from types import SimpleNamespace

import pytest

from ferryman.plan.slot_policy import SlotPolicy
from ferryman.plan.slot_sizes import SlotSizes, slot_sizes


def alike(slots):
    """The policy for units of one size."""
    sizes = SlotSizes(2, (1,) * (slots - 2)) if slots > 1 else SlotSizes(1, is_single=True)
    return SlotPolicy(sizes, lambda unit: 1)


def choose_fetch(loaded, busy, upcoming):
    fetch = alike(len(loaded)).choose(loaded, busy, upcoming)
    return None if fetch is None else (fetch.unit, fetch.slot)


def count_fetches(order, slots):
    return len(alike(slots).fetched_visits(order))


def next_use(unit, upcoming):
    return upcoming.index(unit) if unit in upcoming else len(upcoming)


def sweeps(n):
    """Forward and back; at the turn the last unit stays."""
    return [*range(n), *reversed(range(n - 1))]


ORDERS = {
    "stack": sweeps(6),
    "tied": [0, *range(1, 6), 0, *range(5, 0, -1), 0],  # embedding and head are one unit
    "encoder and decoder": [0, 1, 2, 0, 3, 4, 0, 4, 3, 2, 1, 0],  # both embed with the same unit
    "reused": [0, *[1, 2] * 3, 3, *[2, 1] * 3, 0],
}


def random_orders(count, seed=0):
    """Of visits: no unit is visited twice running."""
    generator = random.Random(seed)
    for _ in range(count):
        units, length = generator.randint(2, 6), generator.randint(2, 12)
        yield [unit for unit, _ in itertools.groupby(generator.choices(range(units), k=length))]


def walk(order, slots):
    """A step as the engine walks it; returns fetches ahead of the visit that needs them, and those at it."""
    return walk_with(alike(slots), order)


def walk_with(policy, order):
    held, ahead, late = [None] * policy.sizes.count, 0, 0
    for at, unit in enumerate(order):
        if unit not in held:
            policy.choose(held, (), order[at:]).put_into(held)
            late += 1
        while (chosen := policy.choose(held, {held.index(unit)}, order[at + 1 :])) is not None:
            assert held.index(unit) not in chosen.overwrites
            chosen.put_into(held)
            ahead += 1
        assert_apart(policy, held)
    return ahead, late


def assert_apart(policy, held):
    """What the slots hold is within them, and the two ends of a memory do not overlap."""
    sizes = policy.sizes
    for memory, room in enumerate(sizes.memories):
        there = [unit for slot, unit in enumerate(held) if sizes.memory_of(slot) == memory and unit is not None]
        assert sum(map(policy._size, there)) <= room


def fewest(order, slots):
    """By trying everything: no fewer fetches will do if each unit must be there before its visit begins."""

    @functools.cache
    def best(at, held):
        if at == len(order):
            return 0
        here = set(order[at : at + 2] if slots > 1 else order[at : at + 1])
        missing = here - held
        excess = max(0, len(held) + len(missing) - slots)
        victims = itertools.combinations(sorted(held - here), excess)
        return len(missing) + min(best(at + 1, held - set(gone) | missing) for gone in victims)

    return best(0, frozenset())


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("units", [1, 2, 3, 8, 200])
def test_a_step_takes_two_fetches_a_unit_less_what_the_slots_keep(units, slots):
    assert count_fetches(sweeps(units), slots) == max(2 * units - slots, units)


@pytest.mark.parametrize("order", [*ORDERS.values(), *random_orders(50)], ids=str)
def test_more_slots_mean_fewer_fetches(order):
    counts = [count_fetches(order, slots) for slots in range(1, 9)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == len(order)
    assert counts[-1] == len(set(order))


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ORDERS)
def test_no_order_of_fetches_takes_fewer(name, slots):
    assert count_fetches(ORDERS[name], slots) == fewest(ORDERS[name], slots)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_nor_for_random_orders(slots):
    for order in random_orders(300, seed=slots):
        assert count_fetches(order, slots) == fewest(order, slots), order


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
def test_what_is_counted_is_what_is_done(slots):
    for order in [*ORDERS.values(), sweeps(40), *random_orders(200, seed=slots)]:
        assert count_fetches(order, slots) == sum(walk(order, slots)), order


@pytest.mark.parametrize("slots", [2, 3, 4, 8])
def test_only_the_first_visit_waits_for_its_fetch(slots):
    for order in [*ORDERS.values(), sweeps(40), *random_orders(200, seed=slots)]:
        assert walk(order, slots)[1] == 1, order


def test_never_worse_than_fetching_at_every_visit():
    for order in random_orders(300):
        for slots in range(1, 6):
            assert len(set(order)) <= count_fetches(order, slots) <= len(order), (order, slots)


def test_what_is_needed_sooner_is_kept():
    generator = random.Random(0)
    for _ in range(2000):
        slots = generator.randint(1, 5)
        held = [*generator.sample(range(8), k=slots)]
        held = [unit if generator.random() < 0.8 else None for unit in held]
        busy = set(generator.sample(range(slots), k=generator.randint(0, 1)))
        upcoming = generator.choices(range(8), k=generator.randint(0, 10))
        chosen = choose_fetch(held, busy, upcoming)
        missing = [unit for unit in upcoming if unit not in held]
        if chosen is None:
            continue
        unit, slot = chosen
        assert unit == missing[0]
        assert slot not in busy
        assert next_use(held[slot], upcoming) > upcoming.index(unit)
        if upcoming[0] == unit:  # it cannot wait: the slot that is needed last
            others = [next_use(held[other], upcoming) for other in range(slots) if other not in busy]
            assert next_use(held[slot], upcoming) == max(others)


def test_what_is_needed_now_is_always_fetched():
    assert choose_fetch([None], (), ["a"]) == ("a", 0)
    assert choose_fetch(["b"], (), ["a", "b"]) == ("a", 0)
    assert choose_fetch(["b", "c"], (), ["a", "b", "c"]) == ("a", 1)


def test_nothing_is_fetched_when_nothing_is_missing_or_no_slot_is_free():
    assert choose_fetch([None, None], (), []) is None
    assert choose_fetch(["a", "b"], (), ["b", "a", "b"]) is None
    assert choose_fetch(["a"], {0}, ["b"]) is None
    assert choose_fetch(["a", "b"], {0}, ["b", "c"]) is None  # b is needed before c


def test_an_empty_slot_is_taken_first():
    assert choose_fetch(["a", None], {0}, ["b", "a"]) == ("b", 1)


# Units of different sizes, in the slots that a plan makes for them.

BLOCKS = {
    "a head": [9, *[4] * 8, 9],
    "tied": [12, *[3] * 8],
    "two stacks": [6, *[3] * 4, *[4] * 4],
    "growing": [1, 2, 4, 8, 9],
}


def of_sizes(sizes, slots, several=()):
    """The policy for units of these sizes, called by their numbers. `several`: those with more than one module."""
    units = [SimpleNamespace(size=size, modules=(1,) * (1 + (at in several))) for at, size in enumerate(sizes)]
    return SlotPolicy(slot_sizes(units, slots, lambda unit: unit.size), sizes.__getitem__)


def order_of(name):
    n = len(BLOCKS[name])
    if name == "tied":
        return [*range(n), 0, *reversed(range(1, n)), 0], (0,)
    if name == "two stacks":
        return [0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 0, 8, 7, 6, 5, 0, 4, 3, 2, 1, 0], (0,)
    return sweeps(n), ()


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", BLOCKS)
def test_slots_that_take_what_their_units_take_need_no_more_fetches(name, slots):
    (order, several), sizes = order_of(name), BLOCKS[name]
    policy = of_sizes(sizes, slots, several)
    ahead, late = walk_with(policy, order)
    assert ahead + late == len(policy.fetched_visits(order))
    assert late == (1 if slots > 1 else len(order)), "no fetch but the first waits for the visit that needs it"
    assert len(policy.fetched_visits(order)) <= count_fetches(order, slots) + (name == "growing")
    assert policy.sizes.nbytes < slots * max(sizes) or slots == 1


def test_two_slots_are_as_large_as_two_neighbors():
    assert of_sizes([9, 4, 4, 4, 8], 2).sizes == SlotSizes(13)
    assert of_sizes([9, 4, 4, 4, 8], 5).sizes == SlotSizes(13, (8, 4, 4))
    assert of_sizes([4, 4, 4, 9], 4).sizes == SlotSizes(13, (4, 4))
    assert of_sizes([9, 3, 3, 4, 4], 3, several=(0,)).sizes == SlotSizes(13, (4,)), "beside any other unit"
    assert of_sizes([9, 4], 1).sizes == of_sizes([9], 3).sizes == SlotSizes(9, is_single=True)


def test_with_a_slot_for_each_unit_nothing_is_fetched_twice():
    for name, sizes in BLOCKS.items():
        order, several = order_of(name)
        policy = of_sizes(sizes, len(sizes), several)
        assert policy.sizes.nbytes == sum(sizes)
        assert len(policy.fetched_visits(order)) == len(sizes), name


def test_any_order_is_served_though_large_units_are_no_neighbors():
    generator = random.Random(0)
    for order in random_orders(500):
        sizes = [generator.randint(1, 9) for _ in range(6)]
        for slots in (1, 2, 3, 4):
            policy = of_sizes(sizes, slots)
            assert sum(walk_with(policy, order)) == len(policy.fetched_visits(order)) <= len(order), (order, sizes)


def test_large_units_that_follow_each_other_against_the_order_of_the_model_wait():
    policy = of_sizes([9, 4, 4, 9], 2)
    assert policy.choose([0, None], {0}, [3]) is None, "it would overwrite the unit in use"
    assert policy.choose([0, None], (), [3]).overwrites == (0,)
    assert policy.choose([1, 0], (), [3]).overwrites == (1,), "what is beside a block may stay"
    assert set(of_sizes([5, 3, 3, 7], 2).choose([0, 0], (), [3]).overwrites) == {0, 1}
    assert policy.choose([0, None], {0}, [1]).overwrites == (1,), "a neighbor is beside it"
