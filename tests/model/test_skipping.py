"""Blocks that a step skips: it equals the model without them, and they are not fetched."""

import copy

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from support.block_changes import (
    WideToy,
    assert_steps,
    blocks_of,
    fetched,
    fetches_without,
    insert,
    new_block,
    pass_over,
    remove,
)
from support.devices import delay_copies
from support.models import (
    CASES,
    WIDTH,
    Block,
    Skipping,
    Toy,
    assert_same,
    build,
    cut,
    model_loss,
    on,
    plain_step,
    step,
    text,
)
from support.slow import covering, slow


@covering
@pytest.mark.parametrize("name", ["toy", "llama", *slow("gpt2")])
@pytest.mark.parametrize("skipped", [{0}, {1}], ids=str)
def test_a_step_that_skips_blocks(name, skipped, device):
    """In the very first step and later; the one after it is whole again."""
    delay_copies(device, 0.01)
    model, loose = build(CASES[name]), CASES[name].loose
    plain = on(device, model)
    with Engine(model, device=device) as engine:
        for _ in range(2):
            engine.skip(skipped)
            assert_steps(engine, model, pass_over(plain, skipped), loose=loose)
            parameters = [p for number in skipped for p in blocks_of(model)[number].parameters()]
            assert all(p.grad is None for p in parameters)
            assert_steps(engine, model, plain, loose=loose)
            assert all(p.grad is not None for p in parameters)


def test_other_blocks_in_each_step(device):
    model = build(CASES["toy"])
    plain = on(device, model)
    with Engine(model, device=device) as engine:
        for skipped in ({2}, {0}, set(), {0, 1, 2}, {1}, {0, 2}):
            engine.skip(skipped)
            assert_steps(engine, model, pass_over(plain, skipped))


def test_blocks_are_skipped_by_name_and_where_they_are_now(device):
    model = build(CASES["toy"])
    plain = on(device, model)
    with Engine(model, device=device) as engine:
        insert(engine, plain, 0, new_block())
        engine.skip({"blocks.1", 3})
        assert_steps(engine, model, pass_over(plain, {1, 3}))
        remove(engine, plain, 0)
        engine.skip(["blocks.1"])
        assert_steps(engine, model, pass_over(plain, {1}))


def test_blocks_that_return_more_than_a_tensor(device):
    class Tuples(Block):
        def forward(self, x, flag=None):
            return {"hidden": [super().forward(x)], "none": None, "number": 3}

    class Model(Toy):
        def hidden(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                out = block(x=x, flag=True)
                assert (out["none"], out["number"]) == (None, 3)
                (x,) = out["hidden"]
            return x

    torch.manual_seed(0)
    model = Model()
    model.blocks = nn.ModuleList(Tuples() for _ in range(3))
    plain = on(device, model)
    reference = copy.deepcopy(plain)
    reference.blocks[1].forward = lambda x, flag: {"hidden": [x], "none": None, "number": 3}
    with Engine(model, device=device) as engine:
        for _ in range(2):
            engine.skip({1})
            assert_steps(engine, model, reference)
            assert_steps(engine, model, plain)


def test_gradients_of_skipped_blocks_wait(device):
    """As in a plain loop: what a step before has added stays."""
    model = build(CASES["toy"])
    plain = on(device, model)
    with Engine(model, device=device) as engine:
        for seed, skipped in enumerate((set(), {1}, {0, 2}, set())):
            for number, block in enumerate(plain.blocks):
                block.__dict__.pop("forward", None)
                if number in skipped:
                    block.forward = lambda x: x
            engine.skip(skipped)
            torch.manual_seed(seed)
            expected = plain_step(plain, cut(text(8, seed), 4))
            torch.manual_seed(seed)
            assert_same(step(engine, model, text(8, seed)), expected)


def test_skipped_units_are_not_fetched(accelerator):
    with Engine(Toy(4), device=accelerator, recompute="always") as engine:  # no trial, which would fetch, too
        for _ in range(2):  # in the very first step, and when the order is known
            engine.skip({1, 3})
            assert fetched(engine) == fetches_without(engine, "blocks.1", "blocks.3")
            assert fetched(engine) == fetches_without(engine)
        engine.skip({0})
        assert fetched(engine, 2) == fetches_without(engine, "blocks.0")


def test_blocks_that_the_model_passes_over_itself_are_not_fetched(accelerator):
    torch.manual_seed(0)
    model, batch = Skipping(), text(8)
    plain = on(accelerator, model)
    batch["input_ids"][:, 0] = 1
    with Engine(model, device=accelerator) as engine:
        engine.forward_backward(batch, 4)
        before = engine.fetches
        engine.forward_backward(batch, 4)
        assert engine.fetches - before == fetches_without(engine, "blocks.1", "blocks.2")
        engine.skip({0})
        assert_steps(engine, model, pass_over(plain, {0}))


@pytest.mark.exact
@pytest.mark.parametrize("options", [{"memory": "140KiB"}, {"units": ["blocks.*.up", "blocks.*.down"]}], ids=str)
def test_blocks_that_are_cut_are_skipped_as_a_whole(options, accelerator):
    torch.manual_seed(0)
    model = WideToy()
    plain = on(accelerator, model)
    with Engine(model, device=accelerator, slots=2, **options) as engine:
        assert {"blocks.0.up", "blocks.0.down"} < {unit.name for unit in engine.units}
        for _ in range(2):
            engine.skip({1})
            assert_steps(engine, model, pass_over(plain, {1}), micro_batches=4)
            assert_steps(engine, model, plain, micro_batches=4)
        fetched(engine, 8)  # with what a trial fetches
        engine.skip({1, 2})
        assert fetched(engine, 8) == fetches_without(engine, "blocks.1", "blocks.2")


def test_blocks_inside_of_a_unit_can_be_skipped(device):
    class Outer(Toy):
        def __init__(self):
            super().__init__()
            self.stack = nn.Sequential(*self.blocks)
            del self.blocks

        def hidden(self, ids):
            return self.stack(self.embed(ids))

    torch.manual_seed(0)
    model = Outer()
    plain = on(device, model)
    plain.stack[1].forward = lambda x: x
    with Engine(model, device=device, units=["stack"]) as engine:
        engine.skip({1})
        assert_steps(engine, model, plain)


def test_a_step_that_fails_skips_no_longer(device):
    def loss(model, part):
        if armed:
            raise KeyError("loss")
        return model_loss(model, part)

    model, armed = build(CASES["toy"]), [True]
    plain = on(device, model)
    with Engine(model, device=device, loss=loss) as engine:
        engine.skip({1})
        with pytest.raises(KeyError):
            engine.forward_backward(text(8), 4)
        armed.clear()
        assert_steps(engine, model, plain)


def test_only_steps_skip(device):
    """Not evaluation, nor a block by itself, in between."""
    model = build(CASES["toy"]).eval()
    plain, ids, x = on(device, model), text(2)["input_ids"].to(device), torch.randn(2, WIDTH)
    with Engine(model, device=device) as engine:
        engine.skip({1})
        with torch.no_grad():
            assert torch.equal(model(ids).logits, plain(ids).logits)
        assert torch.equal(model.blocks[1](x), copy.deepcopy(plain.blocks[1]).cpu()(x))
        assert_steps(engine, model, pass_over(plain, {1}))


@covering
@pytest.mark.parametrize("first", [True, False])
def test_skipping_a_block_that_returns_several_tensors(first, device):
    model, case = build(CASES["t5"]), CASES["t5"]
    plain = on(device, model)
    with Engine(model, device=device) as engine:
        if not first:
            assert_steps(engine, model, plain, loose=case.loose)
        engine.skip({"encoder.block.1"})
        with pytest.raises(ValueError, match=r"a T5Block cannot be skipped.*in the model's own forward"):
            engine.forward_backward(text(8), 4)
        assert_steps(engine, model, plain, loose=case.loose)


def test_one_block_need_not_be_in_a_set(device):
    model = Toy()
    with Engine(model, device=device) as engine:
        engine.skip(1)
        engine.forward_backward(text(4), 2)
        assert model.blocks[1].up.weight.grad is None
        assert model.blocks[0].up.weight.grad is not None
