"""The user's own model, given by `ferryman verify --model my_module:make`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ferryman.model.loss import Loss, model_loss
from ferryman.model.unit_discovery import hint
from ferryman.plan.batch import samples_in
from ferryman.verify.reference import seed_all

_MAX_MICRO_BATCHES = 4
_CONTRACT = "it must return (model, batch) or (model, batch, loss)"


class ModelAndBatch(NamedTuple):
    """The return value of the user's function."""

    model: nn.Module
    batch: Any
    loss: Loss


class UserModel:
    """Calls the function `my_module:make`. Every check gets its own model, all with the same initial weights."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._make = _find(place)
        self._first: ModelAndBatch | None = self._call()  # raises here if the function is wrong, before any check

    def make(self) -> ModelAndBatch:
        made, self._first = self._first or self._call(), None
        return made

    def _call(self) -> ModelAndBatch:
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
        if not isinstance(batch, dict | tuple | list | torch.Tensor):
            raise ValueError(
                f"{about}, where the batch is a tensor, a dict or tuple of tensors, or a list of micro-batches; its "
                f"batch is a {type(batch).__name__}"
            )
        if not callable(loss) or isinstance(loss, nn.modules.loss._Loss):
            raise ValueError(
                f"{about}, where the loss is a function of the model and a micro-batch; its loss is a "
                f"{type(loss).__name__}"
            )
        return ModelAndBatch(model, batch, loss)


def micro_batches(batch: Any) -> int:
    """The number of micro-batches that checks use: the entries of a list; else at most four, by samples."""
    if isinstance(batch, list):
        return len(batch)
    samples = samples_in(batch) or 1
    length = -(-samples // _MAX_MICRO_BATCHES)
    return -(-samples // length)


def _find(place: str) -> Callable[[], Any]:
    name, _, function = place.partition(":")
    if not (name and function):
        raise ValueError(f"--model {place}: must name a module and a function in it, such as my_module:make")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python` does; the path of an installed command does not start here
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
