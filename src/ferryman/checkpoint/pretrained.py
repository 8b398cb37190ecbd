"""Loads pretrained weights from a transformers directory into an engine's model.

Files may use other names than the model, or several tensors where it has one (the experts of a mixture). transformers
knows these conversions for its models; this module uses them, and converts one group of tensors at a time.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ferryman.checkpoint import schema, tensor_file
from ferryman.checkpoint.compatibility import compare
from ferryman.checkpoint.contents import Contents
from ferryman.checkpoint.missing import fill_missing
from ferryman.checkpoint.stream import DamagedError
from ferryman.checkpoint.tensor_file import Entry
from ferryman.model.units import Item
from ferryman.runtime import host_memory as memory

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass
class _Group:
    """Tensors in files that are converted into one or more tensors of the model."""

    converter: Any = None  # a transformers WeightConverter; None: one tensor that needs no conversion
    sources: list[tuple[str, str, Path, Entry]] = field(default_factory=list)  # name, pattern, file, entry


class Weights:
    """Weights in files. The constructor checks that they fit the engine's model, before anything is changed."""

    replaces = ("weights",)

    def __init__(self, contents: Contents, directory: Path) -> None:
        entries = _entries(directory)
        self._contents = contents
        self._items = _items_by_name(contents)
        self._groups = _groups(contents.model, entries, set(self._items))
        _check(contents, directory, self._items, self._groups)

    def load(self) -> None:
        units = self._contents.unit_of()

        def take(name: str, values: torch.Tensor) -> None:
            item = self._items[name]
            self._contents.store.take(units[item], item, values.contiguous())

        for name, group in self._groups.items():
            if group.converter is None:
                ((_, _, path, entry),) = group.sources
                take(name, tensor_file.read_tensor(path, entry))
                continue
            for source, pattern, path, entry in group.sources:
                group.converter.add_tensor(name, source, pattern, tensor_file.read_tensor(path, entry))
            model: Any = self._contents.model
            for target, made in group.converter.convert(name, model=model, config=model.config).items():
                take(target, made[0] if isinstance(made, list) else made)
            group.converter = None  # frees the tensors that it has collected
        fill_missing(self._contents)
        memory.trim()  # returns the temporary buffers to the system


def has_weights(directory: Path) -> bool:
    """Whether the directory has safetensors files, or an index of them (loading reports missing ones)."""
    return (directory / _INDEX).is_file() or any(directory.glob("*.safetensors"))


def _entries(directory: Path) -> dict[str, tuple[Path, Entry]]:
    """The tensors in the files. The index decides which one counts, if several files have a tensor of the same name."""
    files, index = _files(directory)
    found: dict[str, tuple[Path, Entry]] = {}
    for path in files:
        for name, entry in tensor_file.read_header(path).items():
            file = str(path.relative_to(directory))
            if index.get(name, file) == file:
                if name in found:
                    raise ValueError(f"{path} has {name!r}, which is in {found[name][0]} as well, but not in {_INDEX}")
                found[name] = path, entry
    return found


def _files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The files with weights, and the index that says which tensor is in which; empty if there is none."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give one with safetensors files, as save_pretrained writes")
    if (directory / _INDEX).is_file():
        index: dict[str, str] = schema.read(directory / _INDEX, schema.INDEX)["weight_map"]
        names = sorted(set(index.values()))
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise DamagedError(f"{directory / missing[0]} is missing; it is listed in {_INDEX}")
        return [directory / name for name in names], index
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE], {}
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found, {}
    others = sorted(path.name for path in (*directory.glob("*.bin"), *directory.glob("*.pt")))
    told = f"; {others[0]} is a pickle, which ferryman does not read" if others else ""
    raise ValueError(f"{directory} has neither {_SINGLE} nor {_INDEX}{told}")


def _items_by_name(contents: Contents) -> dict[str, Item]:
    """The tensors of the state_dict, under all of their names."""
    by_tensor = {id(item.tensor): item for unit in contents.units for item in unit.items}
    lasting = contents.model.state_dict(keep_vars=True)
    return {name: by_tensor[id(tensor)] for name, tensor in lasting.items() if id(tensor) in by_tensor}


def _groups(model: nn.Module, entries: dict[str, tuple[Path, Entry]], mine: set[str]) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    naming = _Naming(model, mine)
    for name in naming.ordered(entries):
        target, pattern, converter = naming.target(name)
        group = groups.setdefault(target, _Group(converter))
        group.sources.append((name, pattern, *entries[name]))
    return groups


class _Naming:
    """Maps names in files to names in the model."""

    def __init__(self, model: Any, mine: set[str]) -> None:
        self._mine = mine
        self._prefix = getattr(model, "base_model_prefix", "")
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        self._shapes = model.state_dict()
        if hasattr(model, "config") and hasattr(model, "base_model_prefix"):
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter

            for one in get_model_conversion_mapping(model):
                (self._converters if isinstance(one, WeightConverter) else self._renamings).append(one)
        self._by_pattern = {pattern: one for one in self._converters for pattern in one.source_patterns}

    def ordered(self, names: Any) -> list[str]:
        """Sorts names by the numbers in them, since converters stack experts in this order."""
        if not self._converters:
            return list(names)
        from transformers.core_model_loading import dot_natural_key

        return sorted(names, key=dot_natural_key)

    def target(self, name: str) -> tuple[str, str, Any]:
        """The name in the model, the pattern that matched, and the converter, if one is needed."""
        if name in self._mine or not self._prefix:
            return name, name, None
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._shapes)
        if pattern is None:
            return target, name, None
        return target, pattern, copy.deepcopy(self._by_pattern[pattern])


def _check(contents: Contents, directory: Path, items: dict[str, Item], groups: dict[str, _Group]) -> None:
    model: Any = contents.model
    wanted = contents.names()
    named = {name: wanted.get(item, name) for name, item in items.items()}  # one name for each shared tensor
    plain = {name: group.sources[0][3].shape for name, group in groups.items() if group.converter is None}
    there = {named.get(name, name): shape for name, shape in plain.items()}
    mine = {name: tuple(item.tensor.shape) for item, name in wanted.items()}
    for name, group in groups.items():
        if group.converter is not None and name in items:  # the shape is known only after conversion
            for target in _targets(group, name):
                there[named.get(target, target)] = mine.get(named.get(target, target), ())
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    for name in [name for name in there if name not in mine]:
        if any(re.search(pattern, name) for pattern in ignored):
            del there[name]
            groups.pop(name, None)
    if differences := compare(mine, there):
        raise ValueError(f"{directory} does not fit this model (a {type(model).__name__}): {differences}")


def _targets(group: _Group, first: str) -> list[str]:
    patterns = group.converter.target_patterns
    return [first.replace(patterns[0], pattern) for pattern in patterns]
