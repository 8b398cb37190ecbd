"""`ferryman doctor`: what this machine has, what it can do, what is wrong with it and how to mend that."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import ferryman
from ferryman.cli.machine import find_device
from ferryman.forecast import measure
from ferryman.runtime import amx, native
from ferryman.runtime import host_memory as memory
from ferryman.runtime.pinned import PinnedMemory
from ferryman.runtime.sizes import show_bytes, show_rate

EPILOG = """
[bold]Examples[/bold]

[dim]# everything, with a few seconds of measurements[/dim]
ferryman doctor

[dim]# what is there, without measuring[/dim]
ferryman doctor --quick

[dim]# one device; exit code 1 if there is a problem[/dim]
ferryman doctor --device cuda:1

[dim]# for a script[/dim]
ferryman doctor --json | jq '.findings[] | select(.severity == "problem")'
"""

Severity = Literal["ok", "note", "problem"]

_COLOURS: dict[Severity, str] = {"ok": "green", "note": "yellow", "problem": "red"}
_LITTLE = 4 << 30  # bytes of host memory, or of disk, below which a word is said
_SLOW_LINK = 6e9  # bytes a second; PCIe 3.0 x16 gives twice as much
_PINNED = 1 << 26  # bytes, to try


@dataclass(frozen=True)
class Finding:
    what: str
    severity: Severity
    says: str
    mend: str = ""  # how, if something is wrong


@dataclass
class Report:
    facts: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)  # a second: bytes, parameters, floating-point operations
    findings: list[Finding] = field(default_factory=list)

    def find(self, what: str, severity: Severity, says: str, mend: str = "") -> None:
        self.findings.append(Finding(what, severity, says, mend))

    @contextlib.contextmanager
    def probe(self, what: str) -> Iterator[None]:
        """A probe that fails is a finding itself."""
        try:
            yield
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self.find(what, "problem", f"could not be looked at: {type(error).__name__}: {first}", "as it says")

    @property
    def has_problem(self) -> bool:
        return any(finding.severity == "problem" for finding in self.findings)


def doctor(
    device: Annotated[
        str | None, typer.Option(help="The device to look at; else the accelerator that PyTorch reports.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not measure anything.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, and nothing else.")] = False,
) -> None:
    """Tells what this machine has and can do, what is wrong, and how to mend it.

    Devices, pinned memory, the compiled host kernels and their instruction set, memory and CPUs with the limits of
    containers, and measured rates. The exit code is 1 if there is a problem.
    """
    report = examine(device, quick=quick)
    if as_json:
        document = {"problem": report.has_problem, **asdict(report)}
        typer.echo(json.dumps(document, indent=2))
    else:
        _show(Console(), report)
    if report.has_problem:
        raise typer.Exit(1)


def examine(device: str | None = None, *, quick: bool = False) -> Report:
    report = Report()
    here = torch.device("cpu")
    with report.probe("versions"):
        _versions(report)
    with report.probe("device"):
        try:
            here = find_device(device)
        except ValueError as error:
            report.find("device", "problem", str(error), "leave --device out, or name one that there is")
        else:
            _device(report, here)
    probes: dict[str, Callable[[Report, torch.device], None]] = {
        "native kernels": _native,
        "AMX": _amx,
        "host memory": _host_memory,
        "pinned memory": _pinned,
        "CPUs": _cpus,
        "disk": _disk,
    }
    if not quick:
        probes |= {"host rates": _host_rates, "compute": _compute}
        if here.type != "cpu":
            probes["link"] = _link
    for name, look in probes.items():
        with report.probe(name):
            look(report, here)
    return report


def _versions(report: Report) -> None:
    report.facts["versions"] = {
        "ferryman": ferryman.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in ("transformers", "peft", "torch_virtual")},
    }
    report.facts["system"] = platform.platform()
    if report.facts["versions"]["transformers"] is None:
        report.find(
            "transformers", "note", "not installed: models by configuration cannot be trained or planned",
            "pip install 'ferryman[transformers]'",
        )  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown" if importlib.util.find_spec(package) is not None else None


def _device(report: Report, device: torch.device) -> None:
    found = torch.accelerator.current_accelerator()
    report.facts["device"] = str(device)
    report.facts["accelerators"] = 0 if found is None else torch.accelerator.device_count()
    if device.type == "cpu":
        mend = "install the PyTorch build for your accelerator and its driver (https://pytorch.org/get-started)"
        if _version("torch_virtual") is not None:
            mend += "; to try things out, --device virtual is an accelerator made of the CPU"
        report.find("device", "note", "PyTorch sees no accelerator: the CPU computes, and nothing is relayed", mend)
        return
    free, total = torch.accelerator.get_memory_info(device)
    report.facts["device_memory"] = {"free": free, "total": total}
    report.find("device", "ok", f"{device} with {show_bytes(total)}, of which {show_bytes(free)} are free")
    if free < total / 2:
        report.find(
            "device memory", "note", f"more than half of {device} is in use already",
            "see which process has it, or give the engine a budget: memory='...'",
        )  # fmt: skip


def _native(report: Report, device: torch.device) -> None:
    library = native.library()
    report.facts["native"] = None if library is None else native.INSTRUCTION_SETS[library.ferryman_best_isa()]
    if library is None:
        report.find(
            "native kernels", "problem", "not built: torch code updates the weights on the host, half as fast",
            "install a C++ compiler (g++) and install ferryman again: pip install --force-reinstall ferryman",
        )  # fmt: skip
    elif report.facts["native"] == "baseline" and platform.machine() == "x86_64":
        report.find("native kernels", "note", "this CPU has no AVX2, so updates on the host are slow", "none")
    else:
        report.find("native kernels", "ok", f"loaded, with {report.facts['native']}")


def _amx(report: Report, device: torch.device) -> None:
    advertised = amx.is_advertised()
    works = amx.try_tiles() if advertised else None
    report.facts["amx"] = {"advertised": advertised, "works": works}
    if not advertised:
        report.find("AMX", "ok", "not advertised by this CPU, and not used")
    elif works:
        report.find("AMX", "ok", "works")
    else:
        limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")
        report.find(
            "AMX", "note", f"advertised, but its instructions fail; ferryman keeps PyTorch off it ({limit})",
            "in programs that do not import ferryman: export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16",
        )  # fmt: skip


def _host_memory(report: Report, device: torch.device) -> None:
    free = memory.available()
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    swap = _swap()
    report.facts["host_memory"] = {"available": free, "group_limit": limit, "swap_used": swap}
    if free is None:
        report.find("host memory", "note", "the system does not tell how much is free", "none is needed")
    elif free < _LITTLE:
        report.find(
            "host memory", "note", f"{show_bytes(free)} are free; the model and its optimizer state live there",
            "end other programs, or raise the container's limit",
        )  # fmt: skip
    else:
        of = "" if limit is None else f", within a container's limit of {show_bytes(limit)}"
        report.find("host memory", "ok", f"{show_bytes(free)} are free{of}")
    if swap is not None and swap > 1 << 28:
        report.find(
            "swap", "note", f"{show_bytes(swap)} of swap are in use: pinned memory cannot be swapped, all else will be",
            "free memory, or switch swap off for the training (swapoff -a)",
        )  # fmt: skip


def _swap() -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return (int(lines["SwapTotal"].split()[0]) - int(lines["SwapFree"].split()[0])) * 1024


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None


def _pinned(report: Report, device: torch.device) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = None if soft == resource.RLIM_INFINITY else soft
    report.facts["memlock_limit"] = limit
    shown = "unlimited" if limit is None else show_bytes(limit)
    if device.type == "cpu":
        report.find("pinned memory", "ok", f"not needed without an accelerator (ulimit -l: {shown})")
        return
    try:
        PinnedMemory(_PINNED, device).close()
    except RuntimeError as error:
        report.find(
            "pinned memory", "problem", f"{show_bytes(_PINNED)} could not be pinned (ulimit -l: {shown}): {error}",
            "raise the limit: ulimit -l unlimited, or LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1",
        )  # fmt: skip
    else:
        report.find("pinned memory", "ok", f"{show_bytes(_PINNED)} could be pinned (ulimit -l: {shown})")


def _cpus(report: Report, device: torch.device) -> None:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _quota()
    threads = os.environ.get("OMP_NUM_THREADS")
    report.facts["cpus"] = {"usable": usable, "quota": quota, "OMP_NUM_THREADS": threads}
    if quota is not None and quota < usable:
        report.find(
            "CPUs", "note", f"{usable} are visible, and the container may use {quota:g}: more threads than that wait",
            f"host_threads={max(1, int(quota))} in the engine, or raise the limit (docker run --cpus)",
        )  # fmt: skip
    else:
        report.find("CPUs", "ok", f"{usable} usable")
    if threads is not None and threads.isdigit() and int(threads) < usable:
        report.find(
            "OMP_NUM_THREADS", "note",
            f"is {threads} for {usable} CPUs: it limits PyTorch's own work, not ferryman's updates",
            "unset OMP_NUM_THREADS, unless something else needs it",
        )  # fmt: skip


def _quota() -> float | None:
    path = Path("/sys/fs/cgroup/cpu.max")
    words = path.read_text().split() if path.exists() else []
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _disk(report: Report, device: torch.device) -> None:
    free = {name: shutil.disk_usage(path).free for name, path in (("here", "."), ("temporary", tempfile.gettempdir()))}
    report.facts["disk_free"] = free
    if free["here"] < _LITTLE:
        report.find(
            "disk", "note", f"{show_bytes(free['here'])} are free here; a checkpoint takes 12 to 16 bytes a parameter",
            "write checkpoints to another disk",
        )  # fmt: skip
    else:
        report.find("disk", "ok", f"{show_bytes(free['here'])} are free here")


def _host_rates(report: Report, device: torch.device) -> None:
    report.rates["host updates"] = updates = measure.host_updates()
    report.rates["host triad"] = measure.triad()
    report.find("host updates", "ok", f"{show_rate(updates, 'parameters')} with AdamW")


def _compute(report: Report, device: torch.device) -> None:
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        report.rates[f"compute {name}"] = measure.operations(device, dtype)
    wide, narrow = report.rates["compute fp32"], report.rates["compute bf16"]
    says = f"{show_rate(wide, 'operations')} in fp32, {show_rate(narrow, 'operations')} in bf16"
    if narrow < wide / 2:
        report.find("compute", "note", f"{says}: bf16 is slower here", "use precision='fp32' on this device")
    else:
        report.find("compute", "ok", says)


def _link(report: Report, device: torch.device) -> None:
    into, out, both = measure.link(device)
    report.rates |= {"link in": into, "link out": out, "link both": both}
    says = " in, ".join(show_rate(rate, "bytes") for rate in (into, out)) + f" out, {show_rate(both, 'bytes')} together"
    if device.type == "virtual":
        report.find("link", "ok", f"{says}: of a virtual accelerator, whose link is the host's memory")
    elif min(into, out) < _SLOW_LINK:
        report.find(
            "link", "note", f"{says}: slow for an accelerator",
            "see that the card has all its lanes (a x16 slot, the right generation), and memory near its CPU",
        )  # fmt: skip
    elif both < 1.2 * max(into, out):
        report.find("link", "note", f"{says}: the directions do not overlap", "updates='host' crosses the link least")
    else:
        report.find("link", "ok", says)


def _show(console: Console, report: Report) -> None:
    versions = report.facts.get("versions", {})
    console.print(", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items()))
    table = Table("", "", "found", "how to mend it", box=None, pad_edge=False)
    for finding in report.findings:
        mark = f"[{_COLOURS[finding.severity]}]{finding.severity}[/{_COLOURS[finding.severity]}]"
        table.add_row(mark, finding.what, escape(finding.says), escape(finding.mend))
    console.print(table)
    problems = sum(finding.severity == "problem" for finding in report.findings)
    console.print(f"[red]{problems} to mend[/red]" if problems else "[green]nothing is wrong[/green]")
