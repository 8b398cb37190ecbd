"""Process checks: what a step leaves in the process that called it, and how much of its time is Python's."""

from __future__ import annotations

import copy
import functools
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ferryman.engine import Engine
from ferryman.runtime.pinned import PinnedMemory
from ferryman.runtime.sizes import show_bytes
from ferryman.verify.context import CheckContext
from ferryman.verify.reference import adamw
from ferryman.verify.result import Check, Measurements, Verdict
from ferryman.verify.small_models import Batch, Transformer, batch, build

_SMAPS = Path("/proc/self/smaps")
_CHILD_SECONDS = 30  # far more than a forked child needs to refuse
_MAX_PYTHON_SHARE = 0.5
_MICRO_BATCHES = 4
_LENGTH = 64  # tokens per sample
_WARM_UP_ROUNDS, _ROUNDS = 3, 5


def checks(context: CheckContext) -> Iterator[Check]:
    compared = "device, stream and modes of the calling thread before and after each use of an engine: the same"
    yield Check("process", "caller", compared, lambda: _caller(context))
    compared = "a forked child: it has no copy of pinned memory, and reading weights there raises"
    yield Check("process", "fork", compared, lambda: _fork(context))
    compared = (
        "forward and backward with all weights on the device against plain PyTorch with checkpointing: the additional "
        f"time is at most {_MAX_PYTHON_SHARE:.0%} of the engine's"
    )
    yield Check("process", "python", compared, lambda: _python(context))


# The caller.


def _caller(context: CheckContext) -> Verdict:
    device = context.device
    model = _model(64)
    changed: list[str] = []
    with context.accelerator.stream():
        engine = Engine(model, adamw(model), device=device, stash="auto" if context.accelerator.is_host else "host")
        uses: dict[str, Callable[[], object]] = {
            "step": lambda: engine.step(batch(0), 2),
            "forward_backward": lambda: engine.forward_backward(batch(1), 2),
            "update": engine.update,
            "evaluate": lambda: engine.evaluate(batch(2)),
            "close": engine.close,
        }
        for name, use in uses.items():
            before = _state_of_caller(device)
            use()
            after = _state_of_caller(device)
            changed += [f"{what} ({name})" for what in before if after[what] != before[what]]
    figures: Measurements = {"uses": len(uses), "compared": len(before)}
    if changed:
        return Verdict.failed(f"the caller's state was changed: {', '.join(changed)}", figures)
    return Verdict.ok(figures)


def _state_of_caller(device: torch.device) -> dict[str, Any]:
    """What belongs to the calling thread or to the process, and must be the same after an engine was used."""
    found: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", device.type)],
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type != "cpu":
        found["device"] = torch.accelerator.current_device_index()
        found["stream"] = torch.accelerator.current_stream(device).stream_id
    return found


# Forks.


def _fork(context: CheckContext) -> Verdict:
    if not hasattr(os, "fork") or not _SMAPS.exists():
        return Verdict.skipped("this system has no fork, or does not say which pages a fork copies")
    model = _model(64)
    with Engine(model, adamw(model), device=context.device) as engine:
        engine.step(batch(0), 2)
        engine.wait()
        weights = [parameter.data_ptr() for parameter in model.parameters()]
        sizes = [parameter.nbytes for parameter in model.parameters()]
        pinned = _pins(context)
        copied = sum(size for at, size in zip(weights, sizes, strict=True) if _is_copied(at)) if pinned else 0
        said = _in_child(lambda: model.state_dict())
    figures: Measurements = {"weights": show_bytes(sum(sizes)), "pinned": "yes" if pinned else "no", "child": said}
    if copied:
        return Verdict.failed(f"a fork copies {show_bytes(copied)} of pinned weights", figures)
    if said != "refused":
        return Verdict.failed(f"a forked child that reads weights {said}; it should raise", figures)
    return Verdict.ok(figures)


def _pins(context: CheckContext) -> bool:
    """Whether the driver pins memory. Without pins, a fork shares pages as always."""
    memory = PinnedMemory(1 << 16, context.device)
    is_pinned = memory.is_pinned
    memory.close()
    return is_pinned


def _is_copied(address: int) -> bool:
    """Whether a fork copies the page at this address, if it is pinned: it is not marked as "don't copy"."""
    inside = False
    for line in _SMAPS.read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return "dc" not in rest.split()
    return True


def _in_child(work: Callable[[], object]) -> str:
    """What happens to `work` in a forked child: it is "refused", "returns" or "hangs"."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
            os.write(writing, b"returns")
        except BaseException:
            os.write(writing, b"refused")
        finally:
            os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], _CHILD_SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
            return "hangs"
        return os.read(reading, 100).decode() or "dies"
    finally:
        os.close(reading)
        os.waitpid(child, 0)


# Python's share.


def _python(context: CheckContext) -> Verdict:
    model = _model(1024 if context.accelerator.is_fast else 96, _LENGTH)
    whole = batch(0, _MICRO_BATCHES, _LENGTH)
    plain = _Plain(model, context)
    held = None if context.accelerator.is_host else True
    with Engine(model, device=context.device, held=held) as engine:

        def ours() -> None:
            engine.forward_backward(whole, _MICRO_BATCHES)
            engine.zero_grad()
            context.accelerator.synchronize()

        ways: list[Callable[[], None]] = [lambda: plain.run(whole), ours]
        # The first rounds have trials and checksums. The best of the others counts, as for overlap.
        taken = [[_seconds(way) for way in ways] for _ in range(_WARM_UP_ROUNDS + _ROUNDS)]
        calls = 2 * _MICRO_BATCHES * len(engine.units)
    theirs, own = (min(column) for column in zip(*taken[_WARM_UP_ROUNDS:], strict=True))
    more = max(0.0, own - theirs)
    share = more / own
    figures: Measurements = {
        "plain": f"{theirs * 1e3:.1f} ms",
        "ours": f"{own * 1e3:.1f} ms",
        "per call": f"{more / calls * 1e6:.0f} us",
        "share": f"{share:.0%}",
    }
    if share > _MAX_PYTHON_SHARE:
        return Verdict.failed("most of a step's time goes into the engine's own Python code", figures)
    return Verdict.ok(figures)


class _Plain:
    """Forward and backward in plain PyTorch with activation checkpointing, which computes what the engine computes."""

    def __init__(self, model: nn.Module, context: CheckContext) -> None:
        self._model = copy.deepcopy(model).to(context.device)
        for block in self._model.blocks:  # type: ignore[union-attr]
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        self._context = context

    def run(self, whole: Batch) -> None:
        parts = [tensor.to(self._context.device).chunk(_MICRO_BATCHES) for tensor in whole.values()]
        for part in zip(*parts, strict=True):
            (self._model(*part).loss / _MICRO_BATCHES).backward()
        self._model.zero_grad()
        self._context.accelerator.synchronize()


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _model(width: int, length: int = 16) -> nn.Module:
    return build(lambda: Transformer(4, width, tied=False, length=length))
