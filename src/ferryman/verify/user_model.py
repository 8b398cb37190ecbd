"""A user's own model, as `ferryman verify --model my_module:make` names it."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ferryman.model.loss import Loss, model_loss
from ferryman.model.units import hint
from ferryman.plan.batch import samples_in

_MOST = 4  # micro-batches
_CONTRACT = "it must return (model, batch) or (model, batch, loss)"


class Made(NamedTuple):
    """What one call of the user's function has returned."""

    model: nn.Module
    batch: Any
    loss: Loss


class UserModel:
    """Calls the function `my_module:make`. Every check gets a model of its own, with the same weights as the others."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._make = _find(place)
        self._first: Made | None = self._call()  # a mistake in it shows before any check begins

    def make(self) -> Made:
        made, self._first = self._first or self._call(), None
        return made

    def _call(self) -> Made:
        seed_all(0)
        found = self._make()
        about = f"--model {self._place}: {_CONTRACT}"
        if not isinstance(found, tuple) or len(found) not in (2, 3):
            count = f" of {len(found)}" if isinstance(found, tuple) else ""
            raise ValueError(f"{about}, and it returned a {type(found).__name__}{count}")
        model, batch, *rest = found
        loss = rest[0] if rest else model_loss
        if not isinstance(model, nn.Module):
            raise ValueError(f"{about}, where the model is a torch.nn.Module; its model is a {type(model).__name__}")
        if not isinstance(batch, dict | tuple | list):
            raise ValueError(
                f"{about}, where the batch is a dict or tuple of tensors, or a list of micro-batches; its batch is a "
                f"{type(batch).__name__}"
            )
        if not callable(loss) or isinstance(loss, nn.Module):
            raise ValueError(
                f"{about}, where the loss is a function of the model and a micro-batch; its loss is a "
                f"{type(loss).__name__}"
            )
        return Made(model, batch, loss)


def seed_all(seed: int) -> None:
    """The global generators, as the engine seeds them for a micro-batch."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def micro_batches(batch: Any) -> int:
    """As many as a check makes of the batch: four, or fewer where it has fewer samples; a list is taken as it is."""
    if isinstance(batch, list):
        return len(batch)
    samples = samples_in(batch) or 1
    length = -(-samples // _MOST)
    return -(-samples // length)


def _find(place: str) -> Callable[[], Any]:
    name, _, function = place.partition(":")
    if not (name and function):
        raise ValueError(f"--model {place}: a module and a function in it are required, such as my_module:make")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python` does; the command's own path begins elsewhere
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise ValueError(
            f"--model {place}: the module {name!r} cannot be imported from {here}: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        what = (
            "has no function" if found is None else f"has something of type {type(found).__name__}, not a function, as"
        )
        raise ValueError(
            f"--model {place}: the module {name!r} {what} {function!r}{hint(function, _functions(vars(module)))}"
        )
    return found  # type: ignore[no-any-return]


def _functions(names: dict[str, Any]) -> list[str]:
    return [name for name, value in names.items() if callable(value)]
