"""With device updates, gradients that are not finite change nothing for the worse, and no wait is missing."""

import contextlib
import copy
import math

import pytest
import torch

import ferryman
from ferryman.relay.held_weights import HeldWeights
from ferryman.runtime.lanes import Lane
from ferryman.runtime.marks import Mark
from ferryman.server.device_updates import DeviceUpdates
from ferryman.server.gradient_checks import GradientChecks
from ferryman.server.server import Server
from support.devices import torch_virtual
from support.interleave import MIX, SUBGROUPS, Pair
from support.models import model_loss, text
from support.slow import covering, slow
from support.updates import WAYS

relayed_and_held = pytest.mark.parametrize("held", [False, True], ids=["relayed", "held"])
SIZE = SUBGROUPS[3]


class Loss:
    """The model's own, times a factor that can be set; a hook may spoil a gradient on its way."""

    factor = 1.0

    def __call__(self, model, part):
        return model_loss(model, part) * self.factor


def all_finite(pair):
    state = pair.optimizer.state_dict()["state"]
    values = [*pair.model.state_dict().values(), *(v for entry in state.values() for v in entry.values())]
    return all(torch.isfinite(value).all() for value in values)


@contextlib.contextmanager
def spoilt(module, value=math.nan):
    """The gradient of what comes before this module is not finite; that of all after it is."""

    def hook(_, args):
        args[0].register_hook(lambda gradient: gradient * value)

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(("updates", "way", "held"), [*MIX, ("static:1", "eager", True)])
def test_a_loss_that_is_not_finite_changes_nothing(updates, way, held, accelerator):
    loss = Loss()
    with Pair(accelerator, updates=updates, held=held, subgroup=SIZE, loss=loss, **WAYS[way]) as pair:
        pair.step(0)
        for bad in (math.nan, math.inf):
            loss.factor = bad
            with pytest.raises(ferryman.NonFiniteError, match="No weight was changed"):
                pair.ours(1)
            loss.factor = 1.0
            pair.check()
            pair.check_state()
        for seed in range(2, 4):
            pair.step(seed)
    pair.check()


@pytest.mark.parametrize(("updates", "way", "held"), [("static:0.5", "deferred", False), *MIX[1:]])
def test_a_deferred_step_whose_gradient_is_not_finite_did_not_happen(updates, way, held, accelerator):
    with Pair(accelerator, updates=updates, held=held, subgroup=SIZE, **WAYS[way]) as pair:
        pair.step(0)
        with spoilt(pair.model.head), pytest.raises(ferryman.NonFiniteError, match="No weight was changed"):
            pair.ours(1)
        for seed in range(2, 4):
            pair.step(seed)
        pair.check_state()
    pair.check()


@covering
@relayed_and_held
@pytest.mark.parametrize("updates", ["static:0.5", "stride:2", *slow("static:1")])
def test_an_eager_step_never_uses_a_gradient_that_is_not_finite(updates, held, virtual):
    """What came before it in the backward was updated; that is said."""
    torch_virtual.set_link(virtual, delay=0.002)
    with Pair(virtual, updates=updates, held=held, subgroup=SIZE) as pair:
        pair.step(0)
        pair.engine.wait()
        before = copy.deepcopy(pair.model.blocks[0].state_dict())
        with spoilt(pair.model.norm), pytest.raises(ferryman.NonFiniteError, match="is not finite") as caught:
            pair.ours(1)
        assert "blocks" in str(caught.value) or "embed" in str(caught.value)
        after = pair.model.blocks[0].state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert all_finite(pair)
        losses = [pair.ours(seed).item() for seed in range(2, 5)]
        assert all(map(math.isfinite, losses))
        assert all_finite(pair)
        with torch.no_grad():  # what the device has is what the host has
            seen = pair.model.eval()(**text(2)).logits
            pair.plain.load_state_dict(pair.model.state_dict())
            torch.testing.assert_close(seen, pair.plain.eval()(**text(2)).logits, atol=1e-5, rtol=0)


@covering
@relayed_and_held
@pytest.mark.parametrize("updates", ["static:0.5", "stride:2"])
def test_steps_that_are_not_finite_can_be_skipped(updates, held, accelerator):
    with Pair(accelerator, updates=updates, held=held, subgroup=SIZE, on_nonfinite="skip") as pair:
        for seed in range(6):
            if seed % 2:
                with spoilt(pair.model.head):
                    pair.ours(seed)
                assert not math.isfinite(pair.engine.grad_norm)
                pair.their_scheduler.step()
            else:
                pair.step(seed)
    pair.check()


@covering
@relayed_and_held
@pytest.mark.parametrize("updates", ["static:0.5", "stride:2"])
def test_an_overflow_in_float16_skips_the_step(updates, held, accelerator):
    loss = Loss()
    options = {"held": held, "subgroup": SIZE, "precision": "fp16", "loss": loss}
    with Pair(accelerator, updates=updates, **options) as pair, Pair(accelerator, updates="host", **options) as other:
        for seed, loss.factor in enumerate((1, 3e4, 1, math.inf, 1)):
            before = copy.deepcopy(pair.model.state_dict())
            for each in (pair, other):
                each.ours(seed)
            changed = any(not torch.equal(pair.model.state_dict()[name], value) for name, value in before.items())
            assert changed == (loss.factor == 1)
            assert pair.engine.loss_scale == other.engine.loss_scale
    for ours, theirs in zip(pair.model.parameters(), other.model.parameters(), strict=True):
        assert float((ours - theirs).detach().abs().max()) <= 1e-6


# Negative controls.


def _without_arrival(real):
    def copy(self, copies, **how):
        mark = real(self, copies, **how)
        return Mark(self._group, self.name, "nothing")._resolve_at(None) if self.name == "state in" else mark

    return copy


def _without_berths(real):
    def next_berth(self):
        berth = real(self)
        berth.free = None
        return berth

    return next_berth


def _without_use(real):
    def update(self, requested):
        real(self, requested)
        return requested.after[0]  # when the gradient was complete

    return update


def _without_host(real):
    def refresh(self, unit, runs, after):
        real(self, unit, runs, self._h2d.here())

    return refresh


RELAYED = {"updates": "stride:2", "held": False, "subgroup": SUBGROUPS[2]}
HELD = {**RELAYED, "held": True}

WAITS = {
    "for state that comes in": (Lane, "copy", _without_arrival, RELAYED),
    "for a free berth": (DeviceUpdates, "_next_berth", _without_berths, RELAYED),
    "for the gradient's use": (DeviceUpdates, "update", _without_use, RELAYED),
    "for weights that the device updates": (HeldWeights, "updated", lambda real: lambda self, unit, mark: None, HELD),
    "for weights that the host updates": (HeldWeights, "refresh", _without_host, HELD),
    "for updates before a fetch": (Server, "weights_ready", lambda real: lambda self, unit: [], RELAYED),
}


@pytest.mark.parametrize("options", [RELAYED, HELD], ids=["relayed", "held"])
def test_no_wait_is_missing(options, virtual):
    """As below, but nothing is removed."""
    torch_virtual.set_link(virtual, delay=0.02)
    with Pair(virtual, **options) as pair:
        for seed in range(3):
            pair.step(seed)
    pair.check()


@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_is_found(wait, virtual, monkeypatch):
    torch_virtual.set_link(virtual, delay=0.02)
    where, name, without, options = WAITS[wait]
    pair = Pair(virtual, **options)
    monkeypatch.setattr(where, name, without(getattr(where, name)))

    def train():
        for seed in range(3):
            pair.step(seed)
        pair.engine.close()
        pair.check()

    with pytest.raises((RuntimeError, AssertionError), match=r"race|is off by"):
        train()
    monkeypatch.undo()
    torch_virtual.synchronize()
    torch_virtual.clear_races()
    with contextlib.suppress(RuntimeError):  # a second race, that nobody has seen yet
        pair.engine.close()
    torch_virtual.synchronize()
    torch_virtual.clear_races()


def test_a_missing_look_is_found(virtual, monkeypatch):
    """If the update did not wait for what the host says of a gradient, it would be used."""
    real = GradientChecks.check_sums

    def check_sums(self, subgroup, squared, describe_changes=None):
        real(self, subgroup, squared, describe_changes)
        return squared.landed

    torch_virtual.set_link(virtual, delay=0.002)
    monkeypatch.setattr(GradientChecks, "check_sums", check_sums)
    with Pair(virtual, updates="static:1", subgroup=SIZE) as pair:
        pair.ours(0)
        pair.engine.wait()
        with spoilt(pair.model.head), contextlib.suppress(ferryman.NonFiniteError):
            pair.ours(1)
        assert not all_finite(pair)
