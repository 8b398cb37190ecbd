"""The budget bounds what the device's allocator reserves: whole segments, by stream, with what is left over in them."""

import contextlib
import gc

import pytest
import torch

from ferryman.engine import Engine
from ferryman.runtime.device_memory import usual_budget
from ferryman.runtime.segments import Segments, find_segments
from ferryman.training.micro_batching import MicroBatching
from support.devices import torch_virtual
from support.models import CASES, build
from support.slow import slow
from support.stacks import numbers, perceptrons, square_loss

DEVICE = "virtual:0"
WIDTH = 32
LENGTHS = [8, 64, 33]  # the longest is neither the first nor the last


def scaled(by):
    """CUDA's sizes, smaller by this factor, as models here are."""
    return torch_virtual.Caching(rounding=64, small_segment=(2 << 20) // by, large_segment=(20 << 20) // by)


@pytest.fixture(params=[512, *slow(128)])
def caching(request, virtual):
    gc.collect()
    torch_virtual.synchronize()
    torch_virtual.empty_cache()
    with torch_virtual.caching(scaled(request.param), DEVICE):
        yield scaled(request.param)
    gc.collect()
    torch_virtual.synchronize()
    torch_virtual.empty_cache()


def make(budget, **options):
    model = perceptrons(4, WIDTH)
    return Engine(
        model, torch.optim.AdamW(model.parameters()), device=DEVICE, memory=budget, loss=square_loss, **options
    )


def reserved():
    return torch.accelerator.memory_reserved(DEVICE)


def most_reserved(engine, lengths, before):
    """The peak over steps of these lengths, in addition to what was there before the engine."""
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    peaks = []
    for length in lengths:
        engine.step(numbers(12, length, WIDTH))
        peaks.append(torch.accelerator.max_memory_reserved(DEVICE) - before)
    return max(peaks)


def test_sizes_of_segments_are_found_out(caching):
    found = find_segments(torch.device(DEVICE))
    assert found == Segments(caching.rounding, caching.small_segment, caching.large_segment)
    with torch_virtual.caching(torch_virtual.EXACT, DEVICE):
        assert find_segments(torch.device(DEVICE)).is_exact


def unused_stream(segments):
    """A stream in whose segments no tensor of another test is left, beside which there would be room."""
    for _ in range(32):
        torch_virtual.empty_cache()
        stream, before = torch.Stream(DEVICE), reserved()
        with stream:
            probes = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in (1, segments.small // 2 + 1)]
        grown = reserved() - before
        del probes
        if grown == segments.small + segments.large:
            return stream
    raise AssertionError("all streams are in use")


@pytest.mark.parametrize("seed", range(20))
def test_what_is_reserved_can_be_computed(seed, caching):
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 12, (), generator=generator))
    sizes = [int(2 ** (20 * float(torch.rand((), generator=generator)))) for _ in range(count)]
    segments = find_segments(torch.device(DEVICE))
    stream = unused_stream(segments)
    torch_virtual.empty_cache()
    before = reserved()
    kept = []
    with stream:
        kept += [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in sizes]
    assert reserved() - before == segments.reserved(sizes)


@pytest.mark.parametrize("stash", ["auto", *slow("host")])
@pytest.mark.parametrize("factor", [13, *slow(30)])
def test_a_budget_bounds_what_is_reserved_whatever_the_lengths_of_steps(factor, stash, caching):
    budget, before = factor * caching.large_segment, reserved()
    with make(budget, stash=stash, updates="host") as engine:
        assert engine.plan.account["allocator"] > 0
        assert most_reserved(engine, LENGTHS, before) <= budget
    torch_virtual.set_workspace(torch_virtual.set_workspace(0, DEVICE), DEVICE)  # libraries keep theirs
    torch_virtual.empty_cache()
    assert reserved() - before <= caching.small_segment, "closing gives it back, except for a scalar"


def test_a_budget_bounds_evaluations(caching):
    budget, before = 13 * caching.large_segment, reserved()
    with make(budget, updates="host") as engine:
        assert most_reserved(engine, LENGTHS, before) <= budget
        for length in LENGTHS:
            engine.evaluate(numbers(2, length, WIDTH))
        assert most_reserved(engine, LENGTHS, before) <= budget
        assert torch.accelerator.max_memory_reserved(DEVICE) - before <= budget


def test_a_batch_that_is_too_large_for_an_evaluation_is_evaluated_in_parts(caching):
    budget, batch = 13 * caching.large_segment, numbers(64, LENGTHS[1], WIDTH)
    with make(None) as engine:
        whole = engine.evaluate(batch)
    before = reserved()
    with make(budget, updates="host") as engine:
        torch.accelerator.reset_peak_memory_stats(DEVICE)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            engine.evaluate(numbers(budget // (LENGTHS[1] * WIDTH * 4), LENGTHS[1], WIDTH))
        assert "engine.evaluate(batch, micro_batches=...)" in caught.value.__notes__[-1]
        del caught
        assert engine.evaluate(batch, 64).item() == pytest.approx(whole.item(), rel=1e-6)
        pairs = [{"x": part} for part in batch["x"].split(2)]
        assert engine.evaluate(pairs).item() == pytest.approx(whole.item(), rel=1e-6)
        assert torch.accelerator.max_memory_reserved(DEVICE) - before <= budget


def test_a_budget_that_counts_allocated_bytes_is_not_kept(caching, monkeypatch):
    """The negative control: accounts of allocated bytes, and no cap."""
    before = reserved()
    monkeypatch.setattr("ferryman.engine.find_segments", lambda device: Segments())
    monkeypatch.setattr(torch.accelerator, "memory_reserved", torch.accelerator.memory_allocated)
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", torch.accelerator.max_memory_allocated)
    monkeypatch.delattr(torch_virtual, "get_per_process_memory_fraction")
    budget = 10 * caching.large_segment
    with make(budget, stash="host", updates="host") as engine:
        most_reserved(engine, LENGTHS, 0)
        most = torch_virtual.memory_stats(DEVICE)["reserved_bytes.all.peak"] - before
    assert most > budget


def test_others_keep_what_they_have_and_may_take_more(caching):
    theirs = torch.ones(100_000, dtype=torch.uint8, device=DEVICE)
    fraction = torch_virtual.get_per_process_memory_fraction(DEVICE)
    with make("2MiB") as engine:
        engine.step(numbers(12, 16, WIDTH))
        used = engine._memory.used
        more = [torch.ones(1 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(8)]  # beyond the budget
        engine.step(numbers(12, 16, WIDTH))
        assert engine._memory.used <= max(used, 2 << 20)
        assert torch_virtual.get_per_process_memory_fraction(DEVICE) == fraction
        assert bool(theirs.all())
        more.clear()
        torch_virtual.empty_cache()
        engine.step(numbers(12, 16, WIDTH))
        assert engine._memory.used <= 2 << 20
    assert torch_virtual.get_per_process_memory_fraction(DEVICE) == fraction


def test_a_step_that_exceeds_the_budget_is_stopped_by_the_cap(caching):
    """A loss that takes more in a later step than in the trials."""
    taken = []

    def loss(model, part):
        if taken:
            taken.append(torch.ones(4 << 20, dtype=torch.uint8, device=DEVICE))
        return square_loss(model, part)

    model = perceptrons(4, WIDTH)
    with Engine(model, torch.optim.AdamW(model.parameters()), device=DEVICE, memory="2MiB", loss=loss) as engine:
        engine.step(numbers(12, 16, WIDTH))
        taken.append(None)
        with pytest.raises(torch.OutOfMemoryError, match="this process may take"):
            engine.step(numbers(12, 16, WIDTH))
        taken.clear()
        engine.step(numbers(12, 16, WIDTH))


def gpt2_steps(budget):
    case = CASES["gpt2"]
    model = build(case)
    with Engine(model, device=DEVICE, memory=budget) as engine:
        for seed in range(2):
            engine.forward_backward(case.batch(8, seed=seed))


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "not counted, the control"])
def test_workspaces_that_checks_leave_are_part_of_the_budget(counted, virtual, monkeypatch):
    """A check of the first step computes in other threads, for each of which a library keeps a workspace."""
    if not counted:
        monkeypatch.setattr(MicroBatching, "took", lambda self, nbytes: False)
    outcome = contextlib.nullcontext() if counted else pytest.raises(torch.OutOfMemoryError)
    with torch_virtual.workspace(1 << 14, DEVICE), outcome:
        gpt2_steps("256KiB")


def test_a_default_budget_is_a_share_of_what_is_free(caching):
    """Neither of all that the device has, nor without what only this process's allocator holds."""
    torch_virtual.set_capacity(reserved() + (4 << 20), DEVICE)
    device = torch.device(DEVICE)
    alone = usual_budget(device)
    theirs = torch.ones(2 << 20, dtype=torch.uint8, device=DEVICE)
    beside = usual_budget(device)
    assert alone - beside == pytest.approx(0.9 * theirs.nbytes, rel=0.01)
    assert beside <= torch.accelerator.get_memory_info(DEVICE)[0]
    del theirs  # it is in the allocator's cache
    assert usual_budget(device) == alone


def test_a_budget_above_the_free_memory_is_refused(caching):
    torch_virtual.set_capacity(reserved() + (4 << 20), DEVICE)
    theirs = torch.ones(3 << 20, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(
        ValueError, match=r"memory=2.00MiB is more than is free on 'virtual:0': 1.00MiB of 4.\d+MiB. Ten"
    ):
        make("2MiB")
    del theirs  # it is in the allocator's cache now, which the engine may empty
    with make("2MiB") as engine:
        engine.step(numbers(12, 16, WIDTH))
