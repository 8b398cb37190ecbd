"""Loads a checkpoint into an engine with any device, budget, precision and update policy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from ferryman.checkpoint import compatibility, encoding, tensor_file
from ferryman.checkpoint import directory as directories
from ferryman.checkpoint.contents import (
    Contents,
    Objects,
    Stateful,
    StateKey,
    parse_state_key,
    set_random_states,
    split_objects,
)
from ferryman.checkpoint.manifest import check_sizes, check_sum, check_sums, read_manifest
from ferryman.checkpoint.missing import fill_missing
from ferryman.checkpoint.tensor_file import Entry
from ferryman.model.unit_discovery import hint
from ferryman.model.units import BLOCK, Item, master_dtype
from ferryman.runtime import host_memory as memory
from ferryman.server import kernels
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.state import SCALES
from ferryman.server.state_codec import blocks_of, decoded

_TENSORS = ("weights", "state", "rest")  # lists of files in the manifest


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

    replaces = ("weights", "the optimizer's state")

    def __init__(self, path: Path, contents: Contents, objects: Objects) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self._contents = contents
        self._objects, _ = split_objects(objects)
        self._names = {name: item for item, name in contents.names().items()}
        self._units = contents.unit_of()
        self._check_files()
        self._weights, self._state, self._rest = map(self._entries, _TENSORS)
        self._check()
        self._state_keys = {name: _state_key(name) for name in self._state}

    def load(self) -> None:
        """Loads everything. Until this returns, the engine is in an inconsistent state."""
        rest = self.load_training()
        if self._contents.optimizer_view is not None:
            groups = self._contents.optimizer_view.groups.values()
            for group, there in zip(groups, self.manifest["optimizer"]["groups"], strict=True):
                group.update(encoding.decode(there["options"], rest))
        self._contents.server.scale.restore(self.manifest["loss_scale"])
        self._contents.server.restart(self.manifest["step"])
        mine = self._of_rank()
        for name, thing in self._objects.items():
            self._load_object(name, thing, encoding.decode(mine["objects"][name], rest))
        # Last, because the calls above may draw random numbers.
        set_random_states(encoding.decode(mine["random"], rest), self._contents.device)

    def _load_object(self, name: str, thing: Stateful, state: Any) -> None:
        try:
            thing.load_state_dict(state)
        except (LookupError, TypeError, AttributeError, ValueError) as error:  # not what the object expects
            raise ValueError(
                f"{self.path / directories.MANIFEST}: objects.{name}: load_state_dict() of {type(thing).__name__} "
                f"cannot use the saved state: {error if isinstance(error, ValueError) else repr(error)}"
            ) from error

    def _of_rank(self) -> dict[str, Any]:
        """The part of the manifest that this rank saved; with another number of ranks, that of the first rank."""
        rank, size = self._contents.ranks.share
        others = self.manifest.get("others", [])
        return others[rank - 1] if rank and size == 1 + len(others) else self.manifest

    def load_training(self) -> dict[str, torch.Tensor]:
        """Loads weights and optimizer state; returns the tensors of everything else."""
        self._forget_own_states()
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

        def own(state_key: StateKey, dtype: torch.dtype) -> tuple[torch.Tensor, slice, int] | None:
            """The memory in which this rank keeps this state, which of the parameter's elements (of scales: blocks) it
            holds, and with which of them the piece begins. None: it is not kept, or not in this format."""
            item = self._names[state_key.name]
            if self._contents.optimizer_view is None or (state_key.key == "master" and self._differs(state_key.name)):
                return None
            state = self._contents.store.state(self._units[item])
            kept, place = state.tensors_of(item).get(state_key.key), state.part(item)
            if kept is None or kept.dtype != dtype or self._is_converted(state_key):
                return None
            if state_key.key.endswith(SCALES):
                return kept, blocks_of(place), state_key.start // BLOCK
            return kept, place, state_key.start

        def target(entry: Entry) -> torch.Tensor:
            found = own(self._state_keys[entry.name], entry.dtype)
            if found is not None and found[1] == slice(found[2], found[2] + _size(entry)):
                return found[0]
            return beside.setdefault(entry.name, _new(entry))

        def done(entry: Entry) -> None:
            values, state_key = beside.pop(entry.name, None), self._state_keys[entry.name]
            if values is None:
                return
            if (found := own(state_key, entry.dtype)) is not None:
                _copy_common(values.view(-1), found[2], found[0], found[1])
            elif state_key.key == "master" and self._differs(state_key.name):
                wide = self._in_float32(state_key, values)
                item = self._names[state_key.name]
                self._contents.store.take(self._units[item], item, wide, state_key.start)

        self._read("state", target, done if self._reads_beside() else None)
        self._convert_states()

    def _is_converted(self, state_key: StateKey) -> bool:
        """Whether this state, or the state of these scales, was saved in another format than the engine keeps it in."""
        if self._contents.optimizer_view is None or state_key.key == "master":
            return False
        key, item = state_key.key.removesuffix(SCALES), self._names[state_key.name]
        kept = self._contents.store.state(self._units[item]).tensors_of(item)[key]
        return self._state[str(state_key._replace(key=key))][1].dtype != kept.dtype

    def _convert_states(self) -> None:
        """Stores states that were saved in another format. They are read a second time, tensor by tensor, since a block
        can only be encoded when all of its pieces are known."""
        pieces: dict[tuple[str, str], list[StateKey]] = {}
        for state_key in self._state_keys.values():
            if self._is_converted(state_key) and not state_key.key.endswith(SCALES):
                pieces.setdefault((state_key.name, state_key.key), []).append(state_key)
        for (name, key), some in pieces.items():
            item, view = self._names[name], self._contents.optimizer_view
            state, rule = self._contents.store.state(self._units[item]), None if view is None else view.rule(item)
            assert rule is not None, "own steps have no format"
            values = torch.zeros(state.part(item).stop - state.part(item).start, dtype=torch.float32, device="cpu")
            for state_key in some:
                codes = tensor_file.read_tensor(*self._state[str(state_key)])
                is_coded = codes.dtype == torch.uint8
                of_scales = str(state_key._replace(key=key + SCALES))
                scales = tensor_file.read_tensor(*self._state[of_scales]) if is_coded else None
                _copy_common(decoded(codes, scales, key == rule.root), state_key.start, values, state.part(item))
            state.put_state(item, key, values)

    def _reads_beside(self) -> bool:
        """Whether any tensor needs a temporary buffer. Reading then waits for each of these."""
        pieces = any(state_key.start or self._is_converted(state_key) for state_key in self._state_keys.values())
        return not self._contents.ranks.alone or pieces or any(map(self._differs, self._names))

    def _trained(self) -> list[Item]:
        """The tensors for which the optimizer keeps state."""
        return [] if self._contents.optimizer_view is None else [item for item in self._names.values() if item.trains]

    def _differs(self, name: str) -> bool:
        """Whether the tensor was saved in another precision."""
        return self._weights[name][1].dtype != self._names[name].dtype

    def _forget_own_states(self) -> None:
        """Frees the state of own steps, so that it is not in memory twice."""
        for item in self._trained():
            self._contents.store.state(self._units[item]).restore(item, 0, None)

    def _in_float32(self, state_key: StateKey, master: torch.Tensor) -> torch.Tensor:
        path, entry = self._weights[state_key.name]
        narrow = tensor_file.read_tensor(path, entry).view(-1)
        return kernels.widen(narrow[state_key.start : state_key.start + master.numel()], master.view(-1))

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
        found: dict[str, tuple[Path, Entry]] = {}
        for path in paths:
            for name, entry in tensor_file.read_header(path).items():
                if name in found and _size(entry):  # each rank writes a tensor without elements
                    self._refuse(f"{path} has {name!r}, which is in {found[name][0]} as well")
                found[name] = path, entry
        return found

    # Checks.

    def _check(self) -> None:
        """Runs all checks that are possible before anything is changed."""
        file, contents = self.path / directories.MANIFEST, self._contents
        self._check_references(file)
        shapes = {name: tuple(item.tensor.shape) for name, item in self._names.items()}
        there = {name: entry.shape for name, (_, entry) in self._weights.items()}
        if differences := compatibility.compare(shapes, there):
            self._refuse(
                f"{self.path} belongs to another model (a {self.manifest['model']}, and this is a "
                f"{type(contents.model).__name__}): {differences}"
            )
        for name, (path, entry) in self._weights.items():
            compatibility.check_dtype(name, self._names[name], path, entry, self._refuse)
        kept = compatibility.check_state(self._names, self._weights, self._state, self._refuse)
        if contents.optimizer_view is not None:
            self._check_optimizer(contents.optimizer_view, kept, file)
        missing = [name for name in self._objects if name not in self._of_rank()["objects"]]
        if missing:
            raise ValueError(
                f"{self.path} was saved without the object {missing[0]!r}{hint(missing[0], self._of_rank()['objects'])}"
            )
        compatibility.check_random(self._decode_now(self._of_rank()["random"]), contents, file)

    def _check_files(self) -> None:
        check_sizes(self.path, self.manifest)
        large = {file for what in _TENSORS for file in self.manifest[what]}
        rest = self.manifest["files"].keys() - large  # large files are checked while they are read
        check_sums(self.path, self.manifest, rest)

    def _check_references(self, file: Path) -> None:
        """Checks that all tensors to which encoded state refers are in the files."""
        optimizer = self.manifest.get("optimizer", {"groups": [], "torch": {}})
        ranks = [self.manifest, *self.manifest.get("others", [])]
        values = [group["options"] for group in optimizer["groups"]] + list(optimizer["torch"].values())
        values += [value for rank in ranks for value in (rank["random"], *rank["objects"].values())]
        for kind, name, dims in itertools.chain.from_iterable(map(encoding.references, values)):
            if name not in self._rest:
                self._refuse(f"{file} refers to the tensor {name!r}, which is in none of its files")
            entry = self._rest[name][1]
            if kind == "array" and not encoding.is_array_dtype(entry.dtype):
                self._refuse(f"{file}: {name!r} must have a dtype of numpy, but is {entry.dtype}")
            if dims not in (None, len(entry.shape)):
                self._refuse(f"{file}: {name!r} must have {dims} dimensions, but has shape {tuple(entry.shape)}")

    def _refuse(self, why: str) -> NoReturn:
        """Raises an error about a mismatch, or about a damaged file if that is the cause."""
        check_sums(self.path, self.manifest, self.manifest["files"])
        raise ValueError(why)

    def _check_optimizer(self, optimizer_view: OptimizerView, kept: dict[str, set[str]], file: Path) -> None:
        saved = self.manifest.get("optimizer")
        if saved is None:
            raise ValueError(
                f"{self.path} was saved by an engine without an optimizer, so it has no optimizer state; "
                "engine.load_weights(directory) loads only the weights"
            )
        compatibility.check_members(self._names, optimizer_view, saved, self.path)
        for name, item in self._names.items():
            if not item.trains:
                if kept.get(name):
                    self._refuse(f"{self.path} has optimizer state for {name!r}, which is not trained")
                continue
            there = kept.get(name, set())
            kept_here = self._contents.store.state(self._units[item]).tensors_of(item)
            mine = {key for key in kept_here if not key.endswith(SCALES)} - {"master"}
            if mine != there - {"master"}:
                self._refuse(
                    f"{self.path} has {sorted(there - {'master'})} for {name!r}, but the optimizer keeps "
                    f"{sorted(mine)}: it had other options (momentum, amsgrad, maximize) when it was saved"
                )
            if master_dtype(self._weights[name][1].dtype) is not None and "master" not in there:
                self._refuse(f"{self.path} has no '{name}/master', which {name!r} needs, since it is not in float32")
        for number, (key, group) in enumerate(zip(optimizer_view.groups, saved["groups"], strict=True)):
            options = self._decode_now(group["options"])
            compatibility.check_options(optimizer_view, key, number, options, file)
            for name in group["parameters"]:
                item, has = self._names[name], name in saved["torch"]
                if has and optimizer_view.rule(item) is not None:
                    raise ValueError(f"{file}: optimizer.torch must not have {name!r}, which ferryman updates")
                if optimizer_view.rule(item) is not None:
                    continue
                probe = optimizer_view.probe(key)
                forms = probe.states_like(key.number, item.tensor)
                if has:
                    self._check_own_state(name, forms, file, may_grow=not probe.is_of_torch)
                elif forms and all(forms) and saved["steps"][name] and item.tensor.numel():
                    raise ValueError(f"{file}: optimizer.torch must have {name!r}, which was updated, but does not")

    def _check_own_state(self, name: str, forms: Sequence[Mapping[str, Any]], file: Path, *, may_grow: bool) -> None:
        """Checks state by the headers of its tensors only, since the tensors themselves may need much memory."""
        value = self.manifest["optimizer"]["torch"][name]
        known = {name: _on_meta(self._rest[name][1]) for _, name, _ in encoding.references(value)}
        compatibility.check_own_state(name, forms, encoding.decode(value, known), file, may_grow=may_grow)

    def _decode_now(self, value: Any) -> Any:
        """Decodes a value whose tensors are small."""
        tensors = {name: tensor_file.read_tensor(*self._rest[name]) for _, name, _ in encoding.references(value)}
        return encoding.decode(value, tensors)


def _state_key(text: str) -> StateKey:
    found = parse_state_key(text)
    assert found is not None, text
    return found


def _size(entry: Entry) -> int:
    return math.prod(entry.shape)


def _copy_common(values: torch.Tensor, start: int, into: torch.Tensor, place: slice) -> None:
    """Copies the overlap of `values`, whose first element has the index `start`, into memory for the range `place`."""
    low, high = max(start, place.start), min(start + values.numel(), place.stop)
    if low < high:
        into[low - place.start : high - place.start].copy_(values[low - start : high - start])


def _new(entry: Entry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")


def _on_meta(entry: Entry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")
