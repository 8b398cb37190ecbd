"""What stands for `optimizer.state` while the server has the values."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

State = dict[str, Any]  # of one parameter, as torch's optimizers name it


class ServedState(defaultdict[torch.Tensor, State]):
    """Empty until somebody looks at it; then `show` has put the server's values here.

    From then on it is the user's to change, as in plain PyTorch: what they leave here is what the next update starts
    from, and a parameter that has no entry any more starts anew.
    """

    def __init__(self, show: Callable[[], None]) -> None:
        super().__init__(dict)
        self._show = show
        self.is_shown = False

    def look(self) -> None:
        if not self.is_shown:
            self._show()
            self.is_shown = True

    def clear(self) -> None:
        """What is not here need not be shown first."""
        self.is_shown = True
        super().clear()

    # A copy belongs to a copy of the optimizer, which no engine has.

    def copy(self) -> Any:
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.copy(), memo)

    def __reduce__(self) -> Any:
        return self.copy().__reduce__()

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()


def _after_a_look(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def looking(self: ServedState, *args: Any, **kwargs: Any) -> Any:
        self.look()
        return method(self, *args, **kwargs)

    return looking


# All that a dictionary can be asked for.
for _name in [
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__reversed__", "__repr__"),
    *("__eq__", "__ne__", "__ior__", "get", "items", "keys", "values", "update", "pop", "popitem", "setdefault"),
]:
    setattr(ServedState, _name, _after_a_look(_name))
