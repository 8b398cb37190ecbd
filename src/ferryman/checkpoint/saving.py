"""Saves a checkpoint."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import ferryman
from ferryman.checkpoint import directory as directories
from ferryman.checkpoint import encoding, tensor_file
from ferryman.checkpoint.contents import Contents, Files, Objects, Stateful, StateKey, random_states, split_objects
from ferryman.checkpoint.manifest import FORMAT, crc_of, read_manifest
from ferryman.checkpoint.tensor_file import FileChecksum
from ferryman.model.units import Item
from ferryman.server.optimizer_view import OptimizerView

Tensors = list[tuple[str, torch.Tensor]]

# Files of a checkpoint whose manifest is damaged.
_CHECKPOINT_FILES = ("ferryman/*", "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")

_MAX_SHARD_BYTES = 5_000_000_000  # as in transformers
_MIN_SHARD_BYTES = 64 << 20  # with several ranks, weights are cut into shards so that each rank writes some


def save_in(contents: Contents, directory: Path, objects: Objects, keep: int | None) -> Path:
    """Saves to the directory itself, or with `keep` to a series in it; returns the path of the checkpoint."""
    if keep is None:
        save(contents, directory, objects)
        return directory
    if type(keep) is not int or keep < 1:
        raise ValueError(f"keep={keep!r}: must be an integer of at least 1, the number of checkpoints to keep")
    if directories.is_checkpoint(directory):
        raise ValueError(f"{directory} is itself a checkpoint; with keep={keep} give a directory for several of them")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; a series of checkpoints is a directory")
    path = directories.in_series(directory, contents.server.steps)
    save(contents, path, objects)
    if contents.ranks.rank == 0:
        directories.prune(directory, keep, path)
    return path


def save(contents: Contents, directory: Path, objects: Objects) -> None:
    """Saves a checkpoint, completely or not at all. Each rank writes a part, and the first rank puts it in place."""
    directory = directory.resolve()  # replaces the target of a symbolic link, not the link
    ranks, doing = contents.ranks, f"saving to {directory}"
    parts: list[_RankPart] = []

    def needed_bytes() -> int:
        directories.check_replaceable(directory)
        contents.check_whole()
        parts.append(_RankPart(contents, objects))
        return parts[0].nbytes

    needs = sum(ranks.run_on_all(doing, needed_bytes))
    with contextlib.ExitStack() as stack:

        def begin() -> str | None:
            if ranks.rank > 0:
                return None
            partial = stack.enter_context(directories.replacing(directory, needs=needs))
            (partial / directories.MANIFEST.parent).mkdir()
            return str(partial)

        partial = Path(ranks.run_on_all(doing, begin)[0])
        written = ranks.run_on_all(doing, lambda: parts[0].write(partial))

        def seal() -> None:
            if ranks.rank == 0:
                _seal(contents, directory, partial, parts[0].files, _joined(written))

        ranks.run_on_all(doing, seal)
        ranks.run_on_all(doing, stack.close)  # puts the new directory in place


class _RankPart:
    """The part of a checkpoint that one rank writes: some of the weight files, and its part of the optimizer state."""

    def __init__(self, contents: Contents, objects: Objects) -> None:
        names, ranks = contents.names(), contents.ranks
        self._contents, self._ranks = contents, ranks
        self._weights = [(name, item.tensor) for item, name in names.items()]
        self._state = _state(contents, names)
        self._rest: dict[str, torch.Tensor] = {}
        with_state, self.files = split_objects(objects)
        self._manifest = _describe(contents, names, with_state, self._rest)
        tensor_file.check_dtypes((*self._weights, *self._rest.items()))

    @property
    def nbytes(self) -> int:
        weights = self._weights if self._ranks.rank == 0 else []  # counted once for all ranks
        return sum(tensor.nbytes for _, tensor in (*weights, *self._state, *self._rest.items()))

    def write(self, directory: Path) -> dict[str, Any]:
        """Writes the files of this rank and returns their manifest."""
        if not directory.is_dir():
            raise ValueError(
                f"{directory.parent} is not the same directory on all ranks: several ranks can only save to a disk "
                "that all of their machines share"
            )
        manifest, sums = self._manifest, dict[str, FileChecksum]()
        mine = "" if self._ranks.alone else f".rank{self._ranks.rank}"
        manifest["weights"] = self._write_weights(directory, sums)
        manifest["state"] = _write_shards(directory, f"ferryman/state{mine}", self._state, sums)
        manifest["rest"] = _write_shards(directory, f"ferryman/rest{mine}", list(self._rest.items()), sums)
        manifest["files"] = {name: _facts(found) for name, found in sums.items()}
        return manifest

    def _write_weights(self, directory: Path, sums: dict[str, FileChecksum]) -> list[str]:
        """All ranks have all weights; each writes some of the files."""
        stem = "ferryman/trained" if self._contents.is_adapted else "model"
        rank, size = self._ranks.share
        total = sum(tensor.nbytes for _, tensor in self._weights)
        shards = tensor_file.shard(self._weights, min(_MAX_SHARD_BYTES, max(_MIN_SHARD_BYTES, -(-total // size))))
        files = tensor_file.file_names(stem, len(shards))
        mine = slice(len(shards) * rank // size, len(shards) * (rank + 1) // size)
        for file, some in zip(files[mine], shards[mine], strict=True):
            sums[file] = tensor_file.write(directory / file, some)
        if len(files) > 1 and stem == "model" and rank == 0:  # transformers needs an index
            _write_json(directory / f"{stem}.safetensors.index.json", tensor_file.index(files, shards))
        return files[mine]


def _joined(written: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the manifests of all ranks. Random states and objects are kept per rank."""
    first, *others = written
    for other in others:
        for what in ("weights", "state", "rest"):
            first[what] += other[what]
        first["files"].update(other["files"])
        if "optimizer" in first:
            counts, theirs = first["optimizer"]["steps"], other["optimizer"]
            first["optimizer"]["steps"] = {name: max(count, theirs["steps"][name]) for name, count in counts.items()}
            first["optimizer"]["torch"].update(theirs["torch"])
    first["others"] = [{"random": other["random"], "objects": other["objects"]} for other in others]
    return first


def _seal(contents: Contents, directory: Path, partial: Path, files: Sequence[Files], manifest: dict[str, Any]) -> None:
    """Writes the other files, and finally the manifest."""
    for thing in files:
        thing.save_pretrained(partial)
    _save_configuration(contents, partial)
    for path in sorted(partial.rglob("*")):
        name = str(path.relative_to(partial))
        if path.is_file() and name not in manifest["files"]:
            manifest["files"][name] = _facts(_sync_and_checksum(path))
    manifest["saved"] = max(time.time(), directories.last_saved(directory.parent) + 1e-3)
    _write_json(partial / directories.MANIFEST, {"crc32": crc_of(manifest), "content": manifest})
    old = directories.current(directory)
    directories.carry_over(old, partial, _ours_in(old))


def _facts(found: FileChecksum) -> dict[str, int]:
    return {"bytes": found.nbytes, "crc32": found.crc32}


def _state(contents: Contents, names: dict[Item, str]) -> Tensors:
    """The optimizer state of this rank, as named views of the store's memory."""
    if contents.optimizer_view is None:
        return []
    found: Tensors = []
    for unit in contents.units:
        state = contents.store.state(unit)
        for item in unit.trained:
            start = state.part(item).start
            kept = state.tensors_of(item) if state.owns(item) else {}
            found += [(str(StateKey(names[item], key, start)), tensor) for key, tensor in kept.items()]
    return found


def _describe(
    contents: Contents, names: dict[Item, str], objects: dict[str, Stateful], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    server, mine = contents.server, "" if contents.ranks.rank == 0 else f"rank{contents.ranks.rank}."
    found: dict[str, Any] = {
        "format": FORMAT,
        "ferryman": ferryman.__version__,
        "torch": str(torch.__version__),
        "model": type(contents.model).__name__,
        "step": server.steps,
        "loss_scale": server.scale.state(),
        "random": encoding.encode(random_states(contents.device), f"{mine}random", tensors),
        "objects": {},
    }
    for name, thing in objects.items():
        found["objects"][name] = encoding.encode(thing.state_dict(), f"{mine}objects.{name}", tensors)
    if contents.optimizer_view is not None:
        found["optimizer"] = _describe_optimizer(contents, contents.optimizer_view, names, tensors)
    return found


def _describe_optimizer(
    contents: Contents, optimizer_view: OptimizerView, names: dict[Item, str], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    steps, theirs = {}, {}
    for unit in contents.units:
        state = contents.store.state(unit)
        for item in unit.trained:
            steps[names[item]] = state.steps(item)
            if state.owns(item) and (kept := state.own_state(item)):
                theirs[names[item]] = encoding.encode(kept, f"{names[item]}/torch", tensors)
    groups = []
    for number, group in enumerate(optimizer_view.groups.values()):
        options = {key: value for key, value in group.items() if key != "params"}
        members = [name for item, name in names.items() if item.trains and optimizer_view.group(item) is group]
        groups.append(
            {"parameters": sorted(members), "options": encoding.encode(options, f"optimizer.groups[{number}]", tensors)}
        )
    return {"kind": optimizer_view.name, "groups": groups, "steps": steps, "torch": theirs}


def _write_shards(directory: Path, stem: str, tensors: Tensors, sums: dict[str, FileChecksum]) -> list[str]:
    shards = tensor_file.shard(tensors, _MAX_SHARD_BYTES)
    files = tensor_file.file_names(stem, len(shards))
    for file, some in zip(files, shards, strict=True):
        sums[file] = tensor_file.write(directory / file, some)
    return files


def _save_configuration(contents: Contents, directory: Path) -> None:
    """Writes the configuration files that `from_pretrained` needs."""
    model: Any = contents.model
    if contents.is_adapted:
        model.save_pretrained(directory)  # adapters, in the format of PEFT
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


def _sync_and_checksum(path: Path) -> FileChecksum:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return tensor_file.check_sum(path)


def _write_json(path: Path, content: object) -> None:
    tensor_file.write_bytes(path, [memoryview(json.dumps(content, indent=1).encode())])


def _ours_in(directory: Path) -> Callable[[str], bool]:
    """A predicate that tells which files in a checkpoint's directory belong to the checkpoint."""
    manifest = str(directories.MANIFEST)
    try:
        written = {*read_manifest(directory)["files"], manifest}
        return lambda name: name in written
    except (OSError, ValueError):  # a damaged manifest must not prevent saving
        return lambda name: any(fnmatch.fnmatch(name, pattern) for pattern in _CHECKPOINT_FILES)
