"""Captures torch's modes where the user's code is called, and enables them in another thread or in a second run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_CHECKPOINT = "torch.utils.checkpoint"
_KNOWN = ("ferryman.", _CHECKPOINT)  # modules whose dispatch modes may be off while a unit runs

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Modes(NamedTuple):
    """The modes of torch that belong to one thread, as they were where `here` was called. Other modes apply to all
    threads (default dtype, deterministic algorithms, anomaly detection), or do not change results."""

    functions: list[TorchFunctionMode]  # such as the mode of torch.set_default_device
    saving: Hooks | None  # hooks for tensors that autograd saves (torch.autograd.graph.saved_tensors_hooks)

    @staticmethod
    def here() -> Modes:
        for mode in _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else ():
            kind = type(mode)
            if not kind.__module__.startswith(_KNOWN):
                raise ValueError(
                    f"the TorchDispatchMode {kind.__module__}.{kind.__qualname__} is on around a step or a unit. Units "
                    "run twice, and in threads of the engine, so the mode would see different operations than in plain "
                    "PyTorch. Enter the mode inside a unit's forward, or exit it before engine.step()"
                )
        hooks = saving_hooks()
        if hooks is not None and getattr(hooks[0], "__module__", "") == _CHECKPOINT:
            hooks = None  # checkpointing enters its own hooks in each run
        if hooks is None and not torch._C._len_torch_function_stack():
            return _NONE
        functions = [mode for mode in _get_current_function_mode_stack() if getattr(mode, "holds_in_units", True)]
        return Modes(functions, hooks) if functions or hooks is not None else _NONE

    def on(self) -> contextlib.AbstractContextManager[None]:
        """Context in which exactly these modes are on. Torch switches a function mode off while it handles a function
        such as `backward`."""
        if self.saving is None and not (self.functions or torch._C._len_torch_function_stack()):
            return _NOTHING  # the common case
        if self.saving is None and _get_current_function_mode_stack() == self.functions:
            return _NOTHING
        return self._exchanged()

    @contextlib.contextmanager
    def _exchanged(self) -> Iterator[None]:
        before = _get_current_function_mode_stack()
        with contextlib.ExitStack() as stack:
            if before != self.functions:
                _exchange(self.functions)
                stack.callback(_exchange, before)
            if self.saving is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saving))
            yield


_NONE = Modes([], None)
_NOTHING = contextlib.nullcontext()


def saving_hooks() -> Hooks | None:
    """The hooks for tensors that autograd saves, such as those of torch.utils.checkpoint, if any are on."""
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def _exchange(modes: list[TorchFunctionMode]) -> None:
    """Replaces the stack of function modes. It does not enter them, because a mode may refuse to be entered twice."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
