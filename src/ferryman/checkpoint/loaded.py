"""Which checkpoint an engine was loaded from, and whether loading was completed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from ferryman.checkpoint.contents import Contents
from ferryman.checkpoint.loading import Checkpoint


class Loaded:
    """The load status of one engine."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._from: tuple[Path, list[int]] | None = None  # the checkpoint, and the tensor versions after loading
        self._half: dict[str, Path] = {}  # parts of the engine that are being loaded, or whose loading failed

    @contextlib.contextmanager
    def replacing(self, path: Path, *parts: str) -> Iterator[None]:
        """Context in which these parts of the engine are read from files. If it raises, they cannot be used."""
        self._from = None
        self._half.update(dict.fromkeys(parts, path))
        yield
        for part in parts:
            del self._half[part]

    def check(self) -> None:
        for part, path in self._half.items():
            raise ValueError(f"{part} may be half overwritten, since loading {path} failed; load another checkpoint")

    def came_from(self, path: Path) -> None:
        self._from = path, _versions(self._model)

    def load_again(self, contents: Contents) -> None:
        """Loads the checkpoint again after the engine was rebuilt, since the model and torch's optimizer do not hold
        all of its state (such as the lower bits of bf16 weights)."""
        if self._from is not None:
            path, then = self._from
            if then == _versions(self._model):  # otherwise the user has edited the weights since
                Checkpoint(path, contents, {}).load_training()


def _versions(model: nn.Module) -> list[int]:
    """The version counters of the parameters, which count in-place edits."""
    return [parameter._version for parameter in model.parameters()]
