"""Parameters that share memory without being one tensor are refused by name; tied ones train as one."""

import copy

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from ferryman.model.overlaps import refuse_overlaps
from support.models import CASES, WIDTH, Block, Toy, assert_same, build, cut, on, plain_step, step, text


def assert_step_is_same(engine, model, plain):
    torch.manual_seed(0)
    ours = step(engine, model, text(4), 2)
    torch.manual_seed(0)
    assert_same(ours, plain_step(on(engine.device, plain), cut(text(4), 2)), loose=("*",))


def tied_by_data():
    model = Toy()
    model.head.weight.data = model.embed.weight.data
    return model


def tied_within_a_block():
    model = Toy()
    model.blocks[1].down.weight.data = model.blocks[1].up.weight.data.view(WIDTH, 2 * WIDTH)
    return model


def with_a_buffer_on_a_weight():
    model = Toy()
    model.register_buffer("prototypes", model.head.weight.detach())
    return model


def with_overlapping_parts():
    model, memory = Toy(), torch.randn(3 * WIDTH)
    model.norm.weight.data, model.norm.bias.data = memory[: 2 * WIDTH][:WIDTH], memory[WIDTH - 1 : 2 * WIDTH - 1]
    return model


REFUSED = {
    tied_by_data: r"'embed.weight' and 'head.weight' are two .* model.head.weight = model.embed.weight",
    tied_within_a_block: r"'blocks.1.up.weight' and 'blocks.1.down.weight' .* Use one parameter",
    with_a_buffer_on_a_weight: r"'head.weight' and 'prototypes' .* Read 'head.weight' itself",
    with_overlapping_parts: r"'norm.weight' and 'norm.bias' .* Use one parameter",
}


@pytest.mark.parametrize("make", REFUSED)
def test_is_refused_at_construction(make, device):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=REFUSED[make]):
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_way_out_that_is_named(device):
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    for either in (model, plain):
        either.head.weight = either.embed.weight
    with Engine(model, device=device) as engine:
        assert_step_is_same(engine, model, plain)


def test_an_inserted_block_is_refused(device):
    model = Toy()
    with Engine(model, device=device) as engine:
        block = Block()
        block.norm.weight.data = model.norm.weight.data
        with pytest.raises(ValueError, match=r"'block.norm.weight' and 'norm.weight' are two tensors"):
            engine.insert("blocks.1", block)
        block = Block()
        block.norm.bias.data = block.norm.weight.data
        with pytest.raises(ValueError, match=r"'block.norm.weight' and 'block.norm.bias' are two tensors"):
            engine.insert("blocks.1", block)
        assert len(model.blocks) == 3
        engine.insert("blocks.1", Block())


def test_frozen_ones_may_share():
    model = tied_by_data().requires_grad_(False)
    refuse_overlaps(model.named_parameters())
    model.head.weight.requires_grad_()
    with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight'"):
        refuse_overlaps(model.named_parameters())


def test_parts_of_one_memory_that_do_not_overlap(device):
    """As those of a model that was in an engine before."""
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    parts = flat.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.data = part.view(parameter.shape)
    both = torch.stack([model.norm.weight.detach(), model.norm.bias.detach()], dim=1)
    model.norm.weight.data, model.norm.bias.data = both[:, 0], both[:, 1]  # between each other
    for _ in range(2):
        with Engine(model, device=device) as engine:
            assert_step_is_same(engine, model, plain)
        model.zero_grad()
        plain.zero_grad()


def test_transposed():
    one = nn.Parameter(torch.randn(3, 4))
    two = nn.Parameter(torch.empty(0))
    two.data = one.data.T
    with pytest.raises(ValueError, match="Use one parameter"):
        refuse_overlaps([("one", one), ("two", two)])


def test_another_name_of_the_same_tensor():
    one = nn.Parameter(torch.randn(3, 4))
    refuse_overlaps([("one", one), ("two", one)])
