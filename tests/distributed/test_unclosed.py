"""Scripts that do not close their engine end well, and ranks that go on are told what has become of the others."""

import os
import subprocess
import sys

import pytest
from torch.distributed import TCPStore

from support import unclosed_script
from support.slow import slow
from support.torchrun import Torchrun

pytestmark = pytest.mark.timeout(600)  # torchrun starts several processes, on few cores
SCRIPT = unclosed_script.__file__


@pytest.fixture
def started(tmp_path):
    """Two ranks of the script, as torchrun starts them, but without it; their store is this process's, as it is its."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []

    def start(how):
        around = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        for rank in range(2):
            place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
            variables = {name: str(value) for name, value in {**around, **place, "OMP_NUM_THREADS": 1}.items()}
            command = [sys.executable, SCRIPT, how, tmp_path / "heard"]
            processes.append(
                subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables})
            )
        return processes

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("how", "told", "code", "cause"),
    [
        ("raises", "rank 0 cannot continue without the others: rank 1 has failed: ValueError: corrupt record 17", 1, 1),
        *slow(("early", "rank 1's script has ended", 0, 0)),
    ],
)
def test_a_rank_that_has_raised_or_ended_has_told_the_others(how, told, code, cause, started, tmp_path):
    """What it had to finish is finished, or rank 0 would raise before."""
    first, second = started(how)
    errors = [process.communicate(timeout=300)[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, code), errors
    assert errors[1].count("ValueError: corrupt record 17") == cause
    (heard,) = [line for line in (tmp_path / "heard").read_text().splitlines() if "Error: " in line]  # none of gloo
    assert told in heard


@pytest.mark.slow
def test_a_rank_that_has_ended_or_raised_has_told_the_others(tmp_path):
    """What it had to finish is finished, or rank 0 would raise before."""
    heard = tmp_path / "heard"
    code, _, errors = Torchrun("raises, early", heard, restarts=1, script=[SCRIPT]).end()
    assert code == 0, errors
    assert errors.count("ValueError: corrupt record 17") == 1
    raised, ended = [line for line in heard.read_text().splitlines() if "Error: " in line]  # and none of gloo
    assert "rank 0 cannot continue without the others: rank 1 has failed: ValueError: corrupt record 17" in raised
    assert "rank 1's script has ended" in ended


@pytest.mark.slow
@pytest.mark.parametrize("how", [*["well"] * 5, "well, dropped", "well, own group", "well, destroyed"])
def test_no_rank_aborts(how):
    code, _, errors = Torchrun(how, script=[SCRIPT]).end()
    assert code == 0, errors


@pytest.mark.slow
def test_one_process_does_not_abort():
    ended = subprocess.run([sys.executable, SCRIPT, "well"], capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
