"""Units are found without help, hold each tensor once, and can be cut or named."""

import itertools

import pytest
import torch
from torch import nn

from ferryman.model.binding import bind
from ferryman.model.unit_discovery import find_units
from ferryman.model.units import ALIGNMENT
from support.models import CASES, Block, Toy, build
from support.slow import covering

LIMITS = [None, 8000, 3000, 1]


def names(model, **options):
    units, _ = find_units(model, **options)
    return [unit.names for unit in units]


def resident(model, **options):
    _, residents = find_units(model, **options)
    return {item.name for item in residents.items}


def single(*found):
    return [(name,) for name in found]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", [("transformer.wte", "lm_head"), *single("transformer.wpe", "transformer.h.0", "transformer.h.1")]),
        ("llama", single("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head")),
        (
            "bert",
            [
                ("bert.embeddings.word_embeddings", "cls.predictions.decoder"),
                *single("bert.embeddings.position_embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1"),
                *single("cls.predictions.transform.dense"),
            ],
        ),
        (
            "t5",
            [
                ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"),
                *single("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"),
            ],
        ),
        ("mixtral", single("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head")),
        ("vit", single("vit.embeddings.patch_embeddings.projection", "vit.layers.0", "vit.layers.1")),
        ("two losses", single("embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head", "early")),
    ],
)
def test_blocks_of_all_lists_and_what_is_large_outside_them(name, expected):
    found = names(build(CASES[name]))
    # Several modules of one unit may be registered as the same module, under its first name.
    assert [group[0] for group in found] == [group[0] for group in expected]
    assert all(set(group) <= set(wanted) for group, wanted in zip(found, expected, strict=True))


def test_the_small_rest_is_resident():
    assert resident(build(CASES["toy"])) == {"norm.weight", "norm.bias"}
    assert resident(build(CASES["vit"])) >= {"vit.embeddings.cls_token", "vit.layernorm.weight", "classifier.weight"}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("limit", LIMITS)
def test_each_tensor_is_in_exactly_one_unit(name, limit):
    model = build(CASES[name])
    units, residents = find_units(model, limit=limit)
    held = [id(item.tensor) for unit in (*units, residents) for item in unit.items]
    assert len(held) == len(set(held))
    assert set(held) == {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert all(unit.items and unit.modules for unit in units)
    modules = [module for unit in units for module in unit.modules]
    assert len(modules) == len(set(modules))


@covering
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("limit", LIMITS)
def test_tensors_lie_apart_and_aligned(name, limit):
    units, residents = find_units(build(CASES[name]), limit=limit)
    for unit in (*units, residents):
        ends = [0, *(item.offset + item.nbytes for item in unit.items)]
        assert all(item.offset >= end for item, end in zip(unit.items, ends, strict=False))
        assert all(item.offset % ALIGNMENT == 0 for item in unit.items)
        assert unit.nbytes % ALIGNMENT == 0
        assert max(ends) <= unit.nbytes < max(ends) + ALIGNMENT


def test_views_of_flat_memory():
    model = build(CASES["toy"])
    model.blocks[0].register_buffer("counts", torch.arange(7, dtype=torch.int64))
    model.blocks[0].register_parameter("narrow", nn.Parameter(torch.randn(3, 5).bfloat16()))
    model.blocks[0].register_parameter("empty", nn.Parameter(torch.empty(0, 4)))
    for unit in find_units(model)[0]:
        flat = torch.zeros(unit.nbytes, dtype=torch.uint8)
        for item in unit.items:
            item.view(flat).copy_(item.tensor.detach())
        for item in unit.items:
            assert item.view(flat).dtype == item.tensor.dtype
            assert torch.equal(item.view(flat), item.tensor)


def test_a_shared_parameter_knows_all_its_places():
    model = build(CASES["gpt2"])
    unit = find_units(model)[0][0]
    (item,) = unit.items
    assert {place.name for place in item.places} == {"transformer.wte.weight", "lm_head.weight"}
    other = torch.zeros_like(item.tensor)
    bind([(item, other)])
    assert model.lm_head.weight is model.transformer.wte.weight is other


def test_blocks_that_share_a_parameter_are_one_unit():
    model = Toy(layers=4)
    model.blocks[3].up.weight = model.blocks[1].up.weight
    assert names(model) == [*single("embed", "blocks.0"), ("blocks.1", "blocks.3"), *single("blocks.2", "head")]


def test_buffers_travel_with_their_module():
    model = Toy()
    model.blocks[1].register_buffer("scale", torch.ones(3))
    model.register_buffer("own", torch.ones(3))
    units, _ = find_units(model)
    held = {item.name: unit.name for unit in units for item in unit.items}
    assert held["blocks.1.scale"] == "blocks.1"
    assert "own" in resident(model)


def test_frozen_parameters_travel_too():
    units, _ = find_units(build(CASES["frozen"]))
    assert {unit.name: len(unit.trained) for unit in units}["blocks.0"] == 0
    assert {unit.name: len(unit.trained) for unit in units}["blocks.2"] == 6


@pytest.mark.parametrize("name", CASES)
def test_a_limit_is_kept_down_to_leaves(name):
    model = build(CASES[name])
    counts = []
    for limit in LIMITS:
        units, _ = find_units(model, limit=limit)
        counts.append(len(units))
        for unit in units:
            payload = sum(item.nbytes for item in unit.items)
            cut = any(list(child.parameters()) for module in unit.modules for child in module.children())
            assert limit is None or payload <= limit or not cut, unit
    assert counts == sorted(counts)  # coarser where it may be
    assert counts[-1] > counts[0]


def test_a_limit_cuts_no_more_than_it_must():
    model = Toy()
    whole = sum(p.nbytes for p in model.blocks[0].parameters())
    assert names(model, limit=whole) == names(model)
    assert ("blocks.0.up",) in names(model, limit=whole - 1)


def test_experts_travel_even_if_they_must_be_cut():
    model = build(CASES["mixtral"])
    for limit in LIMITS:
        assert not any("experts" in name or "proj" in name for name in resident(model, limit=limit))


def test_small_parameters_of_a_block_that_is_cut_become_resident():
    model = Toy()
    for block in model.blocks:
        block.scale = nn.Parameter(torch.ones(16))
    assert "blocks.0.scale" not in resident(model)
    assert "blocks.0.scale" in resident(model, limit=3000)


def test_modules_that_use_their_childrens_parameters_stay_whole():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    found = [name for group in names(model, limit=1) for name in group]
    assert "layers.0.self_attn" in found
    assert not any("out_proj" in name for name in found)


@pytest.mark.parametrize("wrapped", [False, True])
def test_sequential_models(wrapped):
    model = nn.Sequential(nn.Embedding(64, 16), Block(), Block(), nn.Linear(16, 64))
    if wrapped:
        model = nn.ModuleDict({"net": model})
    prefix = "net." if wrapped else ""
    assert names(model) == single(*(f"{prefix}{i}" for i in range(4)))


def test_a_plain_stack_of_linear_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert names(model) == single("0", "2", "4")


def test_lists_within_lists():
    """The inner lists are not called themselves, so their members travel."""
    model = nn.Module()
    model.stages = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))
    assert names(model) == single("stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1")


def test_a_module_that_stands_in_two_places_is_one_unit():
    model = Toy(layers=3)
    model.blocks[2] = model.blocks[0]
    assert names(model) == single("embed", "blocks.0", "blocks.1", "head")


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (["blocks.1"], ["blocks.1"]),
        (["blocks.?"], ["blocks.0", "blocks.1", "blocks.2"]),
        (["blocks"], ["blocks.0", "blocks.1", "blocks.2"]),  # a list is not called itself
        (["blocks.*", "blocks.*.up"], ["blocks.0", "blocks.1", "blocks.2"]),  # the outermost
        (["*.up", "head"], ["blocks.0.up", "blocks.1.up", "blocks.2.up", "head"]),
        (["head", "embed"], ["embed", "head"]),
    ],
)
def test_units_by_name(units, expected):
    model = Toy()
    found = names(model, units=units)
    assert found == single(*expected)
    inside = {name for name, _ in model.named_parameters() if any(name.startswith(f"{e}.") for e in expected)}
    assert resident(model, units=units) == {name for name, _ in model.named_parameters()} - inside


def test_units_by_name_are_cut_as_well():
    assert names(Toy(), units=["blocks.0"], limit=3000) == single("blocks.0.norm", "blocks.0.up", "blocks.0.down")


def test_a_model_without_blocks_is_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    with pytest.raises(ValueError, match=r"no repeated blocks .* units=\['0', '1'\]"):
        find_units(model)
    assert names(model, units=["0", "1"]) == single("0", "1")


def test_the_names_that_are_suggested_are_the_models_own():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.activation, self.net = nn.ReLU(), nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.LayerNorm(4)})

    with pytest.raises(ValueError, match=r"units=\['net.a', 'net.b'\]"):
        find_units(Wrapped())
    assert names(Wrapped(), units=["net.a", "net.b"]) == single("net.a", "net.b")
    with pytest.raises(ValueError, match=r"no repeated blocks .* cannot be divided into units"):
        find_units(nn.Linear(4, 4))


def test_a_name_that_does_not_exist_is_refused_with_a_near_one():
    with pytest.raises(ValueError, match=r"'block\.1'; did you mean 'blocks\.1'\?"):
        find_units(Toy(), units=["block.1"])
    with pytest.raises(ValueError, match=r"'zzz'; there are embed, blocks, blocks.0"):
        find_units(Toy(), units=["zzz"])


def test_names_without_any_parameters_are_refused():
    with pytest.raises(ValueError, match="no parameters"):
        find_units(Toy(), units=["blocks.0.dropout"])


def test_units_are_in_the_order_of_the_model():
    for name, limit in itertools.product(CASES, LIMITS):
        model = build(CASES[name])
        order = [found for found, _ in model.named_modules()]
        first = [order.index(unit.name) for unit in find_units(model, limit=limit)[0]]
        assert first == sorted(first), name


def test_parameters_can_be_kept_on_the_device():
    model = build(CASES["gpt2"])
    units, residents = find_units(model, resident=["transformer.wpe.weight", "*.ln_1.*"])
    kept = {item.name for item in residents.items}
    assert "transformer.wpe.weight" in kept
    assert "transformer.h.0.ln_1.bias" in kept
    traveling = {item.name for unit in units for item in unit.items}
    assert not kept & traveling
    with pytest.raises(ValueError, match=r"resident=.*no parameter.*'wpe'"):
        find_units(model, resident=["wpe"])
