"""Reads a checkpoint into an engine: on any device, budget, precision and policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch

from ferryman.checkpoint import directory as directories
from ferryman.checkpoint import plain, tensor_file
from ferryman.checkpoint.contents import Contents, Objects, set_random_states, split
from ferryman.checkpoint.manifest import check_sizes, check_sum, check_sums, read_manifest
from ferryman.checkpoint.missing import fill_missing
from ferryman.checkpoint.stretch import Stretch, parse_stretch
from ferryman.checkpoint.tensor_file import Entry
from ferryman.model.units import Item, hint
from ferryman.runtime import host_memory as memory
from ferryman.server import kernels


def find(directory: Path) -> Path:
    """The checkpoint that is meant: the directory itself, or the newest of the series in it."""
    found = directories.current(directory)
    if directories.is_checkpoint(found):
        return found
    if series := directories.series(directory):
        return series[-1]
    if not directory.exists():
        near = [path.name for path in directory.parent.glob("*") if path.is_dir()] if directory.parent.is_dir() else []
        raise ValueError(f"there is no checkpoint at {directory}{hint(directory.name, near) if near else ''}")
    raise ValueError(
        f"{directory} is no checkpoint: it has no {directories.MANIFEST}, nor a series of step-... with one. "
        "Weights alone, of a pretrained model, are loaded by engine.load_weights(directory)"
    )


class Checkpoint:
    """One on the disk, compared with the engine that shall have it before anything is changed."""

    def __init__(self, path: Path, contents: Contents, objects: Objects) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self._contents = contents
        self._objects, _ = split(objects)
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
                f"{path} has no object {missing[0]!r}{hint(missing[0], self.manifest['objects'])} It was saved without"
            )

    def load(self) -> None:
        """From here on the engine is neither what it was nor what it shall be, until this returns."""
        rest = self.load_training()
        if self._contents.optimizer_view is not None:
            groups = zip(
                self._contents.optimizer_view.optimizer.param_groups, self.manifest["optimizer"]["groups"], strict=True
            )
            for group, there in groups:
                group.update(plain.decode(there["options"], rest))
        self._contents.server.scale.restore(self.manifest["loss_scale"])
        self._contents.server.restart(self.manifest["step"])
        mine = self._of_rank()
        for name, thing in self._objects.items():
            thing.load_state_dict(plain.decode(mine["objects"][name], rest))
        # Last: what was called until here may have drawn from them.
        set_random_states(plain.decode(mine["random"], rest), self._contents.device)

    def _of_rank(self) -> dict[str, Any]:
        """What each rank has saved for itself; where there were more of them, or fewer, that of the first."""
        rank, size = self._contents.ranks.share
        others = self.manifest.get("others", [])
        return others[rank - 1] if rank and size == 1 + len(others) else self.manifest

    def load_training(self) -> dict[str, torch.Tensor]:
        """Weights and the optimizer's state; returns the tensors of other things."""
        self._forget_torch()
        rest: dict[str, torch.Tensor] = {}
        self._read("rest", lambda entry: rest.setdefault(entry.name, _new(entry)))
        self._load_weights()
        self._load_state()
        if self._contents.optimizer_view is not None:
            self._restore_optimizer(rest)
        fill_missing(self._contents)
        memory.trim()  # of what was read beside
        return rest

    def _load_weights(self) -> None:
        """Of another precision they are read beside, tensor by tensor, and taken from there; and what another rank
        writes into the memory that this one shares is only compared with its checksum."""
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
        """Without an optimizer there is one thing to take from it: with the master, narrow weights are float32."""
        if self._contents.optimizer_view is None and not any(map(self._differs, self._names)):
            return
        beside: dict[str, torch.Tensor] = {}

        def own(stretch: Stretch) -> tuple[torch.Tensor, slice] | None:
            """Where this rank keeps the like, and which of the tensor's elements."""
            item = self._names[stretch.name]
            if self._contents.optimizer_view is None or (stretch.key == "master" and self._differs(stretch.name)):
                return None
            state = self._contents.store.state(self._units[item])
            return state.tensors_of(item)[stretch.key], state.part(item)

        def target(entry: Entry) -> torch.Tensor:
            stretch = parse_stretch(entry.name)
            found = own(stretch)
            if found is not None and found[1] == slice(stretch.start, stretch.start + _size(entry)):
                return found[0]
            return beside.setdefault(entry.name, _new(entry))

        def done(entry: Entry) -> None:
            values, stretch = beside.pop(entry.name, None), parse_stretch(entry.name)
            if values is None:
                return
            if (found := own(stretch)) is not None:
                _copy_common(values.view(-1), stretch.start, *found)
            elif stretch.key == "master" and self._differs(stretch.name):
                wide = self._in_float32(stretch, values)
                item = self._names[stretch.name]
                self._contents.store.take(self._units[item], item, wide, stretch.start)

        self._read("state", target, done if self._reads_beside() else None)

    def _reads_beside(self) -> bool:
        """Whether any tensor cannot be read straight into its place. Each that cannot is waited for."""
        pieces = any(parse_stretch(name).start for name in self._state)
        return not self._contents.ranks.alone or pieces or any(map(self._differs, self._names))

    def _trained(self) -> list[Item]:
        """What the optimizer keeps something of."""
        return [] if self._contents.optimizer_view is None else [item for item in self._names.values() if item.trains]

    def _differs(self, name: str) -> bool:
        """Whether the tensor was saved in another precision."""
        return self._weights[name][1].dtype != self._names[name].dtype

    def _forget_torch(self) -> None:
        """What torch's optimizers keep: there is not to be room for it twice."""
        for item in self._trained():
            self._contents.store.state(self._units[item]).restore(item, 0, None)

    def _in_float32(self, stretch: Stretch, master: torch.Tensor) -> torch.Tensor:
        path, entry = self._weights[stretch.name]
        narrow = tensor_file.read_tensor(path, entry).view(-1)
        return kernels.join(narrow[stretch.start : stretch.start + master.numel()], master.view(-1))

    def _take(self, item: Item, values: torch.Tensor) -> None:
        self._contents.store.take(self._units[item], item, values)

    def _restore_optimizer(self, rest: dict[str, torch.Tensor]) -> None:
        saved = self.manifest["optimizer"]
        for name, item in self._names.items():
            if item.trains:
                state = self._contents.store.state(self._units[item])
                has = name in saved["torch"] and state.owns(item)
                theirs = plain.decode(saved["torch"][name], rest) if has else None
                state.restore(item, saved["steps"][name], theirs)

    def _read(
        self, what: str, target: Callable[[Entry], torch.Tensor], done: Callable[[Entry], None] | None = None
    ) -> None:
        for file in self.manifest[what]:
            check_sum(self.path, self.manifest, file, tensor_file.read(self.path / file, target, done))

    def _entries(self, what: str) -> dict[str, tuple[Path, Entry]]:
        paths = [self.path / file for file in self.manifest[what]]
        return {name: (path, entry) for path in paths for name, entry in tensor_file.read_header(path).items()}

    # What may be wrong.

    def _check_files(self) -> None:
        check_sizes(self.path, self.manifest)
        large = {file for what in ("weights", "state", "rest") for file in self.manifest[what]}
        rest = self.manifest["files"].keys() - large  # those are compared when they are read
        check_sums(self.path, self.manifest, rest)

    def _refuse(self, why: str) -> NoReturn:
        """It does not fit; unless that is because a file's header is damaged."""
        check_sums(self.path, self.manifest, self.manifest["files"])
        raise ValueError(why)

    def _check_tensors(self) -> None:
        shapes = {name: tuple(item.tensor.shape) for name, item in self._names.items()}
        there = {name: entry.shape for name, (_, entry) in self._weights.items()}
        if differences := compare(shapes, there):
            self._refuse(
                f"{self.path} is of another model (a {self.manifest['model']}, this is a "
                f"{type(self._contents.model).__name__}): {differences}"
            )

    def _check_optimizer(self) -> None:
        optimizer_view, saved = self._contents.optimizer_view, self.manifest.get("optimizer")
        assert optimizer_view is not None
        if saved is None:
            raise ValueError(
                f"{self.path} was saved by an engine without an optimizer, so it has no state for one; "
                "engine.load_weights(directory) loads the weights alone"
            )
        kind = type(optimizer_view.optimizer).__name__
        if saved["kind"] != kind:
            raise ValueError(f"{self.path} has the state of {saved['kind']}, and the engine's optimizer is {kind}")
        groups = optimizer_view.optimizer.param_groups
        if len(groups) != len(saved["groups"]):
            raise ValueError(
                f"{self.path} has {len(saved['groups'])} groups of parameters, and the optimizer {len(groups)}"
            )
        for number, (group, told) in enumerate(zip(groups, saved["groups"], strict=True)):
            members = {
                name for name, item in self._names.items() if item.trains and optimizer_view.group(item) is group
            }
            if differences := _first_difference(members, set(told["parameters"])):
                raise ValueError(f"group {number} of the optimizer is not that of {self.path}: {differences}")
        there: dict[str, set[str]] = {}
        for stretch in map(parse_stretch, self._state):
            there.setdefault(stretch.name, set()).update({stretch.key} - {"master"})
        for name, item in self._names.items():
            if item.trains:
                mine = set(self._contents.store.state(self._units[item]).tensors_of(item)) - {"master"}
                if mine != there.get(name, set()):
                    self._refuse(
                        f"{self.path} has {sorted(there.get(name, ()))} of {name!r}, and the optimizer keeps "
                        f"{sorted(mine)}: it had other options (momentum, amsgrad, maximize) when it was saved"
                    )


def compare(mine: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]]) -> str:
    """How the tensors of a model differ from those in files; nothing if they do not."""
    found = []
    for names, what in (
        (mine.keys() - theirs.keys(), "is missing there"),
        (theirs.keys() - mine.keys(), "is only there"),
    ):
        if names:
            found.append(f"{_some(names)} {what}")
    other = [name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]]
    found += [f"{name!r} has shape {mine[name]} here and {theirs[name]} there" for name in sorted(other)[:3]]
    return "; ".join(found) + (f"; and {len(other) - 3} more shapes" if len(other) > 3 else "")


def _first_difference(mine: Collection[str], theirs: Collection[str]) -> str:
    mine, theirs = set(mine), set(theirs)
    if mine - theirs:
        return f"{_some(mine - theirs)} did not train there, or was in another group"
    return f"{_some(theirs - mine)} trained there, and does not here, or is in another group" if theirs - mine else ""


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return f"{ordered[0]!r}{f' and {len(ordered) - 1} more' if len(ordered) > 1 else ''}"


def _size(entry: Entry) -> int:
    return math.prod(entry.shape)


def _copy_common(values: torch.Tensor, start: int, into: torch.Tensor, place: slice) -> None:
    """Of values from the element `start` on, those that belong into a memory for the elements `place`."""
    low, high = max(start, place.start), min(start + values.numel(), place.stop)
    if low < high:
        into[low - place.start : high - place.start].copy_(values[low - start : high - start])


def _new(entry: Entry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype)
