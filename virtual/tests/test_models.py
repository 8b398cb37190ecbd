"""Three training steps of tiny random transformers equal the CPU's to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch_virtual
import transformers
from torch import nn

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 96}
STEPS = 3

Batch = dict[str, torch.Tensor]


def _tokens(step: int) -> torch.Tensor:
    return torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(step))


def _causal(step: int) -> Batch:
    tokens = _tokens(step)
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def _masked(step: int) -> Batch:
    tokens = _tokens(step)
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def _pictures(step: int) -> Batch:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(step))
    return {"pixel_values": pixels, "labels": torch.tensor([1, 0])}


def _gpt2(attention: str) -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=16)
    config._attn_implementation = attention
    return transformers.GPT2LMHeadModel(config)


def _llama(attention: str) -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=16, attention_dropout=0.1)
    config._attn_implementation = attention
    return transformers.LlamaForCausalLM(config)


def _bert(attention: str) -> nn.Module:
    config = transformers.BertConfig(**SMALL, max_position_embeddings=16)
    config._attn_implementation = attention
    return transformers.BertForMaskedLM(config)


def _t5(attention: str) -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0, use_cache=False
    )
    config._attn_implementation = "eager" if attention == "eager" else None
    return transformers.T5ForConditionalGeneration(config)


def _mixtral(attention: str) -> nn.Module:
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=16, output_router_logits=True
    )
    config._attn_implementation = attention
    return transformers.MixtralForCausalLM(config)


def _vit(attention: str) -> nn.Module:
    options = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    config = transformers.ViTConfig(**options, image_size=16, patch_size=4, num_labels=2, hidden_dropout_prob=0.1)
    config._attn_implementation = attention
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, tuple[Callable[[str], nn.Module], Callable[[int], Batch]]] = {
    "GPT-2": (_gpt2, _causal),
    "Llama": (_llama, _causal),
    "BERT": (_bert, _masked),
    "T5": (_t5, _masked),
    "Mixtral": (_mixtral, _causal),
    "ViT": (_vit, _pictures),
}


def make(name: str, attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name][0](attention).train()


def train(
    model: nn.Module, batches: list[Batch], autocast: torch.dtype | None = None, **optimizer_options: bool
) -> list:
    """Losses and, at the end, all parameters."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **optimizer_options)
    torch.manual_seed(7)  # dropout's: the same on both devices
    losses = []
    for batch in batches:
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [losses, [p.detach() for p in model.parameters()]]


def moved(batch: Batch, device: str = "virtual", **options: bool) -> Batch:
    return {k: v.to(device, **options) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("optimizer", ["fused", "foreach"])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_cpus(same, name, optimizer, attention):
    batches = [MODELS[name][1](step) for step in range(STEPS)]
    model = make(name, attention)
    assert any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()) or name in ("Llama", "Mixtral")
    on_device = copy.deepcopy(model).to("virtual")
    start = [p.detach().clone() for p in model.parameters()]
    expected = train(model, batches, **{optimizer: True})
    with torch_virtual.strict():
        got = train(on_device, [moved(b) for b in batches], **{optimizer: True})
    same(got, expected)
    assert any(not torch.equal(p, q) for p, q in zip(start, expected[1], strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_training_with_batches_copied_ahead_and_delays(same, name):
    """Batches come from pinned memory on a stream of their own, late: equal all the same, and without a race."""
    batches = [MODELS[name][1](step) for step in range(STEPS)]
    pinned = [{k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in b.items()} for b in batches]
    model = make(name)
    on_device = copy.deepcopy(model).to("virtual")
    expected = train(model, batches, fused=True)
    fetch, compute = torch.Stream("virtual"), torch_virtual.current_stream()

    def arriving():
        for batch in pinned:
            with fetch:
                there = moved(batch, non_blocking=True)
            compute.wait_stream(fetch)
            yield there
            fetch.wait_stream(compute)  # the batch's memory goes back to the fetching stream
            del there

    with torch_virtual.strict(), torch_virtual.link(delay=0.03):
        got = train(on_device, arriving(), fused=True)
    same(got, expected)


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_training_with_batches_nobody_waits_for_is_caught(take_races, name):
    """The negative control: without the wait the same loop is a race, and its first batch is wrong."""
    batch = MODELS[name][1](0)
    batch["labels"] = batch["labels"].clone()  # as its own buffer
    pinned = {k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    model = make(name).to("virtual")
    fetch = torch.Stream("virtual")
    with torch_virtual.link(delay=0.2):
        with fetch:
            there = moved(pinned, non_blocking=True)
        with pytest.raises(RuntimeError, match="reads what 'copy host to device' on stream"), torch_virtual.strict():
            model(**there)
    torch_virtual.synchronize()
    assert len(take_races()) == 1


@pytest.mark.parametrize("name", MODELS)
def test_training_in_bfloat16_autocast(name):
    batches = [MODELS[name][1](step) for step in range(STEPS)]
    model = make(name).eval()  # without dropout: under autocast the two devices' operator lists differ
    on_device = copy.deepcopy(model).to("virtual")
    expected, _ = train(model, batches, torch.bfloat16, fused=True)
    got, parameters = train(on_device, [moved(b) for b in batches], torch.bfloat16, fused=True)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.isfinite(mine)
        assert mine.item() == pytest.approx(theirs.item(), rel=0.05)
    assert all(torch.isfinite(p).all() and p.dtype == torch.float32 for p in parameters)


def test_memory_returns_to_where_it_was():
    """Parameters, their gradients and the optimizer's state are all that a step leaves behind."""
    base = torch_virtual.memory_allocated()
    model = make("GPT-2").to("virtual")
    weights = sum(p.nbytes for p in model.parameters())
    assert torch_virtual.memory_allocated() - base == weights + sum(b.nbytes for b in model.buffers())
    model(**moved(_causal(0))).loss.backward()
    assert torch_virtual.memory_allocated() - base == 2 * weights + sum(b.nbytes for b in model.buffers())
    model.to("cpu")
    del model
    assert torch_virtual.memory_allocated() == base
