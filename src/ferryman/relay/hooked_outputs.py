"""The outputs of a call on which the user's code has hooks (`Tensor.register_hook`) or keeps gradients (`retain_grad`).

Outside the unit, the user's code has the tensor of the first run; the second run makes another one. The gradient
reaches the outer tensor first. It lacks the part that comes from the unit's other outputs, if these depend on the
tensor.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch


class HookedOutputs:
    """`outer`: the tensors outside the unit. `first`: those of a first run with a graph, in a trial."""

    def __init__(self, unit: str, outer: Sequence[torch.Tensor], first: Sequence[torch.Tensor] = ()) -> None:
        self._unit = unit
        used = self._used = [is_used_by(tensor, first) for tensor in first] or [False] * len(outer)
        # The dictionaries are valid even after the tensors have been dropped.
        self._hooks = [_watched_hooks(*pair, unit) for pair in zip(outer, used, strict=True)]
        self._outer = [weakref.ref(tensor) for tensor in outer]

    def is_used_inside(self, number: int) -> bool:
        """Whether the first run had a graph, in which another output depends on this one."""
        return self._used[number]

    def check(self, inner: Sequence[torch.Tensor]) -> None:
        """Refuses hooks outside that would see another gradient than in plain PyTorch. `inner`: of the second run."""
        for output, hooks, reference in zip(inner, self._hooks, self._outer, strict=True):
            outer = reference()
            if not hooks and (outer is None or not outer.retains_grad):
                continue
            what = "a hook (Tensor.register_hook)" if hooks else "retain_grad()"
            if output._backward_hooks:
                raise ValueError(
                    f"an output of the unit {self._unit!r} has a hook (Tensor.register_hook) that the unit's code has "
                    f"registered, and {what} from outside the unit, which would see the gradient before that hook has "
                    "run. Use both inside, or both outside"
                )
            if is_used_by(output, inner):
                raise _sees_a_part(self._unit, what)

    def keep_gradients(self, inner: Iterable[torch.Tensor]) -> None:
        """After the backward: gradients of tensors for which the unit's code has called `retain_grad`."""
        for output, reference in zip(inner, self._outer, strict=True):
            outer = reference()
            if output.retains_grad and outer is not None and not outer.retains_grad:
                outer.retain_grad()  # torch would warn when the gradient is read
                outer.grad = output.grad


class _Hooks(OrderedDict[int, Any]):
    """Refuses a hook when it is registered: the gradient that it would get may be None."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def __setitem__(self, key: int, hook: Any) -> None:
        raise _sees_a_part(self._unit, "a hook (Tensor.register_hook)")


def _sees_a_part(unit: str, what: str) -> ValueError:
    return ValueError(
        f"a tensor that the unit {unit!r} has stored and also uses for its other outputs has {what} from outside the "
        "unit, which would see only a part of the gradient. Use it inside the unit, where the tensor is made"
    )


def _watched_hooks(tensor: torch.Tensor, used_inside: bool, unit: str) -> dict[int, Any]:
    """The dictionary of the tensor's hooks, empty so far; made as `Tensor.register_hook` would make it."""
    hooks: OrderedDict[int, Any] = _Hooks(unit) if used_inside else OrderedDict()
    if tensor.requires_grad:
        tensor._backward_hooks = hooks
        assert tensor.grad_fn is not None
        tensor.grad_fn._register_hook_dict(tensor)
    return hooks


def is_used_by(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Whether the graph of another tensor leads to this one."""
    if not tensor.requires_grad:
        return False
    wanted = tuple(torch.autograd.graph.get_gradient_edge(tensor))[:2]
    pending = [other.grad_fn for other in others if other is not tensor and other.grad_fn is not None]
    seen = set(pending)
    while pending:
        for edge in pending.pop().next_functions:
            if edge == wanted:
                return True
            if edge[0] is not None and edge[0] not in seen:
                seen.add(edge[0])
                pending.append(edge[0])
    return False
