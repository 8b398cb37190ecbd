"""AMX that is advertised and not allowed must not end the process: see Note [AMX that does not work]."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ferryman.runtime import amx
from support.fresh import run_fresh

x86_linux = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="AMX is a matter of x86, and tried on Linux"
)

BF16 = """
x = torch.randn(512, 512, dtype=torch.bfloat16)
assert torch.isfinite(x @ x).all()
linear = torch.nn.Linear(512, 512, dtype=torch.bfloat16)
linear(x).float().square().mean().backward()
assert torch.isfinite(linear.weight.grad).all()
torch.nn.functional.conv2d(torch.randn(4, 16, 32, 32), torch.randn(16, 16, 3, 3))  # goes through oneDNN on any CPU
"""


def run(script: str, **environment: str) -> str:
    """Runs a script in a Python that has imported ferryman and computed nothing; returns what it printed."""
    return _printed(run_fresh(script, environment=environment, directory="/"))


def run_from_the_start(script: str, **environment: str) -> str:
    """Runs a script in a Python that has imported nothing, with no limit inherited; returns what it printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("DNN_MAX_CPU_ISA")}
    command = [sys.executable, "-c", script]
    return _printed(
        subprocess.run(
            command, env=inherited | environment, cwd="/", text=True, capture_output=True, timeout=250, check=False
        )
    )


def _printed(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, f"exit {result.returncode}: {result.stderr}"
    return result.stdout


@pytest.mark.parametrize(
    ("advertised", "works", "environment", "expected"),
    [
        (False, None, {}, False),  # no AMX
        (True, True, {}, False),  # AMX, and it works
        (True, False, {}, True),  # the trap
        (True, None, {}, True),  # perhaps the trap, and no way to try
        (True, False, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False),  # the user has decided
        (True, False, {"DNNL_MAX_CPU_ISA": "AVX2"}, False),
        (True, None, {"ONEDNN_MAX_CPU_ISA": "ALL"}, False),
    ],
)
def test_decision(advertised, works, environment, expected):
    assert amx.needs_limit(advertised, works, environment) is expected


@pytest.mark.parametrize("works", [False, None])
def test_guard_sets_the_limit(monkeypatch, works):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(amx, "is_advertised", lambda: True)
    monkeypatch.setattr(amx, "try_tiles", lambda: works)
    amx.guard()
    assert os.environ == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}


@x86_linux
def test_trying_tiles_survives_and_tells_the_truth():
    works = amx.try_tiles()
    assert works in (True, False)
    if "amx_tile" not in Path("/proc/cpuinfo").read_text():
        assert works is False


@x86_linux
def test_trying_tiles_leaves_the_signal_handlers_alone():
    script = """
import signal
from ferryman.runtime import native
seen = []
signal.signal(signal.SIGILL, lambda *_: seen.append("SIGILL"))
signal.signal(signal.SIGSEGV, lambda *_: seen.append("SIGSEGV"))
native.library().ferryman_amx_executes()  # without asking for permission: a fault, unless AMX was already granted
signal.raise_signal(signal.SIGILL)
signal.raise_signal(signal.SIGSEGV)
assert seen == ["SIGILL", "SIGSEGV"], seen
"""
    run(script)


def test_bf16_runs_after_import():
    run("import ferryman, torch\n" + BF16)


@x86_linux
def test_advertised_amx_is_used_only_if_it_works():
    """Torch reports AMX, as it does where the trap is. What follows is this machine's own."""
    script = """
import os, torch
capabilities = dict(torch.cpu.get_capabilities()) | {"amx_tile": True}
torch.cpu.get_capabilities = lambda: capabilities
import ferryman
from ferryman.runtime import amx
print("works:", amx.try_tiles(), "limit:", os.environ.get("ONEDNN_MAX_CPU_ISA"))
"""
    printed = run_from_the_start(script + BF16, ONEDNN_VERBOSE="1")
    if "works: True limit: None" not in printed:
        assert "works: False limit: AVX512_CORE_FP16" in printed
        (isa,) = [line for line in printed.splitlines() if "info,cpu,isa:" in line]
        assert "AMX" not in isa


@x86_linux
def test_a_limit_set_before_the_first_call_is_obeyed():
    """What the guard relies on: oneDNN reads the variable at its first call, not when torch is imported."""
    printed = run("import os, torch, ferryman\nos.environ['ONEDNN_MAX_CPU_ISA'] = 'SSE41'\n" + BF16, ONEDNN_VERBOSE="1")
    assert "info,cpu,isa:Intel SSE4.1" in printed
