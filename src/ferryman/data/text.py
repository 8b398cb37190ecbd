"""Finds text files and tokenizes them into one token file."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ferryman.runtime.files import replacing_file

SUFFIXES = (".txt", ".md", ".rst", ".py")
TOKEN_SUFFIXES = (".bin", ".npy")

_CHUNK_BYTES = 2**20  # of text that are in memory at a time

Encode = Callable[[bytes], Any]  # from whole lines to an array of token ids


def find_files(
    paths: Sequence[Path], suffixes: Sequence[str] = SUFFIXES, *, without: Path | None = None
) -> tuple[list[Path], list[Path]]:
    """Finds text files and token files.

    Directories are searched recursively for files with these suffixes, in the order of names, without hidden files and
    without the directory `without`, to which the run writes.
    """
    found: list[Path] = []
    wanted = {suffix if suffix.startswith(".") else f".{suffix}" for suffix in suffixes}
    for path in paths:
        if path.is_dir():
            files = sorted(_inside(path, without))
            chosen = [file for file in files if file.suffix in (*wanted, *TOKEN_SUFFIXES)]
            if not chosen:
                raise ValueError(_nothing_in(path, files, sorted(wanted)))
            found += chosen
        elif path.exists():
            found.append(path)
        else:
            raise ValueError(f"--data {path}: there is no such file or directory")
    texts = [path for path in found if path.suffix not in TOKEN_SUFFIXES]
    if texts and not any(path.stat().st_size for path in texts):
        what = f"{texts[0]} is" if len(texts) == 1 else f"all {len(texts)} text files are"
        raise ValueError(f"--data: {what} empty")
    return texts, [path for path in found if path.suffix in TOKEN_SUFFIXES]


def _inside(directory: Path, without: Path | None) -> Iterator[Path]:
    left_out = None if without is None else without.resolve()
    for inside, folders, names in os.walk(directory):
        here = Path(inside)
        folders[:] = [name for name in folders if name[0] != "." and (here / name).resolve() != left_out]
        yield from (here / name for name in names if name[0] != "." and (here / name).is_file())


def _nothing_in(path: Path, files: Sequence[Path], wanted: Sequence[str]) -> str:
    there = collections.Counter(file.suffix or "none" for file in files).most_common(5)
    found = ", ".join(f"{count} {suffix}" for suffix, count in there) if there else "no files"
    return (
        f"--data {path}: no file in this directory ends in {', '.join(wanted)} (text) or {', '.join(TOKEN_SUFFIXES)} "
        f"(tokens); it has {found}. Use --suffix to say which files are text"
    )


def as_bytes(text: bytes) -> np.ndarray[Any, Any]:
    """Encodes text as bytes: every byte is a token."""
    return np.frombuffer(text, dtype=np.uint8)


def with_tokenizer(tokenizer: Any) -> Encode:
    """An encoder that uses a transformers tokenizer. Bytes that are not valid UTF-8 are replaced."""

    def encode(text: bytes) -> Any:
        return tokenizer(text.decode(errors="replace"), add_special_tokens=False, verbose=False)["input_ids"]

    return encode


def write_tokens(
    texts: Iterable[Path], target: Path, encode: Encode, dtype: str, between: bytes | int, vocabulary: int
) -> None:
    """Writes the tokens of all texts to one file, atomically. `between` is a text or token put between two files."""
    with replacing_file(target) as partial, partial.open("wb") as out:
        for number, path in enumerate(texts):
            if number:
                ids = [between] if isinstance(between, int) else encode(between)
                out.write(_packed(ids, dtype, vocabulary, path))
            with path.open("rb") as file:
                for lines in _lines(file):
                    out.write(_packed(encode(lines), dtype, vocabulary, path))


def _packed(ids: Any, dtype: str, vocabulary: int, path: Path) -> bytes:
    """Token ids as bytes. Raises if an id is outside the vocabulary, since it would be truncated to another id."""
    found = np.asarray(ids, dtype=np.int64 if isinstance(ids, list) else None)
    if found.size and int(found.max()) >= vocabulary:
        raise ValueError(
            f"{path}: the tokenizer produced token {int(found.max())}, but the model's vocabulary has {vocabulary} "
            f"entries, from 0 to {vocabulary - 1}; use the tokenizer that belongs to the model, or a larger vocab_size "
            "in its config.json"
        )
    return found.astype(dtype).tobytes()


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Reads a file in pieces that end with a line if possible, so that no word is cut."""
    rest = b""
    while piece := file.read(_CHUNK_BYTES):
        whole, newline, after = piece.rpartition(b"\n")
        if newline:
            yield rest + whole + newline
            rest = after
        elif len(rest) < _CHUNK_BYTES:
            rest += piece
        else:
            yield rest
            rest = piece
    if rest:
        yield rest
