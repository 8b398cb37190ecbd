"""Closing gives the model back as it came, with its weights as they are now."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from support.devices import torch_virtual
from support.fresh import run_fresh
from support.models import CASES, Toy, assert_same, build, cut, model_loss, on, plain_step, step, text
from support.slow import covering


def assert_given_back(model, parameters):
    """`parameters`: the model's own, by name, from before."""
    now = dict(model.named_parameters(remove_duplicate=False))
    assert now.keys() == parameters.keys()
    assert all(now[name] is parameter for name, parameter in parameters.items())
    for name, module in model.named_modules():
        assert "forward" not in module.__dict__, name
        assert not module._forward_hooks, name
        assert not module._forward_pre_hooks, name
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.device.type == "cpu"
        assert type(tensor) in (nn.Parameter, torch.Tensor)


def own(model):
    return dict(model.named_parameters(remove_duplicate=False))


def assert_works_by_itself(model, plain):
    """As a plain model on the host, with gradients."""
    for each in (model, plain):
        each.zero_grad()
    expected, result = ((torch.manual_seed(2), plain_step(m, cut(text(8), 4)))[1] for m in (plain, model))
    assert_same(result, expected)


@covering
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "mixtral", "reused", "frozen"])
def test_the_model_comes_back(name, device):
    case = CASES[name]
    model = build(case)
    parameters, flags = own(model), [p.requires_grad for p in model.parameters()]
    plain = copy.deepcopy(model)
    engine = Engine(model, device=device)
    engine.forward_backward(case.batch(8), 4)
    with torch.no_grad():
        model.eval()(**case.batch(2))
        for each in (model.train(), plain):
            for parameter in each.parameters():
                parameter.mul_(0.9)
    engine.close()
    assert_given_back(model, parameters)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert_works_by_itself(model, plain)


def test_it_can_be_engined_again(device):
    model = build(CASES["gpt2"])
    plain = on(device, model)
    for number in range(3):
        with Engine(model, device=device, slots=2 + number) as engine:
            plain.zero_grad()
            engine.zero_grad()
            torch.manual_seed(number)
            expected = plain_step(plain, cut(text(8), 4))
            torch.manual_seed(number)
            assert_same(step(engine, model, text(8)), expected, CASES["gpt2"].loose)


def test_other_devices_one_after_the_other(accelerator):
    model = build(CASES["toy"])
    plain = copy.deepcopy(model)
    for place in ("cpu", accelerator, "cpu"):
        with Engine(model, device=place) as engine:
            engine.forward_backward(text(8), 4)
    assert_works_by_itself(model, plain)


@covering
@pytest.mark.parametrize("when", ["first", "later"])
def test_after_an_exception(when, device):
    def loss(model, part):
        value = model_loss(model, part)
        if armed:
            raise KeyError("loss")
        return value

    model = build(CASES["toy"])
    parameters, plain, armed = own(model), copy.deepcopy(model), []

    def fail():
        with Engine(model, device=device, loss=loss) as engine:
            if when == "later":
                engine.forward_backward(text(8), 4)
            armed.append(True)
            engine.forward_backward(text(8), 4)

    with pytest.raises(KeyError, match="loss"):
        fail()
    assert_given_back(model, parameters)
    assert_works_by_itself(model, plain)


def test_a_failure_in_a_lane_that_nobody_has_seen(device):
    """It comes out of close, and the model comes back all the same; an exception on its way is not hidden by it."""
    model = build(CASES["toy"])
    parameters, plain = own(model), copy.deepcopy(model)

    def fail():
        raise KeyError("lane")

    engine = Engine(model, device=device)
    engine._parts.lanes.host("failing").submit(fail)
    with pytest.raises(KeyError, match="lane"):
        engine.close()
    try:
        assert_given_back(model, parameters)
    finally:
        engine.close()

    def leave():
        with Engine(model, device=device) as engine:
            engine._parts.lanes.host("failing").submit(fail)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    assert_given_back(model, parameters)
    assert_works_by_itself(model, plain)


def test_gradients_stay(device):
    model = build(CASES["toy"])
    with Engine(model, device=device) as engine:
        result = step(engine, model, text(8))
    gc.collect()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, result.gradients[name])


def test_a_forward_of_the_instances_own_is_kept(device):
    """Other libraries replace the forward of a module, too."""
    model = Toy()

    def doubled(x):
        return 2 * type(model.blocks[1]).forward(model.blocks[1], x)

    def whole(*args, **kwargs):
        return Toy.forward(model, *args, **kwargs)

    model.blocks[1].forward, model.forward = doubled, whole
    with Engine(model, device=device) as engine:
        engine.forward_backward(text(8), 4)
    assert model.blocks[1].__dict__.get("forward") is doubled
    assert model.__dict__.get("forward") is whole


def test_closing_twice_and_without_a_step(device):
    model = build(CASES["toy"])
    parameters = own(model)
    engine = Engine(model, device=device)
    engine.close()
    engine.close()
    assert_given_back(model, parameters)


def test_a_closed_engine_takes_no_step(device):
    engine = Engine(Toy(), device=device)
    engine.close()
    with pytest.raises((ValueError, RuntimeError), match="closed"):
        engine.forward_backward(text(8), 4)


@pytest.mark.exact
def test_nothing_is_left(virtual):
    """No thread, no byte on the device."""
    gc.collect()
    torch_virtual.synchronize()
    threads, memory = {*threading.enumerate()}, torch_virtual.memory_allocated(virtual)
    model = build(CASES["toy"])
    with Engine(model, device=virtual) as engine:
        engine.forward_backward(text(8), 4)
        assert torch_virtual.memory_allocated(virtual) > memory
    del engine
    gc.collect()
    assert {*threading.enumerate()} <= threads
    torch_virtual.synchronize()  # memory that several streams used returns when all have passed
    assert torch_virtual.memory_allocated(virtual) == memory


DROPPED = """
import gc, torch, torch_virtual
from ferryman.engine import Engine
for number in range(8):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    engine = Engine(model, device="virtual")
    if number % 2:
        try:
            Engine(torch.nn.Sequential(torch.nn.Linear(8, 8)), device="virtual")  # has no blocks
        except ValueError:
            pass
    del model, engine
    gc.collect()
"""


def test_engines_that_are_dropped_and_not_closed_leave_no_pinned_memory(virtual):
    """In a process of its own, since what is left would disturb other tests."""
    ended = run_fresh(DROPPED)
    assert ended.returncode == 0, ended.stderr


NO_CUDA = [] if torch.cuda.is_available() else ["cuda"]


@pytest.mark.parametrize("device", [*NO_CUDA, "cuda:77", "nonsense", "virtual:99"])
def test_a_device_that_does_not_exist(device):
    model = build(CASES["toy"])
    parameters, places = own(model), [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError, match=device.split(":")[0]):
        Engine(model, device=device).close()
    assert_given_back(model, parameters)
    assert [p.data_ptr() for p in model.parameters()] == places


@covering
@pytest.mark.parametrize("options", [{"units": ["zzz"]}, {"units": []}, {"slots": 0}])
def test_an_engine_that_cannot_be_made_leaves_the_model_alone(options, device):
    model = build(CASES["toy"])
    parameters, places = own(model), [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError, match=next(iter(options))):
        Engine(model, device=device, **options).close()
    assert_given_back(model, parameters)
    assert [p.data_ptr() for p in model.parameters()] == places


def test_a_second_engine_is_refused(device):
    model = build(CASES["toy"])
    with Engine(model, device=device), pytest.raises(ValueError, match="has an engine already"):
        Engine(model, device=device)
    Engine(model, device=device).close()
