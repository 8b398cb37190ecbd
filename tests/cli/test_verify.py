"""`ferryman verify` holds on what there is here, and fails where the engine is broken."""

import contextlib
import itertools
import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from ferryman.cli.main import app
from ferryman.engine import Engine
from ferryman.relay.micro_batch import MicroBatch
from ferryman.runtime import pinned
from ferryman.runtime.lanes import Lane
from ferryman.server import kernels
from ferryman.server.server import Server
from ferryman.verify import delays, overlap, parity, process, races
from ferryman.verify.context import CheckContext
from support.devices import chosen, torch_virtual
from support.slow import slow


@pytest.fixture
def take_races(virtual):
    """For tests that cause races: none of them counts in the end."""
    yield
    torch_virtual.synchronize()
    torch_virtual.clear_races()


def run(*options):
    return CliRunner().invoke(app, ["verify", *options], env={"COLUMNS": "200"})


def rows_of(ran):
    return {(row["group"], row["check"]): row for row in json.loads(ran.stdout)["checks"]}


@pytest.mark.parametrize("cases", [("weights late",), *slow((tuple(races._CASES),))])
def test_races_and_memory_hold_on_the_virtual_accelerator(cases, monkeypatch, virtual):
    monkeypatch.setattr(races, "_CASES", {name: races._CASES[name] for name in cases})
    ran = run("--device", "virtual", "--quick", "--only", "races", "--only", "memory", "--json")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["ok"]
    rows = rows_of(ran)
    assert {group for group, _ in rows} == {"races", "memory"}
    assert {check for group, check in rows if group == "races"} == {*cases}
    assert {row["result"] for row in rows.values()} == {"ok"}
    assert all("a race" in row["figures"].values() for (group, _), row in rows.items() if group == "races")  # controls
    assert torch_virtual.races() == []


def check(accelerator, name):
    """One row of the group `process`."""
    context = CheckContext(accelerator, quick=True)
    return next(check for check in process.checks(context) if check.name == name).run()


def test_the_callers_state_and_forks_hold(accelerator):
    assert check(accelerator, "caller").outcome == "ok"
    verdict = check(accelerator, "fork")
    assert verdict.outcome == "ok"
    assert verdict.figures["pinned"] == "yes"


def test_a_step_that_leaves_another_stream_fails(monkeypatch, accelerator):
    step = Engine.step

    def on_another_stream(self, *args):
        loss = step(self, *args)
        torch.accelerator.set_stream(torch.Stream(accelerator))
        return loss

    before = torch.accelerator.current_stream(accelerator)
    monkeypatch.setattr(Engine, "step", on_another_stream)
    verdict = check(accelerator, "caller")
    torch.accelerator.set_stream(before)
    assert verdict.outcome == "FAILED"
    assert "stream (step)" in verdict.reason


def test_pinned_memory_that_a_fork_copies_fails(monkeypatch, virtual):
    monkeypatch.setattr(pinned.mmap, "MADV_DONTFORK", pinned.mmap.MADV_NORMAL)
    assert "a fork copies" in check(virtual, "fork").reason


def test_a_step_that_is_mostly_python_fails(monkeypatch, accelerator):
    real, resumed = MicroBatch.resume, []

    def resume(self):
        resumed.append(self)
        real(self)

    def seconds(way):
        """One for the arithmetic, and one for each time that a micro-batch goes on, however busy the machine is."""
        resumed.clear()
        way()
        return 1.0 + len(resumed)

    monkeypatch.setattr(MicroBatch, "resume", resume)
    monkeypatch.setattr(process, "_seconds", seconds)
    monkeypatch.setattr(process, "_LENGTH", 8)
    monkeypatch.setattr(process, "_ROUNDS", 1)
    monkeypatch.setattr(process, "_WARM_UP_ROUNDS", 1)
    verdict = check(accelerator, "python")
    assert verdict.outcome == "FAILED"
    assert verdict.figures.keys() == {"plain", "ours", "per call", "share"}
    assert "Python code" in verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("device", chosen())
def test_all_of_it_holds(device):
    rows = rows_of(run("--device", device, "--json"))
    assert {group for group, _ in rows} == {"parity", "races", "overlap", "memory", "process"}
    # Overlap and Python's share are matters of time: on a busy machine they may not be seen.
    results = {row["result"] for (group, check), row in rows.items() if group != "overlap" and check != "python"}
    assert results == ({"ok"} if device == "virtual" else {"ok", "skipped"})
    if device == "virtual":
        assert rows["parity", "eager"]["figures"]["gradients"] == "bitwise"


def test_on_the_cpu_what_needs_a_link_is_skipped_with_the_reason():
    ran = run("--device", "cpu", "--quick", "--only", "overlap", "--only", "memory", "--json")
    assert ran.exit_code == 0, ran.output
    skipped = rows_of(ran).values()
    assert {row["result"] for row in skipped} == {"skipped"}
    assert all("the device is the CPU" in row["reason"] for row in skipped)


def test_a_wrong_update_fails_and_the_table_names_the_check(monkeypatch):
    real, cases = kernels.update, parity._cases
    monkeypatch.setattr(kernels, "update", lambda rule, pieces, **how: real(rule, pieces[1:] or pieces, **how))
    monkeypatch.setattr(parity, "_cases", lambda context: itertools.islice(cases(context), 2))
    ran = run("--device", "cpu", "--quick", "--only", "parity")
    assert ran.exit_code == 1
    lines = [line for line in ran.output.splitlines() if "parity:" in line and "FAILED" in line]
    assert len(lines) == 2
    assert "parity: eager" in lines[0]
    assert "parity: deferred, clipped" in lines[1]
    assert "weights off by" in lines[0]


def test_a_missing_wait_fails(monkeypatch, take_races):
    monkeypatch.setattr(Lane, "follow", lambda self, *marks: None)
    ran = run("--device", "virtual", "--quick", "--only", "races", "--json")
    assert ran.exit_code == 1
    rows = rows_of(ran)
    assert rows["races", "weights late"]["result"] == "FAILED"
    assert "race" in rows["races", "weights late"]["reason"]


def outlast_others(seconds):
    """A delay that ends only when no other thread of this process has been able to go on for so long, however busy the
    machine is: none is ready to run, and none has run since the last sample."""

    def state():
        ready = False
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                is_own = int(task.name) == threading.get_native_id()
                ready |= not is_own and (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
        return ready, time.process_time() - time.thread_time()

    idle, (_, before) = 0.0, state()
    for _ in range(10_000):
        time.sleep(seconds / 4)
        ready, taken = state()
        idle, before = 0.0 if ready or taken - before > 1e-4 else idle + seconds / 4, taken
        if idle >= seconds:
            return
    raise AssertionError("other threads never rest")


def test_values_alone_show_a_missing_wait(monkeypatch):
    """As on a device without a detector."""
    monkeypatch.setattr(Server, "weights_ready", lambda self, unit: [])
    monkeypatch.setattr(delays, "time", SimpleNamespace(sleep=outlast_others))
    monkeypatch.setattr(races, "_CONTROL_DELAYS", (1,))
    ran = run("--device", "cpu", "--quick", "--only", "races", "--json")
    assert ran.exit_code == 1
    row = rows_of(ran)["races", "updates late"]
    assert row["result"] == "FAILED"
    # An update that comes in the middle of the next step is seen by the engine itself.
    assert re.search("weights changed|is edited in place while the model or the loss runs", row["reason"])


def test_a_control_that_shows_nothing_is_inconclusive(monkeypatch):
    case = races.RaceCase(["host"], "nothing", lambda engine: contextlib.nullcontext())
    monkeypatch.setattr(races, "_ON_HOST", {"updates late": case})
    monkeypatch.setattr(races, "_CONTROL_DELAYS", (1,))
    ran = run("--device", "cpu", "--quick", "--only", "races", "--json")
    assert ran.exit_code == 0
    assert rows_of(ran)["races", "updates late"]["result"] == "inconclusive"
    strict = run("--device", "cpu", "--quick", "--only", "races", "--json", "--strict")
    assert strict.exit_code == 1
    assert rows_of(strict)["races", "updates late"]["result"] == "inconclusive"


def test_copies_that_wait_for_one_another_are_found(monkeypatch, accelerator):
    def one_by_one(self, names):
        for name in names:
            self._work[name]()
            self._lanes.wait()
        return float(len(names))  # each takes a second, however busy the machine is

    monkeypatch.setattr(overlap._BareLanes, "_run", one_by_one)
    monkeypatch.setattr(overlap._BareLanes, "calibrate", lambda self: None)
    monkeypatch.setattr(overlap, "_MAX_ATTEMPTS", 1)
    context = CheckContext(accelerator, quick=True)
    link, beside, _ = overlap.checks(context)
    assert link.run().outcome == "inconclusive"  # the link itself may carry one direction at a time
    assert beside.run().outcome == "FAILED"


def test_what_a_device_lacks_is_skipped_with_the_reason(monkeypatch, accelerator):
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: 0)  # as of one that does not count
    ran = run("--device", str(accelerator), "--quick", "--only", "memory", "--json")
    assert ran.exit_code == 0
    assert all("does not report" in row["reason"] for row in rows_of(ran).values())

    def no_half(*args, dtype=None, **how):
        if dtype == torch.bfloat16:
            raise TypeError("BFloat16 is not supported here")
        return ones(*args, dtype=dtype, **how)

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", no_half)
    context = CheckContext(accelerator, quick=True)
    verdict = next(check for check in parity.checks(context) if check.name == "bf16").run()
    assert verdict.outcome == "skipped"
    assert "BFloat16 is not supported here" in verdict.reason


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "nonsense"], "device='nonsense' cannot be used here"),
        (["--device", "meta"], "must be real"),
        (["--only", "race"], "did you mean 'races'?"),
    ],
)
def test_bad_input_is_refused(options, said):
    ran = run(*options)
    assert isinstance(ran.exception, ValueError)  # which `main` prints, and ends with 2
    assert said in str(ran.exception)
