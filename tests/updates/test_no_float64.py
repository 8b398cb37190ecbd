"""Devices without float64 (MPS, some XPUs): norms and checks are as exact as where there is one."""

import math

import pytest
import torch

from ferryman.engine import Engine
from ferryman.server.gradient_checks import NonFiniteError
from support.devices import torch_virtual
from support.models import CASES, build, text
from support.slow import few

SETTINGS = {
    "eager": {"updates": "stride:2", "subgroup": 64},
    "all on the device": {"updates": "static:1", "subgroup": 64},
    "deferred": {"updates": "stride:2", "subgroup": 64, "max_grad_norm": 0.1},
    "deferred, on the device": {"updates": "static:1", "subgroup": 64, "max_grad_norm": 0.1},
    "bf16": {"updates": "stride:2", "subgroup": 64, "max_grad_norm": 0.1, "precision": "bf16"},
    "host": {"updates": "host", "max_grad_norm": 0.1},
    "stash on the host": {"stash": "host", "slots": 2, "held": False, "updates": "stride:2", "subgroup": 64},
}


def trained(device, **settings):
    model, norms = build(CASES["toy"]), []
    with Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), device=device, **settings) as engine:
        for seed in range(3):
            torch.manual_seed(seed)
            engine.step(text(4, seed), 2)
            norms.append(engine.grad_norm)
        stats = engine.stats()
    return model.state_dict(), norms, stats


@pytest.mark.parametrize("settings", few(SETTINGS.values(), 3), ids=SETTINGS)
def test_steps_are_the_same_without_float64(virtual, settings):
    expected, norms, _ = trained(virtual, **settings)
    with torch_virtual.no_float64(virtual):
        found, same, stats = trained(virtual, **settings)
    assert all(math.isclose(a, b, rel_tol=1e-14) for a, b in zip(norms, same, strict=True))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (stats.device_share > 0) == (settings["updates"] != "host")


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_gradients_that_are_not_finite_are_found_without_float64(virtual, max_grad_norm):
    model = build(CASES["toy"])
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"updates": "static:1", "subgroup": 64, "max_grad_norm": max_grad_norm}

    def loss(model, batch):
        value = model(**batch).loss
        return value + (value - value.detach()).sqrt()  # finite, and its gradient is not

    with torch_virtual.no_float64(virtual), Engine(model, optimizer, device=virtual, loss=loss, **settings) as engine:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(NonFiniteError, match="the gradient of"):
            engine.step(text(4), 2)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
