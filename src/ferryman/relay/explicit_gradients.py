"""Gradients that the user's code computes explicitly (`torch.autograd.grad`), with respect to outputs of units.

For autograd, a unit is one node. If the unit's own code uses an output for its other outputs, the part of the gradient
that comes from there is computed inside the node, which autograd cannot see: `torch.autograd.grad` would return only a
part of the gradient. The same holds inside a unit, for an input on which another input depends. Trials refuse both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ferryman.exactness.escapes import Escapes
from ferryman.relay.call_node import CallNode, Handle
from ferryman.relay.hooked_outputs import is_used_by

_NODE: Any = CallNode._backward_cls
_FUNCTIONS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class ExplicitGradients(TorchFunctionMode):
    """Refuses gradients of which autograd would compute only a part. `escapes` has the inputs of the running call."""

    def __init__(self, escapes: Escapes) -> None:
        super().__init__()
        self._escapes = escapes
        self.holds_in_units = escapes.traced  # the inputs of calls are known only then

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _FUNCTIONS:
            return function(*args, **kwargs)
        inputs = args[1] if function is torch.autograd.grad else kwargs.get("inputs")
        self._refuse_related(inputs)
        asked = list(_outputs_of_units(inputs))
        for _, handle, number in asked:
            if handle.call is not None and handle.call.outputs.is_used_inside(number):
                raise _is_a_part(handle)
        try:
            found = function(*args, **kwargs)
        except RuntimeError as error:
            if asked and "appears to not have been used in the graph" in str(error):
                raise _is_a_part(asked[0][1]) from error
            raise
        if function is torch.autograd.grad:
            for at, handle, _ in asked:
                if found[at] is None:  # with allow_unused
                    raise _is_a_part(handle)
        return found

    def _refuse_related(self, asked: Any) -> None:
        """Refuses, in a unit, the gradient of an input on which another input depends: there, both are leaves."""
        wanted = [] if asked is None else [asked] if isinstance(asked, torch.Tensor) else list(asked)
        outer = [tensor for _, tensor in self._escapes.inputs]
        for inside, tensor in self._escapes.inputs:
            if any(inside is one for one in wanted) and is_used_by(tensor, outer):
                raise ValueError(
                    "torch.autograd.grad is called in a unit, for the gradient of one of its inputs on which another "
                    "input depends. It would not find the part of the gradient that comes from there. Call it outside "
                    "the units, or name a module around the code that makes these inputs in units=[...]"
                )


def _outputs_of_units(inputs: Any) -> Iterator[tuple[int, Handle, int]]:
    """Those of the tensors and gradient edges that are outputs of units: their places, calls and numbers."""
    if inputs is None:
        return
    for at, asked in enumerate([inputs] if isinstance(inputs, torch.Tensor) else inputs):
        node, number = (asked.grad_fn, asked.output_nr) if isinstance(asked, torch.Tensor) else (asked[0], asked[1])
        if isinstance(node, _NODE):
            yield at, node.handle, number


def _is_a_part(handle: Handle) -> ValueError:
    return ValueError(
        f"torch.autograd.grad, or backward(inputs=...), is asked for the gradient of a tensor that the unit "
        f"{handle.unit!r} has stored or returned and also uses for its other outputs. It would find only the part of "
        "the gradient that comes from outside the unit. Call it inside the unit, or cut the unit at this tensor: name "
        "smaller modules in units=[...]"
    )
