"""The graph of a call's forward that is kept until its backward, so that nothing runs twice.

At the turn the backward follows at once, and a graph needs no care. Graphs of other calls *last* from one visit to
another. Meanwhile the unit's weights may be overwritten, and the stash may move what micro-batches hold.

Note [Saved weights]
Autograd saves weights in the graph. Where these do not stay in place, hooks on saved tensors replace each of them by
"these bytes of this unit", and the backward finds them wherever the unit is by then. Everything else that is saved is
kept as it is. With hooks, autograd does not compare versions, so they do. If anything else refers to the unit's memory
after the forward, such as a view of a weight that a custom autograd function has stored on its context, the graph is
not kept (`unit_tensors.py`, Note [Aliases]).
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn, Protocol

import torch

from ferryman.relay.tensor_identity import storages_of, version_of
from ferryman.relay.unit_tensors import UnitTensors

# What torch says where hooks on saved tensors are not allowed, as in transformations of torch.func.
_NO_HOOKS = "saved tensor"


class SavedTensors:
    """Hooks for the tensors that a call's graph saves. See Note [Saved weights].

    The hooks stay in the graph. They do not refer to the call, which refers to the graph: Python cannot collect a cycle
    through autograd's graph.
    """

    def __init__(self, unit: UnitTensors) -> None:
        self._unit = unit
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None  # while they are on; they refer to this
        self.storages: set[int] = set()  # of the tensors that are kept

    def __enter__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        assert hooks is not None
        hooks.__exit__(*error)

    def leaves_aliases(self) -> bool:
        """After the forward: whether anything else now refers to the unit's memory."""
        return self._unit.has_aliases()

    def _pack(self, tensor: torch.Tensor) -> _Weight | _Activation:
        unit = self._unit
        if tensor.layout is torch.strided and unit.moves and unit.within(tensor.data_ptr()):
            if tensor.is_conj() or tensor.is_neg():
                return _Activation.of(tensor.resolve_conj().resolve_neg())
            offset = tensor.data_ptr() - unit.flat.data_ptr()
            return _Weight(unit, offset, tensor.dtype, tensor.shape, tensor.stride())
        if tensor.layout is torch.strided:
            self.storages.update(storages_of([tensor]))
        return _Activation.of(tensor)


class _Weight(NamedTuple):
    """A weight of a unit, or a view of one."""

    unit: UnitTensors
    offset: int  # bytes
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def unpack(self) -> torch.Tensor:
        whole = torch.empty(0, dtype=self.dtype, device=self.unit.flat.device)
        storage, start = self.unit.flat.untyped_storage(), int(self.unit.flat.storage_offset())
        return whole.set_(storage, (start + self.offset) // self.dtype.itemsize, self.size, self.stride)


class _Activation(NamedTuple):
    tensor: torch.Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Activation:
        alias = tensor.detach()  # without the graph, which refers to this; it shares the version counter
        return cls(alias, version_of(alias))

    def unpack(self) -> torch.Tensor:
        now = version_of(self.tensor)
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {list(self.tensor.shape)} is at version {now}; expected version {self.version} "
                "instead"
            )
        return self.tensor


def _unpack(saved: _Weight | _Activation) -> torch.Tensor:
    return saved.unpack()


class Hold(Protocol):
    """Storages that the stash leaves on the device for as long as this object exists."""

    def is_edited(self) -> bool:
        """Whether any of them was edited in place since then."""


class KeptGraph(NamedTuple):
    """Inputs and outputs of a call's forward, with the graph between them."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    lasts: bool  # it is kept until the backward; otherwise only until the end of the visit
    seconds: float  # in which Python ran the forward; the device may have taken longer
    hold: Hold | None = None  # keeps on the device what the graph has saved


class DroppedError(RuntimeError):
    """A backward reaches the graph of a first run, whose saved tensors were dropped."""


def _refuse_backward(_: object) -> NoReturn:
    raise DroppedError(
        "a unit keeps tensors with their graph where the engine has not seen it in its trial run. Let the unit store "
        "them from the first step on, or return them"
    )


# Hooks for a graph that is not kept. The unit's code sees that there is one, as in plain PyTorch, but nothing is saved.
# `id` takes a tensor, returns no reference to it, and is faster than any function in Python.
DROPPING = torch.autograd.graph.saved_tensors_hooks(id, _refuse_backward)


def refuses_hooks(error: RuntimeError) -> bool:
    """Whether the code of a unit failed because there were hooks on saved tensors."""
    return _NO_HOOKS in str(error)
