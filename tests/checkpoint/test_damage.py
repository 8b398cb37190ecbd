"""Checkpoints on disks that fail: damaged files are named, full disks leave the old checkpoint."""

import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ferryman.checkpoint import directory, saving, tensor_file
from ferryman.checkpoint.manifest import crc_of, is_whole
from ferryman.engine import Engine
from ferryman.runtime.files import naming, replacing_file
from support.checkpoints import Run, assert_equal, everything, one_group
from support.models import CASES, build, text

# Damage.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """With every kind of file: several of weights and of state, tensors of torch's own optimizer, a configuration."""
    path = tmp_path_factory.mktemp("good") / "saved"
    model = build(CASES["gpt2"])
    with pytest.MonkeyPatch.context() as patch, Engine(model, one_group()(model), device="cpu") as engine:
        patch.setattr(saving, "_MAX_SHARD_BYTES", 20_000)
        engine.step(text(4), 2)
        engine.save(path)
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert len(files) > 9
    return path


@pytest.fixture(scope="module")
def run():
    with Run("gpt2", one_group(), seed=5) as run:
        run.step(0, 1)
        yield run


def files_of(saved):
    return [file.relative_to(saved) for file in sorted(saved.rglob("*")) if file.is_file()]


def check(run, saved, broken, name):
    """The file is named, the engine steps on if nothing was changed and else refuses to, and a good one mends it."""
    with pytest.raises(ValueError, match=str(name)) as told:
        run.engine.load(broken)
    if run.engine._loaded._half:
        with pytest.raises(ValueError, match=r"may be half overwritten, since loading .* failed"):
            run.engine.step(text(4), 2)
        with pytest.raises(ValueError, match="may be half overwritten"):
            run.engine.save(broken)
        run.engine.load(saved)
    else:
        run.engine._parts.server.wait_for_updates()
    return str(told.value)


def copy_with(saved, tmp_path, name, content):
    broken = tmp_path / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(saved, broken, copy_function=os.link)
    (broken / name).unlink()
    if content is not None:
        (broken / name).write_bytes(content)
    return broken


def test_a_truncated_file_is_named(tmp_path, saved, run):
    for name in files_of(saved):
        content = (saved / name).read_bytes()
        for shorter in (content[:-1], content[: len(content) // 2], b"", content[:4], content + b"\0"):
            told = check(run, saved, copy_with(saved, tmp_path, name, shorter), name)
            assert "truncated" in told or "damaged" in told
        told = check(run, saved, copy_with(saved, tmp_path, name, None), name)
        assert "is missing" in told or "it has no" in told
    run.engine.load(saved)
    run.engine.step(text(4), 2)


def test_a_flipped_bit_is_named(tmp_path, saved, run):
    """Wherever it is: in a header, a tensor, a configuration, the manifest."""
    source = random.Random(0)
    for name in files_of(saved):
        content = (saved / name).read_bytes()
        header = min(len(content), 9 + int.from_bytes(content[:8], "little")) if name.suffix != ".json" else 0
        places = [source.randrange(8 * len(content)) for _ in range(6)]
        places += [source.randrange(8 * header) for _ in range(12 if header else 0)]
        for place in places:
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            if name == directory.MANIFEST and _same_json(content, flipped):
                continue  # 1e-5 and 1E-5
            told = check(run, saved, copy_with(saved, tmp_path, name, bytes(flipped)), name)
            assert "damaged" in told or "truncated" in told, told
    run.engine.load(saved)
    run.engine.step(text(4), 2)


def _same_json(one, other):
    try:
        return json.loads(one) == json.loads(bytes(other))
    except ValueError:
        return False


def test_a_flipped_bit_is_found_without_an_optimizer(tmp_path, saved):
    """Weights in another precision need the master, which is beside the optimizer's state."""
    with Run("gpt2", one_group(), options={"precision": "bf16"}) as narrow:
        narrow.engine.save(tmp_path / "narrow")
    name = Path("ferryman/state.safetensors")
    content = bytearray((tmp_path / "narrow" / name).read_bytes())
    content[-1] ^= 4
    broken = copy_with(tmp_path / "narrow", tmp_path, name, bytes(content))
    with Engine(build(CASES["gpt2"]), device="cpu") as engine:
        with pytest.raises(ValueError, match=r"state\.safetensors is damaged: its checksum"):
            engine.load(broken)
        with pytest.raises(ValueError, match="may be half overwritten"):
            engine.forward_backward(text(4), 2)
        engine.load(tmp_path / "narrow")
        engine.forward_backward(text(4), 2)


def test_weights_alone_do_not_mend_a_state_that_is_half(tmp_path, saved, run):
    name = next(name for name in files_of(saved) if name.name.startswith("state-"))
    content = bytearray((saved / name).read_bytes())
    content[-1] ^= 4
    with pytest.raises(ValueError, match=str(name)):
        run.engine.load(copy_with(saved, tmp_path, name, bytes(content)))
    run.engine.load_weights(saved)
    with pytest.raises(ValueError, match="the optimizer's state may be half overwritten"):
        run.engine.step(text(4), 2)
    run.engine.load(saved)
    run.engine.step(text(4), 2)


def test_weights_that_fail_to_load_are_not_trained(tmp_path, saved, run, monkeypatch):
    real = tensor_file.read_tensor
    read = []

    def ends(path, entry):
        read.append(entry)
        if len(read) > 3:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, entry)

    with monkeypatch.context() as broken:
        broken.setattr(tensor_file, "read_tensor", ends)
        with pytest.raises(OSError, match=r"Input/output error: .*safetensors"):
            run.engine.load_weights(saved)
    with pytest.raises(ValueError, match="weights may be half overwritten"):
        run.engine.step(text(4), 2)
    run.engine.load_weights(saved)
    run.engine.step(text(4), 2)


def test_a_damaged_checkpoint_is_replaced(tmp_path, saved):
    """Also one whose manifest nobody can read any more: training must not end for it."""
    broken = copy_with(saved, tmp_path, directory.MANIFEST, b"{")
    (broken / "tokenizer.json").write_text("tokens")
    with Run("gpt2", one_group()) as run:
        run.engine.save(broken)
        run.engine.load(broken)
    assert (broken / "tokenizer.json").read_text() == "tokens"
    assert not list(broken.glob("model-*")), "what was of the old one"


def test_the_newest_of_a_series_is_told_if_it_is_damaged(tmp_path):
    with Run() as run:
        for number in range(2):
            run.step(number, number + 1)
            run.engine.save(tmp_path, keep=3)
        manifest = tmp_path / "step-00000002" / directory.MANIFEST
        manifest.write_bytes(manifest.read_bytes()[:-1])
        with pytest.raises(ValueError, match=r"step-00000002/ferryman/checkpoint\.json is damaged"):
            run.engine.load(tmp_path)
        assert [is_whole(path) for path in directory.series(tmp_path)] == [True, False]
        assert run.engine.load(tmp_path / "step-00000001")
        run.step(1, 2)
        run.engine.save(tmp_path, keep=1)
        assert run.engine.load(tmp_path).name == "step-00000002"


def test_a_format_of_the_future_is_refused(tmp_path, saved, run):
    whole = json.loads((saved / directory.MANIFEST).read_text())
    whole["content"]["format"] = 99
    whole["crc32"] = crc_of(whole["content"])
    broken = copy_with(saved, tmp_path, directory.MANIFEST, json.dumps(whole).encode())
    with pytest.raises(ValueError, match=r"has format 99, written by ferryman .*; this version reads format 1"):
        run.engine.load(broken)


# Disks.

# In a namespace of its own, so that what is mounted ends with the process.
ON_DISKS = """
import subprocess, sys
from pathlib import Path
sys.path[:0] = {path!r}
import checkpoint.test_damage as tests
for name in ("full", "mounted", "read_only", "out_of_inodes"):
    disk = Path({place!r}) / name
    disk.mkdir()
    limits = "size=1m" + (",nr_inodes=40" if name == "out_of_inodes" else "")
    subprocess.run(["mount", "-t", "tmpfs", "-o", limits, "tmpfs", disk], check=True)
    getattr(tests, "_" + name)(disk)
"""


def test_disks(tmp_path):
    """Real ones, though in memory: full, read-only, and given as the checkpoint's directory themselves."""
    unshare = shutil.which("unshare")
    flags = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
    if unshare is None or subprocess.run([unshare, *flags, "true"], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here: neither root nor user namespaces")
    code = ON_DISKS.format(path=sys.path, place=str(tmp_path))
    done = subprocess.run([unshare, *flags, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-3000:]


def _full(disk):
    """The old checkpoint stays, and nothing else."""
    with Run() as run:
        run.step(0, 1)
        run.engine.save(disk / "saved")
        before = everything(run.engine)
        size = sum(file.stat().st_size for file in (disk / "saved").rglob("*"))
        run.step(1, 2)
        now = everything(run.engine)
        free = shutil.disk_usage(disk).free
        # Too full from the beginning; full in the midst, of weights, of state, of the rest, by other processes.
        for room in (0, size // 2, "weights", "state", "rest", "manifest"):
            filler = disk / "filler"
            if isinstance(room, int):
                filler.write_bytes(bytes(free - room))
            with _filling(filler, room):
                full = r"the disk is full: the checkpoint needs .* The previous checkpoint is unchanged: .*/saved"
                with pytest.raises(OSError, match=full) as told:
                    run.engine.save(disk / "saved")
                assert told.value.errno == errno.ENOSPC
            assert sorted(path.name for path in disk.iterdir()) == ["filler", "saved"], room
            filler.unlink()
            assert_equal(everything(run.engine), now)
            run.engine.load(disk / "saved")
            assert_equal(everything(run.engine), before)
            run.step(1, 2)
        run.engine.save(disk / "saved")
        run.engine.load(disk / "saved")


def _filling(filler, room):
    """Another process takes all that is left when this part is written."""
    patch = pytest.MonkeyPatch.context()
    if isinstance(room, int):
        return patch
    real = tensor_file.write_bytes

    def write_bytes(path, parts):
        wanted = {"weights": "model", "manifest": "checkpoint"}.get(room, room)
        if path.name.startswith(wanted):
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1 << 16))
                except OSError:
                    pass
        return real(path, parts)

    class Patch:
        def __enter__(self):
            self.context = patch.__enter__()
            self.context.setattr(tensor_file, "write_bytes", write_bytes)

        def __exit__(self, *error):
            return patch.__exit__(*error)

    return Patch()


def _read_only(disk):
    """It can be loaded from."""
    with Run() as run:
        run.engine.save(disk / "saved")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for options in ({}, {"keep": 2}):
            with pytest.raises(OSError, match=str(disk)) as told:
                run.engine.save(disk / ("series" if options else "saved"), **options)
            assert told.value.errno == errno.EROFS
        run.engine.load(disk / "saved")
        run.step()


def _out_of_inodes(disk):
    """The system has the same error for it as for no space."""
    left = r"the disk has no inodes left: there are too many files on it, though it has space"
    with Run() as run:
        run.engine.save(disk / "saved")
        before = sorted(path.name for path in (disk / "saved").iterdir())
        files = [disk / f"file{number}" for number in range(40)]
        with contextlib.suppress(OSError):
            for file in files:
                file.touch()
        files[0].unlink()  # for the lock
        with pytest.raises(OSError, match=rf"{left}.* The previous checkpoint is unchanged: .*/saved") as told:
            run.engine.save(disk / "saved")
        assert told.value.errno == errno.ENOSPC
        assert sorted(path.name for path in (disk / "saved").iterdir()) == before
        files[0].touch()
        with pytest.raises(OSError, match=rf"{left}.*: .*/report\.html"), replacing_file(disk / "report.html") as file:
            file.write_text("text")
        assert not (disk / "report.html").exists()
        output = disk / "runs" / "new"
        with pytest.raises(OSError, match=rf"{left}.*: '{output}'"), naming(output):  # of a run that begins
            output.mkdir(parents=True)
        for file in files:
            file.unlink(missing_ok=True)
        run.engine.save(disk / "saved")


def _mounted(disk):
    with Run() as run:
        with pytest.raises(ValueError, match=r"is a mount point.*give a directory inside it"):
            run.engine.save(disk)
        run.engine.save(disk, keep=1)
        run.engine.load(disk)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_not_ones_own(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o500)
    with Run() as run, pytest.raises(PermissionError, match="theirs"):
        run.engine.save(tmp_path / "theirs" / "saved")


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    """Of any kind, at any place."""

    def fail(*_, **__):
        raise KeyboardInterrupt

    with Run() as run:
        run.engine.save(tmp_path / "saved")
        before = everything(run.engine)
        run.step()
        for where, what in ((tensor_file, "write_bytes"), (saving, "_save_configuration"), (directory, "_sync")):
            with monkeypatch.context() as broken:
                broken.setattr(where, what, fail)
                with pytest.raises(KeyboardInterrupt):
                    run.engine.save(tmp_path / "saved")
            assert [path.name for path in tmp_path.iterdir()] == ["saved"]
        run.engine.load(tmp_path / "saved")
        assert_equal(everything(run.engine), before)


def test_an_io_error_names_the_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with Run() as run:
        run.engine.save(tmp_path / "saved")
        for call, act in (("preadv", run.engine.load), ("pwritev", run.engine.save)):
            with monkeypatch.context() as broken:
                broken.setattr(os, call, fail)
                with pytest.raises(OSError, match=r"Input/output error: .*\.safetensors"):
                    act(tmp_path / "saved")
            run.engine.load(tmp_path / "saved")
    assert torch.isfinite(run.model.head.weight).all()
