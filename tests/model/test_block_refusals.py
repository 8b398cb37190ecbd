"""Changes of blocks that cannot be made: refused with an error that says why, and without a trace."""

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from support.block_changes import assert_steps, insert, new_block, remove
from support.models import (
    CASES,
    Block,
    build,
    on,
)
from support.slow import covering


def sharing(model):
    block = Block()
    block.up = model.blocks[0].up
    return block


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda engine, model: engine.insert(4, Block()), r"cannot be inserted at 4: 'blocks' takes positions 0 to 3"),
        (lambda engine, model: engine.insert(-1, Block()), r"cannot be inserted at -1"),
        (lambda engine, model: engine.insert("blocks.4", Block()), r"cannot be inserted at 'blocks\.4'"),
        (lambda engine, model: engine.insert(1.0, Block()), r"a number or its name; this is 1\.0"),
        (lambda engine, model: engine.insert("head", Block()), r"'head' does not name a block.*like 'blocks\.0'"),
        (lambda engine, model: engine.insert(1, model.blocks[0]), "shares a parameter or buffer with the model"),
        (lambda engine, model: engine.insert(1, sharing(model)), "shares a parameter or buffer with the model"),
        (lambda engine, model: engine.insert(1, lambda x: x), r"must be a torch\.nn\.Module; this is a function"),
        (lambda engine, model: engine.remove(3), r"there is no block 3: 'blocks' has blocks 0 to 2"),
        (lambda engine, model: engine.remove(-1), r"there is no block -1"),
        (lambda engine, model: engine.remove("blocks.3"), r"there is no block 'blocks\.3'"),
        (lambda engine, model: engine.remove("blocks"), r"'blocks' does not name a block"),
        (lambda engine, model: engine.remove("blocks.1.up"), r"'blocks\.1\.up' does not name a block"),
        (lambda engine, model: engine.remove(True), "a number or its name; this is True"),
        (lambda engine, model: engine.skip({1, 3}), "there is no block 3"),
        (lambda engine, model: engine.skip({"norm"}), "'norm' does not name a block"),
    ],
)
def test_what_is_no_block_is_refused_and_leaves_no_trace(wrong, words):
    model = build(CASES["toy"])
    plain, blocks = on(torch.device("cpu"), model), list(model.blocks)
    with Engine(model, device="cpu") as engine:
        with pytest.raises(ValueError, match=words):
            wrong(engine, model)
        assert list(model.blocks) == blocks
        assert_steps(engine, model, plain)


def test_a_number_is_not_enough_for_several_lists(device):
    with Engine(build(CASES["t5"]), device=device) as engine:
        for wrong in (lambda: engine.insert(1, Block()), lambda: engine.remove(1), lambda: engine.skip({1})):
            with pytest.raises(ValueError, match=r"several lists.*'encoder\.block\.1', 'decoder\.block\.1'"):
                wrong()
        engine.remove("decoder.block.1")
        with pytest.raises(ValueError, match="several lists"):  # also when one is left with a single block
            engine.remove(0)


def test_a_model_without_lists(device):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), Block()

    with Engine(Pair(), device=device, units=["first", "second"]) as engine:
        for wrong in (lambda: engine.insert(0, Block()), lambda: engine.remove("first"), lambda: engine.skip({0})):
            with pytest.raises(ValueError, match="the model has no list of repeated blocks"):
                wrong()


def test_a_block_on_another_device(accelerator):
    model = build(CASES["toy"])
    plain = on(accelerator, model)
    with Engine(model, device=accelerator) as engine:
        with pytest.raises(ValueError, match=r"must be on the host, and 'norm\.weight' is on virtual:0"):
            engine.insert(1, Block().to(accelerator))
        assert_steps(engine, model, plain)


def test_a_block_of_another_engine(device):
    other = build(CASES["toy"])
    with (
        Engine(other, device=device),
        Engine(build(CASES["toy"]), device=device) as engine,
        pytest.raises(ValueError, match="has an engine already"),
    ):
        engine.insert(1, other.blocks[0])


def test_the_last_one_that_travels_stays(device):
    model = build(CASES["toy"])
    plain = on(device, model)
    with Engine(model, device=device, units=["blocks.*"]) as engine:
        remove(engine, plain, 0)
        remove(engine, plain, 0)
        with pytest.raises(ValueError, match="the block 0 contains all units of the model"):
            engine.remove(0)
        assert_steps(engine, model, plain)


@covering
@pytest.mark.parametrize("to", ["another block", "a resident"])
def test_a_block_that_shares_parameters_stays(to, device):
    model = build(CASES["toy"])
    if to == "another block":
        model.blocks[2].up.weight = model.blocks[0].up.weight
    else:
        model.norm.weight = model.blocks[0].norm.weight
    plain, blocks = on(device, model), list(model.blocks)
    with Engine(model, device=device, resident=[] if to == "another block" else ["norm.weight"]) as engine:
        with pytest.raises(ValueError, match="the block 0 shares parameters with the rest of the model"):
            engine.remove(0)
        assert list(model.blocks) == blocks
        remove(engine, plain, 1)
        assert_steps(engine, model, plain, loose=("*",))


@covering
@pytest.mark.parametrize("options", [{"units": ["blocks.*.up"]}, {"resident": ["blocks.1.norm.weight"]}], ids=str)
def test_a_block_of_which_a_part_is_resident_stays(options, device):
    model = build(CASES["toy"])
    plain = on(device, model)
    with Engine(model, device=device, **options) as engine:
        with pytest.raises(ValueError, match=r"'blocks\.1\.norm\.weight' .* stays on the device"):
            engine.remove(1)
        insert(engine, plain, 1, new_block())
        remove(engine, plain, 1)
        assert_steps(engine, model, plain)


def test_blocks_that_travel_together_stay_as_they_are(device):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.stacks = nn.ModuleDict({"a": nn.Sequential(Block(), Block()), "b": nn.Sequential(Block(), Block())})

    with Engine(Outer(), device=device, units=["stacks.a", "stacks.b.*"]) as engine:
        for wrong in (lambda: engine.insert("stacks.a.1", Block()), lambda: engine.remove("stacks.a.1")):
            with pytest.raises(ValueError, match=r"travel together as the unit 'stacks\.a'"):
                wrong()
        engine.insert("stacks.b.1", Block())
        engine.remove("stacks.b.1")


def test_a_closed_engine_changes_nothing(device):
    model = build(CASES["toy"])
    engine = Engine(model, device=device)
    engine.close()
    blocks = list(model.blocks)
    for wrong in (lambda: engine.insert(1, Block()), lambda: engine.remove(1)):
        with pytest.raises(ValueError, match="the engine is closed"):
            wrong()
    assert list(model.blocks) == blocks
