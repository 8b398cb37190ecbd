"""Loads a checkpoint into an engine with any device, budget, precision and update policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch

from ferryman.checkpoint import directory as directories
from ferryman.checkpoint import encoding, tensor_file
from ferryman.checkpoint.contents import Contents, Objects, StateKey, parse_state_key, set_random_states, split_objects
from ferryman.checkpoint.manifest import check_sizes, check_sum, check_sums, read_manifest
from ferryman.checkpoint.missing import fill_missing
from ferryman.checkpoint.tensor_file import Entry
from ferryman.model.units import Item, hint
from ferryman.runtime import host_memory as memory
from ferryman.server import kernels


def find(directory: Path) -> Path:
    """The checkpoint to load: the directory itself, or the newest of the series in it."""
    found = directories.current(directory)
    if directories.is_checkpoint(found):
        return found
    if series := directories.series(directory):
        return series[-1]
    if not directory.exists():
        near = [path.name for path in directory.parent.glob("*") if path.is_dir()] if directory.parent.is_dir() else []
        raise ValueError(f"there is no checkpoint at {directory}{hint(directory.name, near) if near else ''}")
    raise ValueError(
        f"{directory} is not a checkpoint: it has no {directories.MANIFEST}, and no directories step-... that have "
        "one. To load the weights of a pretrained model, use engine.load_weights(directory)"
    )


class Checkpoint:
    """A checkpoint on the disk. The constructor checks that it fits the engine, before anything is changed."""

    def __init__(self, path: Path, contents: Contents, objects: Objects) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self._contents = contents
        self._objects, _ = split_objects(objects)
        self._names = {name: item for item, name in contents.names().items()}
        self._units = contents.unit_of()
        self._check_files()
        self._weights = self._entries("weights")
        self._state = self._entries("state")
        self._check_tensors()
        if contents.optimizer_view is not None:
            self._check_optimizer()
        missing = [name for name in self._objects if name not in self.manifest["objects"]]
        if missing:
            raise ValueError(
                f"{path} was saved without the object {missing[0]!r}{hint(missing[0], self.manifest['objects'])}"
            )

    def load(self) -> None:
        """Loads everything. Until this returns, the engine is in an inconsistent state."""
        rest = self.load_training()
        if self._contents.optimizer_view is not None:
            groups = zip(
                self._contents.optimizer_view.optimizer.param_groups, self.manifest["optimizer"]["groups"], strict=True
            )
            for group, there in groups:
                group.update(encoding.decode(there["options"], rest))
        self._contents.server.scale.restore(self.manifest["loss_scale"])
        self._contents.server.restart(self.manifest["step"])
        mine = self._of_rank()
        for name, thing in self._objects.items():
            thing.load_state_dict(encoding.decode(mine["objects"][name], rest))
        # Last, because the calls above may draw random numbers.
        set_random_states(encoding.decode(mine["random"], rest), self._contents.device)

    def _of_rank(self) -> dict[str, Any]:
        """What this rank saved for itself; with another number of ranks, what the first rank saved."""
        rank, size = self._contents.ranks.share
        others = self.manifest.get("others", [])
        return others[rank - 1] if rank and size == 1 + len(others) else self.manifest

    def load_training(self) -> dict[str, torch.Tensor]:
        """Loads weights and optimizer state; returns the tensors of everything else."""
        self._forget_torch()
        rest: dict[str, torch.Tensor] = {}
        self._read("rest", lambda entry: rest.setdefault(entry.name, _new(entry)))
        self._load_weights()
        self._load_state()
        if self._contents.optimizer_view is not None:
            self._restore_optimizer(rest)
        fill_missing(self._contents)
        memory.trim()  # returns the temporary buffers to the system
        return rest

    def _load_weights(self) -> None:
        """Reads weights in place. Those of another precision are read into a temporary tensor and converted; those that
        another rank writes into shared memory are read for their checksum only."""
        beside: dict[str, torch.Tensor] = {}

        def target(entry: Entry) -> torch.Tensor:
            item = self._names[entry.name]
            in_place = entry.dtype == item.dtype and self._contents.store.writes(self._units[item])
            return item.tensor.data if in_place else beside.setdefault(entry.name, _new(entry))

        def done(entry: Entry) -> None:
            values = beside.pop(entry.name, None)
            if values is not None and self._differs(entry.name):
                self._take(self._names[entry.name], values)

        self._read("weights", target, done if self._reads_beside() else None)
        for item in self._trained():
            self._contents.store.state(self._units[item]).taken(item)

    def _load_state(self) -> None:
        """Reads the optimizer's state. Without an optimizer, only the masters are used, to restore float32 weights."""
        if self._contents.optimizer_view is None and not any(map(self._differs, self._names)):
            return
        beside: dict[str, torch.Tensor] = {}

        def own(state_key: StateKey) -> tuple[torch.Tensor, slice] | None:
            """The memory in which this rank keeps this state, and which of the parameter's elements it holds."""
            item = self._names[state_key.name]
            if self._contents.optimizer_view is None or (state_key.key == "master" and self._differs(state_key.name)):
                return None
            state = self._contents.store.state(self._units[item])
            return state.tensors_of(item)[state_key.key], state.part(item)

        def target(entry: Entry) -> torch.Tensor:
            state_key = parse_state_key(entry.name)
            found = own(state_key)
            if found is not None and found[1] == slice(state_key.start, state_key.start + _size(entry)):
                return found[0]
            return beside.setdefault(entry.name, _new(entry))

        def done(entry: Entry) -> None:
            values, state_key = beside.pop(entry.name, None), parse_state_key(entry.name)
            if values is None:
                return
            if (found := own(state_key)) is not None:
                _copy_common(values.view(-1), state_key.start, *found)
            elif state_key.key == "master" and self._differs(state_key.name):
                wide = self._in_float32(state_key, values)
                item = self._names[state_key.name]
                self._contents.store.take(self._units[item], item, wide, state_key.start)

        self._read("state", target, done if self._reads_beside() else None)

    def _reads_beside(self) -> bool:
        """Whether any tensor needs a temporary buffer. Reading then waits for each of these."""
        pieces = any(parse_state_key(name).start for name in self._state)
        return not self._contents.ranks.alone or pieces or any(map(self._differs, self._names))

    def _trained(self) -> list[Item]:
        """The tensors for which the optimizer keeps state."""
        return [] if self._contents.optimizer_view is None else [item for item in self._names.values() if item.trains]

    def _differs(self, name: str) -> bool:
        """Whether the tensor was saved in another precision."""
        return self._weights[name][1].dtype != self._names[name].dtype

    def _forget_torch(self) -> None:
        """Frees the state kept by torch's optimizers, so that it is not in memory twice."""
        for item in self._trained():
            self._contents.store.state(self._units[item]).restore(item, 0, None)

    def _in_float32(self, state_key: StateKey, master: torch.Tensor) -> torch.Tensor:
        path, entry = self._weights[state_key.name]
        narrow = tensor_file.read_tensor(path, entry).view(-1)
        return kernels.join(narrow[state_key.start : state_key.start + master.numel()], master.view(-1))

    def _take(self, item: Item, values: torch.Tensor) -> None:
        self._contents.store.take(self._units[item], item, values)

    def _restore_optimizer(self, rest: dict[str, torch.Tensor]) -> None:
        saved = self.manifest["optimizer"]
        for name, item in self._names.items():
            if item.trains:
                state = self._contents.store.state(self._units[item])
                has = name in saved["torch"] and state.owns(item)
                theirs = encoding.decode(saved["torch"][name], rest) if has else None
                state.restore(item, saved["steps"][name], theirs)

    def _read(
        self, what: str, target: Callable[[Entry], torch.Tensor], done: Callable[[Entry], None] | None = None
    ) -> None:
        for file in self.manifest[what]:
            check_sum(self.path, self.manifest, file, tensor_file.read(self.path / file, target, done))

    def _entries(self, what: str) -> dict[str, tuple[Path, Entry]]:
        paths = [self.path / file for file in self.manifest[what]]
        return {name: (path, entry) for path in paths for name, entry in tensor_file.read_header(path).items()}

    # Checks.

    def _check_files(self) -> None:
        check_sizes(self.path, self.manifest)
        large = {file for what in ("weights", "state", "rest") for file in self.manifest[what]}
        rest = self.manifest["files"].keys() - large  # large files are checked while they are read
        check_sums(self.path, self.manifest, rest)

    def _refuse(self, why: str) -> NoReturn:
        """Raises an error about a mismatch, or about a damaged file if that is the cause."""
        check_sums(self.path, self.manifest, self.manifest["files"])
        raise ValueError(why)

    def _check_tensors(self) -> None:
        shapes = {name: tuple(item.tensor.shape) for name, item in self._names.items()}
        there = {name: entry.shape for name, (_, entry) in self._weights.items()}
        if differences := compare(shapes, there):
            self._refuse(
                f"{self.path} belongs to another model (a {self.manifest['model']}, and this is a "
                f"{type(self._contents.model).__name__}): {differences}"
            )

    def _check_optimizer(self) -> None:
        optimizer_view, saved = self._contents.optimizer_view, self.manifest.get("optimizer")
        assert optimizer_view is not None
        if saved is None:
            raise ValueError(
                f"{self.path} was saved by an engine without an optimizer, so it has no optimizer state; "
                "engine.load_weights(directory) loads only the weights"
            )
        kind = type(optimizer_view.optimizer).__name__
        if saved["kind"] != kind:
            raise ValueError(f"{self.path} has the state of {saved['kind']}, but the engine's optimizer is {kind}")
        groups = optimizer_view.optimizer.param_groups
        if len(groups) != len(saved["groups"]):
            raise ValueError(
                f"{self.path} has {len(saved['groups'])} parameter groups, but the optimizer has {len(groups)}"
            )
        for number, (group, told) in enumerate(zip(groups, saved["groups"], strict=True)):
            members = {
                name for name, item in self._names.items() if item.trains and optimizer_view.group(item) is group
            }
            if differences := _first_difference(members, set(told["parameters"])):
                raise ValueError(f"parameter group {number} differs from that of {self.path}: {differences}")
        there: dict[str, set[str]] = {}
        for state_key in map(parse_state_key, self._state):
            there.setdefault(state_key.name, set()).update({state_key.key} - {"master"})
        for name, item in self._names.items():
            if item.trains:
                mine = set(self._contents.store.state(self._units[item]).tensors_of(item)) - {"master"}
                if mine != there.get(name, set()):
                    self._refuse(
                        f"{self.path} has {sorted(there.get(name, ()))} for {name!r}, but the optimizer keeps "
                        f"{sorted(mine)}: it had other options (momentum, amsgrad, maximize) when it was saved"
                    )


def compare(mine: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]]) -> str:
    """Describes how the tensors of the model differ from those in the files; empty if they do not."""
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


def _size(entry: Entry) -> int:
    return math.prod(entry.shape)


def _copy_common(values: torch.Tensor, start: int, into: torch.Tensor, place: slice) -> None:
    """Copies the overlap of `values`, whose first element has the index `start`, into memory for the range `place`."""
    low, high = max(start, place.start), min(start + values.numel(), place.stop)
    if low < high:
        into[low - place.start : high - place.start].copy_(values[low - start : high - start])


def _new(entry: Entry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype)
