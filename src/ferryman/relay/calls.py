"""One execution of a unit's module for one micro-batch, as a node of autograd's graph.

The node computes neither its forward nor its backward at once: it parks until the unit is on the device. So both sweeps
meet at the units, and everything between them is ordinary autograd in the micro-batch's own thread.

Forward runs the module without a graph and remembers its inputs (the stash). Backward runs it again with a graph, with
the same random numbers, and backpropagates through that. Where the backward is known to follow the forward at once (the
turn), the graph of the forward is kept and nothing runs twice.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ferryman.relay.randomness import State
from ferryman.relay.rendezvous import Direction, MicroBatch
from ferryman.relay.stash import Stashed
from ferryman.units import Unit

if TYPE_CHECKING:
    from ferryman.relay.relay import Relay

Forward = Callable[..., Any]

_TENSOR = object()  # stands in a flattened list where a tensor goes


class _Tree:
    """Arguments or results: tensors apart, the rest and the shape to put them back together."""

    def __init__(self, value: Any) -> None:
        flat, self._spec = pytree.tree_flatten(value)
        self.tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        self.constants = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        them = iter(tensors)
        return pytree.tree_unflatten([next(them) if c is _TENSOR else c for c in self.constants], self._spec)


class Call:
    """A unit's module, called by one micro-batch."""

    def __init__(
        self, relay: Relay, batch: MicroBatch, unit: Unit, module: nn.Module, forward: Forward, arguments: Any
    ) -> None:
        self.unit = unit
        self._relay = relay
        self.batch = batch
        self.module = module
        self._forward = forward
        self._arguments = _Tree(arguments)
        self._results: _Tree | None = None  # between the node's forward and its return
        self._random: State | None = None  # at the forward's start, if it drew any
        self._kept: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None  # the forward's inputs and outputs
        self._wants: list[bool] = []
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in relay.kinds
        ]
        self._inputs: list[Stashed] = []
        self._went_backward = False

    def run(self) -> Any:
        """What the module's forward returns to the user's code."""
        if self.batch.turned and self._relay.for_good:
            raise ValueError(
                f"the unit {self.unit.name!r} is called in the backward, by checkpointing with use_reentrant=True. The "
                "engine runs units again by itself: switch that off, or use use_reentrant=False"
            )
        tensors = self._arguments.tensors
        trains = bool(self.unit.trained)
        stash = self._relay.stash
        if torch.is_grad_enabled() and (trains or any(t.requires_grad for t in tensors)):
            # The anchor makes it a node also where no input requires a gradient.
            outputs = _Node.apply(self, self._relay.anchor if trains else None, *tensors)  # type: ignore[no-untyped-call]
        else:
            self.batch.park(self.unit, Direction.FORWARD, tensors)
            with torch.no_grad(), _disable_current_modes():
                self._results = self._compute([t.detach() for t in tensors])
                outputs = self._results.tensors
        results, self._results = self._results, None  # only the user's code holds them from here on
        assert results is not None
        self._arguments.tensors.clear()
        stash.know(self.batch, outputs)
        return results.rebuild(outputs)

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._wants = [t.requires_grad for t in tensors]
        self.batch.park(self.unit, Direction.FORWARD, tensors)
        randomness = self._relay.randomness
        before, versions = randomness.state(), [t._version for t in tensors]
        buffers = self._relay.buffer_versions()
        self._inputs = [self._relay.stash.keep(self.batch, t) for t in tensors]
        if self._relay.turns_at(self.module):
            inputs = self._detached(tensors)
            with torch.enable_grad():
                self._results = self._compute(inputs)
            self._kept = (inputs, self._results.tensors)
            outputs = [t.detach() for t in self._results.tensors]
        else:
            self._results = self._compute([t.detach() for t in tensors])
            outputs = self._results.tensors
        if not randomness.state().same_as(before):
            self._random = before
        if [t._version for t in tensors] != versions:
            raise ValueError(
                f"the unit {self.unit.name!r} edits one of its inputs in place; running it again in the backward would "
                "edit it twice. Copy the input first (x = x.clone()), or cut the unit differently with units=[...]"
            )
        if (name := self._relay.edited_buffer(buffers)) is not None:
            raise ValueError(
                f"the unit {self.unit.name!r} edits its buffer {name!r} in its forward; running it again in the "
                "backward would edit it twice. Keep such state outside the units, or switch it off in training"
            )
        self._relay.went_forward(self)
        return outputs

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        if self._went_backward:
            raise RuntimeError(
                f"the backward of the unit {self.unit.name!r} runs a second time for one forward (retain_graph=True?); "
                "the relay forgets a call's inputs after its backward"
            )
        self._went_backward = True
        self.batch.park(self.unit, Direction.BACKWARD, [g for g in gradients if g is not None])
        self._relay.goes_backward(self)
        with torch.enable_grad():
            if self._kept is not None:
                (inputs, outputs), self._kept = self._kept, None
            else:
                inputs = self._detached(self._recall())
                outputs = self._replay(inputs)
            self._inputs.clear()
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        self._relay.went_backward(self)
        results = [t.grad if t.requires_grad else None for t in inputs]
        self._relay.stash.know(self.batch, [g for g in results if g is not None])
        return results

    def _recall(self) -> list[torch.Tensor]:
        tensors = [stashed.recall() for stashed in self._inputs]
        if any(tensor is None for tensor in tensors):
            raise ValueError(
                f"an input of the unit {self.unit.name!r} was edited in place after the unit had used it, and its "
                "backward needs it as it was. Use an operation that returns a new tensor (x = x + y, not x += y)"
            )
        return [tensor for tensor in tensors if tensor is not None]

    def drop_graph(self) -> None:
        """The backward did not follow at once: gives the memory back; the forward will run again."""
        self._kept = None

    def _detached(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [t.detach().requires_grad_(wanted) for t, wanted in zip(tensors, self._wants, strict=True)]

    def _compute(self, tensors: Sequence[torch.Tensor]) -> _Tree:
        args, kwargs = self._arguments.rebuild(tensors)
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                # As where it was called. Without autocast's cache, which would keep cast copies of every unit.
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            results = _Tree(self._forward(*args, **kwargs))
        for leaf in results.constants:
            if leaf is not _TENSOR and _hides_tensors(leaf):
                raise ValueError(
                    f"the unit {self.unit.name!r} returns a {type(leaf).__name__}, whose tensors cannot be seen. "
                    "Return tensors, tuples, lists or dicts, or register the class with torch.utils._pytree"
                )
        return results

    def _replay(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._random is None:
            return self._compute(inputs).tensors
        randomness = self._relay.randomness
        now = randomness.state()
        randomness.restore(self._random)
        try:
            return self._compute(inputs).tensors
        finally:
            randomness.restore(now)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, anchor: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        with _disable_current_modes():
            outputs = call.forward(tensors)
        ctx.mark_non_differentiable(*(t for t in outputs if not (t.is_floating_point() or t.is_complex())))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with _disable_current_modes():
            return None, None, *ctx.call.backward(gradients)


def refuse_mutable(unit: Unit, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Caches and the like: the second run in the backward would fill them twice."""
    for name, value in _named_arguments(forward, args, kwargs):
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) or not _holds_state(leaf):
                continue
            raise ValueError(
                f"the unit {unit.name!r} was given a {type(leaf).__name__} as {name!r}, which it would fill again when "
                "it runs again in the backward. Switch caching off in training (use_cache=False)"
            )


def _named_arguments(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    names = list(inspect.signature(forward).parameters)
    for i, value in enumerate(args):
        yield names[i] if i < len(names) else f"argument {i}", value
    yield from kwargs.items()


def _holds_state(value: Any) -> bool:
    kind = type(value)
    if kind.__module__ == "builtins" or isinstance(value, type) or callable(value):
        return False
    if any("Cache" in base.__name__ for base in kind.__mro__):
        return True
    return _hides_tensors(value)


def _hides_tensors(value: Any) -> bool:
    return any(isinstance(member, torch.Tensor) for member in getattr(value, "__dict__", {}).values())
