"""The performance model: its equations against search, simulation and the published tables."""

import json
import math
import random
from pathlib import Path

import pytest

from ferryman.plan.performance import (
    Phase,
    fluid_share,
    fluid_time,
    predict,
    smallest_useful_stride,
    step_time,
    stride_time,
)
from ferryman.plan.policy import parse_policy
from ferryman.plan.rates import Rates
from ferryman.plan.schedule import Traffic, best_discrete, idle, lane_seconds
from support.fresh import run_file_fresh

STATE = Traffic(host_out=0, host_in=2, device_in=12, device_out=12)
STAYS = Traffic(host_out=0, host_in=2, device_in=0, device_out=0)
RATES = Rates(host=1e9, device=5e10, link_in=2e10, link_out=2e10)
ROOT = Path(__file__).parents[2]


def random_cases(count, seed):
    generator = random.Random(seed)
    for _ in range(count):
        traffic = Traffic(*(generator.choice([0, 2, 4, 12, 14]) for _ in range(4)))
        host, device, link_in, link_out = (10 ** generator.uniform(8, 11) for _ in range(4))
        yield traffic, Rates(host, device, link_in, link_out, duplex=generator.random() < 0.5)


def test_no_share_is_better_than_the_fluid_one():
    for traffic, rates in random_cases(50, seed=0):
        best = fluid_time(1, traffic, rates)
        assert 0 <= fluid_share(traffic, rates) <= 1
        for step in range(1001):
            share = step / 1000
            assert max(lane_seconds(1 - share, share, traffic, rates).values()) >= best * (1 - 1e-9)


def test_of_equally_good_shares_the_smallest_is_taken():
    gradients_bind = Traffic(host_out=12, host_in=0, device_in=0, device_out=12)
    assert fluid_share(gradients_bind, Rates(host=1e9, device=1e9, link_in=1e9, link_out=1e9)) == 0


def test_a_stride_takes_what_the_design_says():
    for stride in (2, 3, 5, 10):
        group = max((stride - 1) / 1e9, (12 + 2 * (stride - 1)) / 2e10, 12 / 2e10, 1 / 5e10)
        assert stride_time(stride, stride, STATE, RATES) == pytest.approx(group)


def test_a_link_used_one_way_at_a_time_adds_up():
    one_way = Rates(host=1e10, device=5e10, link_in=2e10, link_out=2e10, duplex=False)
    assert stride_time(2, 2, STATE, one_way) == pytest.approx((12 + 12 + 2) / 2e10)


def test_the_smallest_useful_stride():
    assert smallest_useful_stride(STATE, RATES) == 1 + math.ceil(1e9 * (12 / 2e10 + 1 / 5e10)) == 2
    assert smallest_useful_stride(STATE, Rates(host=1e10, device=5e10, link_in=2e10, link_out=2e10)) == 8


def test_predictions_of_every_policy():
    sizes = [1_000_000] * 60
    found = {
        text: predict(parse_policy(text), sizes, STATE, RATES, 2, STAYS)
        for text in ("host", "static:0.5", "stride:2", "stride:4", "auto")
    }
    assert [found[text].share for text in ("host", "static:0.5", "stride:2", "stride:4")] == [0, 0.5, 0.5, 0.25]
    assert found["host"].seconds == pytest.approx(60e6 / 1e9 + 2e6 / 2e10)  # and the last weights come back
    assert found["host"].bound == "host"
    assert found["static:0.5"].seconds == pytest.approx(30e6 / 1e9 + 2e6 / 2e10)
    assert found["stride:2"].bound == "host"
    assert found["auto"].seconds <= min(found[text].seconds for text in ("host", "stride:2", "stride:4"))
    assert found["auto"].seconds >= fluid_time(60e6, STATE, RATES)


def test_the_best_stride_of_the_model_is_near_that_of_the_simulation():
    sizes = [1_000_000] * 60
    for host in (5e8, 2e9, 4e9, 8e9):
        rates = Rates(host=host, device=5e10, link_in=2e10, link_out=2e10)
        simulated = {
            k: predict(parse_policy(f"stride:{k}"), sizes, STATE, rates, 2, STAYS).seconds for k in range(2, 13)
        }
        foreseen = min(simulated, key=lambda k: stride_time(k, 60e6, STATE, rates))
        assert simulated[foreseen] <= 1.03 * min(simulated.values())


def test_the_fluid_bound_is_below_the_best_schedule():
    sizes = [1_000_000] * 64
    for traffic, rates in random_cases(15, seed=1):
        seconds, _ = best_discrete(sizes, traffic, rates, idle(3))
        assert seconds >= fluid_time(sum(sizes), traffic, rates) * (1 - 1e-9)


def test_a_step_is_as_long_as_what_is_busiest_in_each_phase():
    rates = Rates(host=1, device=1, link_in=10, link_out=5)
    assert step_time(Phase(compute=1), Phase(compute=2), rates) == 3
    assert step_time(Phase(1, bytes_in=30), Phase(2, bytes_out=20), rates) == 3 + 4
    assert step_time(Phase(1, update=6), Phase(2), rates) == 8  # deferred
    assert step_time(Phase(1), Phase(2, update=6), rates) == 7  # eager


def test_rates_follow_what_is_observed():
    rates = RATES
    for _ in range(2):
        rates = rates.following(link_in=1e10)
    assert 1 / rates.link_in == pytest.approx(1 / 2e10 + 15 / 16 * (1 / 1e10 - 1 / 2e10))
    assert (rates.host, rates.device, rates.link_out, rates.duplex) == (1e9, 5e10, 2e10, True)
    assert RATES.following() == RATES
    assert RATES.following(host=1e12).host < 4.1e9  # one outlier does not decide


def test_published_tables_are_reproduced():
    """Every cell that was not put in comes out within 15 %."""
    ran = run_file_fresh(ROOT / "benchmarks" / "paper_tables.py", "--json")
    assert ran.returncode == 0, ran.stderr
    tables = json.loads(ran.stdout)
    predicted = [cell for cell in tables["cells"] if cell["how"] == "predicted"]
    assert len(predicted) == 36
    assert [cell for cell in predicted if abs(cell["error"]) > 0.15] == []
    seconds = {(found["machine"], found["way"]): found["seconds"] for found in tables["promises"]}
    for machine in ("H100", "A100"):
        before, _, auto = (value for (name, _), value in seconds.items() if name == machine)
        assert auto < before
