"""Several ranks train as one process does that has all of their micro-batches."""

import pytest
import rank_jobs
import torch
from ranks import Ranks
from updates import WAYS


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def compare(ranks, *args, **options):
    found = ranks.run(rank_jobs.train, *args, **options)
    losses, norms, weights = rank_jobs.train_alone(*args, **options)
    for theirs in found:
        assert theirs[0] == pytest.approx(losses, rel=1e-5)
        assert theirs[1] == pytest.approx(norms, rel=1e-4)
        for name, value in weights.items():
            assert torch.allclose(theirs[2][name], value, atol=2e-6), name
    for name, value in found[0][2].items():
        assert all(torch.equal(value, theirs[2][name]) for theirs in found), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", ["cpu", "virtual"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_two_ranks(name, device, way, two):
    compare(two, name, device, (2, 2), **WAYS[way])


@pytest.mark.parametrize("counts", [(3, 1), (2, 0), (0, 2)])
@pytest.mark.parametrize("way", ["eager", "clipped"])
@pytest.mark.parametrize("device", ["cpu", "virtual"])
def test_ranks_with_fewer_micro_batches_or_none(device, way, counts, two):
    compare(two, "gpt2", device, counts, **WAYS[way])


@pytest.mark.parametrize("way", ["eager", "clipped"])
@pytest.mark.parametrize("updates", ["stride:2", "static:0.5", "auto", "host"])
@pytest.mark.parametrize("held", [False, True])
def test_all_policies(held, updates, way, two):
    compare(two, "llama", "virtual", (1, 1), updates=updates, subgroup=64, held=held, **WAYS[way])


@pytest.mark.parametrize("name", ["t5", "mixtral", "skipping", "frozen", "reused", "two losses"])
def test_models(name, two):
    compare(two, name, "virtual", (2, 1))
