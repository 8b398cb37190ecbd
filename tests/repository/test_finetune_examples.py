"""The examples with transformers run, at their tiny size."""

import runpy
import sys
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """In this process, which has imported already what takes longest."""

    def run(name):
        monkeypatch.setattr(sys, "argv", [name, "--tiny", "--steps", "3", "--output", str(tmp_path)])
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_trainer(run, tmp_path):
    assert "loss on what it has seen" in run("finetune_trainer.py")
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 6


@pytest.mark.slow
def test_lora(run, tmp_path):
    assert "optimizer state" in run("finetune_lora.py")
    from finetune_trainer import tiny_model

    assert PeftModel.from_pretrained(tiny_model(), tmp_path).active_adapter == "default"
