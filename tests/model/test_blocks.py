"""Blocks that are inserted, removed and skipped: the model then equals a plain one that was changed in the same way."""

import copy
import gc

import pytest
import torch
import transformers as hf
from torch import nn

from ferryman.engine import Engine
from support.block_changes import Wide, WideToy, assert_steps, blocks_of, insert, new_block, remove
from support.devices import delay_copies, torch_virtual
from support.models import (
    CASES,
    TEXT_SIZES,
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
@pytest.mark.parametrize("position", [0, "end"])
def test_a_block_that_was_inserted(name, position, device):
    delay_copies(device, 0.01)
    model, loose = build(CASES[name]), CASES[name].loose
    plain, position = on(device, model), len(blocks_of(model)) if position == "end" else position
    with Engine(model, device=device) as engine:
        assert_steps(engine, model, plain, loose=loose)
        block = new_block(name)
        insert(engine, plain, position, block)
        assert blocks_of(model)[position] is block
        assert_steps(engine, model, plain, loose=loose, steps=2)


@covering
@pytest.mark.parametrize("name", ["toy", "llama", *slow("gpt2")])
@pytest.mark.parametrize("position", [0, 1])
def test_a_block_that_was_removed(name, position, device):
    delay_copies(device, 0.01)
    model, loose = build(CASES[name]), CASES[name].loose
    plain, block = on(device, model), blocks_of(model)[position]
    with Engine(model, device=device) as engine:
        assert_steps(engine, model, plain, loose=loose)
        assert remove(engine, plain, position) is block
        assert_steps(engine, model, plain, loose=loose, steps=2)


@covering
@pytest.mark.parametrize("name", ["toy", "llama"])
def test_many_changes_in_a_row(name, device):
    """Before the first step as well; what was removed comes back; a list may shrink to one block and grow again."""
    model = build(CASES[name])
    plain = on(device, model)
    with Engine(model, device=device) as engine:
        insert(engine, plain, 1, new_block(name, seed=7))
        insert(engine, plain, 1, new_block(name, seed=8))
        assert_steps(engine, model, plain)
        first = remove(engine, plain, 0)
        insert(engine, plain, 2, first)
        assert_steps(engine, model, plain)
        while len(blocks_of(model)) > 1:
            remove(engine, plain, 0)
        assert_steps(engine, model, plain)
        insert(engine, plain, 1, new_block(name, seed=9))
        assert_steps(engine, model, plain, steps=2)


def test_a_larger_block_fits(device):
    delay_copies(device, 0.01)
    model = build(CASES["toy"])
    plain = on(device, model)
    with Engine(model, device=device) as engine:
        assert_steps(engine, model, plain)
        insert(engine, plain, 2, Wide())
        assert_steps(engine, model, plain, steps=2)
        remove(engine, plain, 2)
        assert_steps(engine, model, plain)


@pytest.mark.exact
def test_slots_are_as_large_as_the_largest_block(virtual):
    gc.collect()  # what other tests have left on the device must not go meanwhile
    with Engine(Toy(), device=virtual) as engine:
        around = torch_virtual.memory_allocated(virtual) - engine.plan.fixed
        for change in (lambda: engine.insert(2, Wide()), lambda: engine.insert(0, Wide(512)), lambda: engine.remove(0)):
            fixed = engine.plan.fixed
            change()
            assert engine.plan.fixed != fixed
            assert torch_virtual.memory_allocated(virtual) == around + engine.plan.fixed


def test_fetches_that_nobody_waited_for_do_not_disturb(virtual):
    """The model took another way than expected, so that units are still on their way when their slots are replaced."""
    torch_virtual.set_link(virtual, delay=0.02)
    torch.manual_seed(0)
    model = Skipping()
    plain = on(virtual, model)
    batch = text(4)
    batch["input_ids"][:, 0] = 3  # passes over the last block
    with Engine(model, device=virtual) as engine:
        for change in (
            lambda: insert(engine, plain, 4, Wide()),
            lambda: remove(engine, plain, 3),
            lambda: remove(engine, plain, 3),
        ):
            engine.forward_backward(batch, 2)
            change()
        assert_steps(engine, model, plain)


@covering
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_lists_are_told_apart_by_name(stack, device):
    case = CASES["t5"]
    model = build(case)
    plain, theirs = on(device, model), build(case, seed=7).get_submodule(stack).block[1]
    plain.config.use_cache = plain.decoder.config.use_cache = False  # its blocks' numbers are not up to date
    with Engine(model, device=device) as engine:
        plain.get_submodule(stack).block.insert(1, on(device, theirs))
        engine.insert(f"{stack}.block.1", theirs)
        assert_steps(engine, model, plain, loose=case.loose)
        del plain.get_submodule(stack).block[2]
        removed = engine.remove(f"{stack}.block.2")
        assert_steps(engine, model, plain, loose=case.loose)
    assert removed not in set(model.modules())
    assert {name: len(model.get_submodule(name).block) for name in ("encoder", "decoder")} == {
        "encoder": 2,
        "decoder": 2,
    }


def test_the_configuration_counts_the_blocks_of_its_own_list(device):
    model = build(CASES["t5"])
    with Engine(model, device=device) as engine:
        engine.insert("decoder.block.1", build(CASES["t5"], seed=7).decoder.block[1])
        assert (model.encoder.config.num_layers, model.decoder.config.num_layers) == (2, 3)
        engine.remove("encoder.block.1")
        assert (model.encoder.config.num_layers, model.decoder.config.num_layers) == (1, 3)


def test_kinds_of_blocks_in_the_configuration_follow(device):
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        **TEXT_SIZES,
        num_key_value_heads=2,
        layer_types=["full_attention", "sliding_attention"],
        use_sliding_window=True,
    )
    model = hf.Qwen2ForCausalLM(config).train()
    block = copy.deepcopy(model.model.layers[1])
    with Engine(model, device=device) as engine:
        engine.insert(2, block)
        assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
        engine.forward_backward(text(4), 2)
        engine.remove(0)
        assert config.layer_types == ["sliding_attention", "sliding_attention"]
        assert config.num_hidden_layers == 2
        engine.forward_backward(text(4), 2)


def test_a_model_that_is_itself_the_list(device):
    def loss(model, part):
        return model(part["x"]).square().mean()

    torch.manual_seed(0)
    model, batch = nn.Sequential(Block(), Block()), {"x": torch.randn(8, WIDTH)}
    plain = on(device, model)
    with Engine(model, device=device, loss=loss) as engine:
        block = Block()
        plain.insert(1, on(device, block))
        engine.insert(1, block)
        del plain[0]
        engine.remove("0")
        torch.manual_seed(1)
        expected = plain_step(plain, cut(batch, 4), loss)
        torch.manual_seed(1)
        assert_same(step(engine, model, batch), expected)


def test_a_block_without_parameters(device):
    model = build(CASES["toy"])
    plain = on(device, model)
    with Engine(model, device=device) as engine:
        insert(engine, plain, 1, nn.Tanh())
        assert_steps(engine, model, plain)
        remove(engine, plain, 1)
        assert_steps(engine, model, plain)


@covering
@pytest.mark.parametrize("when", ["at once", "after a step"])
def test_a_removed_block_is_free(when, device):
    model = build(CASES["toy"])
    block = model.blocks[1]
    plain, parameters = copy.deepcopy(block), list(block.parameters())
    with Engine(model, device=device) as engine:
        if when == "after a step":
            engine.forward_backward(text(8), 4)
        with torch.no_grad():
            for p, q in zip(block.parameters(), plain.parameters(), strict=True):
                p.mul_(0.9)
                q.mul_(0.9)
        engine.remove(1)
        assert all("forward" not in module.__dict__ for module in block.modules())
        assert all(p is q for p, q in zip(block.parameters(), parameters, strict=True))
        assert all(torch.equal(p, q) for p, q in zip(block.parameters(), plain.parameters(), strict=True))
        x = torch.randn(2, WIDTH)
        block.zero_grad()
        for each in (block, plain):
            torch.manual_seed(1)
            each(x).square().mean().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(block.parameters(), plain.parameters(), strict=True))
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.fill_(torch.nan)
        assert not engine.forward_backward(text(8), 4).isnan()


def test_names_follow_the_numbers(device):
    def loss(model, part):
        return model_loss(model, part) + (model.blocks[3].down.bias.sum() if armed else 0)

    model, armed = build(CASES["toy"]), []
    last = model.blocks[2]
    with Engine(model, device=device, loss=loss) as engine:
        engine.forward_backward(text(8), 4)
        engine.insert(1, Block())
        assert [unit.name for unit in engine.units] == ["embed", *(f"blocks.{i}" for i in range(4)), "head"]
        assert [unit.modules[0] for unit in engine.units[1:-1]] == list(model.blocks)
        assert {item.name for item in engine.units[4].items} == {
            f"blocks.3.{name}" for name, _ in last.named_parameters()
        }
        armed.append(True)
        with pytest.raises(ValueError, match=r"'blocks\.3\.down\.bias' is used outside .* unit 'blocks\.3'"):
            engine.forward_backward(text(8), 4)
        armed.clear()
        engine.remove(0)
        assert [unit.name for unit in engine.units] == ["embed", *(f"blocks.{i}" for i in range(3)), "head"]
        model.blocks[2].norm.weight.data = torch.ones(WIDTH)
        with pytest.raises(ValueError, match=r"'blocks\.2\.norm\.weight' was replaced"):
            engine.forward_backward(text(8), 4)


def test_gradients_of_other_units_survive(device):
    delay_copies(device, 0.01)
    model = build(CASES["toy"])
    plain = on(device, model)

    def accumulate(seed):
        torch.manual_seed(seed)
        expected = plain_step(plain, cut(text(8, seed), 4))
        torch.manual_seed(seed)
        assert_same(step(engine, model, text(8, seed)), expected)

    with Engine(model, device=device) as engine:
        accumulate(1)
        insert(engine, plain, 1, Wide())
        accumulate(2)
        remove(engine, plain, 0)
        accumulate(3)


def test_the_same_optimizer_goes_on(device):
    model = build(CASES["toy"])
    plain = on(device, model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (model, plain))
    with Engine(model, device=device) as engine:
        for change in (lambda: None, lambda: insert(engine, plain, 1, new_block()), lambda: remove(engine, plain, 0)):
            change()
            assert_steps(engine, model, plain)
            ours.step()
            theirs.step()
    assert all(torch.equal(p, q.cpu()) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@covering
@pytest.mark.parametrize("name", ["toy", "llama", *slow("gpt2")])
def test_closing_afterwards(name, device):
    model = build(CASES[name])
    plain = on(torch.device("cpu"), model)
    with Engine(model, device=device) as engine:
        insert(engine, plain, 1, new_block(name))
        remove(engine, plain, 0)
        engine.forward_backward(text(8), 4)
    assert all("forward" not in module.__dict__ for module in model.modules())
    model.zero_grad()
    torch.manual_seed(1)
    expected = plain_step(plain, cut(text(8), 4))
    torch.manual_seed(1)
    assert_same(plain_step(model, cut(text(8), 4)), expected)


@covering
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_evaluation_afterwards(name, device):
    """Also with a cache, in which blocks have numbers."""
    model = build(CASES[name]).eval()
    plain, ids = on(torch.device("cpu"), model), text(2)["input_ids"]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with Engine(model, device=device) as engine, torch.no_grad():
        for change in (
            lambda: None,
            lambda: insert(engine, plain, 1, new_block(name).eval()),
            lambda: remove(engine, plain, 0),
        ):
            change()
            assert torch.equal(model(ids).logits, plain(ids).logits)
            assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))


# Under a budget of device memory.


@pytest.mark.exact
def test_inserted_blocks_are_cut_as_the_others_are(virtual):
    torch.manual_seed(0)
    model = WideToy()
    plain = on(virtual, model)
    with Engine(model, device=virtual, memory="200KiB") as engine:
        assert "blocks.1.up" in [unit.name for unit in engine.units]
        insert(engine, plain, 1, Wide())
        assert {f"blocks.{i}.{part}" for i in range(4) for part in ("up", "down")} < {u.name for u in engine.units}
        assert_steps(engine, model, plain, steps=2, micro_batches=4)
        remove(engine, plain, 2)
        assert_steps(engine, model, plain, micro_batches=4)


@pytest.mark.exact
def test_a_block_that_is_too_large_is_refused_and_leaves_no_trace(virtual):
    model = build(CASES["toy"])
    plain, blocks = on(virtual, model), list(model.blocks)
    with Engine(model, device=virtual, memory="64KiB") as engine:
        with pytest.raises(ValueError, match=r"with this block .* memory=64\.00KiB.* 'blocks\.1'"):
            engine.insert(1, Wide(4096))
        assert list(model.blocks) == blocks
        assert_steps(engine, model, plain)


@pytest.mark.parametrize(("before", "kib"), [("with fewer blocks", 192), ("with blocks skipped", 224)])
def test_the_budget_is_kept_after_a_step_that_needed_less(before, kib, virtual):
    """Every block adds to what is stashed; by these budgets there is room for that of few on the device."""
    around = torch_virtual.memory_allocated(virtual)
    with Engine(Toy(3 if before == "with fewer blocks" else 12), device=virtual, memory=kib * 1024) as engine:
        if before == "with blocks skipped":
            engine.skip(range(12))
        engine.forward_backward(text(16))
        while len(engine.units) < 14:
            engine.insert(0, Block())
        engine.zero_grad()
        torch.accelerator.reset_peak_memory_stats(virtual)
        engine.forward_backward(text(16))
        assert torch.accelerator.max_memory_allocated(virtual) - around <= kib * 1024
