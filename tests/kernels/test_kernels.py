"""The host kernels: every path gives torch's result in float64, and none gives way to its surroundings."""

import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ferryman.runtime import native
from ferryman.server import kernels
from support.fresh import run_fresh

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COMPILED = [path for path in kernels.paths() if path != "torch"]
LARGE = 1_000_003  # many blocks, and a rest

repo = Path(__file__).parents[2]


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a Python of its own, outside the repo."""
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=os.environ | environment, cwd="/", text=True, capture_output=True, timeout=250, check=False
    )


def numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)


def reference(tensor: torch.Tensor) -> float:
    return tensor.double().square().sum().item()


def test_the_library_is_built_and_preferred():
    assert native.library() is not None
    assert kernels.paths()[0] == COMPILED[0]
    assert kernels.paths()[-2:] == ("baseline", "torch")


@pytest.mark.parametrize("path", kernels.paths())
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_and_start(dtype, path):
    everything = numbers(1100, dtype)
    for length in range(1026):
        for start in (0, 1 + length % 63):
            piece = everything[start : start + length]
            assert kernels.sum_of_squares(piece, path=path) == pytest.approx(reference(piece), rel=1e-13)


@pytest.mark.parametrize("path", kernels.paths())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_read_right(dtype, path):
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    every_number = bits.view(dtype)
    squares = every_number.double().square()
    for kind in (squares > 0) & (squares < 1e-12), squares.isfinite():  # subnormals (of float16) and all
        piece = every_number[kind].contiguous()
        assert kernels.sum_of_squares(piece, path=path) == pytest.approx(reference(piece), rel=1e-12)


@pytest.mark.parametrize("path", kernels.paths())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_finite_exactly_when_every_element_is(bad, dtype, path):
    for length in (1, 15, 16, 17, 1025, LARGE):
        tensor = torch.full((length,), torch.finfo(dtype).max, dtype=dtype)
        assert math.isfinite(kernels.sum_of_squares(tensor, path=path))
        for position in {0, length // 2, length - 1}:
            spoiled = tensor.clone()
            spoiled[position] = bad
            assert not math.isfinite(kernels.sum_of_squares(spoiled, path=path))


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_for_every_instruction_set_and_number_of_threads(dtype):
    tensor = numbers(LARGE, dtype)
    results = {
        kernels.sum_of_squares(tensor, threads=threads, path=path) for path in COMPILED for threads in (1, 2, 3, 5, 32)
    }
    assert len(results) == 1
    assert results.pop() == pytest.approx(reference(tensor), rel=1e-13)
    assert kernels.sum_of_squares(tensor, path="torch") == pytest.approx(reference(tensor), rel=1e-13)


def test_flushing_subnormals_on_the_calling_thread_changes_nothing():
    tensor = torch.full((LARGE,), 1e-40)
    expected = reference(tensor)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        results = [kernels.sum_of_squares(tensor, threads=threads) for threads in (1, 2, 3)]
    finally:
        torch.set_flush_denormal(False)
    assert results == pytest.approx([expected] * 3, rel=1e-13, abs=0)


def test_callers_on_several_threads_take_turns():
    tensors = [numbers(LARGE, dtype) for dtype in DTYPES]
    expected = [kernels.sum_of_squares(tensor) for tensor in tensors]
    wrong = []

    def call() -> None:
        for _ in range(20):
            results = [kernels.sum_of_squares(tensor, threads=3) for tensor in tensors]
            if results != expected:
                wrong.append(results)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads' names from /proc")
def test_the_number_of_threads_is_ours():
    script = f"""
import torch
from pathlib import Path
from ferryman.server import kernels

def workers():
    return [name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")].count("ferryman-pool")

assert torch.get_num_threads() == 1
tensor = torch.ones({LARGE})
kernels.sum_of_squares(tensor)
assert workers() == kernels.default_threads() - 1, workers()
kernels.sum_of_squares(tensor, threads=7)
assert workers() == 6, workers()
"""
    result = run_fresh(script)
    assert result.returncode == 0, result.stderr


def test_a_forked_child_computes_even_if_the_parent_was_computing():
    script = f"""
import os, signal, threading, torch
from ferryman.server import kernels

tensor = torch.ones({LARGE})
done = False
def keep_busy():
    while not done:
        kernels.sum_of_squares(tensor, threads=3)
busy = threading.Thread(target=keep_busy, daemon=True)
busy.start()
for _ in range(30):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs must not outlive the test
        os._exit(0 if kernels.sum_of_squares(tensor, threads=3) == {LARGE} else 1)
    assert os.waitpid(child, 0)[1] == 0
done = True
busy.join()
"""
    result = run_fresh(script)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def install_without_compiler(tmp_path_factory):
    """A folder with ferryman as pip installs it where no compiler is found."""
    source, target, empty = (tmp_path_factory.mktemp(name) for name in ("source", "target", "empty"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(repo / name, source)
    for name in ("native", "src"):
        shutil.copytree(repo / name, source / name, ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "PATH")}
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--target", target, source]
    subprocess.run(command, env=environment | {"PATH": str(empty)}, check=True, capture_output=True)
    return target


def test_without_a_compiler_torch_serves_and_says_so_once(install_without_compiler):
    script = f"""
import ferryman, torch
from ferryman.server import kernels

assert ferryman.__file__.startswith({str(install_without_compiler)!r}), ferryman.__file__
for _ in range(3):
    assert kernels.sum_of_squares(torch.full((1000,), 2.0, dtype=torch.bfloat16)) == 4000
assert kernels.paths() == ("torch",)
"""
    result = run(script, PYTHONPATH=str(install_without_compiler))
    assert result.returncode == 0, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    for part in ("compiled host kernels are missing", "torch code is used", "install g++", "pip install"):
        assert part in lines[0]


def test_what_a_raw_pointer_cannot_take_is_refused():
    with pytest.raises(ValueError, match="not contiguous"):
        kernels.sum_of_squares(torch.ones(4, 4).t())
    with pytest.raises(ValueError, match="float64"):
        kernels.sum_of_squares(torch.ones(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="meta"):
        kernels.sum_of_squares(torch.ones(4, device="meta"))
    with pytest.raises(ValueError, match="at least 1"):
        kernels.sum_of_squares(torch.ones(4), threads=0)
    with pytest.raises(ValueError, match="path='sse9': this machine has"):
        kernels.sum_of_squares(torch.ones(4), path="sse9")


@pytest.mark.parametrize(("cpus", "left"), [(1, 0), (2, 0), (4, 1), (8, 1), (64, 8)])
def test_updates_leave_cpus_to_the_lanes(cpus, left):
    assert kernels.lane_cpus(cpus) == left
