"""Writes a checkpoint."""

from __future__ import annotations

import copy
import fnmatch
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ferryman
from ferryman.checkpoint import directory as directories
from ferryman.checkpoint import plain, tensor_file
from ferryman.checkpoint.contents import Contents, Objects, Stateful, random_states, split
from ferryman.checkpoint.manifest import FORMAT, crc_of
from ferryman.checkpoint.tensor_file import Sum
from ferryman.server.panel import Panel
from ferryman.units import Item

Tensors = list[tuple[str, torch.Tensor]]

# What checkpoints consist of.
_USUAL = ("ferryman/*", "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")

_SHARD = 5_000_000_000  # bytes of a file, at most; as transformers has it


def save_in(contents: Contents, directory: Path, objects: Objects, keep: int | None) -> Path:
    """As the directory, or in the series there; returns where."""
    if keep is None:
        save(contents, directory, objects)
        return directory
    if type(keep) is not int or keep < 1:
        raise ValueError(f"keep={keep!r}: a whole number of checkpoints is needed, at least 1")
    if directories.is_checkpoint(directory):
        raise ValueError(f"{directory} is a checkpoint itself; with keep={keep} give a directory that holds several")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; a series of checkpoints is a directory")
    path = directories.in_series(directory, contents.server.steps)
    save(contents, path, objects)
    directories.prune(directory, keep, path)
    return path


def save(contents: Contents, directory: Path, objects: Objects) -> None:
    """Writes all of it, or nothing."""
    directory = directory.resolve()  # a link stays one, and what it leads to is replaced
    directories.check_replaceable(directory)
    contents.check_whole()
    names = contents.names()
    weights, state = [(name, item.tensor) for item, name in names.items()], _state(contents, names)
    rest: dict[str, torch.Tensor] = {}
    with_state, files = split(objects)
    manifest = _describe(contents, names, with_state, rest)
    manifest["saved"] = max(time.time(), directories.last_saved(directory.parent) + 1e-3)
    tensor_file.check_dtypes((*weights, *rest.items()))
    needs = sum(tensor.nbytes for _, tensor in (*weights, *state, *rest.items()))
    with directories.replacing(directory, needs=needs) as partial:
        (partial / directories.MANIFEST.parent).mkdir()
        sums: dict[str, Sum] = {}
        stem = "ferryman/trained" if contents.is_adapted else "model"
        manifest["weights"] = _write_shards(partial, stem, weights, sums)
        manifest["state"] = _write_shards(partial, "ferryman/state", state, sums)
        manifest["rest"] = _write_shards(partial, "ferryman/rest", list(rest.items()), sums)
        for thing in files:
            thing.save_pretrained(partial)
        _save_configuration(contents, partial)
        for path in sorted(partial.rglob("*")):
            name = str(path.relative_to(partial))
            if path.is_file() and name not in sums:
                sums[name] = _sealed(path)
        manifest["files"] = {name: {"bytes": nbytes, "crc32": crc} for name, (nbytes, crc) in sums.items()}
        _write_json(partial / directories.MANIFEST, {"crc32": crc_of(manifest), "content": manifest})
        old = directories.current(directory)
        directories.carry_over(old, partial, _ours_in(old))


def _state(contents: Contents, names: dict[Item, str]) -> Tensors:
    """What the optimizer keeps, in place."""
    if contents.panel is None:
        return []
    return [
        (f"{names[item]}/{key}", tensor)
        for unit in contents.units
        for item in unit.trained
        for key, tensor in contents.store.state(unit).kept(item).items()
    ]


def _describe(
    contents: Contents, names: dict[Item, str], objects: dict[str, Stateful], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    server = contents.server
    found: dict[str, Any] = {
        "format": FORMAT,
        "ferryman": ferryman.__version__,
        "torch": str(torch.__version__),
        "model": type(contents.model).__name__,
        "step": server.steps,
        "loss_scale": server.scale.state(),
        "random": plain.encode(random_states(contents.device), "random", tensors),
        "objects": {},
    }
    for name, thing in objects.items():
        found["objects"][name] = plain.encode(thing.state_dict(), f"objects.{name}", tensors)
    if contents.panel is not None:
        found["optimizer"] = _describe_optimizer(contents, contents.panel, names, tensors)
    return found


def _describe_optimizer(
    contents: Contents, panel: Panel, names: dict[Item, str], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    steps, theirs = {}, {}
    for unit in contents.units:
        state = contents.store.state(unit)
        for item in unit.trained:
            steps[names[item]] = state.steps(item)
            if kept := state.kept_by_torch(item):
                theirs[names[item]] = plain.encode(kept, f"{names[item]}/torch", tensors)
    groups = []
    for number, group in enumerate(panel.optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        members = [name for item, name in names.items() if item.trains and panel.group(item) is group]
        groups.append(
            {"parameters": sorted(members), "options": plain.encode(options, f"optimizer.groups[{number}]", tensors)}
        )
    return {"kind": type(panel.optimizer).__name__, "groups": groups, "steps": steps, "torch": theirs}


def _write_shards(directory: Path, stem: str, tensors: Tensors, sums: dict[str, Sum]) -> list[str]:
    shards = tensor_file.shard(tensors, _SHARD)
    files = tensor_file.file_names(stem, len(shards))
    for file, some in zip(files, shards, strict=True):
        sums[file] = tensor_file.write(directory / file, some)
    if len(files) > 1 and stem == "model":  # for transformers; of the others the manifest knows
        _write_json(directory / f"{stem}.safetensors.index.json", tensor_file.index(files, shards))
    return files


def _save_configuration(contents: Contents, directory: Path) -> None:
    """What else `from_pretrained` needs."""
    model: Any = contents.model
    if contents.is_adapted:
        model.save_pretrained(directory)  # adapters, the PEFT way
        return
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if (dtype := getattr(model, "dtype", None)) is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(directory)


def _sealed(path: Path) -> Sum:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return tensor_file.check_sum(path)


def _write_json(path: Path, content: object) -> None:
    tensor_file.write_bytes(path, [memoryview(json.dumps(content, indent=1).encode())])


def _ours_in(directory: Path) -> Callable[[str], bool]:
    """Which files of a checkpoint it has itself, by name."""
    manifest = str(directories.MANIFEST)
    try:
        written = {*json.loads((directory / manifest).read_text())["content"]["files"], manifest}
        return lambda name: name in written
    except (OSError, ValueError, KeyError, TypeError):  # damaged, which is no reason not to save
        return lambda name: any(fnmatch.fnmatch(name, pattern) for pattern in _USUAL)
