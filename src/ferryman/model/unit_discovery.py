"""Which modules of a model become units.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ferryman.model.units import DtypeOf, Item, Place, Unit, aligned, own_dtype

# Outside blocks, a module with at least this share of the largest block's bytes is a unit; smaller ones are resident.
_LARGE = 0.1

_CONTAINERS = (nn.ModuleList, nn.Sequential)
# Modules that are never called themselves: the module above uses their members.
_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# Modules that use their children's parameters without calling them.
_WHOLE = (nn.MultiheadAttention, nn.RNNBase)


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
    # If a module is cut, the parameters that it owns itself become resident. If these are large, cutting gains nothing.
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
        offset = aligned(offset + items[-1].nbytes)
    return tuple(items)


def _places(model: nn.Module) -> dict[int, tuple[Place, ...]]:
    """All places of each tensor, by id. Places outside its unit count too: they must not keep the host's tensor."""
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
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}" if known else ""


def find_units(
    model: nn.Module,
    *,
    limit: int | None = None,
    units: Sequence[str] | None = None,
    resident: Sequence[str] = (),
    dtype_of: DtypeOf = own_dtype,
) -> tuple[tuple[Unit, ...], Unit]:
    """The units in the model's order, and the residents, which have no module to intercept.

    `limit`: larger blocks, in bytes, are cut. `units`: names or patterns of modules that become units instead of those
    that are found. `resident`: names or patterns of parameters that stay on the device, whichever module they are in.
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
    traveling: set[int] = set()
    groups = _merge(candidates)
    # A buffer that several units share stays on the device. (Those that share a parameter have become one unit.)
    owners = Counter(key for group in groups for key in {id(tensor) for c in group for tensor in c.tensors()})
    staying = staying | {key for key, count in owners.items() if count > 1}
    for group in groups:
        tensors = (tensor for candidate in group for tensor in candidate.tensors() if id(tensor) not in staying)
        items = _lay_out(tensors, places, dtype_of)
        traveling.update(id(item.tensor) for item in items)
        found.append(Unit(tuple(c.name for c in group), tuple(c.module for c in group), items))
    rest = (tensor for _, tensor in _tensors("", model) if id(tensor) not in traveling)
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
        parts = [whole]  # cutting it would add a resident, and residents cannot be added later
    return tuple(Unit((part.name,), (part.module,), _lay_out(part.tensors(), places, dtype_of)) for part in parts)


def rename(model: nn.Module, units: Iterable[Unit]) -> None:
    """Renames units and their tensors after modules have moved within the model."""
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
    """The sizes of all modules with parameters, largest first. Limits between two of them give the same units."""
    modules = (_Candidate(name, module, dtype_of) for name, module in model.named_modules())
    return sorted({candidate.nbytes for candidate in modules if _has_parameters(candidate.module)}, reverse=True)
