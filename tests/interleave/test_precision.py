"""Host and device updates of the same agree to the last bits, in every precision: moving work changes nothing."""

import pytest
import torch

from ferryman.server import kernels
from support.interleave import SUBGROUPS, Pair, let_auto_guess
from support.kernel_pieces import CASES, DTYPES, Tensors, generator, gradients, numbers, ulp, ulps
from support.models import Case, Toy
from support.slow import covering, slow
from support.updates import WAYS

relayed_and_held = pytest.mark.parametrize("held", [False, True], ids=["relayed", "held"])


def on(device, tensors):
    master = None if tensors.master is None else tensors.master.to(device)
    states = [state.to(device) for state in tensors.states]
    return Tensors(tensors.gradient.to(device), tensors.weights.to(device), master, states)


@pytest.mark.parametrize("form", DTYPES, ids=["weights32", "weightsb16", "weights16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["gradient32", "gradientb16", "gradient16"])
@pytest.mark.parametrize("name", CASES)
def test_the_devices_form_of_an_update_agrees_with_the_hosts(name, dtype, form, accelerator):
    case, count = CASES[name], 5003
    source = generator(1)
    signs = torch.randn(count, generator=source).sign()
    values = signs * (torch.rand(count, generator=source) * 1.5 + 0.5)
    host = Tensors.make(case, values, form, gradients(count, dtype))
    device = on(accelerator, host)
    scratch = kernels.Scratch(1024, accelerator)  # stretches of it, the last one short
    for number in range(1, 8):
        gradient = gradients(count, dtype, seed=number).abs() * signs.to(dtype)  # sums do not cancel
        step_numbers = numbers(case, number, (1.0, 0.3)[number % 2])
        kernels.update(case.rule, [host._replace(gradient=gradient).piece(step_numbers)])
        piece = device._replace(gradient=gradient.to(accelerator)).piece(step_numbers)
        kernels.update_in_torch(case.rule, [piece], scratch)
    back = on("cpu", device)
    for ours, theirs in zip(back.states, host.states, strict=True):
        assert ulps(ours, theirs) <= 2
    far = (back.values.double() - host.values.double()).abs() / ulp(host.values)
    assert far.max() <= (4 if case.has_root else 2)
    assert (far > 2).double().mean() <= 1e-3
    step = {torch.float32: 4, torch.bfloat16: 2**16, torch.float16: 2**13}[form]  # of the working copy's, in float32's
    assert ulps(back.weights.float(), host.weights.float()) <= step


def masters_and_moments(pair):
    """In float32: all that training goes on from."""
    state = pair.optimizer.state_dict()["state"]
    pair.engine.close()  # masters come back
    moments = {(key, name): value.float() for key, entry in state.items() for name, value in entry.items()}
    return {**moments, **{name: value.float() for name, value in pair.model.state_dict().items()}}


@covering
@pytest.mark.parametrize(("updates", "held"), [("static:0.5", False), ("stride:2", True), ("auto", False)])
@pytest.mark.parametrize(
    ("precision", "way"), [("bf16", "clipped"), ("fp16", "eager"), *slow(("fp32", "clipped"), ("bf16", "eager"))]
)
def test_moving_work_changes_nothing(precision, way, updates, held, accelerator, monkeypatch):
    if updates == "auto":
        let_auto_guess(monkeypatch)
    found = []
    for policy in ("host", updates):
        options = {"held": held, "subgroup": SUBGROUPS[3], "precision": precision, **WAYS[way]}
        pair = Pair(accelerator, updates=policy, **options)
        losses = [pair.ours(seed).item() for seed in range(3)]
        assert (pair.engine.stats().device_share > 0.2) == (policy != "host")
        found.append((losses, masters_and_moments(pair)))
    (losses, expected), (seen, actual) = found
    assert seen == pytest.approx(losses, rel=1e-5)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        # Small differences in weights show in the next gradients, in the narrow formats by a step of those.
        torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-6 * max(1.0, float(value.abs().max())))


@relayed_and_held
def test_one_step_from_the_same_agrees_to_two_ulp(held, accelerator):
    """The same gradients for both: nothing but the update differs."""
    for precision in ("fp32", "bf16"):
        found = []
        for updates in ("host", "static:1"):
            options = {"held": held, "subgroup": SUBGROUPS[3], "precision": precision}
            pair = Pair(accelerator, updates=updates, **options)
            for _ in range(2):
                for number, parameter in enumerate(pair.model.parameters()):
                    values = torch.rand(parameter.shape, generator=generator(number)) + 0.1
                    parameter.grad_dtype = torch.float32
                    parameter.grad = values
                pair.engine.update()
                pair.engine.wait()
            found.append(masters_and_moments(pair))
        for key, value in found[0].items():
            size = value.abs().clamp_min(1e-3)  # of what the update may have brought near zero
            assert ulps(found[1][key], value, size) <= 2, key


def test_a_unit_of_two_dtypes(accelerator):
    def loss(model, part):
        with torch.autocast(accelerator.type, torch.bfloat16):
            return model(part["input_ids"], part["labels"]).loss

    def make():
        model = Toy()
        model._keep_in_fp32_modules_strict = ["up"]
        return model

    found = []
    for updates, held in (("host", False), ("stride:2", False), ("stride:2", True), ("static:1", False)):
        options = {"held": held, "subgroup": SUBGROUPS[3], "precision": "bf16", "loss": loss}
        pair = Pair(accelerator, Case(make), updates=updates, **options)
        assert {p.dtype for p in pair.model.blocks[0].parameters()} == {torch.float32, torch.bfloat16}
        for seed in range(3):
            pair.ours(seed)
        found.append(masters_and_moments(pair))
    for other in found[1:]:
        for key, value in found[0].items():
            torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-6)
