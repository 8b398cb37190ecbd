"""The command `ferryman doctor`: examines this machine, measures it, and says how to fix what is wrong."""

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
from ferryman.runtime.sizes import show_bytes, show_count, show_rate

EPILOG = """
[bold]Examples[/bold]

[dim]# examine everything, with a few seconds of measurements[/dim]
ferryman doctor

[dim]# without measurements[/dim]
ferryman doctor --quick

[dim]# examine one device; exit code 1 if there is a problem[/dim]
ferryman doctor --device cuda:1

[dim]# use it in a script[/dim]
ferryman doctor --json | jq '.findings[] | select(.severity == "problem")'
"""

Severity = Literal["ok", "note", "problem"]

_COLORS: dict[Severity, str] = {"ok": "green", "note": "yellow", "problem": "red"}
_LOW_BYTES = 4 << 30  # of host memory or disk: less than this is worth a note
_SLOW_LINK = 6e9  # bytes per second; PCIe 3.0 x16 gives twice as much
_PINNED_BYTES = 1 << 26  # how much is pinned as a test


@dataclass(frozen=True)
class Finding:
    what: str
    severity: Severity
    message: str
    fix: str = ""  # what the user can do about it


@dataclass
class Report:
    facts: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)  # per second: bytes, parameters or floating-point operations
    findings: list[Finding] = field(default_factory=list)

    def find(self, what: str, severity: Severity, message: str, fix: str = "") -> None:
        self.findings.append(Finding(what, severity, message, fix))

    @contextlib.contextmanager
    def probe(self, what: str) -> Iterator[None]:
        """Context of one probe. A probe that raises is a finding itself."""
        try:
            yield
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self.find(what, "problem", f"could not be examined: {type(error).__name__}: {first}", "see the error")

    @property
    def has_problem(self) -> bool:
        return any(finding.severity == "problem" for finding in self.findings)


def doctor(
    device: Annotated[
        str | None, typer.Option(help="The device to examine. Default: the accelerator that PyTorch reports.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the measurements.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Examine this machine: what it has, how fast it is, what is wrong and how to fix it.

    Checks devices, pinned memory, the compiled host kernels and their instruction set, and memory and CPUs within the
    limits of the container; and measures rates. The exit code is 1 if there is a problem.
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
            report.find("device", "problem", str(error), "leave --device out, or name an existing device")
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
    for name, probe in probes.items():
        with report.probe(name):
            probe(report, here)
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
            "transformers", "note", "not installed; `ferryman train` and `ferryman plan` need it",
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
        fix = "install the PyTorch build for your accelerator, and its driver (https://pytorch.org/get-started)"
        if _version("torch_virtual") is not None:
            fix += "; to try things out, use --device virtual, an accelerator that runs on the CPU"
        report.find("device", "note", "PyTorch reports no accelerator: training runs on the CPU without relaying", fix)
        return
    free, total = torch.accelerator.get_memory_info(device)
    report.facts["device_memory"] = {"free": free, "total": total}
    report.find("device", "ok", f"{device}: {show_bytes(free)} free of {show_bytes(total)}")
    if free < total / 2:
        report.find(
            "device memory", "note", f"more than half of the memory of {device} is already in use",
            "find out which process uses it, or give the engine a budget: memory='...'",
        )  # fmt: skip


def _native(report: Report, device: torch.device) -> None:
    library = native.library()
    report.facts["native"] = None if library is None else native.INSTRUCTION_SETS[library.ferryman_best_isa()]
    if library is None:
        report.find(
            "native kernels", "problem", "not compiled: updates on the host run in PyTorch code, half as fast",
            "install a C++ compiler (g++) and reinstall ferryman: pip install --force-reinstall ferryman",
        )  # fmt: skip
    elif report.facts["native"] == "baseline" and platform.machine() == "x86_64":
        report.find(
            "native kernels", "note", "this CPU has no AVX2, so updates on the host are slow", "use a CPU with AVX2"
        )
    else:
        report.find("native kernels", "ok", f"loaded ({report.facts['native']})")


def _amx(report: Report, device: torch.device) -> None:
    advertised = amx.is_advertised()
    works = amx.try_tiles() if advertised else None
    report.facts["amx"] = {"advertised": advertised, "works": works}
    if not advertised:
        report.find("AMX", "ok", "not supported by this CPU")
    elif works:
        report.find("AMX", "ok", "works")
    else:
        limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")
        report.find(
            "AMX", "note", f"advertised, but its instructions fail; ferryman keeps PyTorch from using it ({limit})",
            "in programs that do not import ferryman: export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16",
        )  # fmt: skip


def _host_memory(report: Report, device: torch.device) -> None:
    free = memory.available()
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    swap = _swap()
    report.facts["host_memory"] = {"available": free, "group_limit": limit, "swap_used": swap}
    if free is None:
        report.find("host memory", "note", "the system does not report how much is free", "nothing to do")
    elif free < _LOW_BYTES:
        report.find(
            "host memory", "note", f"{show_bytes(free)} free; it has to hold the model and the optimizer state",
            "close other programs, or raise the container's limit",
        )  # fmt: skip
    else:
        of = "" if limit is None else f" of the container's limit of {show_bytes(limit)}"
        report.find("host memory", "ok", f"{show_bytes(free)} free{of}")
    if swap is not None and swap > 1 << 28:
        report.find(
            "swap", "note", f"{show_bytes(swap)} of swap in use: memory that is not pinned may be swapped out",
            "free memory, or disable swap while training (swapoff -a)",
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
    memory = PinnedMemory(_PINNED_BYTES, device)
    is_pinned = memory.is_pinned
    memory.close()
    if not is_pinned:
        report.find(
            "pinned memory", "problem", f"{show_bytes(_PINNED_BYTES)} cannot be pinned (ulimit -l: {shown})",
            "raise the limit: ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1",
        )  # fmt: skip
        return
    report.find("pinned memory", "ok", f"{show_bytes(_PINNED_BYTES)} pinned as a test (ulimit -l: {shown})")


def _cpus(report: Report, device: torch.device) -> None:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _quota()
    threads = os.environ.get("OMP_NUM_THREADS")
    report.facts["cpus"] = {"usable": usable, "quota": quota, "OMP_NUM_THREADS": threads}
    if quota is not None and quota < usable:
        report.find(
            "CPUs", "note", f"{usable} visible, but the container is limited to {quota:g}: extra threads would wait",
            f"set host_threads={max(1, int(quota))} in the engine, or raise the limit (docker run --cpus)",
        )  # fmt: skip
    else:
        report.find("CPUs", "ok", f"{usable} usable")
    if threads is not None and threads.isdigit() and int(threads) < usable:
        report.find(
            "OMP_NUM_THREADS", "note",
            f"{threads} for {usable} CPUs: it limits PyTorch's own operators, not ferryman's updates",
            "unset OMP_NUM_THREADS, unless another program needs it",
        )  # fmt: skip


def _quota() -> float | None:
    path = Path("/sys/fs/cgroup/cpu.max")
    words = path.read_text().split() if path.exists() else []
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _disk(report: Report, device: torch.device) -> None:
    free = {name: shutil.disk_usage(path).free for name, path in (("here", "."), ("temporary", tempfile.gettempdir()))}
    report.facts["disk_free"] = free
    if free["here"] < _LOW_BYTES:
        report.find(
            "disk", "note", f"{show_bytes(free['here'])} free here; a checkpoint takes 12 to 16 bytes per parameter",
            "write checkpoints to another disk",
        )  # fmt: skip
    else:
        report.find("disk", "ok", f"{show_bytes(free['here'])} free here")


def _host_rates(report: Report, device: torch.device) -> None:
    report.rates["host updates"] = updates = measure.host_updates()
    report.rates["host triad"] = measure.triad()
    report.find("host updates", "ok", f"{show_rate(updates, 'parameters')} with AdamW")


def _compute(report: Report, device: torch.device) -> None:
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        report.rates[f"compute {name}"] = measure.operations(device, dtype)
    wide, narrow = report.rates["compute fp32"], report.rates["compute bf16"]
    rates = f"{show_rate(wide, 'operations')} in fp32, {show_rate(narrow, 'operations')} in bf16"
    if narrow < wide / 2:
        report.find("compute", "note", f"{rates}: bf16 is slower than fp32", "use precision='fp32' on this device")
    else:
        report.find("compute", "ok", rates)


def _link(report: Report, device: torch.device) -> None:
    into, out, both = measure.link(device)
    report.rates |= {"link in": into, "link out": out, "link both": both}
    shown = {"in": into, "out": out, "both directions at once": both}
    rates = ", ".join(f"{show_rate(rate, 'bytes')} {name}" for name, rate in shown.items())
    if device.type == "virtual":
        report.find("link", "ok", f"{rates} (virtual accelerator: its link is host memory)")
    elif min(into, out) < _SLOW_LINK:
        report.find(
            "link", "note", f"{rates}: slow for an accelerator",
            "check that the card is in a x16 slot of the right PCIe generation, on the NUMA node of its memory",
        )  # fmt: skip
    elif both < 1.2 * max(into, out):
        report.find("link", "note", f"{rates}: the directions do not overlap", "updates='host' uses the link least")
    else:
        report.find("link", "ok", rates)


def _show(console: Console, report: Report) -> None:
    versions = report.facts.get("versions", {})
    console.print(", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items()))
    table = Table("", "", "found", "how to fix it", box=None, pad_edge=False)
    for finding in report.findings:
        mark = f"[{_COLORS[finding.severity]}]{finding.severity}[/{_COLORS[finding.severity]}]"
        table.add_row(mark, finding.what, escape(finding.message), escape(finding.fix))
    console.print(table)
    problems = sum(finding.severity == "problem" for finding in report.findings)
    found = show_count(problems, "problem")
    console.print(f"[red]{found} found[/red]" if problems else "[green]no problems found[/green]")
