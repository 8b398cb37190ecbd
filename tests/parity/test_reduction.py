"""What micro-batches' losses make of the batch's: the mean by samples, or the sum of what was divided before."""

import copy

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from transformers import BatchEncoding

import ferryman
from support.models import CASES, build, gradients, on, text
from support.slow import covering


def ragged(samples=6):
    """Micro-batches with very different numbers of tokens that count."""
    batch = text(samples)
    for row, padding in enumerate([6, 0, 5, 3, 0, 6][:samples]):
        batch["labels"][row, 8 - padding :] = -100
    return batch


def items(batch):
    return int((batch["labels"][:, 1:] != -100).sum())


@covering
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_sum_over_tokens_is_that_of_the_whole_batch(device, name):
    model = build(CASES[name]).eval()  # no dropout: cutting the batch must change nothing
    plain = on(device, model)
    batch = ragged()
    loss = plain(**{key: value.to(device) for key, value in batch.items()}).loss
    loss.backward()
    expected = gradients(plain)
    with ferryman.Engine(model, device=device, reduction="sum") as engine:
        total = engine.forward_backward({**batch, "num_items_in_batch": items(batch)}, micro_batches=3)
        assert total.item() == pytest.approx(loss.item(), rel=1e-6)
        for key, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-5, atol=1e-7)


@covering
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_plain_accumulation(device, reduction):
    model = build(CASES["llama"])
    plain = on(device, model)
    parts = [
        {key: value[start : start + size] for key, value in ragged().items()}
        for start, size in ((0, 3), (3, 2), (5, 1))
    ]
    count = sum(map(items, parts))

    def loss_of(model, part):
        logits = model(input_ids=part["input_ids"]).logits[:, :-1].flatten(0, 1)
        summed = F.cross_entropy(logits, part["labels"][:, 1:].flatten(), reduction="sum")
        return summed / (count if reduction == "sum" else len(part["labels"]))

    losses = []
    for part in parts:
        weight = 1.0 if reduction == "sum" else len(part["labels"]) / 6
        losses.append(loss_of(plain, {key: value.to(device) for key, value in part.items()}) * weight)
        losses[-1].backward()
    with ferryman.Engine(model, device=device, loss=loss_of, reduction=reduction) as engine:
        total = engine.forward_backward(parts)
        assert torch.equal(total, sum(losses[1:], losses[0]).detach())
        for key, gradient in gradients(plain).items():
            assert torch.equal(gradients(model)[key], gradient), key


def test_ready_micro_batches_may_be_what_a_tokenizer_makes(device):
    model = build(CASES["llama"])
    other = copy.deepcopy(model)
    with ferryman.Engine(model, device=device) as engine, ferryman.Engine(other, device=device) as plain:
        loss = engine.forward_backward([BatchEncoding(ragged(2)), BatchEncoding(ragged(4))])
        assert torch.equal(loss, plain.forward_backward([ragged(2), ragged(4)]))


def test_refuses_other_reductions():
    with pytest.raises(ValueError, match=r"reduction='tokens'.*'mean'.*'sum'"):
        ferryman.Engine(build(CASES["llama"]), reduction="tokens")
