"""What has been loaded into an engine, and whether it is whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from ferryman.checkpoint.contents import Contents
from ferryman.checkpoint.loading import Checkpoint


class Loaded:
    """Of one engine."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._from: tuple[Path, list[int]] | None = None  # a checkpoint, and the tensors' versions then
        self._half: dict[str, Path] = {}

    @contextlib.contextmanager
    def replacing(self, path: Path, *parts: str) -> Iterator[None]:
        """These parts of the engine are read from files; until that has ended well they are nothing."""
        self._from = None
        self._half.update(dict.fromkeys(parts, path))
        yield
        for part in parts:
            del self._half[part]

    def check(self) -> None:
        for part, path in self._half.items():
            raise ValueError(f"{part} may be half those of {path}, which failed to load; load another checkpoint")

    def came_from(self, path: Path) -> None:
        self._from = path, _versions(self._model)

    def load_again(self, contents: Contents) -> None:
        """The engine was built anew, with what the model and torch's optimizer could hold: that is not all."""
        if self._from is not None:
            path, then = self._from
            if then == _versions(self._model):  # else the user has other weights in mind
                Checkpoint(path, contents, {}).load_training()


def _versions(model: nn.Module) -> list[int]:
    """Which count edits in place."""
    return [parameter._version for parameter in model.parameters()]
