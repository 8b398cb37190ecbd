"""The trace says what ran when, in which lane."""

import itertools
import json
import time

import pytest
import torch

from ferryman.engine import Engine
from ferryman.observe.trace import Trace
from ferryman.runtime.lanes import Lanes
from support.devices import torch_virtual
from support.models import Toy, text
from support.slow import covering

RESOLUTION = 1e-5  # seconds, of clocks and of the times of events


def test_every_piece_of_work_is_recorded(device):
    """On one time axis. The anchor that brings the device's clock to the host's is never early, and late by no more
    than the time that it took to set it."""
    trace = Trace()
    with Lanes(device, trace=trace) as lanes:
        host, (h2d, late) = lanes.host("host"), anchored(lanes)
        first = host.submit(lambda: time.sleep(0.02), label="update unit 1", nbytes=100)
        h2d.submit(lambda: None, after=[first], label="fetch unit 1", nbytes=200)
    ended, spans = trace.now(), trace.spans()
    assert [(span.lane, span.label, span.nbytes) for span in spans] == [
        ("host", "update unit 1", 100),
        ("h2d", "fetch unit 1", 200),
    ]
    assert spans[0].end - spans[0].start >= 0.02
    assert all(span.start <= span.end for span in spans)
    assert spans[1].start >= spans[0].end - RESOLUTION
    assert spans[1].end <= ended + late + RESOLUTION


def anchored(lanes):
    """The device's first lane, and the seconds by which its times may be late."""
    began = time.perf_counter()
    lane = lanes.device("h2d")
    return lane, time.perf_counter() - began


def test_device_work_is_timed_where_it_runs(virtual):
    """A copy's span is its time on the link, not the time it took to submit it."""
    nbytes = 4_000_000
    torch_virtual.set_link(virtual, h2d=100e6)
    source, slot = (
        torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True),
        torch.zeros(nbytes, dtype=torch.uint8, device=virtual),
    )
    torch_virtual.synchronize()
    trace, began = Trace(), time.perf_counter()
    with Lanes(virtual, trace=trace) as lanes:
        h2d = lanes.device("h2d")
        for _ in range(3):
            h2d.submit(lambda: slot.copy_(source, non_blocking=True), label="fetch", nbytes=nbytes)
    elapsed = time.perf_counter() - began
    spans = trace.spans()
    lengths = [span.end - span.start for span in spans]
    assert min(lengths) >= 0.04 * 0.99  # and more where a thread wakes up late
    for before, after in itertools.pairwise(spans):
        assert after.start >= before.end - 1e-4
    # All were submitted at once: spans that contained the wait for those before would be twice as long together.
    assert sum(lengths) <= elapsed + 1e-3


def test_the_file_has_a_row_per_lane(device, tmp_path):
    trace = Trace()
    path = tmp_path / "trace.json"
    with Lanes(device, trace=trace) as lanes:
        for make, name in ((lanes.device, "compute"), (lanes.device, "h2d"), (lanes.host, "host")):
            make(name).submit(lambda: time.sleep(0.001), label=f"work of {name}", nbytes=10)
    trace.save(path)
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(rows.values()) == ["compute", "h2d", "host"]
    work = [e for e in events if e["ph"] == "X"]
    assert sorted((rows[e["tid"]], e["name"]) for e in work) == [
        ("compute", "work of compute"),
        ("h2d", "work of h2d"),
        ("host", "work of host"),
    ]
    assert all(e["dur"] > 0 and e["ts"] > 0 and e["args"]["bytes"] == 10 for e in work)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_tracing_can_begin_and_end_between_steps(device):
    trace = Trace()
    with Lanes(device) as lanes:
        lane = lanes.device("compute")
        lane.submit(lambda: None, label="untraced").wait()
        lanes.trace = trace
        lane.submit(lambda: None, label="traced").wait()
        lanes.trace = None
        lane.submit(lambda: None, label="untraced").wait()
    assert [span.label for span in trace.spans()] == ["traced"]


def test_work_that_failed_or_was_cancelled_is_not_recorded_as_done(device):
    trace = Trace()
    lanes = Lanes(device, trace=trace)
    host = lanes.host("host")
    host.submit(lambda: 1 / 0, label="fails")
    host.submit(lambda: None, label="cancelled")
    with pytest.raises(ZeroDivisionError):
        lanes.close()
    assert trace.spans() == []


def engine_of(device, trace, **options):
    torch.manual_seed(0)
    model = Toy()
    options = {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "max_grad_norm": 1.0, **options}
    return Engine(model, device=device, trace=trace, **options)


def busy_of(spans, step):
    """Of each lane, by itself: how much of the step its spans cover."""
    busy = {}
    for span in spans:
        inside = max(0.0, min(span.end, step.end) - max(span.start, step.start))
        busy[span.lane] = busy.get(span.lane, 0.0) + inside
    return {lane: seconds for lane, seconds in busy.items() if seconds}


@pytest.mark.exact
def test_steps_have_their_figures(device):
    trace, on_device = Trace(), device.type != "cpu"
    with engine_of(device, trace, memory="1MiB" if on_device else None) as engine:
        losses = [engine.step(text(8, seed), micro_batches=4).item() for seed in range(3)]
        fixed = engine.plan.fixed
    steps = trace.steps()
    assert [step.number for step in steps] == [1, 2, 3]
    assert [step.loss for step in steps] == losses
    assert {(step.micro_batches, step.samples, step.tokens) for step in steps} == {(4, 8, text(8)["input_ids"].numel())}
    for before, after in itertools.pairwise(steps):
        assert before.start < before.end <= after.start
    for step in steps:
        assert step.busy == pytest.approx(busy_of(trace.spans(), step))
        assert 0 < step.share("compute") <= 1
    assert trace.last_step == steps[-1]
    samples = trace.samples()
    assert bool(samples) == on_device
    if on_device:
        assert all(fixed <= sample.nbytes <= step.peak <= 2**20 for sample in samples for step in steps)
        assert [sample.at for sample in samples] == sorted(sample.at for sample in samples)
    else:
        assert {step.peak for step in steps} == {None}


def test_what_is_no_step_is_not_recorded_as_one(accelerator):
    trace = Trace()
    with engine_of(accelerator, trace) as engine:
        first, second = (engine.forward_backward(text(4, seed), 2).item() for seed in range(2))
        engine.update()  # with both: one step
        with pytest.raises(ValueError, match="micro_batches"):
            engine.step(text(4), 5)
        engine.forward_backward(text(4), 2)
        engine.zero_grad()
        for parameter in engine._model.parameters():
            parameter.grad = torch.ones_like(parameter)
        engine.update()  # with the user's own gradients: nothing ran
        engine.step(text(6), 3)
    both, last = trace.steps()
    assert (both.number, both.micro_batches, both.samples) == (1, 4, 8)
    assert both.loss == pytest.approx((first + second) / 2)
    assert (last.number, last.micro_batches, last.samples) == (3, 3, 6)


def test_without_an_optimizer_a_step_ends_with_its_backward(device):
    trace = Trace()
    with engine_of(device, trace, optimizer=None, max_grad_norm=None) as engine:
        losses = [engine.forward_backward(text(4), 2).item() for _ in range(2)]
    assert [(step.number, step.loss) for step in trace.steps()] == list(enumerate(losses, 1))


def test_an_engine_that_only_evaluates_leaves_the_facts_of_the_training(device):
    trace = Trace()
    with engine_of(device, trace) as engine:
        engine.step(text(4), 2)
    facts = trace.facts
    assert (facts["optimizer"], facts["plan"]["updates"]) == ("AdamW", "host")
    with engine_of(device, trace, optimizer=None, max_grad_norm=None) as engine:
        engine.forward_backward(text(4), 2)
    assert trace.facts == facts
    with engine_of(device, trace, precision="bf16"):  # this one trains
        assert trace.facts["precision"] == ["bfloat16"]


@covering
@pytest.mark.parametrize("keep", [1, 2, 4])
def test_only_the_last_steps_are_kept_but_the_figures_of_all(device, keep):
    trace, seen = Trace(keep_steps=keep), set()
    with engine_of(device, trace) as engine:
        for seed in range(7):
            engine.step(text(4, seed), 2)
            seen |= set(trace.spans())
        engine.wait()
    spans, steps = trace.spans(), trace.steps()
    seen |= set(spans)
    assert [step.number for step in steps] == list(range(1, 8))
    for step in steps:  # also of those whose spans are gone
        assert step.busy == pytest.approx(busy_of(seen, step))
    # What is in the time of a step that is kept is there, and what ended before the first of them is not.
    begin = steps[-keep].start
    assert {span for span in seen if span.end > begin} <= set(spans)
    before = steps[-keep - 1].end
    assert not any(span.end < before for span in spans)
    assert all(sample.at > before for sample in trace.samples())


def test_a_very_long_run_is_thinned_and_bounded():
    trace = Trace(keep_steps=3)
    count = 45_000
    for number in range(count):
        trace.begin_step(number)
        if number:
            trace.note(number - 1, f"updates of step {number - 1}", {"device_share": number - 1})
        trace.end_step(loss=0.0, micro_batches=1)
        assert len(trace._notes) <= 4
    numbers = [step.number for step in trace.steps()]
    assert numbers[-3:] == [count - 3, count - 2, count - 1]
    assert numbers[:-3] == list(range(0, count - 3, 8))
    notes = trace.notes()
    assert [note.step for note in notes] == numbers[:-1]
    assert all(note.values["device_share"] == note.step for note in notes)
    assert trace.last_note == notes[-1]


def test_a_copy_that_outlasts_steps_is_not_lost(virtual):
    seconds, seen = 0.1, None
    while seen is None:
        seen = outlasting(virtual, seconds)
        seconds *= 2
    # The copy may begin within the first step.
    assert seen == ([], [["slow"], ["slow"], []], [1, 1, 1, 0, 0, 0])


def outlasting(virtual, seconds):
    """What a trace has of a copy that takes so long; None if four steps took longer. While it runs, after these steps:
    its spans. In three steps after it, its spans. In the end, the share of all steps but the first that it fills."""
    nbytes = 1_000_000
    torch_virtual.set_link(virtual, h2d=nbytes / seconds)
    source = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    slot = torch.zeros(nbytes, dtype=torch.uint8, device=virtual)
    torch_virtual.synchronize()
    trace, after = Trace(keep_steps=1), []
    with Lanes(virtual, trace=trace) as lanes:
        h2d, late = anchored(lanes)
        slow = h2d.submit(lambda: slot.copy_(source, non_blocking=True), label="slow", nbytes=nbytes)
        while not trace._unread[0].begin.query():
            time.sleep(0.001)
        time.sleep(late)  # its times in the trace may be later by so much
        for number in range(4):
            trace.begin_step(number)
            time.sleep(0.002)
            trace.end_step(loss=0.0, micro_batches=1)
        meanwhile = trace.spans()
        if slow.passed():
            return None
        slow.wait()
        time.sleep(late)
        for number in range(4, 7):
            trace.begin_step(number)
            if number == 4:
                (span,) = trace.spans()
            after.append([span.label for span in trace.spans()])
            trace.end_step(loss=0.0, micro_batches=1)
    shares = [max(0.0, min(span.end, s.end) - max(span.start, s.start)) / s.seconds for s in trace.steps()]
    assert [step.share("h2d") for step in trace.steps()] == pytest.approx(shares, abs=1e-6)
    return meanwhile, after, shares[1:]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "8"])
def test_a_number_of_steps_to_keep_must_be_one(wrong):
    with pytest.raises(ValueError, match="keep_steps"):
        Trace(keep_steps=wrong)


def test_the_file_has_steps_memory_and_facts(virtual, tmp_path):
    trace, path = Trace(), tmp_path / "trace.json"
    with engine_of(virtual, trace, memory="1MiB") as engine:
        engine.step(text(4), 2)
        engine.wait()
    trace.begin_step(1)
    trace.end_step(loss=float("nan"), micro_batches=2)
    trace.save(path)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads(path.read_text(), parse_constant=refuse)
    events = content["traceEvents"]
    steps = [e for e in events if e["ph"] == "X" and e["name"].startswith("step ")]
    assert [e["args"]["loss"] for e in steps] == [trace.steps()[0].loss, "nan"]
    counters = [e for e in events if e["ph"] == "C"]
    assert [e["args"]["allocated"] for e in counters] == [sample.nbytes for sample in trace.samples()]
    # Microseconds and back may round in the last bit.
    assert [e["ts"] / 1e6 for e in counters] == pytest.approx([sample.at for sample in trace.samples()], rel=1e-12)
    assert [e["name"] for e in events if e["ph"] == "i"] == ["updates of step 1"]
    facts = content["otherData"]["ferryman"]["0"]
    assert (facts["device"], facts["virtual"], facts["budget"], facts["precision"]) == (
        "virtual:0",
        True,
        2**20,
        ["float32"],
    )
    assert facts["parameters"] == sum(p.numel() for p in Toy().parameters())
    assert facts["plan"]["account"] == engine.plan.account
