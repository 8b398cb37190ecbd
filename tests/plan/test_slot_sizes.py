"""Slots are as large as what passes through them: an embedding or a head does not make the others large."""

import torch
import transformers as hf

from ferryman.engine import Engine
from ferryman.plan.slot_sizes import SlotSizes, gradient_slot_bytes, gradient_slot_sizes


def tied(tie=True):
    torch.manual_seed(0)
    config = hf.GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=512, n_positions=32, tie_word_embeddings=tie)
    return hf.GPT2LMHeadModel(config)


def sums(unit):
    return gradient_slot_bytes(unit, updates=True)


def test_a_tied_embedding_has_a_slot_for_gradients_of_its_own(device):
    with Engine(tied(), device=device) as engine:
        units, plan = engine.units, engine.plan
        embedding, *blocks = sorted(units, key=sums, reverse=True)
        assert len(embedding.modules) > 1
        assert sums(blocks[0]) < sums(embedding)
        found = gradient_slot_sizes(units, plan.gradient_slots, plan.updates)
        assert [set(units) for units in found.serves] == [set(blocks), set(blocks), {embedding}]
        assert found.sizes == SlotSizes(sums(blocks[0]) + sums(blocks[1]), (sums(embedding),))
        assert plan.account["gradient slots"] == found.sizes.nbytes
        slots = engine._parts.relay.gradients._slots
        assert [slot.memory.nbytes for slot in slots[1:]] == [*found.sizes.memories]


def test_too_few_slots_are_shared(device):
    with Engine(tied(), device=device) as engine:
        largest = sorted(map(sums, engine.units))[-2:]
        for count, expected in ((1, SlotSizes(largest[1], is_single=True)), (2, SlotSizes(sum(largest)))):
            sizes, serves = gradient_slot_sizes(engine.units, count, engine.plan.updates)
            assert (sizes, [set(units) for units in serves]) == (expected, [set(engine.units)] * count)


def test_a_head_shares_its_memory_with_a_block(accelerator):
    with Engine(tied(tie=False), device=accelerator, slots=4, held=False) as engine:
        sizes = {unit.name: unit.nbytes for unit in engine.units}
        block, head = sizes["transformer.h.2"], sizes["lm_head"]
        assert head == sizes["transformer.wte"] > 2 * block
        assert engine.plan.weight_slot_sizes == SlotSizes(head + block, (block, block))
        assert engine.plan.account["weight slots"] == head + 3 * block, "4 times the head's bytes if all were alike"
        memory = {unit.name: sums(unit) for unit in engine.units}
        assert engine.plan.account["gradient slots"] == memory["lm_head"] + memory["transformer.h.2"]
