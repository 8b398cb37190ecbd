"""Detects threads that the user's code starts in a step and that use the device.

A micro-batch runs on the relay's stream, and the stash watches the operators of its thread. Neither holds for other
threads: they would compute on another stream, with tensors that may have been moved to the host. Trials refuse them.

Note [Why Thread.start is replaced]
A dispatch mode belongs to one thread, so some code must run in each new thread. `threading.setprofile` and `settrace`
could do that, but they would replace those of a profiler, a debugger or a coverage tool. They also do not say which
thread has started another, so a data loader's threads, which may use the device, would be refused. The device does not
know which Python thread has launched an operator. An audit hook (`sys.addaudithook`) is called when a thread starts,
but it cannot be removed. So `Thread.start` is replaced, and only while a trial runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ferryman.relay.step_state import StepState


@contextlib.contextmanager
def refusing_user_threads(step: StepState, device: torch.device) -> Iterator[None]:
    """Context in which a thread started by a micro-batch gets a ValueError if it uses a tensor on the device."""
    if device.type == "cpu":  # the CPU has no streams, and no tensor is moved
        yield
        return
    start, watches = threading.Thread.start, list[_ThreadWatch]()

    def start_watched(thread: threading.Thread) -> None:
        if step.running is not None and step.running.runs_here():
            run, watch = thread.run, _ThreadWatch(step, device)
            watches.append(watch)

            def run_watched() -> None:
                with watch:
                    run()

            thread.run = run_watched  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_watched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        for watch in watches:
            watch.step = None  # a thread may outlive the trial


class _ThreadWatch(TorchDispatchMode):
    def __init__(self, step: StepState, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step: StepState | None = step
        self._device = device

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.step is not None:
            leaves = pytree.tree_leaves((args, kwargs))
            if any(isinstance(leaf, torch.Tensor) and leaf.device.type == self._device.type for leaf in leaves):
                self.step.refuse_thread(f"a tensor on {self._device.type!r} (by {function})")
        return function(*args, **(kwargs or {}))
