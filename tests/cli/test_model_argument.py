"""The MODEL that commands take: what is understood, what is refused, and that nothing of it is allocated."""

import itertools
import json
import re
import sys

import pytest
import transformers as hf

from ferryman.cli.model_argument import BYTE_VOCABULARY, SIZES, parse_model


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_a_byte_level_gpt(size):
    found = parse_model(f"gpt:{size}")
    model = found.on_meta()
    assert found.is_bytes
    assert found.weights is None
    assert found.config.vocab_size == BYTE_VOCABULARY
    assert found.context == SIZES[size].context
    assert model.training
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[size].parameters
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_sizes_are_a_ladder():
    sizes = [size.parameters for size in SIZES.values()]
    assert sizes == sorted(sizes)
    assert sizes[0] < 2e5
    assert sizes[-1] > 9e8
    assert all(large / small < 8 for small, large in itertools.pairwise(sizes))


def test_any_size_can_be_written():
    config = parse_model("gpt:layers=3, width=24,heads=2,context=32").config
    assert (config.n_layer, config.n_embd, config.n_head, config.n_positions) == (3, 24, 2, 32)


def test_a_directory_and_its_file_are_the_same_model(tmp_path):
    hf.LlamaConfig(hidden_size=32, num_hidden_layers=3).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        found = parse_model(str(path))
        assert found.weights is None
        assert not found.is_bytes
        assert type(found.on_meta()) is hf.LlamaForCausalLM
        assert found.config.num_hidden_layers == 3


def test_pretrained_weights_are_found(tmp_path):
    parse_model("gpt:tiny").config.save_pretrained(tmp_path)
    hf.GPT2LMHeadModel(parse_model("gpt:tiny").config).save_pretrained(tmp_path)
    assert parse_model(str(tmp_path)).weights == tmp_path


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("gpt:smal", "did you mean 'gpt:small'"),
        ("gpt:enormous", "gpt:layers=12,width=768"),
        ("gpt:", "is not a size"),
        ("small", "did you mean 'gpt:small'"),
        ("gpt:layers=2,width=64", "heads and context must be given"),
        ("gpt:layer=2,width=64,heads=2,context=8", "did you mean 'layers'"),
        ("gpt:layers=2,layers=3", "twice"),
        ("gpt:layers=-2,width=64,heads=2,context=8", "layers='-2' must be a positive integer"),
        ("gpt:layers=2,width=65,heads=2,context=8", "width=65 is not divisible by heads=2"),
        ("/nowhere/at/all", "there is no model"),
    ],
)
def test_what_is_not_a_model_is_refused(model, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_model(model)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (hf.ViTConfig(), "is a 'vit'.*causal language model"),
        (hf.CLIPConfig(), "is a 'clip'"),
        (hf.T5Config(), "is a 't5'"),
        (hf.BertConfig(), "is a 'bert'"),
    ],
)
def test_what_is_not_a_causal_language_model_is_refused(config, said, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said):
        parse_model(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no 'model_type'"),
        ("{}", "no 'model_type'"),
        (json.dumps({"model_type": "lama"}), "did you mean 'llama'"),
        (json.dumps({"model_type": "mine", "auto_map": {}}), "its own code, which is not run"),
        (json.dumps({"model_type": "llama", "hidden_size": "wide"}), "transformers cannot use"),
    ],
)
def test_a_configuration_that_is_none_is_refused(content, said, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=said):
        parse_model(str(tmp_path))


def test_a_directory_without_a_configuration_is_refused(tmp_path):
    (tmp_path / "readme").touch()
    with pytest.raises(ValueError, match=r"has no config\.json.*readme"):
        parse_model(str(tmp_path))


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    with pytest.raises(ValueError, match=re.escape("ferryman[transformers]")):
        parse_model("gpt:tiny")
