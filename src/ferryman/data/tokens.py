"""Files of token ids. They are memory-mapped, so a corpus may be larger than memory."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

DTYPES = ("uint8", "uint16", "uint32")

# Before training starts, this many samples of this many tokens of each file are checked; all others when they are read.
_SAMPLES, _SAMPLE_TOKENS = 64, 4096


class TokenFile(NamedTuple):
    """The tokens of one file."""

    path: Path
    ids: np.ndarray[Any, Any]


class Tokens:
    """The concatenated tokens of several files."""

    def __init__(self, parts: Sequence[TokenFile], vocabulary: int) -> None:
        self._parts = list(parts)
        self._ends = list(itertools.accumulate(len(part.ids) for part in parts))
        self._vocabulary = vocabulary
        for part in parts:
            self._check_samples(part)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> torch.Tensor:
        """The tokens from `start` to `stop` as an int64 tensor."""
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
        return torch.from_numpy(np.concatenate(pieces)) if pieces else torch.empty(0, dtype=torch.int64, device="cpu")

    def _check_samples(self, part: TokenFile) -> None:
        """Checks samples all over the file, which detects a wrong dtype or tokenizer at once."""
        for i in range(_SAMPLES):
            start = i * max(0, len(part.ids) - _SAMPLE_TOKENS) // (_SAMPLES - 1)
            self._check(part, part.ids[start : start + _SAMPLE_TOKENS], start)

    def _check(self, part: TokenFile, ids: np.ndarray[Any, Any], start: int) -> None:
        wrong = (ids < 0) | (ids >= self._vocabulary)
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(
                f"{part.path}: token {start + at} is {int(ids[at])}, but the model's vocabulary has "
                f"{self._vocabulary} entries, from 0 to {self._vocabulary - 1}. The file may have been made with "
                "another tokenizer, or with another type than --token-dtype"
            )


def open_tokens(path: Path, dtype: str) -> TokenFile:
    """Maps a `.npy` file, which records its type, or a raw file of ids of type `dtype`."""
    if dtype not in DTYPES:
        raise ValueError(f"--token-dtype {dtype}: must be one of {', '.join(DTYPES)}")
    if path.suffix == ".npy":
        return TokenFile(path, _open_npy(path))
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise ValueError(
            f"{path}: its size of {size} bytes is not a multiple of {width}, the size of a {dtype} token; give the "
            f"type with --token-dtype ({', '.join(DTYPES)})"
        )
    if size == 0:
        raise ValueError(f"{path} is empty")
    ids = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    head = ids[: 2 * _SAMPLE_TOKENS]
    if dtype == "uint16" and size % 4 == 0 and len(head) > 64 and not head[1::2].any() and head.any():
        raise ValueError(
            f"{path}: every second token is 0, as if 4-byte integers were read as {dtype}; use --token-dtype uint32"
        )
    return TokenFile(path, ids)


def _open_npy(path: Path) -> np.ndarray[Any, Any]:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as a .npy file: {error}") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        what = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise ValueError(f"{path} must hold a one-dimensional array of integers, the token ids; it holds {what}")
    if len(ids) == 0:
        raise ValueError(f"{path} is empty")
    return ids
