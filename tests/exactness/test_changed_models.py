"""Models that change while an engine has them, and models that no engine can have: refused by name, without a trace."""

import threading

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from support.small_models import WIDTH, Block, Model, assert_equal_to_plain, batches, loss, made

NEXT = next(batches(1))


@pytest.mark.parametrize("optimizer", [True, False], ids=["optimizer", "no optimizer"])
def test_a_parameter_that_was_added(optimizer, device):
    model = made(Model, None)
    ours = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
    with Engine(model, ours, device=device, loss=loss) as engine:
        run = engine.step if optimizer else engine.forward_backward
        run(NEXT, 2)
        model.head.extra = nn.Parameter(torch.ones(5, device=device), requires_grad=False)
        run(NEXT, 2)  # what does not train may be added
        model.head.extra.requires_grad_(True)
        if ours is not None:
            ours.add_param_group({"params": [model.head.extra]})
        before = model.head.weight.detach().clone()
        with pytest.raises(ValueError, match=r"'head.extra' was added .* engine.insert\(\).* make a new engine"):
            run(NEXT, 2)
        assert torch.equal(model.head.weight, before)
        model.head.extra.requires_grad_(False)
        run(NEXT, 2)


def test_a_parametrization_that_was_added(device):
    model = made(Model, None)
    with Engine(model, device=device, loss=loss) as engine:
        engine.forward_backward(NEXT, 2)
        nn.utils.parametrizations.weight_norm(model.blocks[0].linear)
        with pytest.raises(ValueError, match=r"'blocks.0.linear.weight' was replaced .* or a parametrization\)"):
            engine.forward_backward(NEXT, 2)
        nn.utils.parametrize.remove_parametrizations(model.blocks[0].linear, "weight")


class Scripted(Model):
    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.linear = torch.jit.script(nn.Linear(WIDTH, WIDTH))


class ScriptedActivation(Model):
    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.activation = torch.jit.script(nn.GELU())

        def forward(self, x):
            return x + self.activation(self.linear(x))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_script_modules(device):
    with pytest.raises(ValueError, match=r"'blocks.0.linear' is a ScriptModule .* the original module"):
        Engine(made(Scripted, None), device=device)
    assert_equal_to_plain(ScriptedActivation, loss, None, 2, device)


class Refusing(nn.Linear):
    def register_state_dict_pre_hook(self, hook):
        raise TypeError("not here")


def test_an_installation_that_fails_undoes_itself(device):
    model = made(Model, None)
    model.head.__class__ = Refusing
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, threads = {name: id(tensor) for name, tensor in model.named_parameters()}, set(threading.enumerate())
    with pytest.raises(TypeError, match="not here"):
        Engine(model, optimizer, device=device, loss=loss)
    assert not any("forward" in vars(module) or module._state_dict_pre_hooks for module in model.modules())
    assert before == {name: id(tensor) for name, tensor in model.named_parameters()}
    assert set(threading.enumerate()) <= threads
    model.head.__class__ = nn.Linear
    with Engine(model, optimizer, device=device, loss=loss) as engine:
        engine.step(NEXT, 2)


def test_edits_through_data_of_weights_that_stay_on_the_device(accelerator):
    found = []
    for edit in (lambda p: p.data.clamp_(-0.1, 0.1), lambda p: p.detach().copy_(p.detach().clamp(-0.1, 0.1))):
        model = made(Model, None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with Engine(model, optimizer, device=accelerator, loss=loss, held=True) as engine:
            for batch in batches(2):
                found.append(engine.step(batch, 2).item())
                for parameter in model.parameters():
                    edit(parameter)
    assert found[:2] == found[2:]


@pytest.mark.parametrize("way", ["model", "evaluate"])
def test_averages_in_place_of_weights_are_not_ignored_by_evaluations(way, device):
    """As classes for moving averages do it: `parameter.data = average`, and the old memory again after evaluation."""
    model = made(Model, None)
    batch = next(batches(1))
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=loss) as engine:
        engine.step(batch, 2)
        kept = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter.data)
        if way == "model" and device.type == "cpu":  # where the model runs as it is
            with torch.no_grad():
                assert not model(batch[0]).any()
        else:
            with torch.no_grad(), pytest.raises(ValueError, match=r"the memory of 'blocks\.0.* was replaced"):
                model(batch[0]) if way == "model" else engine.evaluate(batch)
        for parameter, data in zip(model.parameters(), kept, strict=True):
            parameter.data = data
        engine.step(batch, 2)
