"""Installs the engine's forwards and hooks in the user's model, and removes them again."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ferryman.model.reads import Reads
from ferryman.model.units import Forward


class _InstalledForward:
    """Replaces a module's forward. A copied or unpickled module gets the original forward."""

    def __init__(self, module: nn.Module, forward: Forward, own: Forward | None) -> None:
        self._module, self._forward, self.own = module, forward, own
        self.__signature__ = inspect.signature(module.forward)  # some callers inspect the arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.own is not None:
            return copy.deepcopy(self.own, memo)
        copied = memo[id(self._module)]
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.own is not None:
            return copy.copy, (self.own,)
        return getattr, (self._module, "forward")  # when this is called, the module only has its class's forward


class _Hook:
    """One of the engine's hooks on a module. In a copied or unpickled module it does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(_do_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    pass


class ModelPatch:
    """Replaces forwards of modules, and hooks reads of their weights."""

    def __init__(self) -> None:
        # Forwards that were set on module instances, to be restored; usually None.
        self._forwards: dict[nn.Module, Forward | None] = {}
        self._hooks: dict[nn.Module, tuple[RemovableHandle, ...]] = {}
        self._compiled_calls: dict[nn.Module, Forward] = {}  # of `module.compile()`, which would trace these forwards

    def replace(self, module: nn.Module, forward: Forward) -> None:
        if module._compiled_call_impl is not None:
            self._compiled_calls[module], module._compiled_call_impl = module._compiled_call_impl, None
        own = self._forwards.setdefault(module, module.__dict__.get("forward"))
        module.__dict__["forward"] = _InstalledForward(module, forward, own)

    def watch(self, modules: Iterable[nn.Module], reads: Reads) -> None:
        """Makes `state_dict` and `load_state_dict` of these modules wait for pending updates."""
        for module in modules:
            # A ScriptModule takes no hooks; the engine accepts those without weights, such as activation functions.
            if module not in self._hooks and not isinstance(module, torch.jit.ScriptModule):
                self._hooks[module] = (
                    module.register_state_dict_pre_hook(_Hook(lambda *_: reads.wait())),
                    module.register_state_dict_post_hook(_Hook(functools.partial(_remember, reads))),
                    module.register_load_state_dict_pre_hook(_Hook(lambda *_: reads.wait())),
                )

    def give_back(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            if module in self._forwards:
                own = self._forwards.pop(module)
                module.__dict__.pop("forward", None)
                if own is not None:
                    module.__dict__["forward"] = own
            if module in self._compiled_calls:
                module._compiled_call_impl = self._compiled_calls.pop(module)
            for hook in self._hooks.pop(module, ()):
                hook.remove()

    def end(self) -> None:
        self.give_back({*self._forwards, *self._hooks})


def _remember(reads: Reads, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Registers the entries of a state_dict that share memory with the module's parameters."""
    for name, parameter in module._parameters.items():
        shown = state.get(prefix + name)
        if parameter is None or type(shown) is not torch.Tensor or shown.device != parameter.device:
            continue
        if shown.data_ptr() == parameter.data_ptr():
            reads.remember(shown)


def is_taken(module: nn.Module) -> bool:
    """Whether an engine uses the module."""
    return isinstance(module.__dict__.get("forward"), _InstalledForward)
