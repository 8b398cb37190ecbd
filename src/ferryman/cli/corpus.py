"""The data of a run: what is trained on and what is kept for evaluation, as windows of tokens."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferryman.cli.defaults import window
from ferryman.cli.model import BYTES, Description
from ferryman.cli.run import Run
from ferryman.cli.train_options import TrainOptions
from ferryman.data.text import SUFFIXES, as_bytes, find_files, with_tokenizer, write_tokens
from ferryman.data.tokens import Tokens, open_tokens
from ferryman.data.windows import Windows


@dataclass(frozen=True)
class Corpus:
    training: Windows
    validation: Windows | None
    tokens: int
    sequence: int
    tokenizer: Any  # of transformers; None: tokens are bytes, or nobody knows
    is_bytes: bool
    note: str | None = None  # what may surprise

    def decode(self, ids: list[int]) -> str | None:
        """Text, where it is known how tokens become text."""
        if self.is_bytes:
            return bytes(ids).decode(errors="replace")
        return None if self.tokenizer is None else str(self.tokenizer.decode(ids))


def open_corpus(options: TrainOptions, model: Description, run: Run) -> Corpus:
    """Text is written into the run as tokens, unless it was before; token files are used where they are."""
    sequence, cache = window(options.sequence, model), run.tokens
    texts, token_files = find_files(options.data or [], options.suffix or SUFFIXES, without=run.directory)
    vocabulary = int(model.config.vocab_size)
    tokenizer = _tokenizer(model)
    is_bytes = model.is_bytes or (tokenizer is None and bool(texts))
    dtype = "uint8" if is_bytes else "uint16" if vocabulary <= 2**16 else "uint32"
    if texts and is_bytes:
        _check_bytes(model, vocabulary)
    if texts and not cache.exists():
        end = None if is_bytes else tokenizer.eos_token_id
        encode = as_bytes if is_bytes else with_tokenizer(tokenizer)
        write_tokens(texts, cache, encode, dtype, b"\n" if end is None else end, vocabulary)
    parts = [open_tokens(cache, dtype)] if texts else []
    parts += [open_tokens(path, options.token_dtype) for path in token_files]
    tokens = Tokens(parts, vocabulary)
    note = f"no tokenizer in {_directory(model)}: text is read as bytes, vocabulary {BYTES} of {vocabulary}"
    return _split(tokens, options, sequence, tokenizer, is_bytes, note if is_bytes and not model.is_bytes else None)


def _split(
    tokens: Tokens, options: TrainOptions, sequence: int, tokenizer: Any, is_bytes: bool, note: str | None
) -> Corpus:
    kept = int(len(tokens) * options.validation)
    kept = 0 if options.validation == 0 else max(sequence, kept)
    border = len(tokens) - kept
    if border < sequence:
        raise ValueError(
            f"--data has {len(tokens)} tokens, too few: a window takes {sequence} (--sequence)"
            + (f", and {kept} are kept for evaluation (--validation)" if kept else "")
            + ". Give more data or a shorter --sequence"
        )
    return Corpus(
        Windows(tokens, sequence, stop=border, seed=options.seed),
        Windows(tokens, sequence, start=border) if kept else None,
        len(tokens),
        sequence,
        tokenizer,
        is_bytes,
        note,
    )


def _check_bytes(model: Description, vocabulary: int) -> None:
    if model.weights is not None and vocabulary != BYTES:
        raise ValueError(
            f"{model.name!r} is pretrained and has no tokenizer beside its weights, so it is not known how text "
            "becomes its tokens; put its tokenizer there (tokenizer.json), or give token files (.bin, .npy)"
        )
    if vocabulary < BYTES:
        raise ValueError(
            f"without a tokenizer every byte of the text is a token, and {model.name!r} has a vocabulary of "
            f"{vocabulary}, less than {BYTES}; raise it, or give token files (.bin, .npy)"
        )


def _directory(model: Description) -> Path:
    path = Path(model.name).expanduser()
    return path if path.is_dir() else path.parent


def _tokenizer(model: Description) -> Any:
    """That lies beside the configuration; None if there is none."""
    directory = _directory(model)
    if model.is_bytes or not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    transformers: Any = importlib.import_module("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a tokenizer's files make it raise
        raise ValueError(f"the tokenizer in {str(directory)!r} cannot be used: {error}") from error
