"""`ferryman train` and `ferryman plan` compute losses in chunks of a large vocabulary, unless they are told not to."""

import json

import numpy as np
import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from ferryman.cli.main import app
from ferryman.model.chunked_cross_entropy import COLUMNS
from support.commands import metrics, trained

VOCABULARY = 16 * COLUMNS
LOGITS = 32 * VOCABULARY * 4  # of one window


@pytest.fixture
def config(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama" / "config.json"


@pytest.mark.usefixtures("virtual")
def test_train(config, tmp_path):
    runs, data = {}, tmp_path / "tokens.bin"
    np.arange(4096, dtype=np.uint16).tofile(data)
    for way in ("--chunked-loss", "--no-chunked-loss", ""):
        run = tmp_path / f"run{way}"
        arguments = ["--device", "virtual", "--steps", 2, "--batch", 1, "--eval-every", 1, "--eval-windows", 2]
        trained(config, "--data", data, "-o", run, *arguments, "--sample", 3, *filter(None, [way]))
        assert len(metrics(run, "eval")) == 3
        runs[way] = run
    peaks = {way: metrics(run)[-1]["device_peak"] for way, run in runs.items()}
    assert max(peaks[""], peaks["--chunked-loss"]) <= peaks["--no-chunked-loss"] - LOGITS
    for event in ("step", "eval"):
        found = [[line["loss"] for line in metrics(runs[way], event)] for way in ("", "--no-chunked-loss")]
        assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_plan(config):
    def activations(*way):
        machine = ["--device-memory", "1GiB", "--host-memory", "64GiB", "--link", "12GB/s", "--device-flops", "1TFLOPS"]
        arguments = [str(config), *machine, "--host-updates", "900Mparam/s", "--batch", "1", *way, "--json"]
        found = json.loads(CliRunner().invoke(app, ["plan", *arguments]).stdout)
        return found["device"]["one call's activations"]

    assert activations() == activations("--chunked-loss")
    assert activations() <= activations("--no-chunked-loss") - LOGITS
