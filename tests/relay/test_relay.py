"""How a step runs: each unit once a sweep for all micro-batches, the same random numbers, no wait missing."""

import contextlib
import gc
import itertools
import queue
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from ferryman.distributed.ranks import Ranks
from ferryman.engine import Engine
from ferryman.model.precision import LossScale
from ferryman.model.unit_discovery import find_units
from ferryman.observe.trace import Trace
from ferryman.options import PlainOptions
from ferryman.plan.policy import Policy
from ferryman.plan.slot_policy import weight_slot_policy
from ferryman.plan.staging import Staging
from ferryman.relay.gradient_slots import GradientSlots
from ferryman.relay.weight_slots import WeightSlots
from ferryman.runtime.lanes import Lane, Lanes
from ferryman.runtime.streams import Streams
from ferryman.server.server import Server
from ferryman.server.store import RamStore
from support.devices import delay_copies, torch_virtual
from support.models import CASES, Block, Toy, assert_same, build, cut, on, plain_step, step, text
from support.slow import covering, slow


def visits(trace):
    """The units' names; a label has the direction behind."""
    return [span.label.split(" ")[1] for span in trace.spans() if span.label.startswith("visit ")]


@covering
@pytest.mark.parametrize("slots", [1, 2, 3, 16])
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
@pytest.mark.parametrize("recompute", ["auto", "always"])
def test_fetches_do_not_depend_on_the_number_of_micro_batches(slots, micro_batches, recompute, accelerator):
    model = Toy(layers=4)
    with Engine(model, device=accelerator, slots=slots, recompute=recompute) as engine:
        units = engine.units
        policy = weight_slot_policy(engine.plan.weight_slot_sizes)
        expected = len(policy.fetched_visits([*units, *reversed(units[:-1])]))
        for number in range(3):
            before = engine.fetches
            engine.forward_backward(text(8), micro_batches)
            measured = number == 0 and recompute == "auto"  # by a trial, which fetches, too
            assert measured or engine.fetches - before == expected
    assert expected <= max(2 * len(units) - slots, len(units))
    assert slots == 1 or expected == max(2 * len(units) - slots, len(units))


@covering
@pytest.mark.parametrize("name", ["gpt2", "t5", "skips", "reused", *slow("bert", "mixtral", "two losses")])
@pytest.mark.parametrize("slots", [2, 3])
def test_fetches_of_any_model_follow_from_the_order_of_its_visits(name, slots, virtual):
    case, trace = CASES[name], Trace()
    with Engine(build(case), device=virtual, slots=slots, trace=trace) as engine:
        plan, orders, fetches = engine.plan, [], []
        for micro_batches in (2, 2, 4, 4):  # twice each: the first time, a trial fetches, too
            seen, before = len(visits(trace)), engine.fetches
            engine.forward_backward(case.batch(8), micro_batches)
            torch_virtual.synchronize()
            orders.append(visits(trace)[seen:])
            fetches.append(engine.fetches - before)
    assert orders[0] == orders[1] == orders[2] == orders[3]
    units = {unit.name: unit for unit in plan.units}
    order = [units[name] for name in orders[1]]
    expected = len(weight_slot_policy(plan.weight_slot_sizes).fetched_visits(order))
    assert fetches[1] == fetches[3] == expected


def test_gradients_go_to_the_slot_whose_flush_is_longest_ago(accelerator):
    # With the one that was flushed just now, every visit of the backward would wait for the link.
    with Lanes(accelerator) as lanes:
        units, residents = find_units(Toy())
        streams = Streams(lanes)
        staging = Staging(Policy("host"), 1024, lambda unit: None, deferred=False)
        store = RamStore(units, accelerator, None, Ranks())
        server = Server(store, None, streams, accelerator, PlainOptions(), LossScale(), staging, Ranks())
        slots = GradientSlots(accelerator, 2, residents, server, streams.h2d, streams.d2h)
        slots.make_room_for(units)
        used = []
        for unit in units:
            slots.enter(unit)
            used.append(slots._slot_of(unit))
            slots.leave(unit, lanes.here())
            slots.flush(unit)
        assert len(set(used)) == 2
        assert all(one != other for one, other in itertools.pairwise(used))


def test_each_gradient_crosses_once_and_weights_cross_as_counted(virtual):
    model = build(CASES["toy"])
    units, residents = find_units(model)
    sizes = [unit.nbytes for unit in units]
    gradients = 4 * sum(p.numel() for p in model.parameters())
    with Engine(model, device=virtual) as engine:
        for _ in range(3):  # in the first steps, checksums of second runs cross as well
            engine.forward_backward(text(8), 4)
            engine.zero_grad()
        batch = sum(value.nbytes for value in text(8).values())
        with torch_virtual.watch(virtual) as seen:
            engine.forward_backward(text(8), 4)
    # Two sweeps, of which the second finds two units in their slots.
    assert seen.counters.h2d_bytes == 2 * sum(sizes) - sum(sizes[-2:]) + residents.nbytes + batch
    assert gradients <= seen.counters.d2h_bytes <= gradients + 64  # and losses


class Masked(nn.Module):
    """Remembers the mask of each of its executions."""

    def __init__(self, layers=3):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(layers))

    class Block(Block):
        def __init__(self):
            super().__init__()
            self.masks = None

        def forward(self, x):
            mask = torch.rand(x.shape, device=x.device) < 0.5
            self.masks.put(mask.cpu().numpy().tobytes())
            return super().forward(x * mask)

    def forward(self, x):
        noise = torch.rand(x.shape, device=x.device)  # between the units as well
        for block in self.blocks:
            x = block(x + noise)
        return x.square().mean()


@pytest.mark.parametrize("slots", [2, 3])
def test_masks_of_the_second_run_are_those_of_the_first(slots, device):
    torch.manual_seed(0)
    model, xs = Masked(), {"x": torch.randn(8, 16)}
    plain = on(device, model)

    def loss(model, part):
        return model(**part)

    with Engine(model, device=device, slots=slots, loss=loss, recompute="always") as engine:
        for number in range(3):
            for block in (*model.blocks, *plain.blocks):
                block.masks = queue.SimpleQueue()  # the engine cannot see into it: in a list, it undoes second runs
            engine.zero_grad()
            plain.zero_grad()
            torch.manual_seed(number)
            expected = plain_step(plain, cut(xs, 4), loss)
            torch.manual_seed(number)
            assert_same(step(engine, model, xs), expected)
            for at, (ours, theirs) in enumerate(zip(model.blocks, plain.blocks, strict=True)):
                mine, plains = taken(ours.masks), taken(theirs.masks)
                once = at == len(model.blocks) - 1  # at the turn nothing runs twice, which the trial has found out
                if number > 0:
                    assert Counter(mine) == dict.fromkeys(plains, 1 if once else 2)
                assert len(set(plains)) == 4
                assert set(plains) <= set(mine)


def taken(masks):
    return [masks.get() for _ in range(masks.qsize())]


def test_a_run_is_reproducible_and_its_micro_batches_differ(device):
    model = build(CASES["bert"])
    batch = {key: value[:1].repeat(4, 1) for key, value in text(1).items()}
    seen = []

    def loss(model, part):
        value = model(**part).loss
        seen.append(value.detach())  # with its graph, what it holds on the device would outlive the test
        return value

    with Engine(model, device=device, loss=loss) as engine:
        results = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            engine.zero_grad()
            results.append(step(engine, model, batch))
            after = torch.randint(0, 2**62, ())
            torch.manual_seed(seed)
            torch.randint(0, 2**62, ())
            assert torch.equal(after, torch.randint(0, 2**62, ()))  # one number was drawn, however many were used
    assert_same(results[0], results[1])
    assert not torch.equal(results[0].loss, results[2].loss)
    assert len({loss.item() for loss in seen[:4]}) == 4


def test_logits_of_two_micro_batches_never_coexist(device):
    """Whoever has logits goes backward through them before the next has any."""
    model, events = build(CASES["gpt2"]), []

    def loss(model, part):
        number = int(part["number"][0])
        logits = model(input_ids=part["input_ids"]).logits
        events.append(("forward", number))
        logits.register_hook(lambda gradient: events.append(("backward", number)))
        return F.cross_entropy(logits.flatten(0, 1), part["input_ids"].flatten())

    batch = {"input_ids": text(4)["input_ids"], "number": torch.arange(4)}
    with Engine(model, device=device, loss=loss) as engine:
        for _ in range(2):
            events.clear()
            engine.forward_backward(batch, 4)
            assert events == [(way, number) for number in range(4) for way in ("forward", "backward")]


def test_peak_memory_does_not_grow_with_micro_batches_by_their_logits(virtual):
    vocabulary = 4000
    model = Toy()
    model.head = nn.Linear(16, vocabulary)
    logits = 2 * 8 * vocabulary * 4
    peaks = []
    with Engine(model, device=virtual, recompute="always") as engine:
        for micro_batches in (2, 8):
            for _ in range(2):
                engine.zero_grad()
                with torch_virtual.watch(virtual) as seen:
                    engine.forward_backward(text(2 * micro_batches), micro_batches)
            peaks.append(seen.counters.peak_memory)
    assert peaks[1] - peaks[0] < 0.2 * logits


@pytest.mark.parametrize("used", [True, False])
def test_a_step_leaves_nothing_on_the_device(used, virtual):
    """Also of calls that had no backward; and without waiting for the garbage collector."""

    class Model(Toy):
        def hidden(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x) if used else (x, block(x))[0]
            return x

    with Engine(Model(), device=virtual) as engine:
        left = []
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                engine.forward_backward(text(8), 4)
                torch_virtual.synchronize(virtual)  # the loss that it returned goes when its streams are done
                left.append(torch_virtual.memory_allocated(virtual))
        finally:
            gc.enable()
    assert left[0] == left[1] == left[2]


def test_gradients_of_bfloat16_are_added_up_in_float32(device):
    model = build(CASES["llama"]).to(torch.bfloat16)
    plain, batch = on(device, model), text(16)
    sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    narrow = {name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in model.named_parameters()}
    for part in cut(batch, 8):
        plain.zero_grad()
        loss = plain(**{key: value.to(device) for key, value in part.items()}).loss * (1 / 8)
        loss.backward()
        for name, p in plain.named_parameters():
            sums[name] += p.grad.cpu().float()
            narrow[name] += p.grad.cpu()
    with Engine(model, device=device) as engine:
        engine.forward_backward(batch, 8)
        for name, p in model.named_parameters():
            expected = sums[name].to(p.grad.dtype)
            assert torch.equal(p.grad, expected), name
            assert not torch.equal(narrow[name].to(p.grad.dtype), expected), name  # else nothing was shown


def test_caches_are_off_in_a_step_and_as_they_were_after_it(device):
    for name in ("llama", "t5"):
        model = build(CASES[name])
        configs = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "use_cache")}
        before = {key: config.use_cache for key, config in configs.items()}
        assert any(before.values())
        with Engine(model, device=device) as engine:
            engine.forward_backward(CASES[name].batch(4), 2)
            assert {key: config.use_cache for key, config in configs.items()} == before
            with pytest.raises((RuntimeError, TypeError, IndexError)):
                engine.forward_backward({"input_ids": torch.randn(4, 8), "labels": torch.zeros(4, 8)}, 2)
            assert {key: config.use_cache for key, config in configs.items()} == before


WAITS = {
    "for fetched weights": (Lane, "follow", lambda real: lambda self, *marks: None),
    "for a free slot": (WeightSlots, "leave", lambda real: lambda self, slot, end: None),
    "for the sums": (GradientSlots, "flush", lambda real: lambda *args, **how: _forget("used", real, *args, **how)),
    "for the flush": (GradientSlots, "flush", lambda real: lambda *args, **how: _forget("free", real, *args, **how)),
    "for landed gradients": (GradientSlots, "wait", lambda real: lambda self: None),
}


def _forget(marks, real, slots, unit, **how):
    slot = slots._slot_of(unit)
    if slot is not None and marks == "used":
        slot.used = None
    real(slots, unit, **how)
    if slot is not None and marks == "free":
        slot.free = []


@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_is_found(wait, virtual, monkeypatch):
    """The negative control: without one of the waits there is a race, or wrong gradients."""
    delay_copies(virtual)
    model = build(CASES["toy"])
    plain, batch = on(virtual, model), text(8)
    torch.manual_seed(5)
    expected = plain_step(plain, cut(batch, 4))
    engine = Engine(model, device=virtual)
    where, name, without = WAITS[wait]
    monkeypatch.setattr(where, name, without(getattr(where, name)))
    torch.manual_seed(5)
    with pytest.raises((RuntimeError, AssertionError)) as caught:
        assert_same(step(engine, model, batch), expected)
    # The host's reading of gradients is no device's work: their values tell.
    assert wait == "for landed gradients" or "race" in str(caught.value)
    monkeypatch.undo()
    torch_virtual.synchronize()
    torch_virtual.clear_races()
    with contextlib.suppress(RuntimeError):  # a second race, that nobody has seen yet
        engine.close()


class Counting(Toy):
    """Keeps a count outside its units."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, input_ids, labels=None):
        self.count += len(input_ids)
        return super().forward(input_ids, labels)


def test_what_the_model_counts_outside_its_units_is_kept(device):
    model = Counting()
    with Engine(model, device=device) as engine:
        engine.forward_backward(text(8), micro_batches=4)
        with torch.no_grad():
            model(**text(3))
        assert model.count.item() == 11
        engine.forward_backward(text(8), micro_batches=2)
    assert model.count.item() == 19


def test_lists_in_a_batch_are_cut_with_its_tensors(device):
    seen = []

    def loss(model, part):
        seen.append((part["names"], part["about"], len(part["input_ids"])))
        return model(part["input_ids"], part["labels"]).loss

    with Engine(Toy(), device=device, loss=loss) as engine:
        engine.forward_backward({**text(4), "names": ["a", "b", "c", "d"], "about": ["all"]}, micro_batches=2)
    assert seen == [(["a", "b"], ["all"], 2), (["c", "d"], ["all"], 2)]


class Edits(Toy):
    """Edits what a call has used, right after a second call of the same unit in a row."""

    def hidden(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) + 1
            y = block(x)
            x.mul_(2)
            x = x + y
        return x


@pytest.mark.parametrize("stash", ["host", "device"])
def test_an_input_that_is_edited_afterwards_is_copied_before(stash, virtual):
    torch.manual_seed(0)
    model = Edits().eval()
    plain, batch = on(virtual, model), text(4)
    with torch_virtual.link(virtual, delay=2e-3), Engine(model, device=virtual, stash=stash) as engine:
        if stash == "device":
            with pytest.raises(ValueError, match="edited in place after the unit had used it"):
                engine.forward_backward(batch, micro_batches=4)
            return
        result = step(engine, model, batch)
    for block in plain.blocks:  # so that the edit does not disturb autograd's own graph
        forward = block.forward
        block.forward = lambda x, forward=forward: forward(x.clone())
    assert_same(result, plain_step(plain, cut(batch, 4)), loose=("*",))
