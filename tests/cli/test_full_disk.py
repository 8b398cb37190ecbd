"""Commands on a disk, or with an output, that is full: what is full is named, and so is what is still there."""

import os
from pathlib import Path

import pytest

from support.commands import GPT, trained
from support.fresh import run_fresh

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("full")
    (place / "text.txt").write_text("a ferry carries what does not fit\n" * 100)
    trained(GPT, "--data", place / "text.txt", "-o", place / "run", "--steps", 2, "--batch", 2)
    return place / "run"


def ferryman(*arguments, before="", output="/dev/full"):
    """Runs a command in a process of its own, after some code, with its output going to a file."""
    code = f"import sys\n{before}\nfrom ferryman.cli.main import main\nsys.argv = ['ferryman', *sys.argv[1:]]\nmain()"
    with Path(output).open("w") as out:
        return run_fresh(code, *arguments, output=out)


LIMIT = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
"""


def test_a_resumed_run_knows_its_checkpoint(run):
    done = ferryman("train", "--resume", "-o", run, "--steps", 4)
    assert done.returncode == 1
    assert "No space left on device: 'standard output'" in done.stderr
    assert "Nothing was saved" not in done.stderr
    assert f"The last checkpoint is {run / 'checkpoints' / 'step-00000002'}; resume with: " in done.stderr


def test_a_report_names_what_is_full(run, tmp_path):
    done = ferryman("report", run / "trace.json", "-o", tmp_path / "report.html")
    assert done.returncode == 2
    assert "No space left on device: 'standard output'" in done.stderr
    done = ferryman("report", run / "trace.json", "-o", tmp_path / "other.html", before=LIMIT, output=os.devnull)
    assert done.returncode == 2
    assert f"File too large: '{tmp_path / 'other.html'}'" in done.stderr
    assert not (tmp_path / "other.html").exists()


def test_the_start_of_a_run_names_the_file(run, tmp_path):
    data = run.parent / "text.txt"
    done = ferryman("train", GPT, "--data", data, "-o", tmp_path / "new", before=LIMIT, output=os.devnull)
    assert done.returncode == 2
    assert f"File too large: '{tmp_path / 'new' / 'run.json'}'" in done.stderr
