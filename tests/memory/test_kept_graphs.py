"""Graphs are kept where the budget has room for them, and the budget is kept."""

import pytest
import torch

from ferryman.engine import Engine
from ferryman.plan.fit import Choice, Fit, Needs, Stretch, TooLargeError, Trial, count_to_keep
from ferryman.plan.keep import EVERYTHING, CallCost, Keep, bytes_of, fill, is_all, seconds_of
from support.devices import torch_virtual
from support.slow import slow
from support.stacks import numbers, perceptrons, square_loss

DEVICE = "virtual:0"
WIDTH, LAYERS, COUNT = 32, 4, 4


def make(memory=None, **options):
    return Engine(perceptrons(LAYERS, WIDTH), device=DEVICE, memory=memory, loss=square_loss, **options)


def calls_of(engine):
    return engine._parts.relay.calls


def run(engine, batch, count=COUNT):
    engine.zero_grad()
    return engine.forward_backward(batch, count)


def most_reserved(engine, batch, before):
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    run(engine, batch)
    return torch.accelerator.max_memory_reserved(DEVICE) - before


@pytest.mark.parametrize("stash", ["auto", *slow("host")])
def test_the_more_room_the_more_is_kept_within_the_budget(stash, virtual):
    kept, losses = [], []
    for mib in (2, 3, 8):
        before = torch.accelerator.memory_reserved(DEVICE)
        with make(f"{mib}MiB", stash=stash, recompute="auto") as engine, torch_virtual.link(DEVICE, delay=1e-3):
            for length in (64, 96, 48):  # the second is longer, and what is kept is decided again
                peak = most_reserved(engine, numbers(4 * COUNT, length, WIDTH), before)
                assert peak <= mib << 20
                kept.append(calls_of(engine).kept)
                losses.append(float(run(engine, numbers(4 * COUNT, length, WIDTH))))
    first, second, third = kept[:3], kept[3:6], kept[6:]
    assert first <= second <= third
    assert third == [LAYERS * COUNT] * 3, "all of them"
    assert first[0] < second[0] or second[0] < third[0]
    assert losses[:3] == losses[3:6] == losses[6:]


def test_always_keeps_none_but_the_turn(virtual):
    for memory in (None, "6MiB"):
        with make(memory, recompute="always") as engine:
            for _ in range(2):
                run(engine, numbers(4 * COUNT, 64, WIDTH))
            assert calls_of(engine)[:2] == (COUNT, (LAYERS - 1) * COUNT)


def test_never_is_refused_with_a_budget_that_would_do(virtual):
    batch = numbers(4 * COUNT, 64, WIDTH)
    with make("1MiB", recompute="never") as engine, pytest.raises(ValueError, match="recompute='never'") as caught:
        run(engine, batch)
    enough = str(caught.value).split("memory=")[2].split(" would be enough")[0]
    with make(enough, recompute="never") as engine:
        run(engine, batch)
        assert calls_of(engine).recomputed == 0


def test_without_a_budget_what_is_free_is_used(virtual):
    batch = numbers(4 * COUNT, 64, WIDTH)
    with make(recompute="auto") as engine:
        run(engine, batch)
        assert engine.choice.keep == EVERYTHING
        assert calls_of(engine).recomputed == 0
    torch_virtual.empty_cache()
    torch_virtual.set_capacity(torch.accelerator.memory_allocated(DEVICE) + (3 << 19), DEVICE)
    with make(recompute="auto") as engine:
        for _ in range(2):
            run(engine, batch)
        assert calls_of(engine).recomputed > 0, "and nothing is refused"


# The choice, without a device.

COSTS = {"slow": CallCost(100, 10, 4.0), "quick": CallCost(100, 10, 1.0), "large": CallCost(1000, 10, 5.0)}


@pytest.mark.parametrize(
    ("room", "counts"),
    [
        (99, {"slow": 0, "quick": 0, "large": 0}),
        (100, {"slow": 1, "quick": 0, "large": 0}),
        (350, {"slow": 2, "quick": 1, "large": 0}),
        (1400, {"slow": 2, "quick": 2, "large": 1}),
        (2400, {"slow": 2, "quick": 2, "large": 2}),
    ],
)
def test_most_seconds_per_byte_come_first(room, counts):
    keep = fill(COSTS, 2, room, stash_on_host=False)
    assert keep.counts == counts
    assert bytes_of(keep, COSTS, micro_batches=2, stash_on_host=False) <= room
    assert seconds_of(keep, COSTS, micro_batches=2) == sum(COSTS[name].seconds * n for name, n in counts.items())
    assert is_all(keep, COSTS, 2) == (room == 2400)


def test_inputs_count_if_the_stash_would_move_them():
    assert fill(COSTS, 2, 109, stash_on_host=True).counts["slow"] == 0
    assert fill(COSTS, 2, 110, stash_on_host=True).counts["slow"] == 1


def fit_of(budget, recompute="auto", stash="device", reserved=lambda choice: 0):
    def measure(parts, room, choice):
        return Trial([Stretch("unit", 1000)], 10, 10, reserved(choice), COSTS)

    return Fit(budget, stash, measure, recompute)


def test_a_trial_that_reserves_too_much_leads_to_fewer():
    def reserved(choice):
        return 10**9 if sum((choice.keep.counts or {}).values()) > 3 else 0

    batch = {"x": torch.zeros(2, 1)}
    assert sum(fit_of(10**6).choose(batch, 2, 2, 0).keep.counts.values()) == 6
    assert 0 < sum(fit_of(10**6, reserved=reserved).choose(batch, 2, 2, 0).keep.counts.values()) <= 3


def test_a_trial_with_graphs_leaves_the_allocator_room():
    batch = {"x": torch.zeros(2, 1)}
    for reserved, keeps in ((3800, True), (3950, False)):
        fit = fit_of(4000, reserved=lambda choice, reserved=reserved: reserved if choice.keep else 0)
        assert bool(fit.choose(batch, 2, 2, 0).keep) == keeps


def needs_of(activations, logits):
    """Of micro-batches in which a sample takes so much in a block, for three of them, and at the turn."""
    trials = (
        Trial([Stretch("block", n * activations), Stretch("head", n * logits)], 0, 0, 0,
              {name: CallCost(n * activations, 0, 1.0) for name in "abc"})
        for n in (1, 2)
    )  # fmt: skip
    return Needs(*trials)


@pytest.mark.parametrize(
    ("logits", "room", "count"),
    [
        (1200, 5000, 3),  # the turn of each of two takes all of it, that of each of three leaves room for 0.45 of all
        (1200, 2600, 8),
        (100, 1100, 2),  # four would keep a twelfth more
        (1200, 8000, 2),  # all graphs fit
        (1200, 1300, 8),  # none fits
    ],
)
def test_more_micro_batches_than_the_fewest_are_made_if_they_keep_many_more_graphs(logits, room, count):
    least = next(n for n in (2, 4, 8) if 1.04 * max(8 // n * logits, 8 // n * 100) <= room)
    assert count_to_keep(needs_of(100, logits), 8, least, room, stash_on_host=True) == count


def test_an_engine_makes_more_only_of_batches_that_it_cuts_by_itself():
    def measure(parts, room, choice):
        samples, needs = len(parts[0]["x"]), needs_of(100, 1200)
        return (needs.one, needs.two)[samples > 1] if samples <= 2 else Trial([Stretch("head", 1200 * samples)], 0, 0)

    for recompute, size, asked, count in (
        ("auto", 8, None, 3),
        ("auto", 4, None, 1),  # it fits
        ("auto", 8, 2, 2),
        ("always", 8, None, 2),
    ):
        choice = Fit(5000, "host", measure, recompute).choose({"x": torch.zeros(size, 1)}, size, asked, 0)
        assert choice.micro_batches == count
        assert bool(choice.keep) == (count == 3)


def test_what_fits_is_measured_once():
    seen = []
    fit = fit_of(4000, reserved=lambda choice: seen.append(choice) or 0)
    batch = {"x": torch.zeros(2, 1)}
    first = fit.choose(batch, 2, 2, 0)
    assert first.keep
    count = len(seen)
    assert fit.choose(batch, 2, 2, 0) == first
    assert len(seen) == count


def test_never_needs_room_for_all():
    batch = {"x": torch.zeros(2, 1)}
    assert is_all(fit_of(4000, "never").choose(batch, 2, 2, 0).keep, COSTS, 2)
    with pytest.raises(TooLargeError) as caught:
        fit_of(3000, "never").choose(batch, 2, 2, 0)
    assert "recompute='never' keeps the activations of all calls" in caught.value.advice


def test_a_choice_covers_those_that_keep_less():
    assert EVERYTHING.covers(Keep({"a": 2}))
    assert Keep({"a": 2}).covers(Keep({"a": 1, "b": 0}))
    assert not Keep({"a": 2}).covers(Keep({"a": 2, "b": 1}))
    assert not Keep({"a": 2}).covers(EVERYTHING)
    assert Choice(2, stash_on_host=False).keep == Keep()
