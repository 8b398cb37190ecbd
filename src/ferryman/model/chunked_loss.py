"""Losses without logits: a model's head returns a placeholder for its logits, and computes their cross entropy itself.

In a step, the largest activation of many language models is their logits. With `chunked_loss=True` the model's own
code runs unchanged, but its head returns `DeferredLogits`: the hidden states that it was given, and a record of what
the code does with the logits. Reshaping and slicing of tokens apply to the hidden states; scaling and soft-capping are
recorded. When the code computes the cross entropy (in transformers' `loss_function`, or in a loss of the user's), the
head is called with the targets, as a unit with its weights on the device, and computes the loss in chunks
(`chunked_cross_entropy.py`). Any other use of the logits is an error that names it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional

from ferryman.model.chunked_cross_entropy import COLUMNS, Adjustment, chunked_cross_entropy
from ferryman.model.patching import ModelPatch
from ferryman.model.units import Forward, Unit

_OFF = "Use chunked_loss=False to train with whole logits"


def find_head(model: nn.Module) -> nn.Linear | None:
    """The module that computes the model's logits, if their cross entropy can be computed in chunks."""
    found = _output_embeddings(model)
    return found if isinstance(found, nn.Linear) and _is_plain(found) else None


def check_head(model: nn.Module) -> None:
    """Raises a ValueError if the loss cannot be computed in chunks."""
    if find_head(model) is not None:
        return
    found = _output_embeddings(model)
    if found is None:
        raise ValueError(
            "chunked_loss=True needs to know which module computes the logits: the model must have a method "
            f"get_output_embeddings() that returns it, as transformers' causal language models do. {_OFF}"
        )
    name = next((name for name, module in model.named_modules() if module is found), "")
    kind = type(found)
    raise ValueError(
        f"chunked_loss=True needs a head that is a torch.nn.Linear, and {name!r} is a {kind.__module__}."
        f"{kind.__qualname__}. With adapters, leave the head out of target_modules= and modules_to_save=. {_OFF}"
    )


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    find: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()


def _is_plain(head: nn.Linear) -> bool:
    """Whether the head computes what nn.Linear computes, and not what a subclass or an adapter makes of it."""
    return type(head).forward is nn.Linear.forward and "forward" not in head.__dict__


class ChunkedHead:
    """Makes a model's head compute cross entropies. `defers` tells whether it returns deferred logits now."""

    def __init__(self, model: nn.Module, units: Iterable[Unit], defers: Callable[[], bool]) -> None:
        check_head(model)
        head = find_head(model)
        assert head is not None
        self._head, self._defers = head, defers
        self._forward: Forward | None = None  # what the head's forward was before logits were deferred
        for unit in units:
            if head not in unit.modules and any(head in set(module.modules()) for module in unit.modules):
                raise ValueError(
                    f"chunked_loss=True needs the head as a unit of its own, and it is inside the unit {unit.name!r}: "
                    f"name smaller modules in units=, or leave it out. {_OFF}"
                )

    @property
    def _is_small(self) -> bool:
        return self._head.out_features <= COLUMNS  # a single chunk would be as large as the logits

    def add_loss(self, patch: ModelPatch) -> None:
        """Before units are intercepted: the forward of the head can compute losses, too."""
        if not self._is_small:
            patch.replace(self._head, functools.partial(_forward_or_loss, self._head, self._head.forward))

    def defer(self, patch: ModelPatch) -> None:
        """After units are intercepted: the head returns deferred logits."""
        if not self._is_small:
            self._forward = self._head.forward
            patch.replace(self._head, self._run)

    def _run(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert self._forward is not None
        if not self._defers():
            return self._forward(hidden, *args, **kwargs)
        if self._head._forward_hooks or self._head._backward_hooks or self._head._backward_pre_hooks:
            raise ValueError(f"chunked_loss=True: the head has a hook, which would see no logits. {_OFF}")
        return DeferredLogits(hidden, self._head.out_features, self._forward)


def _forward_or_loss(
    head: nn.Linear, forward: Forward, hidden: torch.Tensor, target: torch.Tensor | None = None, *settings: Any
) -> torch.Tensor:
    """The head's forward: logits, or with a target their cross entropy."""
    if target is None:
        return forward(hidden)  # type: ignore[no-any-return]
    return chunked_cross_entropy(hidden, head.weight, head.bias, target, *settings)


class DeferredLogits:
    """Stands for the logits of `hidden`, of which there are `width` for each token, before and after `adjustments`.

    `head`: called with hidden states, targets and settings, it computes the cross entropy.
    """

    def __init__(
        self, hidden: torch.Tensor, width: int, head: Forward, adjustments: tuple[Adjustment, ...] = ()
    ) -> None:
        self._hidden, self._width, self._head, self._adjustments = hidden, width, head, adjustments

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._width))

    @property
    def ndim(self) -> int:
        return self._hidden.ndim

    @property
    def dtype(self) -> torch.dtype:
        converted = [step.value for step in self._adjustments if step.name == "convert"]
        return converted[-1] if converted else self._hidden.dtype

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def requires_grad(self) -> bool:
        return torch.is_grad_enabled()

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self._hidden.ndim

    # Elementwise operations, which the head applies to each chunk.

    def _adjusted(self, name: str, value: Any = None) -> DeferredLogits:
        steps = (*self._adjustments, Adjustment(name, value))
        return DeferredLogits(self._hidden, self._width, self._head, steps)

    def float(self) -> DeferredLogits:
        return self._adjusted("convert", torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        dtype = kwargs.get("dtype", args[0] if args else None)
        if len(args) + len(kwargs) == 1 and isinstance(dtype, torch.dtype):
            return self._adjusted("convert", dtype)
        if len(args) == 1 and not kwargs and args[0] in (self.device, str(self.device)):
            return self
        raise _refusal("Tensor.to(...)")

    def tanh(self) -> DeferredLogits:
        return self._adjusted("tanh")

    def __mul__(self, factor: Any) -> DeferredLogits:
        return self._adjusted("multiply", self._number(factor, "multiplied by"))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> DeferredLogits:
        return self._adjusted("divide", self._number(divisor, "divided by"))

    def _number(self, value: Any, what: str) -> Any:
        if not isinstance(value, int | float):
            raise _refusal(f"logits {what} a {type(value).__name__}")
        return value

    # Operations on tokens, which apply to the hidden states.

    def _tokens(self, hidden: torch.Tensor) -> DeferredLogits:
        return DeferredLogits(hidden, self._width, self._head, self._adjustments)

    def contiguous(self) -> DeferredLogits:
        return self

    def view(self, *shape: Any) -> DeferredLogits:
        return self._tokens(self._hidden.reshape(self._hidden_shape(shape)))

    reshape = view

    def _hidden_shape(self, shape: Sequence[Any]) -> tuple[int, ...]:
        """The shape of the hidden states if this is that of the logits."""
        given = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else tuple(shape)
        if not given or given[-1] != self._width:
            raise _refusal(f"a view of the shape {given}")
        return (*given[:-1], self._hidden.shape[-1])

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> DeferredLogits:
        if end_dim % self.ndim == self.ndim - 1:
            raise _refusal(f"Tensor.flatten({start_dim}, {end_dim})")
        return self._tokens(self._hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> DeferredLogits:
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, slice | int) or part is Ellipsis for part in parts):
            raise _refusal("an index that is neither a number nor a slice")
        reaches_last = len(parts) >= self.ndim or Ellipsis in parts[:-1]
        if reaches_last and parts[-1] != slice(None):
            raise _refusal("an index that selects some of the vocabulary")
        return self._tokens(self._hidden[index])

    # The loss.

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy and args and isinstance(args[0], cls):
            return args[0]._cross_entropy(*args[1:], **kwargs)
        if func in _FUNCTIONS and not kwargs and isinstance(args[0], cls):
            return _FUNCTIONS[func](*args)
        raise _refusal(f"{getattr(func, '__module__', None) or 'torch'}.{getattr(func, '__name__', func)}")

    def _cross_entropy(
        self,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: Any = 0.0,
    ) -> torch.Tensor:
        if weight is not None or size_average is not None or reduce is not None:
            raise _refusal("cross_entropy(...) with weight=, size_average= or reduce=")
        if label_smoothing:
            raise _refusal(f"cross_entropy(..., label_smoothing={label_smoothing})")
        if self.ndim != 2 or target.shape != self.shape[:1] or target.is_floating_point():
            raise _refusal(
                f"cross_entropy of logits of the shape {tuple(self.shape)} and a target of the shape "
                f"{tuple(target.shape)} and {target.dtype}, where (tokens, vocabulary) and (tokens) with class indices "
                "are required,"
            )
        loss: torch.Tensor = self._head(self._hidden, target, self._adjustments, ignore_index, reduction)
        return loss

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.Tensor, name) and not name.startswith("__"):
            raise _refusal(f"Tensor.{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


# Functions of torch that are methods, too.
_FUNCTIONS: dict[Any, Callable[..., DeferredLogits]] = {
    torch.tanh: DeferredLogits.tanh,
    torch.mul: DeferredLogits.__mul__,
    torch.div: DeferredLogits.__truediv__,
}


def _refused_operator(name: str) -> Callable[..., NoReturn]:
    def refuse(self: DeferredLogits, *_: Any) -> NoReturn:
        raise _refusal(f"the operator {name}")

    return refuse


for _name in (
    "__add__", "__radd__", "__sub__", "__rsub__", "__pow__", "__matmul__", "__neg__", "__rtruediv__", "__iadd__",
    "__isub__", "__imul__", "__itruediv__", "__setitem__", "__lt__", "__gt__", "__le__", "__ge__",
):  # fmt: skip
    setattr(DeferredLogits, _name, _refused_operator(_name))


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"chunked_loss=True: the model or the loss uses {what} on the logits, which do not exist: their cross entropy "
        "is computed in chunks. Scaling by numbers, tanh, conversions and selecting tokens are possible before "
        f"torch.nn.functional.cross_entropy. {_OFF}"
    )
