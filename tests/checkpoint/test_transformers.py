"""Checkpoints and transformers: it loads what the engine saves, and the engine loads what it saves."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from ferryman.checkpoint import saving
from ferryman.engine import Engine
from support.checkpoints import everything, one_group
from support.models import CASES, TEXT_SIZES, VOCABULARY, Case, build, cut, on, plain_step, text
from support.slow import covering


def bart():
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
    return hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=VOCABULARY, **sizes, **heads))


def qwen2():
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**TEXT_SIZES, num_key_value_heads=2, tie_word_embeddings=True))


def marian():
    """Its tables of positions are in no file."""
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
    return hf.MarianMTModel(hf.MarianConfig(vocab_size=VOCABULARY, **sizes, **heads, **ends))


KINDS = {name: CASES[name] for name in ("gpt2", "llama", "bert", "t5", "mixtral", "vit")} | {
    "bart": Case(bart),
    "qwen2": Case(qwen2),
    "marian": Case(marian),
}


def logits(model, name):
    model.eval()
    batch = KINDS[name].batch(2)
    with torch.no_grad():
        return model(**batch).logits


def on_meta(name):
    with torch.device("meta"):
        return KINDS[name].make()


def training(model, **options):
    return Engine(model, one_group()(model), **{"device": "cpu", **options})


# Theirs from ours.


def test_a_tokenizer_is_part_of_the_checkpoint(tmp_path):
    """Its files are checked like all others, and it is not asked for what it does not have when it is loaded."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[?]": 0, "ferry": 1}, unk_token="[?]"))
    objects = {"tokenizer": hf.PreTrainedTokenizerFast(tokenizer_object=made)}
    with training(KINDS["gpt2"].make()) as engine:
        for _ in range(2):  # the second takes the place of the first
            engine.save(tmp_path / "saved", objects=objects)
        engine.load(tmp_path / "saved", objects=objects)
        assert hf.AutoTokenizer.from_pretrained(tmp_path / "saved")("ferry")["input_ids"] == [1]
        (tmp_path / "saved" / "tokenizer.json").write_text("{}")
        with pytest.raises(ValueError, match=r"tokenizer\.json is truncated"):
            engine.load(tmp_path / "saved")


@pytest.mark.trials  # ViT sets an attribute of its configuration in the first forward
@covering
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("limit", [None, 4096])
def test_transformers_loads_it(tmp_path, name, limit, monkeypatch):
    """Every tensor and no other; in several files, too."""
    if limit is not None:
        monkeypatch.setattr(saving, "_MAX_SHARD_BYTES", limit)
    model = build(KINDS[name])
    with training(model) as engine:
        engine.step(KINDS[name].batch(4), 2)
        engine.save(tmp_path / "saved")
        assert (limit is None) == (tmp_path / "saved" / "model.safetensors").exists()
        loaded, told = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
        assert not any(told.values()), told
        assert torch.equal(logits(loaded, name), logits(model, name))
        for key, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value), key


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_transformers_loads_it_in_the_precision_of_compute(tmp_path, precision):
    model = build(KINDS["llama"])
    with training(model, precision=precision) as engine:
        engine.step(text(4), 2)
        engine.save(tmp_path / "saved")
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert loaded.dtype == model.dtype != torch.float32
        assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)


def test_transformers_loads_inserted_blocks(tmp_path):
    model = build(KINDS["llama"])
    with Engine(model, device="cpu") as engine:
        engine.insert(1, build(KINDS["llama"], 7).model.layers[0])
        engine.save(tmp_path / "saved")
        loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
        assert loaded.config.num_hidden_layers == 3
        assert torch.equal(logits(loaded, "llama"), logits(model, "llama"))


# Ours from theirs.


@covering
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", ["5GB", "5KB"])
def test_pretrained_weights_into_a_model_on_meta(tmp_path, name, size):
    source = build(KINDS[name])
    source.save_pretrained(tmp_path, max_shard_size=size)
    with training(model := on_meta(name)) as engine:
        engine.load_weights(tmp_path)
        assert torch.equal(logits(model, name), logits(source, name))
        engine.step(KINDS[name].batch(4), 2)


@covering
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_they_train_as_the_model_they_are_from(tmp_path, device, precision):
    build(KINDS["llama"]).save_pretrained(tmp_path)
    losses = []
    for model in (hf.LlamaForCausalLM.from_pretrained(tmp_path), on_meta("llama")):
        with training(model.train(), device=device, precision=precision) as engine:
            if not losses:
                engine.load_weights(tmp_path)  # over what is there
            engine.load_weights(tmp_path)
            losses.append([engine.step(text(4, number), 2).item() for number in range(3)])
            found = everything(engine)
    assert losses[0] == losses[1]
    assert found["model.embed_tokens.weight"].dtype == torch.float32


def test_experts_in_files_of_their_own_names(tmp_path):
    """As Mixtral was published: a tensor for each expert, under other names."""
    source = build(KINDS["mixtral"])
    source.save_pretrained(tmp_path / "now")
    names = load_file(tmp_path / "now" / "model.safetensors")
    assert any(".experts.3.w2" in name for name in names), sorted(names)
    assert not names.keys() <= source.state_dict().keys()
    with training(model := on_meta("mixtral")) as engine:
        engine.load_weights(tmp_path / "now")
        for key, value in source.state_dict().items():
            assert torch.equal(model.state_dict()[key], value), key


def test_a_base_model_and_the_whole_have_other_prefixes(tmp_path):
    source = build(KINDS["gpt2"])
    source.transformer.save_pretrained(tmp_path)  # the head is the embedding
    with training(model := on_meta("gpt2")) as engine:
        engine.load_weights(tmp_path)
        assert torch.equal(logits(model, "gpt2"), logits(source, "gpt2"))
    source.save_pretrained(tmp_path)
    with torch.device("meta"):
        base = hf.GPT2Model(source.config)
    with Engine(base, device="cpu") as engine:
        engine.load_weights(tmp_path)
        assert torch.equal(base.h[1].mlp.c_fc.weight, source.transformer.h[1].mlp.c_fc.weight)


def test_a_part_of_what_files_have(tmp_path):
    """What transformers passes over, an encoder's decoder, is passed over; a head that nobody has is not."""
    source = build(KINDS["t5"])
    source.save_pretrained(tmp_path)
    with torch.device("meta"):
        encoder = hf.T5EncoderModel(source.config)
    with Engine(encoder, device="cpu") as engine:
        engine.load_weights(tmp_path)
        assert torch.equal(encoder.shared.weight, source.shared.weight)
    build(KINDS["llama"]).save_pretrained(tmp_path)
    with torch.device("meta"):
        base = hf.LlamaModel(build(KINDS["llama"]).config)
    with Engine(base, device="cpu") as engine, pytest.raises(ValueError, match=r"'lm_head\.weight' not in the model"):
        engine.load_weights(tmp_path)


def test_models_of_ones_own(tmp_path, device):
    source = build(CASES["toy"])
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    with torch.device("meta"):
        model = CASES["toy"].make()
    with Engine(model.train(), device=device) as engine:
        engine.load_weights(tmp_path)
        torch.manual_seed(1)
        loss = engine.forward_backward(text(4), 2)
        torch.manual_seed(1)
        assert torch.equal(loss.cpu(), plain_step(on(device, source), cut(text(4), 2)).loss)


def test_what_is_in_no_file_is_said(tmp_path):
    source = build(KINDS["llama"])
    source.save_pretrained(tmp_path)
    with training(model := on_meta("gpt2")) as engine:
        with pytest.raises(
            ValueError, match=r"does not fit this model \(a GPT2LMHeadModel\): 'transformer.*missing in the files"
        ):
            engine.load_weights(tmp_path)
        with pytest.raises(ValueError, match="was on the meta device"):
            engine.step(text(4), 2)
    tensors = load_file(tmp_path / "model.safetensors")
    taken = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with training(model := build(KINDS["llama"], 3)) as engine:
        before = everything(engine)
        with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' missing in the files"):
            engine.load_weights(tmp_path)
        assert torch.equal(everything(engine)["lm_head.weight"], before["lm_head.weight"])
        save_file({**tensors, "model.layers.1.mlp.up_proj.weight": taken[:3]}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"has shape \(32, 16\) in the model and \(3, 16\) in the files"):
            engine.load_weights(tmp_path)
        engine.step(text(4), 2)
    assert model.training


def test_directories_without_weights_are_said(tmp_path):
    with training(build(KINDS["gpt2"])) as engine:
        with pytest.raises(ValueError, match="is not a directory"):
            engine.load_weights(tmp_path / "nothing")
        with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
            engine.load_weights(tmp_path)
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle"):
            engine.load_weights(tmp_path)
        engine._model.save_pretrained(tmp_path, max_shard_size="5KB")
        gone = sorted(tmp_path.glob("*.safetensors"))[1]
        kept = gone.read_bytes()
        gone.unlink()
        with pytest.raises(ValueError, match=rf"{gone.name} is missing"):
            engine.load_weights(tmp_path)
        gone.write_bytes(kept[:-1])
        with pytest.raises(ValueError, match=rf"{gone.name} is truncated"):
            engine.load_weights(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_text("{")
        with pytest.raises(ValueError, match=r"index\.json is damaged"):
            engine.load_weights(tmp_path)


def test_a_checkpoint_after_pretrained_weights(tmp_path):
    """Weights that are loaded into an engine that came from a checkpoint are those that it trains, and saves."""
    source = build(KINDS["gpt2"], 4)
    source.save_pretrained(tmp_path / "theirs")
    with training(model := build(KINDS["gpt2"])) as engine:
        engine.step(text(4), 2)
        engine.save(tmp_path / "ours")
        engine.load(tmp_path / "ours")
        engine.load_weights(tmp_path / "theirs")
        engine.save(tmp_path / "ours")
    with training(model := on_meta("gpt2")) as engine:
        engine.load(tmp_path / "ours")
        assert engine.steps == 1
        assert torch.equal(logits(model, "gpt2"), logits(source, "gpt2"))


def test_a_checkpoint_into_a_model_on_meta(tmp_path, device):
    with training(model := build(KINDS["llama"]), device=device, precision="bf16") as engine:
        engine.step(text(4), 2)
        engine.save(tmp_path / "saved")
        expected = engine.step(text(4, 2), 2)
    with training(on_meta("llama").train(), device=device, precision="bf16") as engine:
        engine.load(tmp_path / "saved")
        assert torch.equal(engine.step(text(4, 2), 2), expected)
    assert model.training


# Adapters.


def adapted(seed):
    peft = pytest.importorskip("peft")
    base = build(KINDS["llama"])
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config)


def test_adapters_alone_are_saved(tmp_path):
    peft = pytest.importorskip("peft")
    with training(model := adapted(1)) as engine:
        engine.step(text(4), 2)
        engine.save(tmp_path / "saved")
        expected, shown = logits(model, "llama"), everything(engine)
    total = sum(path.stat().st_size for path in (tmp_path / "saved").rglob("*.safetensors"))
    assert total < sum(p.nbytes for p in model.parameters()), "the model below is the user's"
    loaded = peft.PeftModel.from_pretrained(build(KINDS["llama"]), tmp_path / "saved")
    assert torch.equal(logits(loaded, "llama"), expected)
    with training(model := adapted(2)) as engine:
        engine.load(tmp_path / "saved")
        assert torch.equal(logits(model, "llama"), expected)
        assert everything(engine).keys() == shown.keys()
        model.train()
        engine.step(text(4), 2)


# Host memory.

HOST = """
import os, sys, torch
from safetensors.torch import save_file
from torch import nn
from ferryman.engine import Engine
from ferryman.runtime.host_memory import trim

def high():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10

def reset():
    trim()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return high()

def make():
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024)) for _ in range(4)))

directory = sys.argv[1]
if not os.fork():
    save_file(make().state_dict(), directory + "/model.safetensors")
    os._exit(0)
os.wait()
with torch.device("meta"):
    model = make()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
before = reset()
engine = Engine(model, optimizer, device="cpu", precision="bf16")
engine.load_weights(directory)
print("load_weights", high() - before - sum(engine.host_account.values()))
engine.save(directory + "/first")  # and what the process loads of libraries
start = reset()
engine.save(directory + "/saved")
print("save", high() - start)
start = reset()
engine.load(directory + "/saved")
print("load", high() - start)
print("unit", max(unit.nbytes for unit in engine.units))
"""


@pytest.mark.slow
def test_host_memory(tmp_path):
    """What loading and saving take beside the server's own: less than one unit."""
    memory = Path("/dev/shm")  # files there are not the process's memory, and no disk is waited for
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as place:
        done = subprocess.run([sys.executable, "-c", HOST, place], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    found = {name: int(count) for name, count in (line.split() for line in done.stdout.splitlines())}
    assert found["unit"] > 4 << 20
    for name in ("save", "load"):
        assert found[name] < found["unit"], found
    # Weights come in float32, and are twice as large as the unit then; and the engine itself has its objects.
    assert found["load_weights"] < 3 * found["unit"], found
