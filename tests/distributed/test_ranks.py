"""Several ranks train as one process does that has all of their micro-batches."""

import math
import os
import signal
import time

import pytest
import torch

from ferryman.distributed.ranks import RankError
from ferryman.forecast.estimate import Machine, Training, estimate_step
from ferryman.plan.network import Cluster
from ferryman.plan.rates import Rates
from support import rank_jobs
from support.devices import chosen, chosen_accelerator, whole
from support.models import CASES, build
from support.ranks import Ranks
from support.slow import covering, cpu_is_slow, slow
from support.updates import WAYS, adamw


def differences(ranks, *args, memory=None, **options):
    """What differs between ranks that have this budget and one process that has none."""
    found = ranks.run(rank_jobs.train, *args, memory=memory, **options)
    losses, norms, weights = rank_jobs.train_alone(*args, **options)
    wrong = []
    for rank, (theirs, their_norms, their_weights) in enumerate(found):
        if theirs != pytest.approx(losses, rel=1e-5):
            wrong.append(f"rank {rank}: losses {theirs}, not {losses}")
        if their_norms != pytest.approx(norms, rel=1e-4):
            wrong.append(f"rank {rank}: norms {their_norms}, not {norms}")
        wrong += [
            f"rank {rank}: {name}"
            for name, value in weights.items()
            if not torch.allclose(their_weights[name], value, atol=2e-6)
            or not torch.equal(their_weights[name], found[0][2][name])
        ]
    return wrong


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", cpu_is_slow())
@pytest.mark.parametrize("name", ["gpt2", *slow("llama")])
def test_two_ranks(name, device, way, two):
    assert differences(two, name, device, (2, 2), **WAYS[way]) == []


@covering
@pytest.mark.parametrize("counts", [(3, 1), (0, 2), *slow(((2, 0),))])
@pytest.mark.parametrize("way", ["eager", "clipped"])
@pytest.mark.parametrize("device", cpu_is_slow())
def test_ranks_with_fewer_micro_batches_or_none(device, way, counts, two):
    assert differences(two, "gpt2", device, counts, **WAYS[way]) == []


@covering
@pytest.mark.parametrize("way", ["eager", "clipped"])
@pytest.mark.parametrize("updates", ["stride:2", "auto", *slow("static:0.5", "host")])
@pytest.mark.parametrize("held", [False, *slow(True)])
def test_all_policies(held, updates, way, two, accelerator):
    assert (
        differences(two, "llama", accelerator.type, (1, 1), updates=updates, subgroup=64, held=held, **WAYS[way]) == []
    )


@pytest.mark.parametrize(
    "name",
    [
        "skipping",
        "frozen",
        *slow("t5", "mixtral", "reused", "two losses"),
    ],
)
def test_models(name, two, accelerator):
    assert differences(two, name, accelerator.type, (2, 1)) == []


@pytest.mark.parametrize("device", chosen())
def test_gradients_that_were_kept(device, two):
    found = two.run(rank_jobs.in_two_parts, "llama", device, (2, 1))
    losses, _, weights = rank_jobs.in_two_parts("llama", device, (2, 1))
    for theirs in found:
        assert theirs[0] == pytest.approx(losses, rel=1e-5)
        assert all(torch.allclose(theirs[2][name], value, atol=2e-6) for name, value in weights.items())


@pytest.mark.parametrize("precision", ["fp16", *slow("bf16")])
@pytest.mark.parametrize("way", ["eager", "clipped"])
def test_precisions(way, precision, two, accelerator):
    options = {"precision": precision, **WAYS[way]}
    found = two.run(rank_jobs.train, "llama", accelerator.type, (2, 2), **options)
    losses, norms, weights = rank_jobs.train_alone("llama", accelerator.type, (2, 2), **options)
    for theirs in found:
        assert theirs[0] == pytest.approx(losses, rel=2e-3)
        assert theirs[1] == pytest.approx(norms, rel=2e-2)
        for name, value in weights.items():
            assert torch.allclose(theirs[2][name], value, atol=2e-3), name


@pytest.mark.parametrize("make", [rank_jobs.rmsprop, rank_jobs.several, rank_jobs.decays_all])
def test_optimizers_that_step_by_themselves(make, two):
    assert differences(two, "llama", "cpu", (1, 1), make=make) == []


@pytest.mark.parametrize("about", ["model", "layers", "frozen", "lr", "max_grad_norm", "agree"])
def test_ranks_that_disagree_are_told_by_name(about, two):
    names = {
        "model": "the model's '",
        "layers": "the model's 'model.layers.2.",
        "frozen": "lm_head",
        "lr": "'lr' of the optimizer's group 0: rank 0 has 0.001, rank 1 has 0.002.",
        "agree": "steps",
    }
    two.start(rank_jobs.disagreeing, about)
    for answer in two.answers():
        assert isinstance(answer, ValueError)
        assert f"the ranks do not agree on {'' if about != 'frozen' else 'the model'}" in str(answer)
        assert names.get(about, about) in str(answer)


def test_rates_that_differ_are_refused(two):
    two.start(rank_jobs.other_rates)
    for answer in two.answers():
        assert "the optimizer's group 0 differs between ranks: lr=0.001 on rank 0, lr=0.002 on rank 1" in str(answer)


@pytest.mark.parametrize("rows", [4, 1])
def test_a_mean_by_tokens(rows, two, accelerator):
    """Ranks have very different numbers of them, or one has none at all."""
    losses, weights = rank_jobs.by_tokens(rows)
    for theirs in two.run(rank_jobs.by_tokens, rows):
        assert theirs[0] == pytest.approx(losses, rel=1e-5)
        assert all(torch.allclose(theirs[1][name], value, atol=2e-6) for name, value in weights.items())


def test_tokens_of_one_rank_alone_are_refused(two, accelerator):
    two.start(rank_jobs.by_tokens, 4, counted_alone=True)
    for answer in two.answers():
        assert isinstance(answer, ValueError)
        assert "num_items_in_batch is 3 on rank 0 and 13 on rank 1" in str(answer)
        assert "engine.total" in str(answer)


def test_totals(two):
    for found in two.run(rank_jobs.totals, [(1, 2**60 + 1), (0.5, 1), (torch.tensor([2]), torch.tensor(3.5))]):
        assert found == [2**60 + 2, 1.5, 5.5]
        assert [type(one) for one in found] == [int, float, float]
    two.start(rank_jobs.totals, [(1, "two")])
    refused, wrong = two.answers()
    assert isinstance(wrong, ValueError)
    assert "engine.total takes an int, a float or a tensor with one element; this is 'two'" in str(wrong)
    assert "rank 1 failed while adding up a total: ValueError" in str(refused)


def test_a_batch_without_rows_is_none(two):
    assert len(set(two.run(rank_jobs.no_rows, "cpu"))) == 1


def test_ranks_that_make_different_numbers_of_steps_are_told_so(two):
    two.start(rank_jobs.disagreeing, "steps")
    for answer in two.answers():
        assert "rank 0 is closing the engine, rank 1 is making a step" in str(answer)


def test_a_rank_that_fails_tells_the_others_why(two, accelerator):
    two.start(rank_jobs.failing, accelerator.type)
    first, second = two.answers()
    assert isinstance(second, KeyError)
    assert "rank 1 has failed: KeyError: 'no such thing'" in str(first)


@pytest.mark.parametrize("bad_rank", [1, *slow(0)])
@pytest.mark.parametrize("options", [{"deferred": True}, {"on_nonfinite": "skip"}, {"precision": "fp16"}])
def test_an_overflow_anywhere_skips_or_raises_everywhere(options, bad_rank, two, accelerator):
    found = two.run(rank_jobs.with_infinite_gradients, accelerator.type, bad_rank, **options)
    for seen in found:
        errors = [error for error, _, _ in seen]
        assert [changed for _, changed, _ in seen] == [True, False, True]
        assert errors[0] is errors[2] is None
        assert (errors[1] or "").startswith("NonFiniteError" if "deferred" in options else "")
        assert (seen[1][2] < seen[0][2]) == ("precision" in options)
    assert [scale for _, _, scale in found[0]] == [scale for _, _, scale in found[1]]


def test_a_budget_is_one_plan_for_all_ranks(two, virtual):
    assert differences(two, "llama", virtual.type, (2, 1), steps=2, memory="224KiB", max_grad_norm=0.3) == []


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("way", ["eager", *slow("clipped")])
def test_a_rank_that_is_late_changes_nothing(way, late, two, accelerator):
    assert differences(two, "llama", accelerator.type, (2, 2), late=late, **WAYS[way]) == []


@pytest.mark.parametrize("way", ["eager", *slow("clipped")])
def test_ranks_fetch_ahead_and_tell_each_other_of_edits(way, two, accelerator):
    """All fetch the next step's first units while updates run. One rank edits them through `.data`, which is no new
    version of a tensor, so only that rank can notice it."""
    job = "gpt2", accelerator.type
    found = two.run(rank_jobs.edited_by_one_rank, *job, **WAYS[way])
    _, weights = rank_jobs.edited_by_one_rank(*job, **WAYS[way])
    assert [ahead for ahead, _ in found] == [[2] * 4] * 2
    for name, value in weights.items():
        assert torch.allclose(found[0][1][name], value, atol=2e-6), name
    # The control: the forward of the rank that was not told has the old weights, and its backward the new ones.
    with pytest.raises(RankError, match=r"rank 1 has failed: .* gives other outputs when it runs again"):
        two.run(rank_jobs.edited_by_one_rank, *job, told=False, recompute="always", **WAYS[way])


def test_ranks_that_were_given_the_same_are_warned_once(two):
    told, nothing = two.run(rank_jobs.the_same_data)
    assert nothing == []
    assert [file for _, file in told] == [rank_jobs.__file__]
    assert "all 2 ranks were given the same batch" in told[0][0]


def test_the_others_stop_when_one_is_killed(tmp_path):
    ranks = Ranks(2)
    ranks.start(rank_jobs.for_ever, tmp_path / "sign")
    while not (tmp_path / "sign").exists():
        time.sleep(0.1)
    os.kill(ranks.processes[1].pid, signal.SIGKILL)
    first, second = ranks.answers()
    assert isinstance(first, RankError)
    assert "has stopped or does not answer" in str(first)
    assert isinstance(second, ProcessLookupError)
    ranks.close()


def test_ranks_of_a_node_have_one_copy_together(two, accelerator):
    found = two.run(rank_jobs.one_copy, accelerator.type)
    parameters = found[0][3]
    assert all(inside for _, _, inside, _ in found), "units' weights are in the memory that is shared"
    assert sum(own for own, _, _, _ in found) + found[0][1] == pytest.approx(12 * parameters, rel=0.05)


@pytest.mark.parametrize("device", cpu_is_slow())
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_share_no_memory(way, device, nodes):
    assert differences(nodes, "llama", device, (2, 1), **WAYS[way]) == []


CLUSTERS = {"two": Cluster(2, 1, loopback=1.0), "nodes": Cluster(1, 2, network=1.0)}


def planned_for(cluster, **options):
    """At a byte a second for everything: times are bytes."""
    with torch.device("meta"):
        model = build(CASES["llama"])
    length = CASES["llama"].batch(1)["input_ids"].shape[1]
    optimizer, _ = adamw(model)
    training = Training(2 * cluster.size, length, **options)
    return estimate_step(
        model,
        optimizer,
        training,
        Machine(Rates(1e9, math.inf, 1.0, 1.0), cluster=cluster),
        whole(chosen_accelerator()),
    )


@covering
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp32", "held": True},
        {"precision": "bf16", "max_grad_norm": 1.0, "held": False},
        {"precision": "bf16", "updates": "host", "held": False},
    ],
)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_what_ranks_take_and_move_is_what_was_planned(cluster, options, request, accelerator):
    ranks, cluster = request.getfixturevalue(cluster), CLUSTERS[cluster]
    estimate = planned_for(cluster, **options)
    found = ranks.run(rank_jobs.what_is_taken, **options)
    node = found[-cluster.devices :]
    taken = node[0][2]["common"] + sum(of[2]["own"] for of in node)
    planned = {part: estimate.host[part] for part in found[0][0]}
    assert sum(planned.values()) == pytest.approx(taken, rel=0.02)
    for account, plan, *_ in found:
        plan.pop("allocator", None)  # what this device's allocator adds; a plan for any device does not know it
        assert plan == {part: estimate.device[part] for part in plan}
        account["weights"] += (cluster.devices - 1) * estimate.plan.residents.nbytes  # of each rank's own
        for part, nbytes in account.items():
            share = planned[part] if part == "weights" else planned[part] / cluster.devices
            assert nbytes == pytest.approx(share, rel=0.02), part
    forward, backward = estimate.forecast.forward.named, estimate.forecast.backward.named
    for _, _, _, moved in found:
        link_in, link_out = (
            sum(moved.get(lane, 0) for lane in lanes) for lanes in (("h2d", "state in"), ("d2h", "state out"))
        )
        assert forward["link in"] + backward["link in"] == pytest.approx(link_in, rel=0.1)
        assert forward["link out"] + backward["link out"] == pytest.approx(link_out, rel=0.1)
    weights = [unit.trained_elements * unit.weight_itemsize for unit in estimate.plan.in_forward_order]
    gone_round = 0 if estimate.plan.staging.deferred else weights[0] if cluster.nodes == 1 else sum(weights)
    crossed = backward["exchange"] if cluster.nodes == 1 else 2 * backward["network"]
    assert crossed - gone_round == pytest.approx(found[0][3]["exchange"], rel=0.05)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_ranks_look_at_a_nodes_memory_together(cluster, request, accelerator):
    """Each would fit by itself, but not all of them: all refuse, or none."""
    ranks, estimate = request.getfixturevalue(cluster), planned_for(CLUSTERS[cluster], precision="fp32")
    needed = sum(estimate.host[part] for part in ("weights", "optimizer state"))
    for refused in ranks.run(rank_jobs.with_host_memory, needed - 1, precision="fp32"):
        assert "the host cannot hold this" in refused
    assert ranks.run(rank_jobs.with_host_memory, needed, precision="fp32") == [None] * 2


@pytest.mark.slow
@pytest.mark.parametrize("homes", [(0, 0, 1), (0, 1, 0, 1)])
@pytest.mark.parametrize("way", WAYS)
def test_nodes_of_any_size_and_order(way, homes):
    ranks = Ranks(len(homes), homes=homes)
    assert differences(ranks, "llama", "cpu", (1,) * len(homes), **WAYS[way]) == []
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (2, 1, 0, 1)])
@pytest.mark.parametrize("device", chosen())
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "skipping"])
def test_four_ranks_on_two_nodes(name, way, device, counts, four):
    assert differences(four, name, device, counts, **WAYS[way]) == []


@pytest.mark.slow
@pytest.mark.parametrize("updates", ["stride:2", "static:0.5", "auto", "host"])
@pytest.mark.parametrize("held", [False, True])
def test_all_policies_on_four_ranks(held, updates, four, accelerator):
    assert differences(four, "llama", accelerator.type, (1, 1, 1, 1), updates=updates, subgroup=64, held=held) == []
