"""The trace says what ran when, in which lane."""

import itertools
import json
import time

import pytest
import torch
import torch_virtual

from ferryman.lanes import Lanes
from ferryman.trace import Trace


def test_every_piece_of_work_is_recorded(device):
    trace = Trace()
    with Lanes(device, trace=trace) as lanes:
        host, h2d = lanes.host("host"), lanes.device("h2d")
        first = host.submit(lambda: time.sleep(0.02), label="update unit 1", nbytes=100)
        h2d.submit(lambda: None, after=[first], label="fetch unit 1", nbytes=200)
    spans = trace.spans()
    assert [(span.lane, span.label, span.nbytes) for span in spans] == [
        ("host", "update unit 1", 100),
        ("h2d", "fetch unit 1", 200),
    ]
    assert spans[0].end - spans[0].start >= 0.02
    assert spans[0].end <= spans[1].start + 1e-3  # two clocks, brought together by the anchor
    assert all(span.start <= span.end for span in spans)


def test_device_work_is_timed_where_it_runs(virtual):
    """A copy's span is its time on the link, not the time it took to submit it."""
    nbytes = 4_000_000
    torch_virtual.set_link(virtual, h2d=100e6)
    source, slot = (
        torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True),
        torch.zeros(nbytes, dtype=torch.uint8, device=virtual),
    )
    torch_virtual.synchronize()
    trace = Trace()
    with Lanes(virtual, trace=trace) as lanes:
        h2d = lanes.device("h2d")
        for _ in range(3):
            h2d.submit(lambda: slot.copy_(source, non_blocking=True), label="fetch", nbytes=nbytes)
    spans = trace.spans()
    lengths = [span.end - span.start for span in spans]
    assert lengths == pytest.approx([0.04] * 3, rel=0.05)
    for before, after in itertools.pairwise(spans):
        assert after.start >= before.end - 1e-4


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
