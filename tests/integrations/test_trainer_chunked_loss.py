"""FerrymanTrainer trains without logits, and still has them in evaluations."""

import pytest
import torch
import transformers as hf

from ferryman.model import chunked_cross_entropy
from support.models import TEXT_SIZES
from support.trainers import assert_same_logs, ferryman_trainer, nothing_left, trainer


def llama():
    torch.manual_seed(0)
    sizes = {**TEXT_SIZES, "vocab_size": chunked_cross_entropy.COLUMNS + 100}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=2))


def test_equals_the_plain_trainer(accelerator, tmp_path):
    shapes = []

    def metrics(prediction):
        shapes.append(prediction.predictions.shape)
        return {}

    plain = trainer(hf.Trainer, llama(), tmp_path / "plain", max_steps=2)
    plain.train()
    made = ferryman_trainer(
        accelerator,
        llama(),
        tmp_path / "ours",
        engine={"chunked_loss": True},
        max_steps=2,
        others={"compute_metrics": metrics},
    )
    with nothing_left(made):
        made.train()
    assert_same_logs(made, plain, 1e-5)
    made.evaluate()
    assert shapes == [(5, 8, chunked_cross_entropy.COLUMNS + 100)]


def test_label_smoothing_is_refused(accelerator, tmp_path):
    engine = {"chunked_loss": True}
    made = ferryman_trainer(accelerator, llama(), tmp_path, engine=engine, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"chunked_loss=True: .*log_softmax.*chunked_loss=False"):
        made.train()
