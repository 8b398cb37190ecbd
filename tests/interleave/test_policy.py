"""What `updates=` takes, and which subgroups are the device's."""

import pytest
import torch
from torch import nn

from ferryman.model.unit_discovery import find_units
from ferryman.plan.policy import Policy, parse_policy
from ferryman.plan.staging import Staging, gradient_berth_bytes


@pytest.mark.parametrize(
    "text", ["host", "auto", "static:0", "static:0.5", "static:0.1", "static:1", "stride:2", "stride:10"]
)
def test_a_policy_reads_as_it_was_written(text):
    assert str(parse_policy(text)) == text


def test_a_policy_is_what_was_written():
    assert parse_policy("host") == Policy("host")
    assert parse_policy("auto") == Policy("auto")
    assert parse_policy("static:0.25") == Policy("static", share=0.25)
    assert parse_policy("stride:3") == Policy("stride", stride=3)


@pytest.mark.parametrize("text", ["", "gpu", "host:1", "auto:2", "static", "stride", None, 2, 0.5, ["host"], "Host "])
def test_anything_else_is_refused_with_what_there_is(text):
    with pytest.raises(ValueError, match=r"updates=.* is not a policy.*'host', 'static:R'.*'stride:K'.*'auto'"):
        parse_policy(text)


@pytest.mark.parametrize(
    ("text", "meant"), [("hots", "host"), ("autp", "auto"), ("strid:2", "stride:K"), ("static", "static:R")]
)
def test_what_was_probably_meant_is_said(text, meant):
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        parse_policy(text)


@pytest.mark.parametrize("share", ["", "half", "50%", "-0.1", "1.01", "nan", "inf", "1/2"])
def test_a_share_is_a_number_from_0_to_1(share):
    with pytest.raises(ValueError, match=f"updates='static:{share}'.*from 0 to 1, such as 'static:0.25'"):
        parse_policy(f"static:{share}")


@pytest.mark.parametrize("stride", ["", "two", "1", "0", "-2", "2.5", " 2", "²"])
def test_a_stride_is_a_whole_number_of_at_least_2(stride):
    with pytest.raises(ValueError, match=f"updates='stride:{stride}'.*at least 2; 'stride:2', every other subgroup"):
        parse_policy(f"stride:{stride}")


@pytest.mark.parametrize("stride", [2, 3, 7])
def test_a_stride_gives_the_device_the_last_of_every_k(stride):
    policy = Policy("stride", stride=stride)
    assert [index for index in range(3 * stride) if policy.device_owns(index)] == [
        stride - 1,
        2 * stride - 1,
        3 * stride - 1,
    ]


@pytest.mark.parametrize("percent", range(0, 101, 5))
def test_a_share_is_spread_evenly_and_without_rounding(percent):
    policy = parse_policy(f"static:{percent / 100}")
    owned = [policy.device_owns(index) for index in range(400)]
    for count in range(401):
        assert sum(owned[:count]) == percent * count // 100


def test_the_host_alone_owns_everything():
    assert not any(Policy("host").device_owns(index) for index in range(100))


@pytest.mark.parametrize("policy", ["host", "static:0.3", "static:1", "stride:3", "auto"])
@pytest.mark.parametrize("size", [64, 192, 4096])
@pytest.mark.parametrize("held", [True, False])
def test_the_bytes_of_subgroups_are_the_same_counted_and_listed(policy, size, held):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(10 + width, 64) for width in range(5)))
    units, residents = find_units(model, units=[str(number) for number in range(5)])
    staging = Staging(parse_policy(policy), size, lambda unit: None if unit is units[1] else 2, deferred=True)
    every = (residents, *units)
    account = {purpose: sum(sizes) for purpose, sizes in staging.allocations(every, held=held).items()}
    resident, holding = staging.resident(every), staging.with_gradient_berths(every, held=held)
    assert sum(staging.bytes_for(s.unit, s.size) for s in resident) == account.get("state on the device", 0)
    assert sum(gradient_berth_bytes(s) for s in holding) == account.get("gradients on the device", 0)
    assert staging.has_gradient_berths(every, held=held) == bool(holding)
    assert {s.unit for s in staging.subgroups(every)} == {*units} - {units[1]}
