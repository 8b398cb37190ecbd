"""Units: parameters that travel together, and their layout in flat memory.

A unit is one or more modules and all tensors in them. The relay intercepts the forwards of these modules.
`unit_discovery.py` decides which modules become units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

GRADIENT = torch.float32  # the dtype in which gradients of micro-batches accumulate

GRAIN = 16  # elements: alignment of tensors in flat memories of gradients and optimizer state; one AVX-512 register

BLOCK = 256  # elements of a moment in eight bits that share a scale

SHORTEST_COMPACT = 2 * BLOCK  # elements of scratch memory in which a block can be updated

SMALL = 4096  # tensors with fewer elements have their moments in float32, whatever the format of the others

ALIGNMENT = 256  # bytes: alignment of tensors in a unit's flat memory; enough for any vector load


Forward = Callable[..., Any]  # the forward of a module

DtypeOf = Callable[[str, torch.Tensor], torch.dtype]  # from a tensor's name and the tensor to its dtype in transfers


def own_dtype(name: str, tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype


@dataclass(frozen=True)
class Place:
    """An attribute of a module that is a parameter or a buffer."""

    module: nn.Module
    attribute: str
    name: str  # in the model

    def current(self) -> torch.Tensor | None:
        if self.attribute in self.module._parameters:
            return self.module._parameters[self.attribute]
        return self.module._buffers.get(self.attribute)


@dataclass(eq=False)
class Item:
    """One tensor of a unit: a parameter or a buffer."""

    tensor: torch.Tensor
    places: tuple[Place, ...]  # several, if modules share it
    offset: int  # of its bytes in the unit's flat memory
    dtype: torch.dtype  # the dtype in transfers; also the tensor's own dtype once the server owns its memory

    @property
    def name(self) -> str:
        return self.places[0].name

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    @property
    def trains(self) -> bool:
        return self.tensor.requires_grad

    @functools.cached_property
    def is_buffer(self) -> bool:
        return not isinstance(self.tensor, nn.Parameter)

    @functools.cached_property
    def is_recurrent(self) -> bool:
        """Whether a module of a recurrent network has it, which refers to its weights in a second way."""
        return any(isinstance(place.module, nn.RNNBase) for place in self.places)

    @property
    def is_in_training(self) -> bool:
        """Whether a module that it belongs to is in training mode."""
        return any(place.module.training for place in self.places)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This tensor's part of a unit's flat memory."""
        part = flat[self.offset : self.offset + self.nbytes]
        return part.view(self.dtype).view(self.tensor.shape)


@dataclass(eq=False)
class Unit:
    """Tensors that travel together, and the modules whose forwards use them."""

    names: tuple[str, ...]  # of its modules
    modules: tuple[nn.Module, ...]
    items: tuple[Item, ...]
    nbytes: int = field(init=False)  # of its flat memory

    def __post_init__(self) -> None:
        self.nbytes = max((aligned(item.offset + item.nbytes) for item in self.items), default=0)

    @property
    def name(self) -> str:
        return self.names[0] if self.names else "residents"

    # Cached: planning reads these thousands of times. They cannot change: the engine refuses later freezing.

    @functools.cached_property
    def trained(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.trains)

    @functools.cached_property
    def trained_dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(item.dtype for item in self.trained)

    @functools.cached_property
    def trained_offsets(self) -> Mapping[Item, int]:
        """The first element of each trained tensor in flat memories of gradients and of optimizer state."""
        offsets, end = {}, 0
        for item in self.trained:
            offsets[item] = _begin_of(item, end)
            end = _end_of(item, offsets[item])
        return offsets

    @functools.cached_property
    def trained_elements(self) -> int:
        """The length, in elements, of flat memories of gradients and of optimizer state."""
        if not self.trained:
            return 0
        last = self.trained[-1]
        return _end_of(last, self.trained_offsets[last])

    @functools.cached_property
    def weight_itemsize(self) -> int:
        """Bytes of the widest trained weight."""
        return max((dtype.itemsize for dtype in self.trained_dtypes), default=0)

    @functools.cached_property
    def master_itemsize(self) -> int:
        """Bytes per element that are stored beside the trained weights for their float32 masters."""
        rest = map(master_dtype, self.trained_dtypes)
        return max((dtype.itemsize for dtype in rest if dtype is not None), default=0)

    def __repr__(self) -> str:
        return f"<Unit {' + '.join(self.names)}: {len(self.items)} tensors, {self.nbytes} bytes>"


def _begin_of(item: Item, end: int) -> int:
    """Where a tensor begins after `end`: large ones with a block, so that cuts between blocks are cuts of the unit."""
    grain = GRAIN if item.tensor.numel() < SMALL else BLOCK
    return -(-end // grain) * grain


def _end_of(item: Item, begin: int) -> int:
    grain = GRAIN if item.tensor.numel() < SMALL else BLOCK
    return begin + -(-item.tensor.numel() // grain) * grain


def gradient_bytes(unit: Unit) -> int:
    return unit.trained_elements * GRADIENT.itemsize


def gradient_views(unit: Unit, flat: torch.Tensor, dtype: torch.dtype = GRADIENT) -> dict[Item, torch.Tensor]:
    """Each trained tensor's part of a flat memory for the unit's gradients."""
    elements = flat[: unit.trained_elements * dtype.itemsize].view(dtype)
    return {
        item: elements[start : start + item.tensor.numel()].view(item.tensor.shape)
        for item, start in unit.trained_offsets.items()
    }


def landing_dtype(unit: Unit) -> torch.dtype:
    """The dtype in which the unit's gradients cross to the host: that of its weights if they agree, else float32."""
    return next(iter(unit.trained_dtypes)) if len(unit.trained_dtypes) == 1 else GRADIENT


def landing_bytes(unit: Unit) -> int:
    """Bytes of the unit's gradients in the dtype in which they cross."""
    return unit.trained_elements * landing_dtype(unit).itemsize


def narrow_bytes(unit: Unit) -> int:
    """Bytes of a copy of the unit's gradients in the dtype in which they cross; 0 if they accumulate in that dtype."""
    return 0 if landing_dtype(unit) == GRADIENT else landing_bytes(unit)


def master_dtype(weights: torch.dtype) -> torch.dtype | None:
    """The dtype of the master that is stored beside weights. For bf16 it is the low 16 bits of the float32 value."""
    return {torch.bfloat16: torch.int16, torch.float16: torch.float32}.get(weights)  # others are masters themselves


class Subgroup(NamedTuple):
    """A range of a unit's trained elements, which is updated as a whole."""

    unit: Unit
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def label_of(subgroups: Sequence[Subgroup]) -> str:
    """The names of the subgroups' units, for a label."""
    first, last = subgroups[0].unit.name, subgroups[-1].unit.name
    return first if first == last else f"{first} to {last}"


def cut_into_subgroups(unit: Unit, size: int, low: int = 0, high: int | None = None) -> list[Subgroup]:
    """Subgroups of the elements from `low` to `high`, of at most `size` elements each, a multiple of GRAIN."""
    stop = unit.trained_elements if high is None else high
    return [Subgroup(unit, start, min(start + size, stop)) for start in range(low, stop, size)]


def overlap(item: Item, begin: int, start: int, count: int) -> tuple[slice, slice] | None:
    """Intersects a tensor, whose first element is at `begin` in a flat memory, with the `count` elements of that memory
    from `start`. Returns the common elements as slices of the tensor and of that range; None if there are none."""
    low, high = max(start, begin), min(start + count, begin + item.tensor.numel())
    return (slice(low - begin, high - begin), slice(low - start, high - start)) if low < high else None


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
