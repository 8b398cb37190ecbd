"""FerrymanTrainer on several ranks: the run of one process that has all of their micro-batches."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from support import rank_jobs
from support.devices import chosen
from support.slow import slow
from support.trainers import assert_near


def assert_near_runs(ours, theirs):
    assert len(ours[0]) == len(theirs[0])
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert mine == {key: pytest.approx(value, rel=1e-4, abs=1e-6) for key, value in other.items()}
    assert_near(ours[1], theirs[1], 2e-5)


def assert_equals_one_process(ranks, size, tmp_path, device):
    arguments = {"model": "llama", "device": device, "rows": 32}
    alone = rank_jobs.fit(directory=tmp_path / "one", gradient_accumulation_steps=2 * size, **arguments)
    found = ranks.run(rank_jobs.fit, directory=tmp_path / "all", gradient_accumulation_steps=2, **arguments)
    for theirs in found:
        assert_near_runs(theirs, alone)
    for name, value in found[0][1].items():
        assert all(torch.equal(value, theirs[1][name]) for theirs in found), name


@pytest.mark.parametrize("device", chosen())
def test_two_ranks(device, two, tmp_path):
    assert_equals_one_process(two, 2, tmp_path, device)


@pytest.mark.parametrize("average", slow(False, True))
def test_a_plain_trainer_on_two_ranks(average, two, accelerator, tmp_path):
    """Whatever losses are divided by; and where an epoch does not come out even."""
    arguments = {"rows": 22, "average_tokens_across_devices": average, "num_train_epochs": 2, "max_steps": -1}
    found = two.run(rank_jobs.fit, "llama", tmp_path / "ours", device=accelerator.type, **arguments)
    plain = two.run(rank_jobs.fit, "llama", tmp_path / "plain", **arguments)
    for ours, theirs in zip(found, plain, strict=True):
        assert_near_runs(ours, theirs)


@pytest.mark.slow
def test_four_ranks(four, accelerator, tmp_path):
    assert_equals_one_process(four, 4, tmp_path, accelerator.type)


def test_saved_and_resumed(two, accelerator, tmp_path):
    arguments = {"model": "llama", "device": accelerator.type, "rows": 32, "save_strategy": "steps", "save_steps": 2}
    whole = two.run(rank_jobs.fit, directory=tmp_path / "run", **arguments)
    path = tmp_path / "run" / "checkpoint-4"
    resumed = two.run(rank_jobs.fit, directory=tmp_path / "again", resume=str(path), **arguments)
    assert resumed[0][0] == whole[0][0]
    for (_, weights), (_, expected) in zip(resumed, whole, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    saved = AutoModelForCausalLM.from_pretrained(path)
    assert saved.config.model_type == "llama"
    alone = rank_jobs.fit(directory=tmp_path / "alone", resume=str(path), gradient_accumulation_steps=8, **arguments)
    assert_near(alone[1], whole[0][1], 2e-5)
