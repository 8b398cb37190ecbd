"""Units: parameters that travel together, and their layout in flat memory.

A unit is one or more modules and all tensors in them. Its modules' forwards are where the relay takes over.
`unit_discovery.py` decides which modules become units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

GRADIENT = torch.float32  # the dtype in which gradients of micro-batches accumulate

GRAIN = 16  # elements: alignment of tensors in flat memories of gradients and optimizer state; the widest register

BLOCK = 256  # elements of a moment in eight bits that share a scale

SHORTEST_COMPACT = 2 * BLOCK  # elements of scratch memory in which a block can be updated

SMALL = 4096  # tensors with fewer elements have their moments in float32, whatever the format of the others

ALIGNMENT = 256  # bytes: alignment of tensors in a unit's flat memory; enough for any vector load


DtypeOf = Callable[[str, torch.Tensor], torch.dtype]  # from a tensor's name and the tensor to its dtype in transfers


def own_dtype(name: str, tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype


@dataclass(frozen=True)
class Place:
    """An attribute of a module that is a parameter or a buffer."""

    module: nn.Module
    attribute: str
    name: str  # in the model

    def bind(self, tensor: torch.Tensor) -> None:
        # Directly into the module's own dictionaries: setattr takes several times as long and refuses plain tensors.
        parameters = self.module._parameters
        if self.attribute in parameters:
            parameters[self.attribute] = tensor  # type: ignore[assignment]
        else:
            self.module._buffers[self.attribute] = tensor

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
    dtype: torch.dtype  # the dtype in transfers; the tensor's own, once the server owns its memory

    @property
    def name(self) -> str:
        return self.places[0].name

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    @property
    def trains(self) -> bool:
        return self.tensor.requires_grad

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

    # Cached: plans read these thousands of times, and the engine refuses tensors that are frozen later.

    @functools.cached_property
    def trained(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.trains)

    @functools.cached_property
    def trained_dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(item.dtype for item in self.trained)

    @functools.cached_property
    def trained_elements(self) -> int:
        """The length of flat memories of gradients and of optimizer state."""
        end = 0
        for item in self.trained:
            end = _end_of(item, _begin_of(item, end))
        return end

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


def trained_offsets(unit: Unit) -> dict[Item, int]:
    """The first element of each trained tensor in flat memories of gradients and of optimizer state."""
    offsets, end = {}, 0
    for item in unit.trained:
        offsets[item] = _begin_of(item, end)
        end = _end_of(item, offsets[item])
    return offsets


def _begin_of(item: Item, end: int) -> int:
    """Where a tensor begins after `end`: large ones with a block, so that cuts between blocks are cuts of the unit."""
    grain = GRAIN if item.tensor.numel() < SMALL else BLOCK
    return -(-end // grain) * grain


def _end_of(item: Item, begin: int) -> int:
    grain = GRAIN if item.tensor.numel() < SMALL else BLOCK
    return begin + -(-item.tensor.numel() // grain) * grain


def trained_elements(unit: Unit) -> int:
    """The length, in elements, of flat memories of gradients and of optimizer state."""
    return unit.trained_elements


def gradient_bytes(unit: Unit) -> int:
    return trained_elements(unit) * GRADIENT.itemsize


def gradient_views(unit: Unit, flat: torch.Tensor, dtype: torch.dtype = GRADIENT) -> dict[Item, torch.Tensor]:
    """Each trained tensor's part of a flat memory for the unit's gradients."""
    elements = flat[: trained_elements(unit) * dtype.itemsize].view(dtype)
    return {
        item: elements[start : start + item.tensor.numel()].view(item.tensor.shape)
        for item, start in trained_offsets(unit).items()
    }


def landing_dtype(unit: Unit) -> torch.dtype:
    """The dtype in which the unit's gradients cross to the host: that of its weights, if all have the same."""
    return next(iter(unit.trained_dtypes)) if len(unit.trained_dtypes) == 1 else GRADIENT


def landing_bytes(unit: Unit) -> int:
    """Bytes of the unit's gradients in the dtype in which they cross."""
    return trained_elements(unit) * landing_dtype(unit).itemsize


def narrow_bytes(unit: Unit) -> int:
    """Bytes of the unit's gradients in the dtype in which they cross, if it is not that of accumulation; else 0."""
    return 0 if landing_dtype(unit) == GRADIENT else landing_bytes(unit)


def master_dtype(weights: torch.dtype) -> torch.dtype | None:
    """The dtype of what is stored beside weights: the low 16 bits of float32, float32 itself, or nothing."""
    return {torch.float32: None, torch.bfloat16: torch.int16, torch.float16: torch.float32}[weights]


def weight_itemsize(unit: Unit) -> int:
    return unit.weight_itemsize


def master_itemsize(unit: Unit) -> int:
    return unit.master_itemsize


class Subgroup(NamedTuple):
    """A range of a unit's trained elements, which is updated as a whole."""

    unit: Unit
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def cut_into_subgroups(unit: Unit, size: int, low: int = 0, high: int | None = None) -> list[Subgroup]:
    """Subgroups of the elements from `low` to `high`, of at most `size` elements each, a multiple of GRAIN."""
    stop = trained_elements(unit) if high is None else high
    return [Subgroup(unit, start, min(start + size, stop)) for start in range(low, stop, size)]


def overlap(item: Item, begin: int, start: int, count: int) -> tuple[slice, slice] | None:
    """The elements that a tensor, which begins at element `begin` of a flat memory, shares with the `count` elements of
    that memory from `start` on: as slices of the tensor and of that range. None if there are none."""
    low, high = max(start, begin), min(start + count, begin + item.tensor.numel())
    return (slice(low - begin, high - begin), slice(low - start, high - start)) if low < high else None


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
