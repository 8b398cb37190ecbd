"""The node of autograd's graph that represents one call, and the objects that the node refers to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ferryman.relay.stash import Stashed

if TYPE_CHECKING:
    from ferryman.model.units import Unit
    from ferryman.relay.call import Call
    from ferryman.relay.step_state import OpenCalls


class SavedInputs:
    """A call's saved inputs. Autograd drops this object when it can no longer run the call's backward."""

    def __init__(self, inputs: Sequence[Stashed], unit: Unit, open_calls: OpenCalls) -> None:
        self.inputs = inputs
        self._unit = unit
        self._open_calls: OpenCalls | None = open_calls
        open_calls.open(unit)

    def give_up(self) -> None:
        """Frees the inputs at the end of the step."""
        self.inputs, self._open_calls = (), None

    def __del__(self) -> None:
        if self._open_calls is not None:
            self._open_calls.close(self._unit)


_BLANK = torch.empty(0, device="cpu", dtype=torch.float32)


def _unpack(_: SavedInputs) -> torch.Tensor:
    return _BLANK


class Handle:
    """The reference from autograd's node to its call, which is cut when the step is over.

    The user's code may keep a tensor with its graph for longer, for example in a list on a block. If the node kept the
    call, which refers to the relay, the model and so the list, that would be a cycle through autograd's graph.
    Python cannot collect such a cycle.
    """

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call
        self.saving: torch.autograd.graph.saved_tensors_hooks | None = None  # on when the node's forward returns
        self.unit = call.unit.name
        self.number = call.batch.number

    def end_saving(self) -> None:
        """Called when autograd has saved what the node's forward has given to it."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.__exit__(None, None, None)

    def end(self) -> None:
        """Drops the call, its inputs and its graph at the end of the step."""
        call, self.call = self.call, None
        if call is None:
            return
        call.drop_graph(lasting=True)
        if (stash := call.stash()) is not None:
            stash.give_up()

    def __del__(self) -> None:
        """The node is gone, so nothing can use the call's graph any more, though others may refer to the call."""
        if self.call is not None:
            self.call.drop_graph(lasting=True)

    def used(self, where: str) -> ValueError:
        return ValueError(
            f"an output of the unit {self.unit!r} for micro-batch {self.number} is used {where}. Something keeps "
            "tensors with their graph from one micro-batch to the next (a list, a dict, an attribute): clear it at the "
            "start of the loss, or detach the tensors"
        )


class CallNode(torch.autograd.Function):
    """Delegates forward and backward to the call."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: Handle,
        anchor: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.is_anchored = handle, anchor is not None
        ctx.set_materialize_grads(False)
        assert handle.call is not None
        outputs, stash = handle.call.forward(tensors)
        ctx.mark_non_differentiable(*handle.call.constants(outputs))
        # Autograd keeps the stash like a saved tensor: until a backward that does not retain the graph, or until the
        # graph is freed.
        handle.saving = torch.autograd.graph.saved_tensors_hooks(lambda _: stash, _unpack)
        handle.saving.__enter__()
        ctx.save_for_backward(_BLANK)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        handle: Handle = ctx.handle
        if all(gradient is None for gradient in gradients):
            return tuple(None for _ in ctx.needs_input_grad)  # the node is reached, but none of its outputs was used
        if torch.is_grad_enabled():
            raise ValueError(
                f"a backward with create_graph=True goes through the unit {handle.unit!r}, whose own backward runs "
                "the unit again and cannot be differentiated. Compute the gradient without create_graph, or keep code "
                "that is differentiated twice outside the units (units=[...])"
            )
        if handle.call is None:
            raise handle.used("outside of its step")
        accumulate = ctx.is_anchored and torch._C._will_engine_execute_node(ctx.next_functions[0][0])
        return None, None, *handle.call.backward(gradients, accumulate=accumulate)


def _refuse_hook(node: Any, hook: Callable[..., Any]) -> None:
    raise ValueError(
        f"an output of the unit {node.handle.unit!r} has a hook on its node of autograd's graph (module."
        "register_backward_hook, or grad_fn.register_hook), which would get the gradients of the whole unit's inputs, "
        "and not those of its last operation. Use module.register_full_backward_hook or tensor.register_hook, or "
        "register the hook inside the unit"
    )


CallNode._backward_cls.register_hook = _refuse_hook  # type: ignore[attr-defined]
