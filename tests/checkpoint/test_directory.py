"""Where checkpoints are: series of them, what else is there, and what is not replaced."""

import json

import pytest

from support.checkpoints import Run

# A series.


def test_a_series_keeps_the_newest(tmp_path):
    with Run() as run:
        for number in range(4):
            run.step(number, number + 1)
            assert run.engine.save(tmp_path / "series", keep=2) == tmp_path / "series" / f"step-{number + 1:08}"
        assert [path.name for path in sorted((tmp_path / "series").iterdir())] == ["step-00000003", "step-00000004"]
        assert run.engine.load(tmp_path / "series") == tmp_path / "series" / "step-00000004"
        assert run.engine.load(tmp_path / "series" / "step-00000003").name == "step-00000003"
        assert run.engine.steps == 3
        with pytest.raises(ValueError, match="is itself a checkpoint; with keep=2"):
            run.engine.save(tmp_path / "series" / "step-00000003", keep=2)
        with pytest.raises(ValueError, match="keep=0: must be an integer"):
            run.engine.save(tmp_path / "series", keep=0)


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path):
    """The newest is what was saved last, not what has the most steps."""
    with Run() as run:
        for number in range(3):
            run.step(number, number + 1)
            run.engine.save(tmp_path, keep=3)
        run.engine.load(tmp_path / "step-00000001")
        run.step(1, 2)
        run.engine.save(tmp_path, keep=2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
        assert run.engine.load(tmp_path).name == "step-00000002"
        run.step(2, 3)
        run.engine.save(tmp_path, keep=1)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


# What else may be in the directory.


def test_files_of_others_stay(tmp_path):
    saved = tmp_path / "saved"
    with Run() as run:
        run.engine.save(saved)
        (saved / "tokenizer.json").write_text("tokens")
        (saved / "logs").mkdir()
        (saved / "logs" / "run").write_text("log")
        (saved / "logs" / "latest").symlink_to("run")
        (saved / "models").symlink_to("logs")
        (saved / "ferryman" / "old.safetensors").write_text("of others, too")
        for _ in range(2):
            run.step()
            run.engine.save(saved)
            assert (saved / "tokenizer.json").read_text() == "tokens"
            assert (saved / "logs" / "latest").read_text() == "log"
            assert (saved / "models" / "run").read_text() == "log"
            assert (saved / "ferryman" / "old.safetensors").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]
        run.engine.load(saved)


def test_a_link_to_a_directory_stays_one(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/saved")
    with Run() as run:
        for _ in range(2):
            run.step()
            run.engine.save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["saved"]
        run.engine.load(tmp_path / "link")


def test_nothing_else_is_replaced(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("text")
    (tmp_path / "empty").mkdir()
    with Run() as run:
        with pytest.raises(ValueError, match=r"file is a file; a checkpoint is a directory"):
            run.engine.save(tmp_path / "file")
        with pytest.raises(ValueError, match=r"file is a file; a series"):
            run.engine.save(tmp_path / "file", keep=1)
        with pytest.raises(ValueError, match=r"full is not a checkpoint \(it holds thesis.tex\)"):
            run.engine.save(tmp_path / "full")
        run.engine.save(tmp_path / "empty")
        run.engine.load(tmp_path / "empty")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]
        assert (tmp_path / "full" / "thesis.tex").read_text() == "text"


def test_what_is_not_there_is_said(tmp_path):
    with Run() as run:
        run.engine.save(tmp_path / "saved")
        (tmp_path / "other").mkdir()
        with pytest.raises(ValueError, match=r"there is no checkpoint at .*saevd; did you mean 'saved'"):
            run.engine.load(tmp_path / "saevd")
        with pytest.raises(ValueError, match=r"other is not a checkpoint: it has no ferryman/checkpoint.json"):
            run.engine.load(tmp_path / "other")
        with pytest.raises(ValueError, match="was saved without the object 'scheduler'"):
            run.engine.load(tmp_path / "saved", objects={"scheduler": run.engine._optimizer_view.optimizers[0]})


@pytest.mark.parametrize("how", ["damaged", "from tomorrow"])
def test_what_was_just_saved_is_never_pruned(tmp_path, how):
    """Whatever the others say of themselves, or the clock."""
    with Run() as run:
        run.step()
        old = run.engine.save(tmp_path, keep=1)
        manifest = old / "ferryman" / "checkpoint.json"
        if how == "damaged":
            manifest.write_text(manifest.read_text()[:20])
        else:
            whole = json.loads(manifest.read_text())
            whole["content"]["saved"] += 86400
            manifest.write_text(json.dumps(whole))
        run.step()
        new = run.engine.save(tmp_path, keep=1)
        assert [path.name for path in tmp_path.glob("step-*")] == [new.name]
        assert run.engine.load(tmp_path) == new
