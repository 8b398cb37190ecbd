"""Units: parameters that travel together.

A unit is one or more modules with all of their tensors. The relay intercepts the forwards of these modules, so a module
can be a unit if its parameters are used only inside its own forward. Units are:

1. *Blocks*: the children of the outermost lists of repeated modules (`ModuleList`, `Sequential`), one unit each.
2. Outside of blocks, modules that own large parameters themselves: embeddings, heads.
3. Units that share a parameter become one unit, with several modules.
4. A unit larger than the limit is cut into its children, down to leaf modules. Coarser is better: every boundary
   between units is a stash.
5. The rest is resident: it stays on the device.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

GRADIENT = torch.float32  # the dtype in which gradients of micro-batches accumulate

GRAIN = 16  # elements: alignment of tensors in flat memories of gradients and optimizer state; the widest register

ALIGNMENT = 256  # bytes: alignment of tensors in a unit's flat memory; enough for any vector load

# Outside blocks, a module with at least this share of the largest block's bytes is a unit; smaller ones are resident.
_LARGE = 0.1

_CONTAINERS = (nn.ModuleList, nn.Sequential)
# Modules that are never called themselves: the module above uses their members.
_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# Modules that use their children's parameters without calling them.
_WHOLE = (nn.MultiheadAttention, nn.RNNBase)


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
        return self.module._buffers[self.attribute]


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
        self.nbytes = max((_aligned(item.offset + item.nbytes) for item in self.items), default=0)

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
        return sum(-(-item.tensor.numel() // GRAIN) * GRAIN for item in self.trained)

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
        offsets[item] = end
        end += -(-item.tensor.numel() // GRAIN) * GRAIN
    return offsets


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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class _Candidate:
    """A module that might be a unit. Properties that are needed for each of many limits are cached."""

    name: str
    module: nn.Module
    dtype_of: DtypeOf

    def tensors(self) -> Iterator[torch.Tensor]:
        for _, tensor in _tensors(self.name, self.module):
            yield tensor

    @functools.cached_property
    def nbytes(self) -> int:
        found = {id(tensor): (place.name, tensor) for place, tensor in _tensors(self.name, self.module)}
        return sum(self._nbytes_of(name, tensor) for name, tensor in found.values())

    def own_nbytes(self) -> int:
        """Bytes of the parameters that the module owns itself."""
        return sum(self._nbytes_of(name, p) for name, p in self.module.named_parameters(self.name, recurse=False))

    @functools.cached_property
    def children(self) -> tuple[_Candidate, ...]:
        named = self.module.named_children()
        return tuple(_Candidate(f"{self.name}.{name}" if self.name else name, c, self.dtype_of) for name, c in named)

    def _nbytes_of(self, name: str, tensor: torch.Tensor) -> int:
        return tensor.numel() * self.dtype_of(name, tensor).itemsize


def _tensors(prefix: str, module: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    for path, owner in module.named_modules(prefix=prefix, remove_duplicate=False):
        for attribute, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                yield Place(owner, attribute, f"{path}.{attribute}" if path else attribute), tensor


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _blocks(top: _Candidate) -> Iterator[_Candidate]:
    """The children of the outermost lists in which a class of modules repeats."""
    if isinstance(top.module, _CONTAINERS):
        members = [member for member in top.children if _has_parameters(member.module)]
        kinds = [type(member.module) for member in members]
        if len(kinds) > len(set(kinds)):
            yield from members
            return
    for child in top.children:
        yield from _blocks(child)


def _large_owners(top: _Candidate, taken: set[nn.Module], least: int) -> Iterator[_Candidate]:
    """Modules outside of those already `taken` that own large parameters themselves."""
    for child in top.children:
        if child.module in taken:
            continue
        own = child.own_nbytes()
        called = not isinstance(child.module, _UNCALLED)
        inside = any(module in taken for module in child.module.modules())
        if called and not inside and (own >= least or (isinstance(child.module, _WHOLE) and child.nbytes >= least)):
            yield child
        else:
            yield from _large_owners(child, taken, least)


def _cut(candidate: _Candidate, limit: int | None) -> Iterator[_Candidate]:
    """The candidate or, if it exceeds the limit, its children, recursively."""
    if not _has_parameters(candidate.module):
        return
    # Parameters that a module owns itself would be resident if it were cut, which would gain nothing.
    own = candidate.own_nbytes()
    whole = isinstance(candidate.module, _WHOLE) or not candidate.children or own > _LARGE * candidate.nbytes
    fits = limit is None or candidate.nbytes <= limit
    if (fits or whole) and not isinstance(candidate.module, _UNCALLED):
        yield candidate
        return
    for child in candidate.children:
        yield from _cut(child, limit)


def _named(model: nn.Module, patterns: Sequence[str], dtype_of: DtypeOf) -> list[_Candidate]:
    """The outermost of the modules that the user named."""
    found: dict[nn.Module, str] = {}
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise ValueError(f"units=[...]: no module of the model matches {pattern!r}{hint(pattern, names)}")
        found.update((model.get_submodule(name), name) for name in matches)
    outermost = [
        _Candidate(name, module, dtype_of)
        for module, name in found.items()
        if not any(module is not other and module in set(other.modules()) for other in found)
    ]
    return [candidate for candidate in outermost if _has_parameters(candidate.module)]


def _merge(candidates: Sequence[_Candidate]) -> list[list[_Candidate]]:
    """Groups candidates that share a parameter."""
    groups: list[list[_Candidate]] = []
    group_of: dict[int, list[_Candidate]] = {}  # by parameter
    for candidate in candidates:
        shared = {id(g): g for p in candidate.module.parameters() if (g := group_of.get(id(p))) is not None}
        group = [member for g in shared.values() for member in g]
        group.append(candidate)
        if shared:
            groups = [g for g in groups if id(g) not in shared]
        groups.append(group)
        group_of.update((id(p), group) for member in group for p in member.module.parameters())
    # Sort groups by the model's order of their first members.
    order = {id(candidate): i for i, candidate in enumerate(candidates)}
    return sorted(groups, key=lambda group: min(order[id(member)] for member in group))


def _lay_out(
    tensors: Iterable[torch.Tensor], places: dict[int, tuple[Place, ...]], dtype_of: DtypeOf
) -> tuple[Item, ...]:
    """Assigns each distinct tensor an offset in a flat memory."""
    items: list[Item] = []
    offset = 0
    for tensor in {id(t): t for t in tensors}.values():
        where = places[id(tensor)]
        items.append(Item(tensor, where, offset, dtype_of(where[0].name, tensor)))
        offset = _aligned(offset + items[-1].nbytes)
    return tuple(items)


def _places(model: nn.Module) -> dict[int, tuple[Place, ...]]:
    """All places of each tensor, also those outside of its unit, which must not keep the host's tensor."""
    found: dict[int, dict[tuple[int, str], Place]] = {}
    for place, tensor in _tensors("", model):
        found.setdefault(id(tensor), {}).setdefault((id(place.module), place.attribute), place)
    return {key: tuple(places.values()) for key, places in found.items()}


def _resident(places: dict[int, tuple[Place, ...]], patterns: Sequence[str]) -> set[int]:
    """The tensors that the user has named as resident."""
    names = {place.name: key for key, places_of in places.items() for place in places_of}
    wanted: set[int] = set()
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise ValueError(
                f"resident=[...]: no parameter or buffer of the model matches {pattern!r}{hint(pattern, names)}"
            )
        wanted.update(names[name] for name in matches)
    return wanted


def hint(pattern: str, names: Iterable[str]) -> str:
    """The end of an error message: the closest existing name."""
    known = list(names)
    near = difflib.get_close_matches(pattern, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known[:8])}, ..."


def find_units(
    model: nn.Module,
    *,
    limit: int | None = None,
    units: Sequence[str] | None = None,
    resident: Sequence[str] = (),
    dtype_of: DtypeOf = own_dtype,
) -> tuple[tuple[Unit, ...], Unit]:
    """The units in the model's order, and the residents, which have no module to intercept.

    `limit`: blocks of more bytes are cut. `units`: names or patterns of modules that become units instead. `resident`:
    names or patterns of parameters that stay on the device, whichever module they are in.
    """
    (found,) = find_cuts(model, [limit], units=units, resident=resident, dtype_of=dtype_of).values()
    return found


def find_cuts(
    model: nn.Module,
    limits: Sequence[int | None],
    *,
    units: Sequence[str] | None = None,
    resident: Sequence[str] = (),
    dtype_of: DtypeOf = own_dtype,
) -> dict[int | None, tuple[tuple[Unit, ...], Unit]]:
    """The units and residents for each limit. If several limits give the same units, only the first is included."""
    whole = _uncut(model, units, dtype_of)
    position = {module: i for i, (_, module) in enumerate(model.named_modules())}
    places = _places(model)
    staying = _resident(places, resident)
    cuts: dict[tuple[nn.Module, ...], tuple[int | None, list[_Candidate]]] = {}
    for limit in limits:
        parts = sorted((part for c in whole for part in _cut(c, limit)), key=lambda c: position[c.module])
        distinct = {part.module: part for part in parts}
        cuts.setdefault(tuple(distinct), (limit, list(distinct.values())))
    if () in cuts:
        raise ValueError(f"units={list(units or ())}: these modules have no parameters")
    return {limit: _made_of(model, parts, places, staying, dtype_of) for limit, parts in cuts.values()}


def _uncut(model: nn.Module, units: Sequence[str] | None, dtype_of: DtypeOf) -> list[_Candidate]:
    """The modules that are units if there is no limit."""
    if units is not None:
        return _named(model, units, dtype_of)
    top = _Candidate("", model, dtype_of)
    blocks = list(_blocks(top))
    if not blocks:
        reason = "no ModuleList or Sequential has several children of one kind"
        raise ValueError(f"no repeated blocks were found in the model: {reason}. {_advice(top)}")
    least = int(_LARGE * max(block.nbytes for block in blocks))
    inside = {module for block in blocks for module in block.module.modules()}
    return [*blocks, *_large_owners(top, inside, least)]


def _advice(top: _Candidate) -> str:
    """Advice that names the outermost modules that could be units, if there are several."""
    inside = [top]
    while len(inside) == 1 and (deeper := [c for c in inside[0].children if _has_parameters(c.module)]):
        inside = deeper
    if inside == [top]:
        return "It is a single module without children, and cannot be divided into units"
    return f"Name the modules that should be units, for example units={[c.name for c in inside[:4]]}"


def _made_of(
    model: nn.Module,
    candidates: Sequence[_Candidate],
    places: dict[int, tuple[Place, ...]],
    staying: set[int],
    dtype_of: DtypeOf,
) -> tuple[tuple[Unit, ...], Unit]:
    """The units of these modules, and the residents."""
    found: list[Unit] = []
    travelling: set[int] = set()
    groups = _merge(candidates)
    # A buffer that several units share stays on the device. (Those that share a parameter have become one unit.)
    owners = Counter(key for group in groups for key in {id(tensor) for c in group for tensor in c.tensors()})
    staying = staying | {key for key, count in owners.items() if count > 1}
    for group in groups:
        tensors = (tensor for candidate in group for tensor in candidate.tensors() if id(tensor) not in staying)
        items = _lay_out(tensors, places, dtype_of)
        travelling.update(id(item.tensor) for item in items)
        found.append(Unit(tuple(c.name for c in group), tuple(c.module for c in group), items))
    rest = (tensor for _, tensor in _tensors("", model) if id(tensor) not in travelling)
    return tuple(found), Unit((), (), _lay_out(rest, places, dtype_of))


def units_of_block(
    model: nn.Module, block: nn.Module, limit: int | None, dtype_of: DtypeOf = own_dtype
) -> tuple[Unit, ...]:
    """The units of a block that was inserted into the model later."""
    name = next(name for name, module in model.named_modules() if module is block)
    places = _places(model)
    whole = _Candidate(name, block, dtype_of)
    parts = list(_cut(whole, limit))
    if {id(t) for part in parts for t in part.tensors()} != {id(t) for t in whole.tensors()}:
        parts = [whole]  # cutting it would add a resident, and the residents cannot change any more
    return tuple(Unit((part.name,), (part.module,), _lay_out(part.tensors(), places, dtype_of)) for part in parts)


def rename(model: nn.Module, units: Iterable[Unit]) -> None:
    """Gives units and their tensors the names that they have in the model now."""
    names = {module: name for name, module in model.named_modules()}
    places = _places(model)
    for unit in units:
        unit.names = tuple(names[module] for module in unit.modules)
        for item in unit.items:
            item.places = places[id(item.tensor)]


def block_lists(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost lists of repeated modules, by name."""
    parents = [block.name.rpartition(".")[0] for block in _blocks(_Candidate("", model, own_dtype))]
    return {name: model.get_submodule(name) for name in dict.fromkeys(parents)}


def module_sizes(model: nn.Module, dtype_of: DtypeOf = own_dtype) -> list[int]:
    """The sizes of all modules with parameters, the largest first: the limits that make a difference."""
    modules = (_Candidate(name, module, dtype_of) for name, module in model.named_modules())
    return sorted({candidate.nbytes for candidate in modules if _has_parameters(candidate.module)}, reverse=True)
