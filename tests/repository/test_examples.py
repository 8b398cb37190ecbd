"""Every example runs, at a tiny size. One as a user would start it; the others here, where all is imported already."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from support.fresh import run_file_fresh

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, "--tiny", *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    before = transformers.logging.get_verbosity()
    yield run
    transformers.logging.set_verbosity(before)


def test_each_is_tested():
    """Here, or beside what it shows."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*examples.py"))
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tests] == []


def test_a_loop_of_ones_own(run, tmp_path):
    check(run("custom_loop.py"), tmp_path)


def test_finetuning(run, tmp_path):
    shown = run("finetune_full.py")
    check(shown, tmp_path)
    saved = Path(re.search(r"saved: (.+)", shown)[1])
    assert transformers.AutoModelForCausalLM.from_pretrained(saved).config.num_hidden_layers == 3
    shutil.rmtree(saved)


def check(shown, tmp_path):
    losses = [float(loss) for loss in re.findall(r"loss[: =']+(\d+\.\d+)", shown)]
    assert losses[-1] < losses[0]
    assert not list(tmp_path.iterdir())


def test_the_demo_shows_what_it_promises(tmp_path):
    """What `make train` runs: plain PyTorch is out of memory, Ferryman is not, and both compute the same.

    In a process of its own: it sets the device's capacity, of which others may have left something in use.
    """
    ran = run_file_fresh(EXAMPLES / "demo.py", "--tiny", "--steps", "9", directory=tmp_path)
    assert ran.returncode == 0, ran.stderr
    shown = ran.stdout
    assert "torch.OutOfMemoryError: virtual:0 is out of memory" in shown
    difference = re.search(r"losses of 8 steps differ by at most (\S+)", shown)
    assert float(difference[1]) < 1e-5
    bits = [float(found) for found in re.findall(r"\((\d+\.\d+) bits per byte\)", shown)]
    assert bits[-1] < bits[0] - 0.5
    assert re.search(r"trains in 3MiB.*no.*yes", shown)
    made = {path.name for path in (tmp_path / "runs" / "demo").iterdir()}
    assert made >= {"checkpoints", "metrics.jsonl", "trace.json", "report.html", "run.json"}


@pytest.mark.slow
@pytest.mark.timeout(600)  # torchrun starts several processes, on few cores
@pytest.mark.parametrize("name", ["custom_loop.py", "finetune_trainer.py"])
def test_several_ranks(name, tmp_path, accelerator):
    """The same scripts under torchrun; the first rank tells."""
    how = ["--nproc-per-node", "2", "--standalone"]
    device = ["--device", accelerator.type] if name == "custom_loop.py" else []
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *how,
        EXAMPLES / name,
        "--tiny",
        *device,
        "--output",
        "out",
    ]
    around = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, env=around)
    assert ran.returncode == 0, ran.stderr
    losses = [float(loss) for loss in re.findall(r"loss[: =']+(\d+\.\d+)", ran.stdout)]
    assert losses[-1] < losses[0]
    assert (tmp_path / "out" / "model.safetensors").is_file()
