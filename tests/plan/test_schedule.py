"""Who updates a subgroup: a pure function of queues and rates, held against the model and against search."""

import itertools
import random

import pytest

from ferryman.plan.performance import fluid_share, fluid_time, predict
from ferryman.plan.policy import Policy
from ferryman.plan.rates import Rates
from ferryman.plan.schedule import (
    MAX_SIMULATED,
    Queues,
    Traffic,
    assign,
    best_discrete,
    choose,
    idle,
    lane_seconds,
    makespan,
    on_device,
    on_host,
)
from support.slow import slow

SIZE = 1_000_000
RELAYED = Traffic(host_out=0, host_in=0, device_in=14, device_out=14)
HELD = Traffic(host_out=0, host_in=2, device_in=10, device_out=12)
EAGER = Traffic(host_out=2, host_in=2, device_in=10, device_out=12)
TRAFFIC = [RELAYED, HELD, EAGER, Traffic(host_out=4, host_in=2, device_in=12, device_out=14)]


def random_rates(generator):
    """From a link that is of no use to a host that is."""
    return Rates(
        host=10 ** generator.uniform(8, 10.5),
        device=10 ** generator.uniform(9.5, 11.5),
        link_in=10 ** generator.uniform(9.5, 11.3),
        link_out=10 ** generator.uniform(9.5, 11.3),
        duplex=generator.random() < 0.7,
    )


def random_cases(count, seed):
    """Every other one with units of a few subgroups, the last of which is what is left, as in a real model."""
    generator = random.Random(seed)
    for number in range(count):
        subgroups = generator.choice([48, 53, 64])
        unit = subgroups if number % 2 else generator.randint(2, 8)
        rest = SIZE if number % 2 else generator.randint(1, SIZE)
        sizes = [rest if (index + 1) % unit == 0 else SIZE for index in range(subgroups)]
        yield sizes, generator.choice(TRAFFIC), random_rates(generator), idle(generator.choice([1, 2, 3]))


def one_by_one(sizes, traffic, rates, queues):
    """As the engine does when it does not know what comes."""
    choices = []
    for size in sizes:
        choices.append(choose(queues, size, traffic, rates))
        queues = (on_device if choices[-1] else on_host)(queues, size, traffic, rates)[1]
    return choices


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_the_long_run_share_is_the_models_optimum(seed):
    generator = random.Random(seed)
    for traffic, _ in itertools.product(TRAFFIC, range(8)):
        rates = random_rates(generator)
        choices = one_by_one([SIZE] * 2000, traffic, rates, idle(3))
        share = sum(choices) / len(choices)
        assert share == pytest.approx(fluid_share(traffic, rates), abs=0.01), (traffic, rates)


@pytest.mark.parametrize("traffic", TRAFFIC)
@pytest.mark.parametrize("duplex", [True, False])
def test_a_slow_link_or_a_fast_host_leaves_the_device_out(traffic, duplex):
    slow_link = Rates(host=1e9, device=5e10, link_in=2e8, link_out=2e8, duplex=duplex)
    fast_host = Rates(host=1e12, device=5e10, link_in=5e10, link_out=5e10, duplex=duplex)
    for rates in (slow_link, fast_host):
        assert not any(one_by_one([SIZE] * 16, traffic, rates, idle(2)))
        assert not any(assign([SIZE] * 16, traffic, rates, idle(2)))


def test_what_is_queued_moves_the_choice():
    rates = Rates(host=1e9, device=5e10, link_in=2e10, link_out=2e10)
    assert not choose(idle(2), SIZE, RELAYED, rates)
    busy_host = Queues(host=1.0, link_in=0.0, device=0.0, link_out=0.0, berths=(0.0, 0.0))
    assert choose(busy_host, SIZE, RELAYED, rates)
    for elsewhere in ({"link_in": 2.0}, {"device": 2.0}, {"link_out": 2.0}, {"berths": (2.0, 2.0)}):
        assert not choose(Queues(**(vars(busy_host) | elsewhere)), SIZE, RELAYED, rates), elsewhere


def test_a_tie_is_the_hosts():
    rates = Rates(host=1e9, device=2e9, link_in=4e9, link_out=4e9)
    traffic = Traffic(host_out=0, host_in=0, device_in=1, device_out=1)
    assert on_host(idle(1), SIZE, traffic, rates)[0] == on_device(idle(1), SIZE, traffic, rates)[0]
    assert not choose(idle(1), SIZE, traffic, rates)


def test_estimates_of_one_subgroup_are_what_the_simulation_takes():
    for sizes, traffic, rates, queues in random_cases(40, seed=1):
        for device, estimate in ((True, on_device), (False, on_host)):
            finish, _ = estimate(queues, sizes[0], traffic, rates)
            assert finish == pytest.approx(makespan([device], sizes[:1], traffic, rates, queues))


def test_one_way_at_a_time_is_one_queue():
    generator = random.Random(2)
    for traffic, device in itertools.product(TRAFFIC, [True, False]):
        queues, rates = idle(2), Rates(1e9, 1e10, 1e10, 2e10, duplex=False)
        for _ in range(10):
            _, queues = (on_device if device else on_host)(queues, generator.randint(1, SIZE), traffic, rates)
            assert queues.link_in == queues.link_out


def test_a_pipeline_by_hand():
    """Two berths; a second to cross in, one to update, one to cross out; the host takes two."""
    rates = Rates(host=0.5, device=1.0, link_in=1.0, link_out=1.0)
    traffic = Traffic(host_out=0, host_in=0, device_in=1, device_out=1)
    assert makespan([True], [1], traffic, rates, idle(2)) == 3
    assert makespan([True] * 2, [1] * 2, traffic, rates, idle(2)) == 4
    assert makespan([True] * 3, [1] * 3, traffic, rates, idle(2)) == 6  # the third waits for the first one's berth
    assert makespan([True] * 3, [1] * 3, traffic, rates, idle(3)) == 5
    assert makespan([True] * 2, [1] * 2, traffic, rates, idle(1)) == 6
    assert makespan([False] * 3, [1] * 3, traffic, rates, idle(1)) == 6
    assert makespan([True, False], [1] * 2, traffic, rates, idle(1)) == 3
    one_way = Rates(host=0.5, device=1.0, link_in=1.0, link_out=1.0, duplex=False)
    assert makespan([True] * 2, [1] * 2, traffic, one_way, idle(2)) == 4
    assert makespan([True] * 3, [1] * 3, traffic, one_way, idle(3)) == 6  # six crossings, one at a time
    assert makespan([], [], traffic, rates, idle(1)) == 0


def test_weights_that_come_back_late_do_not_hold_up_state():
    rates = Rates(host=0.1, device=1.0, link_in=1.0, link_out=1.0)
    traffic = Traffic(host_out=0, host_in=1, device_in=1, device_out=1)
    assert makespan([False, True], [1, 1], traffic, rates, idle(1)) == 11  # not 14
    assert makespan([False, True, True], [1] * 3, traffic, rates, idle(1)) == 11


def test_no_schedule_beats_its_lanes():
    generator = random.Random(3)
    for sizes, traffic, rates, queues in random_cases(60, seed=3):
        choices = [generator.random() < 0.5 for _ in sizes]
        moved = sum(size for size, chosen in zip(sizes, choices, strict=True) if chosen)
        busy = lane_seconds(sum(sizes) - moved, moved, traffic, rates)
        seconds = makespan(choices, sizes, traffic, rates, queues)
        assert seconds >= max(busy.values()) * (1 - 1e-9)
        assert seconds >= fluid_time(sum(sizes), traffic, rates) * (1 - 1e-9)
        assert seconds <= sum(lane_seconds(sum(sizes) - moved, moved, traffic, rates).values()) * (1 + 1e-9)


def test_assign_is_never_worse_than_the_host_or_any_stride():
    generator = random.Random(4)
    for sizes, traffic, rates, queues in random_cases(12, seed=4):
        generator.shuffle(sizes)
        seconds = makespan(assign(sizes, traffic, rates, queues), sizes, traffic, rates, queues)
        fixed = [[False] * len(sizes), one_by_one(sizes, traffic, rates, queues)]
        fixed += [[(index + 1) % k == 0 for index in range(len(sizes))] for k in range(2, len(sizes) + 2)]
        for choices in fixed:
            assert seconds <= makespan(choices, sizes, traffic, rates, queues)


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_assign_is_near_the_best_that_search_finds(seed):
    """On these cases, not on all: of 400 like them one was 1.17, with two berths and uneven subgroups."""
    for sizes, traffic, rates, queues in random_cases(10, seed=100 + seed):
        best, choices = best_discrete(sizes, traffic, rates, queues)
        assert best == makespan(choices, sizes, traffic, rates, queues)
        seconds = makespan(assign(sizes, traffic, rates, queues), sizes, traffic, rates, queues)
        assert best <= seconds <= 1.10 * best, (traffic, rates, queues)


def test_search_finds_the_best_of_all_schedules_of_a_few():
    generator = random.Random(5)
    for _ in range(12):
        traffic, rates, queues = generator.choice(TRAFFIC), random_rates(generator), idle(2)
        every = itertools.product([False, True], repeat=7)
        best = min(makespan(choices, [SIZE] * 7, traffic, rates, queues) for choices in every)
        assert best_discrete([SIZE] * 7, traffic, rates, queues)[0] == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("traffic", [RELAYED, HELD])
def test_of_many_a_pattern_is_repeated_and_costs_little(traffic):
    rates, few, many = Rates(9e8, 5e10, 12e9, 12e9), [SIZE] * (MAX_SIMULATED // 2), [SIZE] * 40 * MAX_SIMULATED
    choices = assign(many, traffic, rates, idle(3))
    assert choices == assign(many[:MAX_SIMULATED], traffic, rates, idle(3)) * 40
    alone = makespan(assign(few, traffic, rates, idle(3)), few, traffic, rates, idle(3))
    seconds = makespan(choices, many, traffic, rates, idle(3))
    assert seconds == pytest.approx(80 * alone, rel=0.05)
    found = predict(Policy("auto"), many, traffic, rates, 3, traffic)
    assert found.seconds == pytest.approx(seconds, rel=0.02)
    assert found.share == sum(choices) / len(many)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_subgroups(count):
    rates = Rates(host=1e8, device=5e10, link_in=5e10, link_out=5e10)
    assert assign([SIZE] * count, RELAYED, rates, idle(2)) == [True] * count
    assert not any(assign([SIZE] * count, RELAYED, Rates(1e10, 5e10, 5e10, 5e10), idle(2)))
    assert assign([], RELAYED, rates, idle(2)) == []
