"""The report: its figures follow from the trace, and its page shows them, in a real browser."""

import copy
import itertools
import json
import math
import shutil
import statistics

import pytest
import torch

from ferryman.engine import Engine
from ferryman.observe.report.figures import RESOURCES, figures_of, kind_of
from ferryman.observe.report.recording import read
from ferryman.observe.trace import Trace, TraceSpan
from support.devices import torch_virtual
from support.models import gpt2, text
from support.report_page import command, place_of

STEPS, KEPT = 5, 3


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short training on a slow link: the trace that was recorded, and the file."""
    path = tmp_path_factory.mktemp("run") / "trace.json"
    before = torch_virtual.set_link("virtual:0", h2d=30e6, d2h=30e6)
    trace = Trace(keep_steps=KEPT)
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {
        "memory": "448KiB",
        "max_grad_norm": 1.0,
        "subgroup": 1024,
        "held": False,
        "stash": "host",
        "trace": trace,
    }
    with torch_virtual.strict(), Engine(model, optimizer, device="virtual:0", **options) as engine:
        for seed in range(STEPS):
            engine.step(text(8, seed), micro_batches=2)
    torch_virtual.set_link("virtual:0", h2d=before.h2d, d2h=before.d2h)
    trace.save(path)
    return trace, path


def union(spans, start, end):
    """How much of the time is covered, by going through all edges."""
    edges = sorted({start, end, *(t for span in spans for t in (span.start, span.end) if start < t < end)})
    return sum(b - a for a, b in itertools.pairwise(edges) if any(s.start <= a and b <= s.end for s in spans))


# Figures.


def test_the_file_says_what_the_trace_knows(run):
    trace, path = run
    (recording,) = read(path)
    assert [step.loss for step in recording.steps] == [step.loss for step in trace.steps()]
    assert [step.seconds for step in recording.steps] == pytest.approx([step.seconds for step in trace.steps()])
    assert recording.kept == set(range(STEPS - KEPT, STEPS))
    assert [span.label for span in recording.spans] == [span.label for span in trace.spans()]
    assert [sample.nbytes for sample in recording.samples] == [sample.nbytes for sample in trace.samples()]
    assert set(recording.updates) == set(range(1, STEPS + 1))
    assert recording.updates[4]["device_share"] == trace.notes()[3].values["device_share"]


def test_figures_equal_those_computed_apart(run):
    trace, path = run
    figures = figures_of(read(path)[0])
    steps = trace.steps()
    assert figures.seconds == pytest.approx(statistics.median(step.end - step.start for step in steps[1:]))
    assert figures.tokens_rate == pytest.approx(statistics.median(step.tokens / step.seconds for step in steps[1:]))
    assert figures.peak == max(step.peak for step in steps) <= 448 * 1024
    assert [account.step.number for account in figures.accounts] == list(range(STEPS - KEPT + 1, STEPS + 1))
    for account, step in zip(figures.accounts, steps[-KEPT:], strict=True):
        inside = [span for span in trace.spans() if span.end > step.start and span.start < step.end]
        for resource, lanes in RESOURCES.items():
            expected = union([span for span in inside if span.lane in lanes], step.start, step.end)
            assert account.whole.busy.get(resource, 0.0) == pytest.approx(expected, rel=1e-4, abs=1e-7), resource
        assert {name: lane.busy for name, lane in account.lanes.items()} == pytest.approx(dict(step.busy), abs=1e-6)
        for lane in account.lanes.values():
            assert sum(lane.kinds.values()) == pytest.approx(lane.busy, abs=1e-6)
        first = next(s for s in inside if s.label.endswith(("(turn)", "(backward)")) and s.start >= step.start)
        forward, backward, finish = account.phases
        assert (forward.start, forward.end) == pytest.approx((step.start, first.start))
        assert (backward.end, finish.end) == pytest.approx((finish.start, step.end))
        assert account.whole.busiest == max(account.whole.busy, key=account.whole.busy.get)


def made_of(tmp_path, spans, seconds=0.0, **facts):
    """A trace file of these spans, in a step that lasts a little where `seconds` says so."""
    trace, path = Trace(), tmp_path / "made.json"
    trace.add_facts(facts)
    for span in spans:
        trace.add_lane(span.lane)
        trace.add(span)
    if seconds:
        trace._step_began = (7, 0.0)
        trace._began -= seconds - trace.now()
        trace.end_step(loss=math.nan, micro_batches=1)
    trace.save(path)
    return path


def test_lanes_that_share_a_link_count_once(tmp_path):
    spans = [TraceSpan("h2d", "fetch a", 0.0, 4.0, 8), TraceSpan("stash in", "restore stash", 3.0, 9.0, 8),
             TraceSpan("compute", "visit a (forward)", 1.0, 3.0, 0),
             TraceSpan("compute", "visit a (backward)", 5.0, 9.0, 0),
             TraceSpan("host", "update a", 9.0, 12.0, 0)]  # fmt: skip
    (account,) = figures_of(read(made_of(tmp_path, spans, seconds=10.0))[0]).accounts
    assert account.whole.busy == pytest.approx({"compute": 6, "link in": 9, "host": 1}, abs=0.01)
    assert (account.whole.bound, account.whole.share) == ("link in", pytest.approx(0.9, abs=0.01))
    forward, backward, finish = account.phases
    assert (forward.bound, forward.share) == ("link in", pytest.approx(1.0))
    assert (backward.busy["compute"], backward.bound) == (pytest.approx(4.0), "compute")
    assert (finish.bound, finish.busy["host"]) == ("host", pytest.approx(1.0, abs=0.01))


def test_a_step_that_nothing_fills_is_not_said_to_be_bounded(tmp_path):
    path = made_of(tmp_path, [TraceSpan("compute", "visit a (forward)", 0.0, 5.0, 0)], seconds=10.0)
    whole = figures_of(read(path)[0]).typical.whole
    assert (whole.busiest, whole.bound, whole.share) == ("compute", None, pytest.approx(0.5, abs=0.01))


def test_a_run_whose_figures_were_thinned_says_so(tmp_path, monkeypatch, capsys, show):
    monkeypatch.setattr("ferryman.observe.trace._MAX_OLD_STEPS", 10)
    trace, path = Trace(keep_steps=2), tmp_path / "long.json"
    trace.add_lane("host")
    for number in range(50):
        trace.begin_step(number)
        trace.add(TraceSpan("host", "work", trace.now() - 1e-5, trace.now(), 0))
        trace.note(number, f"updates of step {number}", {"device_share": 0.5})
        trace.end_step(loss=1.0, micro_batches=1)
    trace.save(path)
    (recording,) = read(path)
    numbers = [*range(0, 48, 8), 48, 49]
    assert [step.number for step in recording.steps] == numbers
    assert list(recording.updates) == numbers
    assert recording.facts["thinned"] == {"every": 8, "steps": 50}
    assert "of 50 steps in total, every 8th of the older ones" in show(path).locator("#headline").inner_text()
    assert command(monkeypatch, path) == 0
    assert "50 steps (8 of them recorded, every 8th of the older ones)" in capsys.readouterr().out


def test_every_label_of_a_run_has_a_kind(run):
    kinds = {kind_of(span.label) for span in run[0].spans()}
    assert kinds >= {"forward", "turn", "backward", "weights", "gradients", "stash", "update", "check"}
    assert {span.label for span in run[0].spans() if kind_of(span.label) == "other"} <= {"loss", "add up losses"}


# The page.


def test_the_page_shows_the_run(run, show):
    trace, path = run
    page = show(path)
    steps = trace.steps()
    seconds = statistics.median(step.seconds for step in steps[1:])
    headline = page.locator("#headline").inner_text()
    assert shown(seconds, {"ms": 1e-3, "s": 1}) in headline.replace("\n", " ")
    assert "of the budget of 448 KiB" in headline
    assert "virtual accelerator" in page.locator("#facts").inner_text()
    assert page.locator("#step option").all_inner_texts() == [f"step {n}" for n in range(STEPS - KEPT + 1, STEPS + 1)]
    lanes = page.evaluate("[...new Set(rows.map(row => row.lane.name))]")
    assert set(lanes) == {span.lane for span in trace.spans()}
    assert f"over {STEPS} steps" in page.locator("#course canvas").first.get_attribute("aria-label")
    assert "on the device" in page.locator("#split").inner_text()
    for canvas in ("#lanes", "#memory", "#course canvas >> nth=0", "#split canvas >> nth=1"):
        painted = "e => new Set(e.getContext('2d').getImageData(0, 0, e.width, e.height).data).size"
        assert page.locator(canvas).evaluate(painted) > 10, canvas


@pytest.fixture
def above(run, tmp_path):
    """The same run, with a budget that its peak exceeds by 2 KiB."""
    content = json.loads(run[1].read_text())
    content["otherData"]["ferryman"]["0"]["budget"] = max(step.peak for step in run[0].steps()) - 2048
    path = tmp_path / "above.json"
    path.write_text(json.dumps(content))
    return path


def test_the_page_warns_of_a_peak_above_the_budget(run, above, show):
    assert "Warning" not in show(run[1]).locator("#headline").inner_text()
    assert "Warning: 2.00 KiB above the budget" in show(above).locator("#headline").inner_text()


def test_the_command_warns_of_a_peak_above_the_budget(run, above, tmp_path, monkeypatch, capsys):
    assert command(monkeypatch, run[1], "-o", tmp_path / "out.html") == 0
    assert "warning" not in capsys.readouterr().out
    assert command(monkeypatch, above) == 0
    assert "warning: the device peak is 2.00KiB above the budget" in capsys.readouterr().out


def shown(value, units):
    """With three digits, in the largest unit of which there is at least one."""
    unit = max((unit for unit in units if value >= units[unit]), key=units.get)
    scaled = value / units[unit]
    return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {unit}"


def test_hovering_writes_facts_what_bytes_and_rate(run, show):
    trace, path = run
    page = show(path)
    x, y, index = place_of(page, "h2d")
    page.mouse.move(x, y)
    span = [span for span in trace.spans() if span.lane == "h2d"][index]
    tip = page.locator("#tip").inner_text()
    assert tip.startswith(span.label)
    assert "lane h2d" in tip  # and no step, if it was fetched ahead of one
    seconds = round((span.end - span.start) * 1e6, 1) / 1e6  # as the page has it
    assert shown(seconds, {"µs": 1e-6, "ms": 1e-3, "s": 1}) in tip
    assert shown(span.nbytes, {"kB": 1e3, "MB": 1e6}) in tip
    assert shown(span.nbytes / seconds, {"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}) in tip
    x, y, _ = place_of(page, "compute")
    page.mouse.move(x, y)
    assert page.locator("#tip b").inner_text().startswith("visit ")
    assert "lane compute, step " in page.locator("#tip").inner_text()
    page.locator("#memory").hover()
    assert "of the budget" in page.locator("#tip").inner_text()
    page.mouse.move(2, 2)
    assert page.locator("#tip").is_hidden()


def test_the_view_follows_wheel_drag_keys_and_buttons(run, show):
    page = show(run[1])

    def length():
        return page.evaluate("view.to - view.from")

    whole, start = length(), page.evaluate("view.from")
    page.locator("#lanes").hover()
    page.mouse.wheel(0, -300)
    page.wait_for_function("before => view.to - view.from < before", arg=whole)
    zoomed = length()
    middle = page.evaluate("view.from")
    page.mouse.down()
    page.mouse.move(900, page.locator("#lanes").bounding_box()["y"] + 60, steps=3)
    page.mouse.up()
    assert page.evaluate("view.from") != middle
    assert length() == pytest.approx(zoomed)
    page.locator("#plots").focus()
    for key, compare in (("+", float.__lt__), ("-", float.__gt__)):
        before = length()
        page.keyboard.press(key)
        assert compare(float(length()), float(before)), key
    page.keyboard.press("0")
    assert (length(), page.evaluate("view.from")) == pytest.approx((whole, start))
    page.get_by_role("button", name="Zoom in").click()
    assert length() < whole
    page.keyboard.down("Shift")
    box = page.locator("#lanes").bounding_box()
    before = length()
    page.mouse.move(box["x"] + 400, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 50, steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    assert length() < before / 3
    page.get_by_role("button", name="Whole step").click()
    assert length() == pytest.approx(whole)
    page.get_by_role("button", name="All").click()
    assert length() > 2 * whole


def test_keys_alone_reach_every_piece_of_work(run, show):
    page = show(run[1])
    page.locator("#plots").focus()
    page.keyboard.press("ArrowDown")
    first = page.locator("#tip").inner_text()
    page.keyboard.press("n")
    assert page.locator("#tip").inner_text() != first
    page.keyboard.press("p")
    assert page.locator("#tip").inner_text() == first
    page.keyboard.press("ArrowDown")
    assert "lane h2d" in page.locator("#tip").inner_text()


def test_another_step_can_be_chosen(run, show):
    page = show(run[1])
    page.locator("#step").select_option(label=f"step {STEPS}")
    assert f"step {STEPS}" in page.locator("#where").inner_text()
    assert f"in step {STEPS}" in page.locator("#split").inner_text()
    assert page.locator("#next").is_disabled()
    page.locator("#previous").click()
    assert page.locator("#step").input_value() == str(KEPT - 2)
    assert f"step {STEPS - 1}" in page.locator("#where").inner_text()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 420)])
def test_light_and_dark_wide_and_narrow(run, show, scheme, width):
    page = show(run[1], width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out

    def brightness():
        pixel = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        return sum(pixel) / 3

    assert (brightness() > 128) == (scheme == "light")
    page.get_by_role("button", name="Switch between light and dark").click()
    assert (brightness() > 128) != (scheme == "light")


def test_what_is_missing_is_said(tmp_path, show):
    """Lanes alone: no steps, no memory, no updates, no facts."""
    page = show(made_of(tmp_path, [TraceSpan("host", "work", 0.0, 1.0, 0), TraceSpan("h2d", "copy", 0.2, 0.4, 100)]))
    words = page.locator("main").inner_text()
    for missing in ("no steps recorded", "no samples of device memory", "has no updates", "no loss to show"):
        assert missing in words, missing
    assert page.locator("#memory").is_hidden()
    assert page.locator("#step option").all_inner_texts() == ["whole trace"]


def test_a_loss_that_is_not_finite_and_a_device_without_memory(tmp_path, show):
    page = show(made_of(tmp_path, [TraceSpan("compute", "visit a (forward)", 0, 1, 0)], seconds=2.0, device="cpu"))
    words = page.locator("main").inner_text()
    assert "losses of these steps are not in the trace" in words
    assert "the device is the CPU" in words


def test_labels_are_text_and_never_markup(tmp_path, show):
    label = "</script><b id=x>fetch</b><!-- {{style}} {{data}} &amp;"
    path = made_of(
        tmp_path,
        [TraceSpan("h2d", label, 0.0, 1.0, 5)],
        model="<img src=x onerror=alert(1)>",
        parameters=1,
        device="<i>",
    )
    named = path.rename(tmp_path / "<b>&{{data}}.json")
    page = show(named)
    assert page.locator("#x, img, #facts i").count() == 0
    assert page.locator("h1").inner_text().startswith("<img src=x onerror=alert(1)>")
    assert page.title() == "<b>&{{data}}.json: ferryman report"
    x, y, _ = place_of(page, "h2d")
    page.mouse.move(x, y)
    assert page.locator("#tip b").inner_text() == label


def test_what_is_drawn_is_bounded_by_pixels_not_by_spans(tmp_path, show):
    lanes, count = ("compute", "h2d", "host"), 6_000
    spans = [TraceSpan(lane, f"work {i % 50}", i / 1e3, (i + 0.9) / 1e3, 100) for lane in lanes for i in range(count)]
    page = show(made_of(tmp_path, spans))
    drawn = page.evaluate(
        """() => {
            let calls = 0;
            const plain = CanvasRenderingContext2D.prototype.fillRect;
            CanvasRenderingContext2D.prototype.fillRect = function (...args) { calls += 1; plain.apply(this, args); };
            paintLanes();
            CanvasRenderingContext2D.prototype.fillRect = plain;
            return calls;
        }"""
    )
    assert 100 < drawn < len(lanes) * 1400 * 2


def test_several_ranks_have_lanes_each(run, tmp_path, show):
    content = json.loads(run[1].read_text())
    second = copy.deepcopy(content["traceEvents"])
    for event in second:
        event["pid"] = 1
    content["traceEvents"] += second
    content["otherData"]["ferryman"]["1"] = content["otherData"]["ferryman"]["0"]
    path = tmp_path / "merged.json"
    path.write_text(json.dumps(content))
    page = show(path)
    lanes = page.evaluate("rows.map(row => [row.rank.rank, row.lane.name])")
    names = [name for rank, name in lanes if rank == 0]
    assert lanes == [[0, name] for name in names] + [[1, name] for name in names]
    assert "2 ranks" in page.locator("#facts").inner_text()
    x, y, _ = place_of(page, "compute")
    page.mouse.move(x, y)
    assert "rank 0, lane compute" in page.locator("#tip").inner_text()


# The command.


def test_the_command_writes_a_report_and_prints_the_headline(run, tmp_path, monkeypatch, capsys):
    path = shutil.copy(run[1], tmp_path / "trace.json")
    assert command(monkeypatch, path) == 0
    assert f"{STEPS} steps" in capsys.readouterr().out
    page = tmp_path / "trace.html"
    assert page.read_text().startswith("<!doctype html>")
    assert command(monkeypatch, path) == 2
    assert "--force" in capsys.readouterr().err
    page.write_text("old")
    assert command(monkeypatch, path, "--force") == 0
    assert page.read_text() != "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.html", "trace.json"]


def test_the_command_prints_figures_for_machines(run, tmp_path, monkeypatch, capsys):
    path = shutil.copy(run[1], tmp_path / "trace.json")
    assert command(monkeypatch, path, "--json") == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert [step["loss"] for step in rank["steps"]] == [step.loss for step in run[0].steps()]
    assert rank["facts"]["budget"] == 448 * 1024
    assert rank["busiest"] in RESOURCES
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    assert command(monkeypatch, path, "--json", "-o", tmp_path / "out.html") == 0
    assert (tmp_path / "out.html").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no file"),
        ("loss 3.5", "is not a trace"),
        ("[1, 2]", "'traceEvents' is missing"),
        ('{"traceEvents": []}', "was not recorded by ferryman"),
        ('{"traceEvents": [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "ferryman"}}]}', "is empty"),
        (
            '{"traceEvents": [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "ferryman"}}, '
            '{"ph": "X", "name": "a", "pid": 0, "tid": 3, "ts": 1, "dur": 1}]}',
            "is damaged",
        ),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_what_is_no_trace_is_refused_by_what_is_wrong(content, words, tmp_path, monkeypatch, capsys):
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert command(monkeypatch, path) == 2
    message = capsys.readouterr().err
    assert words in message
    assert str(path) in message
    assert not (tmp_path / "trace.html").exists()


def test_a_place_that_is_not_there_is_named(run, tmp_path, monkeypatch, capsys):
    assert command(monkeypatch, run[1], "-o", tmp_path / "no" / "report.html") == 2
    assert "does not exist; create it first" in capsys.readouterr().err
    assert command(monkeypatch, tmp_path) == 2
    assert "is a directory" in capsys.readouterr().err
