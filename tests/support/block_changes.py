"""Helpers for tests that insert, remove and skip blocks: the same change to the plain model, and the comparison."""

import copy

import torch
from torch import nn

from ferryman.plan.slot_policy import weight_slot_policy
from support.models import (
    CASES,
    WIDTH,
    Block,
    Toy,
    assert_same,
    build,
    cut,
    on,
    plain_step,
    step,
    text,
)

LISTS = {"toy": "blocks", "gpt2": "transformer.h", "llama": "model.layers"}


class Wide(Block):
    """A block that is larger than the others of its model."""

    def __init__(self, inner=256):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)


class WideToy(Toy):
    def __init__(self, layers=3):
        super().__init__(layers)
        self.blocks = nn.ModuleList(Wide() for _ in range(layers))


def blocks_of(model):
    return next(model.get_submodule(name) for name in LISTS.values() if _has(model, name))


def _has(model, name):
    return name.partition(".")[0] in dict(model.named_children())


def new_block(name="toy", seed=7):
    return blocks_of(build(CASES[name], seed))[0]


def recount(plain):
    """Updates a Llama's configuration: it says how many blocks run, and each block knows its index in the cache."""
    for number, block in enumerate(blocks_of(plain)):
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    if hasattr(plain, "config"):
        plain.config.num_hidden_layers = len(blocks_of(plain))


def insert(engine, plain, position, block):
    blocks_of(plain).insert(position, on(next(plain.parameters()).device, block))
    recount(plain)
    engine.insert(position, block)


def remove(engine, plain, position):
    del blocks_of(plain)[position]
    recount(plain)
    return engine.remove(position)


def pass_over(plain, blocks):
    """A copy of the plain model in which these blocks return their input."""
    plain = copy.deepcopy(plain)
    for number in blocks:
        blocks_of(plain)[number].forward = lambda x, *args, **kwargs: x
    return plain


def assert_steps(engine, model, plain, *, loose=(), steps=1, micro_batches=2):
    for number in range(steps):
        plain.zero_grad()
        engine.zero_grad()
        torch.manual_seed(number)
        expected = plain_step(plain, cut(text(4), micro_batches))
        torch.manual_seed(number)
        assert_same(step(engine, model, text(4), micro_batches), expected, loose)


def fetched(engine, micro_batches=4):
    before = engine.fetches
    engine.forward_backward(text(8), micro_batches)
    return engine.fetches - before


def fetches_without(engine, *skipped):
    """The number of fetches in a step that skips these units."""
    units = [unit for unit in engine.units if not unit.name.startswith(skipped)]
    policy = weight_slot_policy(engine.plan.weight_slot_sizes)
    return len(policy.fetched_visits([*units, *reversed(units[:-1])]))


# Inserting and removing.
