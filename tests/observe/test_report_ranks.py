"""The report of several ranks: each has its lanes, on one axis."""

import dataclasses
import json
import shutil

import pytest

from ferryman.observe.report.figures import figures_of, summary
from ferryman.observe.report.recording import read
from ferryman.observe.trace import trace_path
from support import rank_jobs
from support.report_page import command, place_of


@pytest.fixture(scope="module")
def several(tmp_path_factory, two):
    """Two ranks, of which the second has most to do: the first one's trace, beside which is the other's."""
    path = tmp_path_factory.mktemp("several") / "trace.json"
    ended = two.run(rank_jobs.record, path, (1, 5), memory="256KiB", max_grad_norm=1.0, held=False, stash="host")
    return path, ended


def test_ranks_are_on_one_axis(several):
    path, ended = several
    first, second = read(path)
    assert (first.rank, second.rank, second.facts["ranks"]) == (0, 1, 2)
    assert {"exchange", "share"} <= set(first.lanes) & set(second.lanes)
    (alone,) = read(trace_path(path, 1))
    assert second.spans[0].start - alone.spans[0].start == pytest.approx(second.facts["began"] - first.facts["began"])
    for one, two in zip(first.steps, second.steps, strict=True):
        overlap = min(one.end, two.end) - max(one.start, two.start)
        assert overlap > 0, "each waits for the other in it, however late one begins or ends"
    for recording in (first, second):  # and none of it is after the end
        assert first.facts["began"] + max(span.end for span in recording.spans) <= max(ended)


def test_others_are_found_beside_or_given_and_strangers_are_not_taken(several, tmp_path):
    path, _ = several
    mine, theirs = tmp_path / "trace.json", tmp_path / "trace.rank1.json"
    shutil.copy(path, mine)
    assert [recording.rank for recording in read(mine)] == [0]
    assert [recording.rank for recording in read(trace_path(path, 1), mine)] == [0, 1]
    for change in ({"began": 0.0}, {"ranks": 4}):  # of another run
        content = json.loads(trace_path(path, 1).read_text())
        content["otherData"]["ferryman"]["1"].update(change)
        theirs.write_text(json.dumps(content))
        assert [recording.rank for recording in read(mine)] == [0]
    with pytest.raises(ValueError, match=r"both belong to rank 0; give one trace for each rank"):
        read(mine, path)


def test_figures_are_of_all_ranks_and_name_the_one_they_wait_for(several, tmp_path, monkeypatch, capsys):
    path, _ = several
    figures = [figures_of(recording) for recording in read(path)]
    found = summary(figures)
    assert found["slowest_rank"] == 1
    assert found["tokens_per_second"] == pytest.approx(sum(of.tokens_rate for of in figures))
    assert found["device_peak"] == max(of.peak for of in figures)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert figures[0].typical.whole.busy["other ranks"] > 0
    assert command(monkeypatch, path, "-o", tmp_path / "both.html") == 0
    assert "all ranks: the other ranks wait for rank 1" in capsys.readouterr().out
    shutil.copy(path, tmp_path / "one.json")
    assert command(monkeypatch, tmp_path / "one.json", trace_path(path, 1)) == 0
    assert "rank 1: 4 steps" in capsys.readouterr().out


def test_ranks_that_wait_about_as_long_are_not_set_apart(several):
    path, _ = several
    figures = [figures_of(recording) for recording in read(path)]
    alike = [figures[1], dataclasses.replace(figures[1], recording=figures[0].recording)]
    assert summary(alike)["slowest_rank"] is None
    assert summary(figures[1:])["slowest_rank"] is None  # it is alone


def test_each_rank_has_a_group_of_rows(several, show):
    path, _ = several
    page = show(path)
    lanes = page.evaluate("rows.map(row => [row.rank.rank, row.lane.name])")
    assert [rank for rank, _ in lanes] == sorted(rank for rank, _ in lanes)
    for rank in (0, 1):
        assert [name for of, name in lanes if of == rank][-2:] == ["exchange", "share"]
    x, y, _ = place_of(page, "exchange")
    page.mouse.move(x, y)
    assert "rank 0, lane exchange" in page.locator("#tip").inner_text()
    assert "2 ranks" in page.locator("#facts").inner_text()
    assert "the other ranks wait for rank 1" in page.locator("#headline").inner_text()
    assert "rank 1, which the other ranks wait for" in page.locator("#where").inner_text()
    assert "gradients to the ranks that own them" in page.locator("#where").inner_text()
    assert "rank 0" in page.locator("#memory-title").inner_text()
    page.locator("#memory").hover()
    assert "rank 1: " in page.locator("#tip").inner_text()
