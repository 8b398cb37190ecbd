"""With a chunked loss, what a step needs for its head follows the chunk, and not the size of the vocabulary."""

import pytest
import torch
import transformers as hf

from ferryman.engine import Engine
from ferryman.forecast.dry_run import dry_run
from ferryman.model.chunked_cross_entropy import COLUMNS
from ferryman.model.loss import model_loss
from ferryman.model.unit_discovery import find_units
from support.devices import torch_virtual

DEVICE = "virtual:0"
VOCABULARY, TOKENS, FEW = 32 * COLUMNS, 64, 2
LOGITS = TOKENS * VOCABULARY * 4


def make():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCABULARY, **sizes)).train()


def batch_of(tokens, device="cpu"):
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": ids, "labels": ids}


def peak_of(engine, tokens):
    for _ in range(2):  # the first step finds where the turn is
        engine.forward_backward(batch_of(tokens), 1)
        engine.zero_grad()
    torch_virtual.synchronize()
    with torch_virtual.watch(DEVICE) as seen:
        engine.forward_backward(batch_of(tokens), 1)
    return seen.counters.peak_memory


@pytest.mark.usefixtures("virtual")
def test_at_most_a_tenth_of_the_logits_above_the_rest():
    above = {}
    for chunked in (True, False):
        with Engine(make(), device=DEVICE, chunked_loss=chunked) as engine:
            above[chunked] = peak_of(engine, TOKENS) - peak_of(engine, FEW)
    assert above[True] <= 0.1 * LOGITS
    assert above[False] >= 2 * LOGITS


def test_a_dry_run_counts_it():
    with torch.device("meta"):
        model = make()
    units, residents = find_units(model)
    peaks = {}
    for chunked in (True, False):
        for tokens in (TOKENS, FEW):
            found = dry_run(model, units, residents, model_loss, batch_of(tokens, "meta"), chunked_loss=chunked)
            peaks[chunked, tokens] = max(stretch.peak for stretch in found.trial.stretches)
    assert peaks[True, TOKENS] - peaks[True, FEW] <= 0.1 * LOGITS
    assert peaks[False, TOKENS] - peaks[False, FEW] >= 2 * LOGITS
    assert all("forward" not in vars(module) for module in model.modules())
