"""What the engine puts into the user's model while it has it, and takes out again."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Forward = Callable[..., Any]


class _StandIn:
    """Stands for a module's forward. A copy of the module gets a forward of its own, not the engine's."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        self._module, self._forward = module, forward
        self.__signature__ = inspect.signature(module.forward)  # some callers look which arguments there are

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        copied = memo[id(self._module)]
        return types.MethodType(type(copied).forward, copied)


class Takeover:
    """Forwards that stand in for modules' own, and hooks on reading their weights."""

    def __init__(self, before_reading: Callable[[], None]) -> None:
        self._before_reading = before_reading
        # What instances had for `forward` of their own, to be put back; usually nothing.
        self._forwards: dict[nn.Module, Forward | None] = {}
        self._hooks: dict[nn.Module, tuple[RemovableHandle, ...]] = {}

    def replace(self, module: nn.Module, forward: Forward) -> None:
        self._forwards.setdefault(module, module.__dict__.get("forward"))
        module.__dict__["forward"] = _StandIn(module, forward)

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Whoever asks one of them for its state_dict, or loads one, waits for updates that are under way."""
        for module in modules:
            if module not in self._hooks:
                self._hooks[module] = (
                    module.register_state_dict_pre_hook(lambda *_: self._before_reading()),
                    module.register_load_state_dict_pre_hook(lambda *_: self._before_reading()),
                )

    def give_back(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            if module in self._forwards:
                own = self._forwards.pop(module)
                module.__dict__.pop("forward", None)
                if own is not None:
                    module.__dict__["forward"] = own
            for hook in self._hooks.pop(module, ()):
                hook.remove()

    def end(self) -> None:
        self.give_back({*self._forwards, *self._hooks})


def is_taken(module: nn.Module) -> bool:
    """Whether an engine has the module."""
    return isinstance(module.__dict__.get("forward"), _StandIn)
