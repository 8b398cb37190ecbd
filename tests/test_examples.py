"""Every example runs, at a tiny size, as a user would start it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *arguments, cwd):
    ran = subprocess.run(
        [sys.executable, EXAMPLES / name, "--tiny", *arguments], capture_output=True, text=True, cwd=cwd, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_each_is_tested():
    """Here, or beside what it shows."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*examples.py"))
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tests] == []


@pytest.mark.parametrize("name", ["custom_loop.py", "finetune_full.py"])
def test_it_runs(name, tmp_path):
    losses = [float(loss) for loss in re.findall(r"loss[: =']+(\d+\.\d+)", run(name, cwd=tmp_path))]
    assert losses[-1] < losses[0]
    assert not list(tmp_path.iterdir())


def test_the_demo_shows_what_it_promises(tmp_path):
    """What `make train` runs: plain PyTorch is out of memory, Ferryman is not, and both compute the same."""
    shown = run("demo.py", "--steps", "20", cwd=tmp_path)
    assert "torch.OutOfMemoryError: virtual:0 is out of memory" in shown
    difference = re.search(r"losses of 8 steps differ by at most (\S+)", shown)
    assert float(difference[1]) < 1e-5
    bits = [float(found) for found in re.findall(r"\((\d+\.\d+) bits a byte\)", shown)]
    assert bits[-1] < bits[0] - 0.5
    assert re.search(r"trains in 2MiB.*no.*yes", shown)
    made = {path.name for path in (tmp_path / "runs" / "demo").iterdir()}
    assert made >= {"checkpoints", "metrics.jsonl", "trace.json", "report.html", "run.json"}
