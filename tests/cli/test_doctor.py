"""`ferryman doctor`: what it finds is true, and a probe that fails is a finding, not a crash."""

import json
import os
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from ferryman.cli import doctor_command
from ferryman.cli.main import app, main
from ferryman.forecast import measure
from ferryman.runtime import native
from support.devices import torch_virtual


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


def found(report, what):
    return next(finding for finding in report.findings if finding.what == what)


def test_a_healthy_machine_has_no_problem(soon, accelerator):
    result = run("--device", str(accelerator), "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == document["problem"] == 0, document["findings"]
    assert document["facts"]["device"] == str(accelerator)
    assert document["facts"]["native"] in native.INSTRUCTION_SETS
    assert document["facts"]["host_memory"]["available"] > 1 << 28
    rates = {"host updates", "host triad", "compute fp32", "compute bf16", "link in", "link out", "link both"}
    assert document["rates"].keys() == rates
    assert all(rate > 0 for rate in document["rates"].values())


def test_without_measurements_it_has_no_rates():
    document = json.loads(run("--quick", "--json").stdout)
    assert document["rates"] == {}
    assert document["facts"]["versions"]["torch"] == torch.__version__


def test_what_is_missing_is_a_problem_with_a_remedy(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    result = run("--quick")
    assert result.exit_code == 1
    report = doctor_command.examine(quick=True)
    finding = found(report, "native kernels")
    assert finding.severity == "problem"
    assert "g++" in finding.fix
    assert finding.what in result.stdout


def test_an_unknown_device_is_a_problem():
    report = doctor_command.examine("nowhere", quick=True)
    assert "there is" in found(report, "device").message
    assert report.has_problem
    assert found(report, "host memory").severity == "ok"  # the others are looked at all the same


def test_a_probe_that_fails_is_a_finding(monkeypatch):
    def fail(*_):
        raise OSError("no such thing")

    monkeypatch.setattr(doctor_command.shutil, "disk_usage", fail)
    finding = found(doctor_command.examine(quick=True), "disk")
    assert finding.severity == "problem"
    assert "no such thing" in finding.message


def test_a_thread_limit_is_noted(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert found(doctor_command.examine(quick=True), "OMP_NUM_THREADS").severity == "note"


def test_it_runs_as_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ferryman", "doctor", "--quick", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["facts"]["system"]


def test_the_link_of_a_throttled_device_is_measured(monkeypatch, virtual):
    """No faster than it is; and no slower than the time that the whole measurement takes allows."""
    monkeypatch.setattr(measure, "_MIN_SECONDS", 0.0)
    nbytes, rate = 1 << 16, 2e6
    torch_virtual.set_link(virtual, h2d=rate, d2h=rate)
    began = time.perf_counter()
    into, out, both = measure.link(virtual, nbytes=nbytes)
    elapsed = time.perf_counter() - began
    assert max(into, out, both / 2) < 1.1 * rate
    assert min(into, out, both / 2) > 2 * nbytes / elapsed  # the faster one of two copies counts
