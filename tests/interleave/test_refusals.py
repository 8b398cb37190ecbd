"""What users can get wrong about who updates: refused with what is there and what would fit."""

import re

import pytest
import torch

from ferryman.engine import Engine
from support.interleave import BROAD, SUBGROUPS, Odd, Pair
from support.models import build, text
from support.slow import covering


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"updates": "strid:2"}, r"updates='strid:2' is not a policy \(did you mean 'stride:K'\?\)"),
        ({"updates": "Auto"}, r"updates='Auto' is not a policy \(did you mean 'auto'\?\)"),
        ({"updates": "gpu"}, "updates='gpu' is not a policy; choose 'host', 'static:R'"),
        ({"updates": None}, "updates=None is not a policy"),
        ({"updates": "static:2"}, "updates='static:2': .* from 0 to 1"),
        ({"updates": "static:-0.5"}, "updates='static:-0.5': .* from 0 to 1"),
        ({"updates": "stride:1"}, "updates='stride:1': .* at least 2"),
        ({"updates": "stride:0.5"}, "updates='stride:0.5': .* integer"),
        ({"subgroup": 3}, "subgroup=3: it must be an integer of at least 16"),
        ({"subgroup": 1e6}, r"subgroup=1000000\.0: it must be an integer"),
        ({"subgroup": True}, "subgroup=True: it must be an integer"),
        ({"held": "yes"}, "held='yes': it must be True or False, or None"),
        ({"held": True, "slots": 2}, "held=True keeps all weights on the device, so slots=2 has no meaning"),
    ],
)
def test_arguments(options, words, accelerator):
    model = Odd()
    with pytest.raises(ValueError, match=words):
        Engine(model, adamw(model), device=accelerator, **options)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("updates", ["stride:2", "static:0.5"])
def test_the_host_is_no_device(updates):
    model = Odd()
    with pytest.raises(
        ValueError, match=rf"updates='{updates}' .* device='cpu' is the host itself; use updates='host'"
    ):
        Engine(model, adamw(model), device="cpu", updates=updates)
    with pytest.raises(ValueError, match="held=True keeps all weights on an accelerator, and device='cpu' is the host"):
        Engine(model, adamw(model), device="cpu", held=True)
    for there_is in ("host", "auto"):
        with Engine(model, adamw(model), device="cpu", updates=there_is) as engine:
            engine.step(text(4), 2)
            assert engine.stats().device_share == 0


@pytest.mark.parametrize("options", [{"updates": "stride:2"}, {"updates": "host"}, {"subgroup": 1024}])
def test_updates_need_an_optimizer(options, accelerator):
    words = rf"{next(iter(options))}= is about updates, so the engine needs the optimizer"
    with pytest.raises(ValueError, match=words):
        Engine(Odd(), device=accelerator, **options)
    with Engine(Odd(), device=accelerator) as engine:
        with pytest.raises(ValueError, match="the engine has no optimizer"):
            engine.set_updates("stride:2")
        assert engine.stats() is None


@pytest.mark.exact
@pytest.mark.parametrize(("updates", "kib"), [("stride:2", 600), ("static:0.5", 700)])
def test_a_subgroup_that_the_budget_cannot_hold(updates, kib, virtual):
    """One that would fit is named, and it does."""
    options = {"device": virtual, "updates": updates, "memory": f"{kib}KiB", "held": False}
    model = build(BROAD)
    with pytest.raises(ValueError, match=r"subgroup=65536: memory=.* is too small .* subgroup=\d+ would fit") as e:
        Engine(model, adamw(model), subgroup=65536, **options)
    fits = int(re.search(r"subgroup=(\d+) would fit", str(e.value)).group(1))
    assert fits < 65536
    with Engine(model, adamw(model), subgroup=fits, **options) as engine:
        assert engine.plan.fixed <= kib << 10
        engine.step(text(4))
        assert engine.stats().device_share > 0


def test_a_budget_in_which_no_subgroup_fits(virtual):
    model = build(BROAD)
    with pytest.raises(ValueError, match=r"memory=.* is too small for this model"):
        Engine(model, adamw(model), device=virtual, updates="static:1", memory="256KiB")


def test_weights_that_cannot_all_be_held(virtual):
    model = build(BROAD)
    with pytest.raises(
        ValueError, match=r"memory=300.00KiB is too small for this model: .* is needed before"
    ) as caught:
        Engine(model, adamw(model), device=virtual, held=True, updates="host", memory="300KiB")
    assert "for all weights (" in str(caught.value)
    with Engine(model, adamw(model), device=virtual, updates="host", memory="340KiB") as engine:
        assert "relayed" in str(engine.plan)
        engine.step(text(4))


def test_weights_are_held_where_the_budget_allows(virtual):
    model = build(BROAD)
    with Engine(model, adamw(model), device=virtual, memory="64MiB") as engine:
        assert "held on the device" in str(engine.plan)
        engine.step(text(4))
    with Engine(model, adamw(model), device=virtual, memory="64MiB", held=False) as engine:
        assert "relayed" in str(engine.plan)
    with Engine(model, adamw(model), device=virtual) as engine:
        assert "relayed" in str(engine.plan)


@covering
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("updates", ["static:0.5", "stride:2"])
def test_a_switch_that_is_refused_changes_nothing(updates, held, accelerator):
    with Pair(accelerator, updates=updates, held=held, subgroup=SUBGROUPS[3]) as pair:
        for seed, wrong in enumerate(["gpu", "static:2", "stride:1", None, 7, "strid:2"]):
            pair.step(seed)
            with pytest.raises(ValueError, match=r"is not a policy|must be a number from 0 to 1|at least 2"):
                pair.engine.set_updates(wrong)
            assert f"updates: {updates}" in str(pair.engine.plan)
        pair.step(9)
        assert pair.engine.stats().updates == updates
    pair.check()
    with pytest.raises(ValueError, match="the engine is closed"):
        pair.engine.set_updates("host")


def test_a_switch_that_the_budget_cannot_hold(virtual):
    with Pair(virtual, BROAD, updates="host", memory="700KiB", held=False) as pair:
        pair.step(0)
        with pytest.raises(ValueError, match=r"'static:1' does not fit: .*memory=700.00KiB.*'host' would fit"):
            pair.engine.set_updates("static:1")
        pair.step(1)
        assert pair.engine.stats().updates == "host"
    pair.check()


@pytest.mark.parametrize("updates", ["static:0", "static:1", "stride:1000"])
def test_the_ends_of_what_is_allowed(updates, accelerator):
    with Pair(accelerator, updates=updates, subgroup=SUBGROUPS[3]) as pair:
        for seed in range(2):
            pair.step(seed)
        assert pair.engine.stats().device_share == (1 if updates == "static:1" else 0)
    pair.check()
