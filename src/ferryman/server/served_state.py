"""The dictionary that replaces `optimizer.state` while the server has the values."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

State = dict[str, Any]  # the state of one parameter, with the names of torch's optimizers


class ServedState(defaultdict[torch.Tensor, State]):
    """Empty until it is first read: then `show` fills it with the server's values.

    From then on the user may change it, as in plain PyTorch. The next update starts from what is here; a parameter
    whose entry was removed starts from nothing.
    """

    def __init__(self, show: Callable[[], None]) -> None:
        super().__init__(dict)
        self._show = show
        self.is_shown = False

    def fill(self) -> None:
        """Calls `show`, once."""
        if not self.is_shown:
            self._show()
            self.is_shown = True

    def clear(self) -> None:
        """Removes everything, so there is no need to fill it first."""
        self.is_shown = True
        super().clear()

    # A copy is a plain dictionary: it belongs to a copy of the optimizer, which no engine uses.

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


def _filled_first(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def filled(self: ServedState, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        return method(self, *args, **kwargs)

    return filled


# All methods that read or change a dictionary.
for _name in [
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__reversed__", "__repr__"),
    *("__eq__", "__ne__", "__ior__", "get", "items", "keys", "values", "update", "pop", "popitem", "setdefault"),
]:
    setattr(ServedState, _name, _filled_first(_name))
