"""Tokens: flat files of token ids, mapped into memory, so that a corpus may be larger than it."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

DTYPES = ("uint8", "uint16", "uint32")

# Before training starts, this many stretches of this many tokens are looked at; all others when they are read.
_LOOKS, _LOOK = 64, 4096


class TokenFile(NamedTuple):
    """The tokens of one file."""

    path: Path
    ids: np.ndarray[Any, Any]


class Tokens:
    """The tokens of several files, one after the other."""

    def __init__(self, parts: Sequence[TokenFile], vocabulary: int) -> None:
        self._parts = list(parts)
        self._ends = list(itertools.accumulate(len(part.ids) for part in parts))
        self._vocabulary = vocabulary
        for part in parts:
            self._look(part)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Those from `start` up to `stop`, as a model wants them."""
        assert 0 <= start <= stop <= len(self)
        pieces = []
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            part, end = self._parts[index], min(stop, self._ends[index])
            first = self._ends[index] - len(part.ids)
            piece = np.asarray(part.ids[start - first : end - first], dtype=np.int64)
            self._check(part, piece, start - first)
            pieces.append(piece)
            start, index = end, index + 1
        return torch.from_numpy(np.concatenate(pieces)) if pieces else torch.empty(0, dtype=torch.int64)

    def _look(self, part: TokenFile) -> None:
        """At some of it, all over the file: with the wrong dtype or tokenizer, this tells at once."""
        for i in range(_LOOKS):
            start = i * max(0, len(part.ids) - _LOOK) // (_LOOKS - 1)
            self._check(part, part.ids[start : start + _LOOK], start)

    def _check(self, part: TokenFile, ids: np.ndarray[Any, Any], start: int) -> None:
        wrong = (ids < 0) | (ids >= self._vocabulary)
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(
                f"{part.path}: token {start + at} is {int(ids[at])}, and the model's vocabulary has "
                f"{self._vocabulary}, so ids from 0 to {self._vocabulary - 1}. Was the file made with another "
                "tokenizer, or with another type of number than --token-dtype says?"
            )


def open_tokens(path: Path, dtype: str) -> TokenFile:
    """A `.npy` file, which knows its type, or one that is nothing but ids of type `dtype`."""
    if dtype not in DTYPES:
        raise ValueError(f"--token-dtype {dtype}: there are {', '.join(DTYPES)}")
    if path.suffix == ".npy":
        return TokenFile(path, _open_npy(path))
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise ValueError(
            f"{path}: {size} bytes are no whole number of {dtype} tokens ({width} bytes each); say what they are with "
            f"--token-dtype ({', '.join(DTYPES)})"
        )
    if size == 0:
        raise ValueError(f"{path} is empty")
    ids = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    head = ids[: 2 * _LOOK]
    if dtype == "uint16" and size % 4 == 0 and len(head) > 64 and not head[1::2].any() and head.any():
        raise ValueError(
            f"{path}: every second token is 0, as when numbers of 4 bytes are read as {dtype}; use --token-dtype uint32"
        )
    return TokenFile(path, ids)


def _open_npy(path: Path) -> np.ndarray[Any, Any]:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as a .npy file: {error}") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        what = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise ValueError(f"{path} must hold one row of whole numbers, the token ids; it holds {what}")
    if len(ids) == 0:
        raise ValueError(f"{path} is empty")
    return ids
