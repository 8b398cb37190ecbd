"""Scripts that do not close their engine end well, and ranks that go on are told what has become of the others."""

import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import Torchrun

pytestmark = pytest.mark.timeout(600)  # torchrun starts several processes, on few cores
SCRIPT = Path(__file__).with_name("unclosed.py")


def test_a_rank_that_has_ended_or_raised_has_told_the_others(tmp_path):
    """What it had to finish is finished, or rank 0 would raise before."""
    heard = tmp_path / "heard"
    code, _, errors = Torchrun("raises, early", heard, restarts=1, script=[SCRIPT]).end()
    assert code == 0, errors
    assert errors.count("ValueError: corrupt record 17") == 1
    raised, ended = [line for line in heard.read_text().splitlines() if "Error: " in line]  # and none of gloo
    assert "rank 0 cannot go on without the others: rank 1 has failed: ValueError: corrupt record 17" in raised
    assert "rank 1's script has ended" in ended


@pytest.mark.slow
@pytest.mark.parametrize("how", [*["well"] * 5, "well, dropped", "well, own group", "well, destroyed"])
def test_no_rank_aborts(how):
    code, _, errors = Torchrun(how, script=[SCRIPT]).end()
    assert code == 0, errors


@pytest.mark.slow
def test_one_process_does_not_abort():
    ended = subprocess.run([sys.executable, SCRIPT, "well"], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
