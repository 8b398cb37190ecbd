"""The examples with transformers run, at their tiny size."""

import subprocess
import sys
from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, tmp_path):
    command = [sys.executable, EXAMPLES / name, "--tiny", "--steps", "3", "--output", tmp_path]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout


def test_trainer(tmp_path):
    assert "loss on what it has seen" in run("finetune_trainer.py", tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 6


def test_lora(tmp_path, monkeypatch):
    assert "optimizer state" in run("finetune_lora.py", tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from finetune_trainer import tiny_model

    assert PeftModel.from_pretrained(tiny_model(), tmp_path).active_adapter == "default"
