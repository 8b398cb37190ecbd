"""A model on the meta device: it gets its memory from the engine, and cannot be used before it has values."""

import copy

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from support.models import CASES, Block, assert_same, build, cut, on, plain_step, step, text


def on_meta(name):
    with torch.device("meta"):
        return CASES[name].make().train()


def load(model, source):
    """What is in a state_dict, and in place the buffers that are not."""
    model.load_state_dict(source.state_dict())
    for mine, theirs in zip(model.buffers(), source.buffers(), strict=True):
        mine.copy_(theirs)


def assert_steps(engine, model, plain, steps=2):
    for number in range(steps):
        plain.zero_grad()
        engine.zero_grad()
        torch.manual_seed(number)
        expected = plain_step(plain, cut(text(8), 4))
        torch.manual_seed(number)
        assert_same(step(engine, model, text(8)), expected)


def assert_refused(engine, model, name):
    with pytest.raises(ValueError, match=rf"'{name}' was on the meta device.*load_state_dict"):
        engine.forward_backward(text(8), 4)
    with torch.no_grad(), pytest.raises(ValueError, match=rf"'{name}' was on the meta device"):
        model(text(2)["input_ids"])


@pytest.mark.parametrize("name", ["toy", "llama"])
def test_steps_equal_those_of_the_plain_model(name, device):
    source, model = build(CASES[name]), on_meta(name)
    with Engine(model, device=device) as engine:
        load(model, source)
        assert_steps(engine, model, on(device, source))
        model.eval()
        with torch.no_grad():
            ids = text(2)["input_ids"].to(device)
            assert torch.equal(model(ids).logits, on(device, source).eval()(ids).logits)


@pytest.mark.parametrize("name", ["toy", "llama", "gpt2"])
def test_parameters_stay_the_same_objects(name, device):
    """So that an optimizer from before has them still, and modules share what they shared."""
    source, model = build(CASES[name]), on_meta(name)
    before = dict(model.named_parameters(remove_duplicate=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Engine(model, device=device) as engine:
        now = dict(model.named_parameters(remove_duplicate=False))
        assert now.keys() == before.keys()
        assert all(now[key] is parameter for key, parameter in before.items())
        load(model, source)
        engine.forward_backward(text(8), 4)
        optimizer.step()
    trained = [p for p in model.parameters() if p.grad is not None]
    assert trained
    assert all(not torch.equal(p, source.get_parameter(key)) for key, p in model.named_parameters() if p.grad.any())


def test_parameters_keep_what_they_are(device):
    model = on_meta("toy")
    model.embed.weight.requires_grad_(False)
    model.blocks[0].bfloat16()
    model.head.weight.wanted = "by the user"
    with Engine(model, device=device):
        assert not model.embed.weight.requires_grad
        assert model.blocks[0].up.weight.dtype == torch.bfloat16
        assert model.head.weight.wanted == "by the user"
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("name", ["toy", "llama"])
def test_without_values_it_is_refused(name, device):
    source, model = build(CASES[name]), on_meta(name)
    first = next(name for name, _ in model.named_parameters())
    with Engine(model, device=device) as engine:
        assert_refused(engine, model, first)
        load(model, source)
        assert_steps(engine, model, on(device, source), steps=1)


@pytest.mark.parametrize("missing", ["embed.weight", "blocks.1.norm.bias", "blocks.2.up.weight", "norm.weight"])
def test_with_some_values_it_is_refused(missing, device):
    """Of a unit or of what is resident, whatever else there is in it."""
    source, model = build(CASES["toy"]), on_meta("toy")
    with Engine(model, device=device) as engine:
        model.load_state_dict({k: v for k, v in source.state_dict().items() if k != missing}, strict=False)
        assert_refused(engine, model, missing)
        model.load_state_dict(source.state_dict())
        assert_steps(engine, model, on(device, source), steps=1)


def test_buffers_that_are_not_in_a_state_dict_need_values_too(device):
    source, model = build(CASES["llama"]), on_meta("llama")
    with Engine(model, device=device) as engine:
        model.load_state_dict(source.state_dict())
        assert_refused(engine, model, "model.rotary_emb.(original_)?inv_freq")
        load(model, source)
        assert_steps(engine, model, on(device, source), steps=1)


@pytest.mark.parametrize("how", ["in place", "data", "initialized"])
def test_ways_to_give_values(how, device):
    source, model = build(CASES["toy"]), on_meta("toy")
    with Engine(model, device=device) as engine:
        for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
            if how == "data":
                mine.data.copy_(theirs)
            elif how == "in place":
                with torch.no_grad():
                    mine.copy_(theirs)
            else:
                nn.init.zeros_(mine)
                nn.init.zeros_(theirs)
        assert_steps(engine, model, on(device, source), steps=1)


def test_a_part_on_meta(device):
    source = build(CASES["toy"])
    model = copy.deepcopy(source)
    model.blocks[1].to_empty(device="meta")
    with Engine(model, device=device) as engine:
        assert_refused(engine, model, "blocks.1.norm.weight")
        model.blocks[1].load_state_dict(source.blocks[1].state_dict())
        assert_steps(engine, model, on(device, source))


def test_a_block_on_meta_is_inserted(device):
    source = build(CASES["toy"])
    model, theirs = copy.deepcopy(source), Block()
    with torch.device("meta"):
        block = Block()
    parameters = list(block.parameters())
    with Engine(model, device=device) as engine:
        engine.forward_backward(text(8), 4)
        engine.insert(1, block)
        assert_refused(engine, model, "blocks.1.norm.weight")
        assert all(p is q for p, q in zip(block.parameters(), parameters, strict=True))
        block.load_state_dict(theirs.state_dict())
        source.blocks.insert(1, theirs)
        assert_steps(engine, model, on(device, source))


def test_a_block_without_values_can_be_removed(device):
    source = build(CASES["toy"])
    model = copy.deepcopy(source)
    with torch.device("meta"):
        block = Block()
    with Engine(model, device=device) as engine:
        engine.insert(1, block)
        assert engine.remove(1) is block
        assert_steps(engine, model, on(device, source))
    assert {parameter.device.type for parameter in block.parameters()} == {"cpu"}


@pytest.mark.parametrize("name", ["toy", "llama"])
def test_closing_gives_a_model_on_the_host(name, device):
    source, model = build(CASES[name]), on_meta(name)
    with Engine(model, device=device):
        load(model, source)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert all("forward" not in module.__dict__ for module in model.modules())
    torch.manual_seed(1)
    expected = plain_step(source, cut(text(8), 4))
    torch.manual_seed(1)
    assert_same(plain_step(model, cut(text(8), 4)), expected)
