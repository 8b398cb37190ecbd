"""Host and device share the updates: weights equal plain PyTorch's, whoever makes them, and nothing races."""

import pytest
import torch

from ferryman.server.device_updates import DeviceUpdates
from support.devices import torch_virtual
from support.interleave import MIX, ODD, SUBGROUPS, Pair, let_auto_guess, plain_optimizer, subgroups_of
from support.models import CASES
from support.slow import covering, slow
from support.updates import WAYS, slow_kernels

every_way = pytest.mark.parametrize("way", WAYS)
relayed_and_held = pytest.mark.parametrize("held", [False, True], ids=["relayed", "held"])


@covering
@relayed_and_held
@every_way
@pytest.mark.parametrize("updates", ["host", "static:0.5", "stride:2", "auto", *slow("static:1", "stride:3")])
def test_every_policy(updates, way, held, accelerator):
    with Pair(accelerator, updates=updates, held=held, subgroup=SUBGROUPS[3], **WAYS[way]) as pair:
        for seed in range(4):
            pair.step(seed)
        pair.check()
    pair.check()


@covering
@relayed_and_held
@every_way
def test_whatever_auto_chooses_is_exact(way, held, accelerator, monkeypatch):
    """State goes from host to device and back between steps."""
    let_auto_guess(monkeypatch)
    shares = []
    with Pair(accelerator, updates="auto", held=held, subgroup=SUBGROUPS[7], **WAYS[way]) as pair:
        for seed in range(6):
            pair.step(seed)
            shares.append(pair.engine.stats().device_share)
    pair.check()
    assert all(0.2 < share < 0.8 for share in shares)
    assert len(set(shares)) > 1


@pytest.mark.parametrize(
    ("updates", "way", "held"), [*MIX[1:], *slow(MIX[0], ("stride:2", "eager", True), ("auto", "eager", False))]
)
def test_under_delays_longer_than_a_visit(updates, way, held, virtual, monkeypatch):
    if updates == "auto":
        let_auto_guess(monkeypatch)
    torch_virtual.set_link(virtual, delay=0.02)
    with Pair(virtual, updates=updates, held=held, subgroup=SUBGROUPS[2], **WAYS[way]) as pair:
        for seed in range(2):
            pair.step(seed)
    pair.check()


@covering
@relayed_and_held
@pytest.mark.parametrize(
    ("updates", "way"), [("stride:2", "eager"), ("auto", "clipped"), *slow(("static:0.5", "deferred"))]
)
def test_with_a_host_that_is_late(updates, way, held, accelerator, monkeypatch):
    if updates == "auto":
        let_auto_guess(monkeypatch)
    slow_kernels(monkeypatch, 0.01)
    with Pair(accelerator, updates=updates, held=held, subgroup=SUBGROUPS[2], **WAYS[way]) as pair:
        for seed in range(3):
            pair.step(seed)
    pair.check()


@covering
@relayed_and_held
@pytest.mark.parametrize("updates", ["static:0.5", "stride:2"])
@pytest.mark.parametrize("count", [1, 7, *slow(2)])
def test_any_number_of_subgroups(count, updates, held, accelerator):
    way = list(WAYS.values())[count % 3]
    with Pair(accelerator, updates=updates, held=held, subgroup=SUBGROUPS[count], **way) as pair:
        every, owned = subgroups_of(pair.engine)
        blocks = [unit for unit in pair.engine.units if unit.name.startswith("blocks")]
        assert [sum(s.unit is unit for s in every) for unit in blocks] == [count] * 3
        for seed in range(4):
            pair.step(seed)
        share = sum(s.size for s in owned) / sum(s.size for s in every)
        assert pair.engine.stats().device_share == pytest.approx(share)
    pair.check()


@covering
@relayed_and_held
@pytest.mark.parametrize(
    ("updates", "way"),
    [("stride:2", "eager"), ("stride:3", "deferred"), *slow(("stride:2", "clipped"), ("static:1", "eager"))],
)
def test_the_last_subgroup_is_the_devices(updates, way, held, accelerator, monkeypatch):
    """Which the published code forgets."""
    real, seen = DeviceUpdates.update, []

    def update(self, requested):
        seen.append(requested.subgroup)
        return real(self, requested)

    monkeypatch.setattr(DeviceUpdates, "update", update)
    with Pair(accelerator, updates=updates, held=held, subgroup=SUBGROUPS[3], **WAYS[way]) as pair:
        every, owned = subgroups_of(pair.engine)
        assert every[-1] == owned[-1]
        assert len(owned) > 2
        for seed in range(3):
            seen.clear()
            pair.step(seed)
            assert len(seen) == len(owned)
            assert set(seen) == set(owned)
        pair.check_state()
    pair.check()


@pytest.mark.parametrize(
    ("name", "updates", "way", "held"),
    [
        ("llama", "stride:2", "clipped", False),
        ("gpt2", "stride:3", "deferred", True),
        ("mixtral", "stride:2", "clipped", True),
        ("skipping", "stride:2", "eager", True),
        ("frozen", "static:0.5", "deferred", True),
        ("reused", "stride:2", "eager", False),
        *slow(
            ("llama", "static:0.5", "eager", True),
            ("gpt2", "static:0.5", "eager", False),
            ("mixtral", "stride:3", "eager", False),
            ("skipping", "static:1", "clipped", False),
        ),
    ],
)
def test_real_models(name, updates, way, held, accelerator):
    with Pair(accelerator, CASES[name], updates=updates, held=held, subgroup=496, **WAYS[way]) as pair:
        for seed in range(5):
            pair.step(seed)
            assert pair.engine.stats().device_share > 0
    pair.check()


@covering
@pytest.mark.parametrize(("updates", "held"), [("static:1", False), ("stride:2", True)])
@pytest.mark.parametrize(
    "name", ["AdamW", "SGD, momentum", "Adagrad", "Lion", *slow("Adam with decay", "SGD", "SGD, Nesterov")]
)
def test_every_optimizer_that_has_a_form_for_the_device(name, updates, held, accelerator):
    make = plain_optimizer(name)
    with Pair(accelerator, CASES["skipping"], make, updates=updates, held=held, subgroup=SUBGROUPS[3]) as pair:
        for seed in range(4):
            pair.step(seed)  # some blocks have no gradient at times
        assert pair.engine.stats().device_share > 0.4
        pair.check_state()
    pair.check()


@pytest.mark.parametrize("name", ["RMSprop", "AdamW, amsgrad"])
def test_what_an_own_step_updates_is_left_to_the_host(name, accelerator):
    for updates in ("static:0.5", "stride:2"):
        with pytest.raises(
            ValueError,
            match=rf"updates='{updates}': no unit .* \(\w+\), .* by its own step",
        ):
            Pair(accelerator, make=plain_optimizer(name), updates=updates)
    with Pair(accelerator, make=plain_optimizer(name), updates="auto") as pair:
        for seed in range(3):
            pair.step(seed)
        assert pair.engine.stats().device_share == 0
        with pytest.raises(ValueError, match="by its own step"):
            pair.engine.set_updates("stride:2")
        pair.step(3)
    pair.check(1e-5)


def test_groups_of_different_rules_share_a_unit(accelerator):
    """Some tensors have momentum and some have none: a subgroup may hold both."""

    def make(model):
        wide, rest = ([p for p in model.parameters() if (p.dim() > 1) == is_wide] for is_wide in (True, False))
        groups = [{"params": wide, "momentum": 0.9}, {"params": rest, "lr": 1e-3}]
        optimizer = torch.optim.SGD(groups, lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    for updates in ("static:1", "stride:2"):
        with Pair(accelerator, ODD, make, updates=updates, subgroup=SUBGROUPS[2]) as pair:
            for seed in range(4):
                pair.step(seed)
            pair.check_state()
        pair.check()
