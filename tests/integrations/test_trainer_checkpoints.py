"""FerrymanTrainer saves and resumes: as the engine does, where the Trainer looks for it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from support.slow import slow
from support.trainers import assert_near, assert_same_logs, build, ferryman_trainer, logs, trainer, weights

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}


def names(directory):
    return sorted(path.name for path in directory.glob("checkpoint-*"))


@pytest.mark.parametrize("bf16", [False, *slow(True)])
def test_resumes_as_if_nothing_had_happened(device, tmp_path, bf16):
    """In the middle of an epoch, with dropout."""
    whole = ferryman_trainer(device, "gpt2", tmp_path / "whole", bf16=bf16, **SAVING)
    whole.train()
    first = ferryman_trainer(device, "gpt2", tmp_path / "parts", bf16=bf16, **{**SAVING, "save_steps": 4})
    first.train()
    assert names(tmp_path / "parts") == ["checkpoint-4", "checkpoint-5"]
    # The last one was not written to its end.
    (tmp_path / "parts" / "checkpoint-5" / "trainer_state.json").unlink()
    second = ferryman_trainer(device, build("gpt2"), tmp_path / "parts", bf16=bf16, **SAVING)
    torch.rand(3)
    second.train(resume_from_checkpoint=True)
    assert logs(second)[:-1] == logs(whole)[:-1]  # the last entry is of this run alone
    assert_near(weights(second), weights(whole), 0)


def test_checkpoints_are_pickled_nowhere_and_load_as_models(accelerator, tmp_path):
    made = ferryman_trainer(accelerator, "llama", tmp_path, save_total_limit=2, **SAVING)
    made.train()
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-5"]
    last = tmp_path / "checkpoint-5"
    files = [path for path in last.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert json.loads((last / "trainer_state.json").read_text())["global_step"] == 5
    assert_near(dict(AutoModelForCausalLM.from_pretrained(last).state_dict()), weights(made), 0)


@pytest.mark.parametrize("only_model", [False, True])
def test_loads_the_best_model_at_the_end(accelerator, tmp_path, only_model):
    made = ferryman_trainer(
        accelerator, "llama", tmp_path, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        save_total_limit=1, save_only_model=only_model, eval_strategy="steps", eval_steps=2, **SAVING,
    )  # fmt: skip
    made.train()  # the data has nothing to learn: the first is the best
    assert names(tmp_path) == ["checkpoint-2"]
    assert_near(dict(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2").state_dict()), weights(made), 0)
    assert made.evaluate()["eval_loss"] == pytest.approx(made.state.best_metric, rel=1e-6)


def test_resumes_what_a_plain_trainer_has_saved(accelerator, tmp_path):
    plain = trainer(Trainer, "llama", tmp_path, **SAVING)
    plain.train()
    last = tmp_path / f"checkpoint-{plain.state.global_step}"
    (last / "notes.txt").write_text("mine")
    made = ferryman_trainer(accelerator, "llama", tmp_path, **SAVING)
    with pytest.warns(UserWarning, match="was saved by a plain Trainer"):  # nothing of it is lost
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert (tmp_path / f"plain-{last.name}" / "notes.txt").read_text() == "mine"
    assert_same_logs(made, plain, limit=1)  # the same entries
    assert_near(weights(made), weights(plain))


def test_says_where_there_is_nothing_to_resume(tmp_path):
    with pytest.raises(ValueError, match="no complete checkpoint in"):
        ferryman_trainer("cpu", "llama", tmp_path).train(resume_from_checkpoint=True)
