"""Checks whether a checkpoint fits an engine: tensors, parameter groups and random states. Changes nothing."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from ferryman.checkpoint.contents import Contents, StateKey, parse_state_key, try_random_states
from ferryman.checkpoint.tensor_file import Entry
from ferryman.model.units import BLOCK, Item, master_dtype
from ferryman.server.moments import FORMATS, SCALE
from ferryman.server.optimizer_view import GroupKey, OptimizerView
from ferryman.server.state import SCALES

Refuse = Callable[[str], NoReturn]
Entries = Mapping[str, tuple[Path, Entry]]  # by the name of the tensor: its file, and its place in the file


def compare(mine: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]]) -> str:
    """Describes how the shapes of the model's tensors differ from those in the files. Empty if they are equal."""
    found = []
    for names, what in (
        (mine.keys() - theirs.keys(), "missing in the files"),
        (theirs.keys() - mine.keys(), "not in the model"),
    ):
        if names:
            found.append(f"{_some(names)} {what}")
    other = [name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]]
    found += [
        f"{name!r} has shape {mine[name]} in the model and {theirs[name]} in the files" for name in sorted(other)[:3]
    ]
    return "; ".join(found) + (f"; and {len(other) - 3} more shapes" if len(other) > 3 else "")


def check_dtype(name: str, item: Item, path: Path, entry: Entry, refuse: Refuse) -> None:
    """Checks a tensor's dtype. Floating-point tensors can be converted; all others must have the model's dtype."""
    both_float = item.dtype.is_floating_point and entry.dtype.is_floating_point
    if entry.dtype != item.dtype and not both_float:
        required = "of a floating-point dtype" if item.dtype.is_floating_point else str(item.dtype)
        refuse(f"{path}: {name!r} must be {required}, as in the model, but is {entry.dtype}")


def check_state(items: Mapping[str, Item], weights: Entries, state: Entries, refuse: Refuse) -> dict[str, set[str]]:
    """Checks the pieces of the optimizer's state: each must be flat and of the right dtype, and together they must
    cover the parameter exactly once. Returns the keys of the state of each parameter."""
    pieces: dict[tuple[str, str], list[tuple[StateKey, Path, Entry]]] = {}
    for text, (path, entry) in state.items():
        state_key = parse_state_key(text)
        if state_key is None or state_key.name not in items:
            refuse(f"{path}: {text!r} is not the name of a parameter and a key, such as 'weight/exp_avg@4096'")
        pieces.setdefault((state_key.name, state_key.key), []).append((state_key, path, entry))
    found: dict[str, set[str]] = {}
    for (name, key), some in pieces.items():
        first = some[0][2].dtype
        if key == "master":
            dtype = master_dtype(weights[name][1].dtype)
        elif key.endswith(SCALES):
            dtype = SCALE
        else:
            dtype = first if first in FORMATS.values() else torch.float32
        _check_pieces(name, key, some, dtype, weights[name][1].dtype, items[name].tensor.numel(), refuse)
        if dtype == torch.uint8 and _starts(pieces.get((name, key + SCALES), [])) != _starts(some):
            refuse(f"{some[0][1]}: {name}/{key} is in 8 bits, so {name}/{key}{SCALES} must have a scale for each block")
        if key.endswith(SCALES):
            codes = pieces.get((name, key.removesuffix(SCALES)), [])
            if not codes or codes[0][2].dtype != torch.uint8:
                refuse(f"{some[0][1]}: {name}/{key} must be absent, because {name}'s state is not in 8 bits")
            continue
        found.setdefault(name, set()).add(key)
    return found


def _starts(some: Iterable[tuple[StateKey, Path, Entry]]) -> set[int]:
    return {state_key.start for state_key, _, _ in some}


def _check_pieces(
    name: str,
    key: str,
    some: list[tuple[StateKey, Path, Entry]],
    dtype: torch.dtype | None,
    weights: torch.dtype,
    count: int,
    refuse: Refuse,
) -> None:
    """Checks that the pieces of one state have the dtype and cover `count` elements. Scales stand for a block each."""
    end, each = 0, BLOCK if key.endswith(SCALES) else 1
    for state_key, path, entry in sorted(some, key=lambda piece: piece[0].start):
        if dtype is None:
            refuse(f"{path}: '{state_key}' must be absent, because {name!r} is saved in {weights}")
        if entry.dtype != dtype or len(entry.shape) != 1:
            refuse(f"{path}: '{state_key}' must be flat, in {dtype}, but is {entry.dtype} of shape {entry.shape}")
        covered = min(entry.shape[0] * each, -(-(count - end) // each) * each if entry.shape[0] else 0)
        if state_key.start != end or covered < entry.shape[0] * each or (end % BLOCK and dtype == torch.uint8):
            refuse(
                f"{path}: '{state_key}' has {entry.shape[0]} elements from {state_key.start}, but the state of "
                f"{name!r} must cover its {count} elements once, and the next element is {end}"
            )
        end = min(end + entry.shape[0] * each, count)
    if end != count:
        refuse(f"{path}: {name}/{key} has {end} elements in total, but {name!r} has {count}")


def check_members(
    items: Mapping[str, Item], optimizer_view: OptimizerView, saved: Mapping[str, Any], path: Path
) -> None:
    """Compares the optimizer's class, its groups and their members with those that were saved."""
    kind, groups = optimizer_view.name, optimizer_view.groups
    if saved["kind"] != kind:
        raise ValueError(f"{path} has the state of {saved['kind']}, but the engine's optimizer is {kind}")
    if len(groups) != len(saved["groups"]):
        raise ValueError(f"{path} has {len(saved['groups'])} parameter groups, but the optimizer has {len(groups)}")
    for number, (group, told) in enumerate(zip(groups.values(), saved["groups"], strict=True)):
        members = {name for name, item in items.items() if item.trains and optimizer_view.group(item) is group}
        if differences := _first_difference(members, told["parameters"]):
            raise ValueError(f"parameter group {number} differs from that of {path}: {differences}")
        if len(told["parameters"]) != len(members):
            raise ValueError(f"{path}: optimizer.groups[{number}].parameters must have no name twice")
    trained = {name for name, item in items.items() if item.trains}
    if differences := _first_difference(trained, saved["steps"]):
        raise ValueError(f"optimizer.steps differs from that of {path}: {differences}")
    if strange := saved["torch"].keys() - trained:
        raise ValueError(f"{path}: optimizer.torch has {_some(strange)}, which is not trained")


def check_options(
    optimizer_view: OptimizerView, key: GroupKey, number: int, options: Mapping[str, Any], file: Path
) -> None:
    """Checks the saved options of a group. Options that the optimizer has too must be of the same kind."""
    place = f"{file}: optimizer.groups[{number}].options"
    mine, known = optimizer_view.groups[key], optimizer_view.defaults(key)
    for name, value in options.items():
        if mine.get(name) is None and name not in known:
            continue  # an entry of the user's own that is not set here
        if not _is_alike(mine.get(name), value):
            raise ValueError(f"{place}.{name} must be like the optimizer's {mine[name]!r}, but is {value!r}")
    try:
        optimizer_view.try_options(key, options)
    except (ArithmeticError, TypeError, LookupError, ValueError, RuntimeError) as error:
        raise ValueError(f"{place}: the optimizer cannot use them: {error!r}") from error


def _is_alike(mine: Any, theirs: Any) -> bool:
    """Whether two values of an option are of the same kind: numbers, switches (which may be unset), or sequences."""
    if _is_number(mine):
        return _is_number(theirs)
    if mine is None or isinstance(mine, bool):
        return theirs is None or isinstance(theirs, bool)
    if isinstance(mine, list | tuple):
        same = isinstance(theirs, list | tuple) and len(mine) == len(theirs)
        return same and all(map(_is_alike, mine, theirs))
    return isinstance(theirs, type(mine))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, numbers.Real) and not isinstance(value, bool)  # numpy's numbers, too


def check_own_state(
    name: str, forms: Sequence[Mapping[str, Any]], state: Mapping[str, Any], file: Path, *, may_grow: bool
) -> None:
    """Checks the state that an optimizer's own step keeps for a parameter.

    `forms`: the forms that it takes; in one of them it must be. `may_grow`: there may be others, with more entries.
    """
    found = [_misfit(f"{file}: optimizer.torch[{name!r}]", form, state, may_grow=may_grow) for form in forms]
    if found and all(found):
        raise ValueError(found[-1])


def _misfit(place: str, mine: Any, value: Any, *, may_grow: bool) -> str:
    """How a value differs from the form; empty if it does not."""
    if isinstance(mine, torch.Tensor):
        kind = "a floating-point tensor" if mine.is_floating_point() else f"a tensor of {mine.dtype}"
        found = f"is {value.dtype if isinstance(value, torch.Tensor) else repr(value)}"
        if isinstance(value, torch.Tensor) and (
            value.dtype == mine.dtype or (value.is_floating_point() and mine.is_floating_point())
        ):
            if value.shape == mine.shape or value.numel() == mine.numel() == 1:
                return ""
            found = f"has shape {tuple(value.shape)}"
        return f"{place} must be {kind} of shape {tuple(mine.shape)}, but {found}"
    if isinstance(mine, Mapping) and isinstance(value, Mapping):
        if mine.keys() - value.keys() or (value.keys() - mine.keys() and not may_grow):
            return f"{place} must have {sorted(map(str, mine))}, but has {sorted(map(str, value))}"
        inside = (_misfit(f"{place}.{key}", one, value[key], may_grow=may_grow) for key, one in mine.items())
        return next(filter(None, inside), "")
    if isinstance(mine, list | tuple) and isinstance(value, list | tuple):
        if len(mine) != len(value):
            return "" if may_grow else f"{place} must have {len(mine)} elements, but has {len(value)}"
        parts = zip(mine, value, strict=True)
        inside = (_misfit(f"{place}[{i}]", *both, may_grow=may_grow) for i, both in enumerate(parts))
        return next(filter(None, inside), "")
    if isinstance(value, torch.Tensor) or _is_alike(mine, value):
        return ""
    return f"{place} must be like {mine!r}, but is {value!r}"


def check_random(states: Mapping[str, Any], contents: Contents, file: Path) -> None:
    try:
        try_random_states(states, contents.device)
    except (ArithmeticError, AttributeError, TypeError, LookupError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{file}: random must be states of random generators, but the generators refuse them: {error!r}"
        ) from error


def _first_difference(mine: Collection[str], theirs: Collection[str]) -> str:
    mine, theirs = set(mine), set(theirs)
    if mine - theirs:
        return f"{_some(mine - theirs)} was not trained, or was in another group, when it was saved"
    return (
        f"{_some(theirs - mine)} was trained when it was saved, but is not now, or is in another group"
        if theirs - mine
        else ""
    )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return f"{ordered[0]!r}{f' and {len(ordered) - 1} more' if len(ordered) > 1 else ''}"
