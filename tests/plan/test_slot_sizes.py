"""Slots for gradients are as large as what they hold: a tied embedding does not make the others large."""

import torch
import transformers as hf

from ferryman.engine import Engine
from ferryman.model.units import gradient_bytes
from ferryman.plan.slot_sizes import slot_groups


def tied():
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=512, n_positions=32))


def test_a_tied_embedding_has_a_slot_of_its_own(device):
    with Engine(tied(), device=device) as engine:
        units, plan = engine.units, engine.plan
        embedding = max(units, key=gradient_bytes)
        blocks = [unit for unit in units if unit is not embedding]
        assert len(embedding.modules) > 1
        assert max(map(gradient_bytes, blocks)) < gradient_bytes(embedding)
        groups = slot_groups(units, plan.gradient_slots)
        assert [(set(group.units), group.slots) for group in groups] == [({embedding}, 1), (set(blocks), 2)]
        expected = gradient_bytes(embedding) + 2 * max(map(gradient_bytes, blocks))
        assert plan.account["gradient slots"] == expected
        slots = engine._parts.relay.gradients._slots
        assert sum(slot.wide.nbytes + slot.narrow.nbytes for slot in slots) == expected


def test_too_few_slots_are_shared(device):
    with Engine(tied(), device=device) as engine:
        for count in (1, 2):
            (group,) = slot_groups(engine.units, count)
            assert (set(group.units), group.slots) == (set(engine.units), count)
