"""Whoever saves may be killed at any moment: the last complete checkpoint is there, whole."""

import json
import tempfile
from pathlib import Path

import pytest

from ferryman.checkpoint import directory
from support import killed_saves
from support.checkpoints import Run, assert_equal, everything
from support.fresh import run_file_fresh

pytestmark = pytest.mark.timeout(300)  # of which nearly all is the first one's set-up

KILLED = killed_saves.__file__


def killed(place, modes, seed=0):
    """What campaigns saw, by mode; they fail by themselves where a checkpoint is not what it must be."""
    done = run_file_fresh(KILLED, place, seed, json.dumps(modes), timeout=900)
    assert not done.returncode, done.stderr[-3000:]
    print(done.stdout)
    return {found.pop("mode"): found for found in map(json.loads, done.stdout.splitlines())}


def check(found, points):
    assert found["points"] == found["survived"] >= points
    assert found["in a save"] >= points // 10, "most of the time it saves"
    assert found["steps"] > 0


POINTS = {"one": 12, "series": 10, "without exchange": 10}
BETWEEN = ("between, without exchange", "between, series without exchange")


@pytest.fixture(scope="module")
def seen():
    """In memory: a process that is killed leaves the same there, and no disk is waited for."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        return killed(place, {**POINTS, **dict.fromkeys((*BETWEEN, "together"), 0)})


@pytest.mark.parametrize("mode", POINTS)
def test_it_is_killed_at_any_point(seen, mode):
    check(seen[mode], POINTS[mode])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["one", "series", "without exchange", "series without exchange"])
def test_it_is_killed_at_many_points(tmp_path, mode):
    check(killed(tmp_path, {mode: 300}, seed=1)[mode], 300)


@pytest.mark.parametrize("mode", BETWEEN)
def test_it_is_killed_between_two_names(seen, mode):
    """Where names cannot be exchanged there is a moment with the old one aside and the new one not in its place."""
    assert seen[mode]["left"], "it died in between"
    if "series" not in mode:
        assert seen[mode]["kept"], "what others had put there was aside, too"


def test_two_processes_do_not_mix(seen):
    """Who comes second is refused; whatever is there at the end is whole."""
    assert seen["together"]["done"] > 2
    assert seen["together"]["refused"] > 0


def test_who_comes_second_is_told(tmp_path):
    with Run() as run:
        run.engine.save(tmp_path / "saved")
        before = everything(run.engine)
        run.step()
        with directory._locked(tmp_path / "saved"):
            with pytest.raises(ValueError, match=r"another process is saving to .*saved right now"):
                run.engine.save(tmp_path / "saved")
            run.engine.save(tmp_path / "other")
            assert (tmp_path / ".saved.lock").exists()
        run.engine.load(tmp_path / "saved")
        assert_equal(everything(run.engine), before)
        run.step()
        run.engine.save(tmp_path / "saved")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "saved"]


def test_what_is_left_of_others_in_a_series_goes(tmp_path):
    with Run() as run:
        for name in (".step-00000007.partial", ".step-00000008.before"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "half").write_text("half")
        (tmp_path / ".step-00000009.lock").write_text("")
        with directory._locked(tmp_path / "step-00000006"):  # somebody who is still there
            (tmp_path / ".step-00000006.partial").mkdir()
            run.engine.save(tmp_path, keep=2)
            assert sorted(path.name for path in tmp_path.iterdir()) == [
                ".step-00000006.lock",
                ".step-00000006.partial",
                "step-00000000",
            ]
