"""Which unit goes into which slot: a pure function, compared with the best that is possible."""

import functools
import itertools
import random

import pytest

from ferryman.relay.weight_slots import choose_fetch, count_fetches, next_use


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
    held, ahead, late = [None] * slots, 0, 0
    for at, unit in enumerate(order):
        if unit not in held:
            _, slot = choose_fetch(held, (), order[at:])
            held[slot] = unit
            late += 1
        while (chosen := choose_fetch(held, {held.index(unit)}, order[at + 1 :])) is not None:
            held[chosen[1]] = chosen[0]
            ahead += 1
    return ahead, late


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
