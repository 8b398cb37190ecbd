"""Checkpoints of several ranks: written together, whole or not at all, and read by any number of them."""

import json

import pytest
import torch
import transformers as hf

from support import rank_jobs
from support.devices import chosen_accelerator
from support.models import CASES, build
from support.slow import slow


def assert_equal(weights, others):
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


ACCELERATOR = chosen_accelerator() or "cpu"
WAYS = {
    "fp32": {"device": "cpu"},
    "bf16": {"device": ACCELERATOR, "precision": "bf16", "max_grad_norm": 0.5},
    "static": {"device": ACCELERATOR, "updates": "static:0.5", "subgroup": 64, "deferred": True},
}


@pytest.mark.parametrize("way", ["bf16", *slow("fp32", "static")])
def test_the_same_number_of_ranks_goes_on_to_the_last_bit(way, two, tmp_path):
    whole = two.run(rank_jobs.train_and_save, steps=5, **WAYS[way])
    first = two.run(rank_jobs.train_and_save, steps=3, save=tmp_path / "there", **WAYS[way])
    second = two.run(rank_jobs.train_and_save, steps=2, load=tmp_path / "there", **WAYS[way])
    for rank in range(2):
        assert first[rank][0] + second[rank][0] == whole[rank][0]
        assert_equal(second[rank][1], whole[rank][1])


def test_state_that_is_torchs_own_is_saved_by_who_has_it(two, tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    alone = rank_jobs.rmsprop_again(tmp_path / "one")
    for weights in two.run(rank_jobs.rmsprop_again, tmp_path / "two"):
        for name, value in alone.items():
            assert torch.allclose(weights[name], value, atol=2e-6), name


def test_transformers_loads_it(two, tmp_path):
    (_, weights), _ = two.run(rank_jobs.train_and_save, "cpu", 2, save=tmp_path / "there")
    assert_equal(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "there").state_dict(), weights)
    written = json.loads((tmp_path / "there" / "ferryman" / "checkpoint.json").read_text())["content"]
    assert written["state"] == ["ferryman/state.rank0.safetensors", "ferryman/state.rank1.safetensors"]


@pytest.mark.parametrize("precision", ["bf16", *slow(None)])
def test_from_two_ranks_to_one_and_back(precision, two, tmp_path):
    whole = two.run(rank_jobs.train_and_save, "cpu", 6, precision=precision)[0]
    losses = []
    for place, ranks in enumerate((two, None, two)):
        options = {"save": tmp_path / str(place), "load": tmp_path / str(place - 1) if place else None}
        if ranks is None:
            losses += rank_jobs.train_and_save("cpu", 2, precision=precision, **options)[0]
        else:
            (some, weights), _ = ranks.run(rank_jobs.train_and_save, "cpu", 2, precision=precision, **options)
            losses += some
    limit = 1e-5 if precision is None else 1e-2
    assert losses == pytest.approx(whole[0], rel=limit)
    for name, value in whole[1].items():
        assert torch.allclose(weights[name], value, atol=limit), name


@pytest.mark.slow
def test_four_two_one_four(two, four, tmp_path):
    whole = four.run(rank_jobs.train_and_save, "cpu", 8)[0]
    losses = []
    for place, ranks in enumerate((four, two, None, four)):
        options = {"save": tmp_path / str(place), "load": tmp_path / str(place - 1) if place else None}
        if ranks is None:
            losses += rank_jobs.train_and_save("cpu", 2, **options)[0]
        else:
            losses += ranks.run(rank_jobs.train_and_save, "cpu", 2, **options)[0][0]
    assert losses == pytest.approx(whole[0], rel=1e-5)


def test_another_precision_is_taken_from_all_parts(two, tmp_path):
    (_, weights), _ = two.run(rank_jobs.train_and_save, "cpu", 2, save=tmp_path / "narrow", precision="bf16")
    (_, wide), _ = two.run(rank_jobs.train_and_save, "cpu", 0, load=tmp_path / "narrow")
    assert_equal(wide, weights)  # the float32 that the engine gave back when it was closed


def test_one_that_cannot_be_written_fails_on_all_and_they_go_on(two, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.txt").write_text("years of work")
    two.start(rank_jobs.train_and_save, "cpu", 1, save=tmp_path / "there")
    for answer in two.answers():
        assert "is not a checkpoint" in str(answer)
    two.run(rank_jobs.train_and_save, "cpu", 1, save=tmp_path / "series", keep=2)
    assert [path.name for path in (tmp_path / "series").iterdir()] == ["step-00000001"]


def test_a_damaged_part_is_named_on_all(two, tmp_path):
    two.run(rank_jobs.train_and_save, "cpu", 1, save=tmp_path / "there")
    file = tmp_path / "there" / "ferryman" / "state.rank1.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    two.start(rank_jobs.train_and_save, "cpu", 1, load=tmp_path / "there")
    for answer in two.answers():
        assert "state.rank1.safetensors is damaged" in str(answer)


def test_pretrained_weights_come_into_a_model_on_meta(two, tmp_path):
    model = build(CASES["llama"], seed=5)
    model.save_pretrained(tmp_path / "pretrained")
    for weights in two.run(rank_jobs.load_pretrained, tmp_path / "pretrained"):
        assert_equal(weights, model.state_dict())


@pytest.mark.parametrize("kept", ["bf16", "8bit"])
def test_compact_state_of_two_ranks(kept, two, tmp_path):
    """It is cut between blocks. One rank and two load each other's, also in float32, and two go on to the last bit."""
    alone = rank_jobs.train_compact(kept, save=tmp_path / "one")
    whole = two.run(rank_jobs.train_compact, kept, steps=5)
    parts = two.run(rank_jobs.train_compact, kept, save=tmp_path / "two")
    assert_equal(*parts)
    for name, value in alone.items():
        assert torch.allclose(parts[0][name], value, atol=2e-4), name
    for weights in two.run(rank_jobs.train_compact, kept, 3, 2, load=tmp_path / "two"):
        assert_equal(weights, whole[0])
    ends = [
        rank_jobs.train_compact(kept, 3, 2, load=tmp_path / "two"),
        rank_jobs.train_compact("fp32", 3, 2, load=tmp_path / "two"),
        two.run(rank_jobs.train_compact, kept, 3, 2, load=tmp_path / "one")[0],
        two.run(rank_jobs.train_compact, "fp32", 3, 2, load=tmp_path / "one", save=tmp_path / "wide")[0],
        rank_jobs.train_compact(kept, 3, 2, load=tmp_path / "one"),
    ]
    for end in ends:
        for name, value in end.items():
            assert torch.allclose(value, whole[0][name], atol=1e-3), name
    two.run(rank_jobs.train_compact, kept, 5, 1, load=tmp_path / "wide")
