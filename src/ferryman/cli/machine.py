"""The device that a command runs on, and the machine that a plan is for: described by options or measured."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch

from ferryman.cli.defaults import budget
from ferryman.forecast import measure
from ferryman.forecast.estimate import Machine, Training
from ferryman.model.precision import PRECISIONS
from ferryman.plan.network import Cluster
from ferryman.plan.rates import Rates
from ferryman.runtime import host_memory
from ferryman.runtime.sizes import parse_bytes, parse_rate
from ferryman.training import checks


@dataclass(frozen=True)
class MachineDescription:
    """A machine, and for each of its figures whether it was given or measured."""

    machine: Machine
    device: torch.device
    known: dict[str, str]
    notes: list[str]


def find_device(device: torch.device | str | None, place: int | None = None) -> torch.device:
    """The device that `--device` names, checked to work; by default the accelerator that PyTorch reports, else the CPU.

    `place`: the index of this rank within its node, where each rank has a device of its own.
    """
    if device is not None and str(device).partition(":")[0] == "virtual":  # importing the module registers the device
        try:
            importlib.import_module("torch_virtual")
        except ImportError as error:
            raise ValueError(
                f"--device {device} needs torch_virtual, which is in the folder virtual/ of Ferryman's repository: "
                f"pip install --no-build-isolation ./virtual ({error})"
            ) from error
    return checks.real_device(device, place)


def describe_machine(
    device: str | None,
    device_memory: str | None,
    host_memory_given: str | None,
    link: str | None,
    link_in: str | None,
    link_out: str | None,
    device_flops: str | None,
    host_updates: str | None,
    devices: int,
    nodes: int,
    loopback: str | None,
    network: str | None,
    training: Training,
) -> MachineDescription:
    """Takes each figure from its option, or measures it on this machine where that is possible."""
    _check_ranks(devices, nodes, network, training)
    known: dict[str, str] = {}
    described = any(given is not None for given in (device_memory, link, link_in, link_out, device_flops))
    here = find_device(device)
    elsewhere = described and here.type == "cpu"  # plan for a device that this machine does not have
    kind = torch.device("meta") if elsewhere else here

    def of(name: str, text: str | None, parse: Any, otherwise: Any) -> Any:
        """The value of one figure; records whether it was given, measured or is not known."""
        if text is not None:
            known[name] = "given"
            return parse(text)
        value = otherwise()
        known[name] = "not known" if value is None else "measured here"
        return value

    memory = of("device memory", device_memory, lambda text: parse_bytes(text, "--device-memory"),
                lambda: _free_on(kind))  # fmt: skip
    ram = of("host memory", host_memory_given, lambda text: parse_bytes(text, "--host-memory"), host_memory.available)
    measured: tuple[float, ...] = (math.inf, math.inf)
    if here.type != "cpu" and None in (link_in or link, link_out or link):
        measured = measure.link(here)
    rates = {}
    for name, option, own, found in (
        ("link in", "--link-in", link_in, measured[0]),
        ("link out", "--link-out", link_out, measured[1]),
    ):
        text, option = (own, option) if own is not None else (link, "--link")
        rates[name] = of(
            name, text, lambda text, option=option: parse_rate(text, option, "bytes"), lambda found=found: found
        )
        if elsewhere and text is None:
            raise ValueError(
                f"{option} is needed to plan for another machine: the rate between host and device, such as "
                "--link 12GB/s (PCIe 4.0 gives about 25GB/s, PCIe 3.0 about 12GB/s)"
            )
    dtype = PRECISIONS[training.precision or "fp32"]
    operations = of("device FLOP/s", device_flops, lambda text: parse_rate(text, "--device-flops", "operations"),
                    lambda: None if elsewhere else measure.operations(here, dtype))  # fmt: skip
    host = of("host updates", host_updates, lambda text: parse_rate(text, "--host-updates", "parameters"),
              lambda: measure.host_updates(state=training.state))  # fmt: skip
    within = across = math.inf
    notes = []
    if devices > 1:
        within = of("loopback", loopback, lambda text: parse_rate(text, "--loopback", "bytes"), measure.loopback)
    elif loopback is not None:
        parse_rate(loopback, "--loopback", "bytes")
        notes.append(f"--loopback {loopback} has no effect with one device per node, and is ignored")
    if nodes > 1:
        across = of("network", network, lambda text: parse_rate(text, "--network", "bytes"), None)
    elif network is not None:
        parse_rate(network, "--network", "bytes")
        notes.append(f"--network {network} has no effect with one node, and is ignored")
    cluster = Cluster(devices, nodes, within, across)
    speeds = Rates(host, math.inf, rates["link in"], rates["link out"])
    return MachineDescription(Machine(speeds, memory, ram, operations, cluster), kind, known, notes)


def _check_ranks(devices: int, nodes: int, network: str | None, training: Training) -> None:
    for option, count, what in (("--devices", devices, "a node has"), ("--nodes", nodes, "a job has")):
        if count < 1:
            raise ValueError(f"{option} {count}: {what} at least one")
    if nodes > 1 and network is None:
        raise ValueError(
            f"--network is needed with --nodes {nodes}: the rate between nodes in each direction, such as "
            "--network 10GB/s"
        )
    if training.samples < devices * nodes:
        raise ValueError(
            f"--batch {training.samples}: the samples of a step are distributed over {devices * nodes} devices "
            f"({nodes} x {devices}), and some would get none. Give --batch {devices * nodes} or more, or fewer "
            "--devices"
        )


def _free_on(device: torch.device) -> int | None:
    if device.type == "meta":
        raise ValueError("--device-memory is needed to plan for another machine, such as --device-memory 16GiB")
    return budget(device, None)
