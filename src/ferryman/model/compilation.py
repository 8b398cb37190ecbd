"""Compiled units: each kind of unit is compiled once, by torch.compile.

Note [One compilation for equal units]
What is compiled is the forward of a class, with the module as an argument. So equal blocks share what is compiled,
whatever slot their weights are in, and the forwards that the engine installs in modules are never traced. A module
whose forward was replaced on the object, or that contains no other modules (nothing in it could be fused), runs as it
is.

Modules that the user has compiled (`torch.compile(block)`, `block.compile()`) are compiled in the same way, with the
user's own backend and options. Where such a module contains units, these are compiled in its place.
"""

from __future__ import annotations

import functools
import shutil
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ferryman.model.units import Forward

Compile = Callable[[Forward], Forward]

# A unit runs with and without a graph, and in several shapes. Beyond the usual limit of 8, it would not be compiled.
_compile = functools.partial(torch.compile, recompile_limit=64)


def check_backend(device: torch.device) -> None:
    """Raises a ValueError if torch.compile cannot compile for the device."""
    from torch._inductor import config
    from torch._inductor.codegen import common

    common.init_backend_registration()
    if common.get_scheduling_for_device(device.type) is None:
        raise ValueError(
            f"compile=True: torch.compile has no backend for the device {str(device)!r}; leave compile= out, or train "
            "on a device that torch.compile supports, such as cpu"
        )
    compilers: Any = config.cpp.cxx
    if device.type == "cpu" and not any(map(shutil.which, filter(None, compilers))):
        raise ValueError(
            "compile=True: torch.compile needs a C++ compiler for the CPU, and none was found; install g++, or leave "
            "compile= out"
        )


def is_wrapper(module: nn.Module) -> bool:
    """Whether the module is what `torch.compile(module)` returns. (Importing Dynamo for this would take seconds.)"""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def is_compiled(module: nn.Module) -> bool:
    """Whether the user has compiled the module."""
    return is_wrapper(module) or module._compiled_call_impl is not None


class Compilation:
    """Compiles forwards of modules. `everything`: also of those that the user has not compiled."""

    def __init__(self, *, everything: bool) -> None:
        self._compiled: dict[tuple[Compile, Forward], Forward] = {}
        self._by_default: Compile | None = _compile if everything else None
        self._ways = weakref.WeakKeyDictionary[nn.Module, Compile]()  # of compiled modules, and of those in them

    def include(self, root: nn.Module) -> None:
        """Notes which modules the user has compiled, and how."""
        for module in root.modules():  # from the outside to the inside
            if (way := _way_of(module)) is not None:
                for inside in module.modules():
                    self._ways[inside] = way

    def reaches(self, modules: Iterable[nn.Module]) -> bool:
        """Whether anything in these modules is compiled."""
        return self._by_default is not None or any(inside in self._ways for top in modules for inside in top.modules())

    def forward(self, module: nn.Module) -> Forward:
        """The forward that a unit runs in place of the module's own."""
        way, inner = self._ways.get(module, self._by_default), _original(module)
        if way is None or "forward" in inner.__dict__ or not any(True for _ in inner.children()) or _has_hooks(module):
            return uncompiled(module)
        function: Forward = type(inner).forward
        if (way, function) not in self._compiled:
            self._compiled[way, function] = way(function)
        return functools.partial(self._compiled[way, function], inner)


def uncompiled(module: nn.Module) -> Forward:
    """The forward of a module as it was before the user compiled it."""
    inner = _original(module)
    return module.forward if inner is module else inner


def compiled_around(root: nn.Module, units: Iterable[nn.Module]) -> list[nn.Module]:
    """The compiled modules in `root` that contain modules of units."""
    inside = set(units)
    return [
        module
        for module in root.modules()
        if is_compiled(module) and any(one in inside for one in module.modules() if one is not module)
    ]


def _original(module: nn.Module) -> nn.Module:
    return module._orig_mod if is_wrapper(module) else module  # type: ignore[return-value]


def _has_hooks(module: nn.Module) -> bool:
    """Whether a call of the original module, and not only its forward, is what the user has compiled."""
    inner = _original(module)
    hooks = inner._forward_hooks, inner._forward_pre_hooks, inner._backward_hooks, inner._backward_pre_hooks
    return inner is not module and any(hooks)


def _way_of(module: nn.Module) -> Compile | None:
    """torch.compile with the options with which the user has compiled the module; None if it is not compiled."""
    if is_wrapper(module):
        return module.dynamo_ctx  # type: ignore[return-value]
    if module._compiled_call_impl is None:
        return None
    cells = getattr(module._compiled_call_impl, "__closure__", None) or ()
    contents = (cell.cell_contents for cell in cells)
    contexts = (one for one in contents if isinstance(one, torch._dynamo.eval_frame._TorchDynamoContext))
    return next(contexts, _compile)
