"""The forecast: its times are those of the performance model, and its accounts those of an engine."""

import gc
import math
from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch import nn

from ferryman.cli.model_argument import parse_model
from ferryman.engine import Engine
from ferryman.forecast.dry_run import DryRunError, dry_run
from ferryman.forecast.estimate import Machine, Training, estimate_step
from ferryman.model.loss import model_loss
from ferryman.model.unit_discovery import find_units
from ferryman.plan.batch import portion
from ferryman.plan.network import Cluster, exchange_times
from ferryman.plan.policy import Policy, parse_policy
from ferryman.plan.rates import Rates
from ferryman.plan.schedule import Traffic
from ferryman.plan.step_forecast import Sweep, Update, forecast
from support.devices import chosen_accelerator, torch_virtual, whole
from support.slow import slow

RATES = Rates(host=1e9, device=math.inf, link_in=10e9, link_out=5e9)
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
MODELS = {
    "gpt": lambda: parse_model("gpt:layers=4,width=64,heads=4,context=128").config,
    "llama": lambda: hf.LlamaConfig(**SIZES, vocab_size=512, num_key_value_heads=2),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, vocab_size=256, num_key_value_heads=2, num_local_experts=4),
}
LENGTH = 64


def update(policy="host", *, deferred=False):
    traffic = Traffic(0 if deferred else 2, 0, 12, 12)
    resident = Traffic(traffic.host_out, traffic.host_in, 0, 2)
    return Update(parse_policy(policy), 10**9, 10**6, 3, deferred, traffic, resident, landing=2)


# Times.


def test_each_sweep_is_as_long_as_its_busiest_lane():
    forward, backward = Sweep(1e12, fetched=20e9, stowed=1e9), Sweep(3e12, fetched=10e9, brought=1e9)
    found = forecast(forward, backward, None, 4, RATES, 1e12)
    assert found.forward.named == pytest.approx({"compute": 4, "link in": 2, "link out": 0.8, "update": 0})
    assert found.backward.named == pytest.approx({"compute": 12, "link in": 1.4, "link out": 0, "update": 0})
    assert found.seconds == pytest.approx(16)
    assert (found.forward.bound, found.backward.bound) == ("compute", "compute")


@pytest.mark.parametrize("deferred", [False, True])
def test_an_update_is_beside_the_sweep_that_it_runs_beside(deferred):
    found = forecast(Sweep(1.0), Sweep(1.0), update(deferred=deferred), 1, RATES, 1e12)
    beside, other = (found.forward, found.backward) if deferred else (found.backward, found.forward)
    assert beside.update == pytest.approx(1.0, rel=0.02)  # and the gradient's way there, of the first subgroup
    assert other.update == 0
    assert found.backward.link_out == pytest.approx(2e9 / 5e9)  # gradients leave in the backward either way


def test_the_device_takes_a_share_where_that_helps():
    alone = forecast(Sweep(1.0), Sweep(1.0), update("host"), 1, RATES, 1e15)
    shared = forecast(Sweep(1.0), Sweep(1.0), update("auto"), 1, Rates(1e8, math.inf, 50e9, 50e9), 1e15)
    assert alone.share == 0
    assert 0.5 < shared.share < 1
    assert shared.seconds < 1e9 / 1e8


def test_auto_leaves_all_to_the_host_where_the_link_is_busy_with_weights():
    rates = Rates(host=1e9, device=math.inf, link_in=10e9, link_out=10e9)
    backward = Sweep(1.0, fetched=20e9)
    found = forecast(Sweep(1.0), backward, update("auto"), 1, rates, 1e15)
    assert found.share == 0
    assert found.seconds == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("fetched", [1e9, 30e9, 500e9])
def test_from_the_break_even_on_compute_bounds_both_sweeps(fetched):
    sweeps = Sweep(1e12, fetched=fetched, stowed=1e6), Sweep(3e12, fetched=fetched, brought=1e6)
    even = forecast(*sweeps, update(), 1, RATES, 50e12).break_even
    at, before = (forecast(*sweeps, update(), count, RATES, 50e12) for count in (even, max(1, even - 1)))
    assert {at.forward.bound, at.backward.bound} == {"compute"}
    assert even == 1 or {before.forward.bound, before.backward.bound} != {"compute"}


def test_a_stash_that_crosses_more_slowly_than_compute_has_no_break_even():
    found = forecast(Sweep(1e9, stowed=1e9), Sweep(3e9, brought=1e9), None, 1, RATES, 1e12)
    assert found.break_even is None


def test_without_compute_the_device_that_would_do_is_named():
    sweeps = Sweep(1e12, fetched=10e9), Sweep(3e12, fetched=10e9)
    needed = forecast(*sweeps, update(), 2, RATES, None).needed_operations
    at, below = (forecast(*sweeps, update(), 2, RATES, rate) for rate in (1.01 * needed, 0.9 * needed))
    assert "compute" not in (at.forward.bound, at.backward.bound)
    assert "compute" in (below.forward.bound, below.backward.bound)


@pytest.mark.parametrize("policy", ["host", "stride:3", "static:0.3"])
def test_how_many_are_owned_is_what_counting_gives(policy):
    owned = parse_policy(policy)
    for start, stop in ((0, 1), (0, 100), (7, 31), (99, 100)):
        assert owned.owned(start, stop) == sum(owned.device_owns(index) for index in range(start, stop))
    assert Policy("host").owned(0, 1000) == 0


# Several ranks.


def test_what_a_crew_exchanges():
    assert exchange_times(Cluster(), 8.0, 4.0, 2.0).gathered is exchange_times(Cluster(), 8.0, 4.0, 2.0).crossed is None
    found = exchange_times(Cluster(4, 2, loopback=2.0, network=4.0), gradients=8.0, weights=4.0, residents=2.0)
    assert (found.gathered, found.shared) == (8 * 3 / 2 / 2, 2 * 3 / 2 / 2)
    assert (found.crossed, found.returned) == (4 * 8 / 2 / 4, (4 + 4 * 2) / 2 / 4)


def test_a_rank_does_a_part_and_the_one_that_does_most_is_looked_at():
    assert Training(10, 8).of_one(4).samples == 3
    assert Training(8, 8, micro_batches=4).of_one(2) == Training(4, 8, micro_batches=2)
    assert Training(8, 8, micro_batches=1).of_one(2) == Training(4, 8, micro_batches=1)
    assert Training(8, 8, micro_batches=3).of_one(2) == Training(5, 8, micro_batches=2)
    assert Training(7, 8, micro_batches=4).of_one(2) == Training(4, 8, micro_batches=2)


@pytest.mark.parametrize("micro_batches", [None, 1, 3, 5, 8, 13])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_have_all_samples_between_them(micro_batches, size):
    found = [portion(13, micro_batches, rank, size) for rank in range(size)]
    assert [i for mine, _ in found for i in range(13)[mine]] == [*range(13)]
    most = max(len(range(13)[mine]) for mine, _ in found)
    assert Training(13, 8, micro_batches).of_one(size).samples == most


def test_a_last_micro_batch_that_is_smaller_counts_for_what_it_has():
    training = Training(samples=8, length=LENGTH, precision="fp32", updates="host", stash="host")
    uneven, even = (estimate_of("llama", replace(training, micro_batches=count)) for count in (3, 4))
    assert (uneven.samples, uneven.sample_size) == (8, 3)
    assert uneven.forecast.backward.compute == pytest.approx(even.forecast.backward.compute)
    assert uneven.backward_operations == pytest.approx(even.backward_operations)
    assert uneven.host["stash"] == pytest.approx(even.host["stash"], rel=0.05)
    assert uneven.forecast.forward.link_out == pytest.approx(even.forecast.forward.link_out, rel=0.05)
    assert uneven.device["one call's activations"] > even.device["one call's activations"]


def test_ranks_share_the_hosts_cores_and_what_it_keeps():
    training = Training(samples=4, length=LENGTH, precision="fp32", updates="host")
    one, two = (estimate_of("llama", training, cluster=Cluster(devices)) for devices in (1, 2))
    assert one.one_device is None
    assert two.one_device.forecast.seconds == one.forecast.seconds
    once = one.forecast.backward
    assert two.forecast.backward.update == pytest.approx(once.update, rel=0.05)  # half of it, by half of the cores
    assert two.forecast.backward.link_out == pytest.approx(once.link_out)
    assert two.forecast.backward.compute == pytest.approx(once.compute / 2)
    assert one.host["weights"] < two.host["weights"] < 1.1 * one.host["weights"]
    assert two.host["optimizer state"] == one.host["optimizer state"]


# Accounts: what is forecast is what an engine makes.


def on_meta(name):
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(MODELS[name]()).train()


def estimate_of(name, training, memory=None, cluster=Cluster()):  # noqa: B008 - frozen
    model = on_meta(name)
    machine = Machine(RATES, memory, None, 1e12, cluster)
    return estimate_step(model, torch.optim.AdamW(model.parameters()), training, machine, whole(chosen_accelerator()))


def tokens(samples):
    ids = torch.randint(0, 256, (samples, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.exact
@pytest.mark.parametrize(
    ("name", "options", "memory"),
    [
        ("gpt", {"precision": "bf16", "max_grad_norm": 1.0}, 6 << 20),
        *slow(
            ("mixtral", {"precision": "bf16", "updates": "static:0.5"}, 16 << 20),
            ("llama", {"precision": "fp32"}, None),
            ("gpt", {"precision": "fp16", "updates": "stride:2"}, 1 << 30),
        ),
    ],
)
def test_accounts_are_those_of_an_engine(name, options, memory, virtual):
    estimate = estimate_of(name, Training(samples=4, length=LENGTH, **options), memory)
    model = hf.AutoModelForCausalLM.from_config(MODELS[name]()).train()
    optimizer = torch.optim.AdamW(model.parameters())
    with Engine(model, optimizer, device=virtual, memory=memory, **options) as engine:
        always = {part: estimate.device[part] for part in engine.plan.account}
        assert always == engine.plan.account
        assert {part: estimate.host[part] for part in engine.host_account} == engine.host_account
        assert estimate.plan.held == engine.plan.held
        engine.step(tokens(4))
        if memory is not None:
            assert engine.choice.micro_batches == estimate.choice.micro_batches


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["bf16", *slow("fp32")])
def test_activations_are_near_what_a_step_takes(name, precision, virtual):
    estimate = estimate_of(
        name, Training(samples=4, length=LENGTH, micro_batches=2, precision=precision, stash="host", recompute="always")
    )
    model = hf.AutoModelForCausalLM.from_config(MODELS[name]()).train()
    with Engine(
        model,
        torch.optim.AdamW(model.parameters()),
        device=virtual,
        precision=precision,
        stash="host",
        recompute="always",
    ) as engine:
        engine.step(tokens(4), 2)
        engine.wait()
        gc.collect()
        others = torch.accelerator.memory_allocated(virtual) - engine.plan.fixed
        with torch_virtual.watch(virtual) as seen:
            engine.step(tokens(4), 2)
        peak = seen.counters.peak_memory - others
    assert estimate.device["one call's activations"] == pytest.approx(peak - engine.plan.fixed, rel=0.25)
    assert sum(estimate.device.values()) == pytest.approx(peak, rel=0.15)


# The dry run.


def dry_run_of(model, samples=1):
    units, residents = find_units(model)
    ids = torch.zeros(samples, LENGTH, dtype=torch.long, device="meta")
    return dry_run(model, units, residents, model_loss, {"input_ids": ids, "labels": ids}), units


def test_a_dry_run_visits_units_as_a_step_does_and_leaves_nothing_behind():
    model = on_meta("gpt")
    before = [(name, id(p), p.grad) for name, p in model.named_parameters()]
    found, units = dry_run_of(model)
    assert len(found.visits) == 2 * len(units) + 1  # the embedding, which is the head, is there three times
    assert found.visits == found.visits[::-1]
    assert found.forward_visits == len(units) + 1
    assert [(name, id(p), p.grad) for name, p in model.named_parameters()] == before
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_its_arithmetic_is_two_operations_a_parameter_and_token_and_attention():
    model = on_meta("llama")
    found, _ = dry_run_of(model, samples=3)
    embedding = model.get_input_embeddings().weight.numel()
    products = sum(p.numel() for p in model.parameters() if p.dim() > 1) - embedding
    attention = 4 * 4 * LENGTH * LENGTH * 64  # layers, and for each the scores and their product with values
    assert found.forward == pytest.approx(3 * (2 * products * LENGTH + attention), rel=1e-6)
    assert found.backward == pytest.approx(3 * found.forward, rel=0.1)


def test_only_experts_that_are_active_count():
    few, many = (
        hf.MixtralConfig(**SIZES, vocab_size=256, num_key_value_heads=2, num_local_experts=experts)
        for experts in (4, 16)
    )
    with torch.device("meta"):
        models = [hf.MixtralForCausalLM(config).train() for config in (few, many)]
    (first, _), (second, _) = map(dry_run_of, models)
    assert sum(p.numel() for p in models[1].parameters()) > 2 * sum(p.numel() for p in models[0].parameters())
    assert second.forward < 1.15 * first.forward


def test_a_model_that_needs_data_says_so():
    class GradientChecks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            return self.blocks[1](self.blocks[0](x)[torch.nonzero(x[:, 0])].sum(1))

    with torch.device("meta"):
        model = GradientChecks()
    units, residents = find_units(model)
    with pytest.raises(DryRunError, match="nonzero"):
        dry_run(model, units, residents, lambda m, x: m(x).sum(), torch.empty(2, 4, device="meta"))


@pytest.mark.parametrize(("stash", "memory"), [("device", None), ("host", None), ("host", 64 << 20)])
def test_the_bytes_that_cross_are_those_of_a_step(stash, memory, virtual):
    options = {"precision": "fp32", "updates": "host", "stash": stash, "held": False, "recompute": "always"}
    training = Training(samples=4, length=LENGTH, micro_batches=4, **options)
    model = hf.AutoModelForCausalLM.from_config(MODELS["llama"]()).train()
    optimizer = torch.optim.AdamW(model.parameters())
    with Engine(model, optimizer, device=virtual, memory=memory, **options) as engine:
        for _ in range(2):
            engine.step(tokens(4), 4)
        engine.stats()  # waits for updates, and is no use of the weights, which are fetched ahead
        engine._parts.lanes.wait()  # for these fetches: each step's count has those of the next one
        with torch_virtual.watch(virtual) as seen:
            engine.step(tokens(4), 4)
            engine.wait()
            engine._parts.lanes.wait()
        estimate = estimate_of("llama", training, memory)
        assert estimate.choice == engine.choice
    found = estimate.forecast
    into, out = (getattr(found.forward, lane) + getattr(found.backward, lane) for lane in ("link_in", "link_out"))
    assert into * RATES.link_in == pytest.approx(seen.counters.h2d_bytes, rel=0.1)
    assert out * RATES.link_out == pytest.approx(seen.counters.d2h_bytes, rel=0.1)
