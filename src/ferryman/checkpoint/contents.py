"""What a checkpoint saves: the parts of an engine, and the names of their tensors in files."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn

from ferryman.distributed.ranks import Ranks
from ferryman.model.members import unchanged
from ferryman.model.units import Item, Unit
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.server import Server
from ferryman.server.store import RamStore


class Stateful(Protocol):
    """An object saved with the model, such as a scheduler or the position in the data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class Files(Protocol):
    """An object that is saved as files beside the model, such as a tokenizer. The engine does not load it."""

    def save_pretrained(self, directory: Any, /) -> Any: ...


Objects = Mapping[str, Stateful | Files]


def split_objects(objects: Objects) -> tuple[dict[str, Stateful], list[Files]]:
    """Separates objects with a state from those that are only saved as files."""
    with_state: dict[str, Stateful] = {}
    files: list[Files] = []
    for name, thing in objects.items():
        if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            with_state[name] = cast(Stateful, thing)
        elif hasattr(thing, "save_pretrained"):
            files.append(thing)
        else:
            raise ValueError(
                f"objects={{{name!r}: ...}} is a {type(thing).__name__}; objects to save must have state_dict() and "
                "load_state_dict(), or save_pretrained()"
            )
    return with_state, files


@dataclass(frozen=True)
class Contents:
    """The parts of an engine that a checkpoint saves. Used while no lane has work and all state is on the host."""

    model: nn.Module
    device: torch.device
    units: tuple[Unit, ...]
    store: RamStore
    optimizer_view: OptimizerView | None
    server: Server
    ranks: Ranks

    @property
    def is_adapted(self) -> bool:
        """Whether the model has PEFT adapters. Then only trained parameters are saved, not the base model."""
        return hasattr(self.model, "peft_config") and hasattr(self.model, "get_base_model")

    def check_whole(self) -> None:
        """Raises if a checkpoint could not restore the engine's current state."""
        self.store.check_values()
        for unit in self.units:
            unchanged(unit, self.store.weights(unit), self.store.trained)
            if self.optimizer_view is not None and any(item.tensor.grad is not None for item in unit.trained):
                raise ValueError(
                    "there are gradients from forward_backward that no update has used yet, and a checkpoint does not "
                    "save gradients: save after engine.update(), or discard them with engine.zero_grad()"
                )

    def names(self) -> dict[Item, str]:
        """The name in files of each tensor of the state_dict; for shared tensors the name that transformers uses."""
        lasting = self.model.state_dict()
        if strange := [name for name, value in lasting.items() if not isinstance(value, torch.Tensor)]:
            raise ValueError(
                f"{strange[0]!r} in the model's state_dict is not a tensor; a checkpoint can only hold tensors"
            )
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        dropped = set(getattr(self.model, "_keys_to_ignore_on_save", None) or ())
        found = {}
        for unit in sorted(self.units, key=lambda unit: bool(unit.modules)):  # residents first
            for item in unit.items:
                of_item = [place.name for place in item.places if place.name in lasting]
                left_out = not item.trains and (self.is_adapted or dropped.issuperset(of_item))
                if of_item and not left_out:
                    found[item] = next((name for name in of_item if name not in tied), of_item[0])
        return found

    def unit_of(self) -> dict[Item, Unit]:
        return {item: unit for unit in self.units for item in unit.items}


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of the global random generators of Python, numpy, torch and the device."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = numpy.random.get_state(legacy=False)
    if device.type != "cpu":
        found[device.type] = torch.get_device_module(device).get_rng_state(device)
    return found


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restores the states, except those of another type of device."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def try_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Raises if `set_random_states` would fail. The global generators are not changed: others are set."""
    random.Random().setstate(states["python"])
    torch.Generator().set_state(states["torch"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.RandomState().set_state(states["numpy"])
        if not 0 <= states["numpy"]["state"]["pos"] <= len(states["numpy"]["state"]["key"]):
            raise ValueError("numpy: the position must be within the state")  # numpy itself does not check that
    if device.type in states and device.type != "cpu":
        mine, theirs = torch.get_device_module(device).get_rng_state(device), states[device.type]
        if theirs.dtype != mine.dtype or theirs.shape != mine.shape:
            raise ValueError(
                f"{device.type}: the state must be {mine.dtype} of shape {tuple(mine.shape)}, but is {theirs.dtype} of "
                f"shape {tuple(theirs.shape)}"
            )


class StateKey(NamedTuple):
    """The name of a piece of optimizer state in a file: `layers.0.weight/exp_avg`. Where several ranks saved one part
    each, the offset of the part follows: `layers.0.weight/exp_avg@4096`."""

    name: str  # of the parameter
    key: str  # in the optimizer's state
    start: int = 0  # offset of the first element

    def __str__(self) -> str:
        return f"{self.name}/{self.key}" + (f"@{self.start}" if self.start else "")


def parse_state_key(text: str) -> StateKey | None:
    """Parses the name of a piece of optimizer state; returns None if it is not one."""
    found = _STATE_KEY.fullmatch(text)
    return None if found is None else StateKey(found[1], found[2], int(found[3] or 0))


_STATE_KEY = re.compile(r"(.+)/([^/@]+)(?:@([1-9][0-9]{0,18}))?", re.DOTALL)
