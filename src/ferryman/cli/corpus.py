"""The data of a run: windows of tokens for training and for evaluation."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ferryman.cli.defaults import window
from ferryman.cli.model_argument import BYTE_VOCABULARY, ModelSpec
from ferryman.cli.run_directory import RunDirectory
from ferryman.cli.train_options import TrainOptions
from ferryman.data.text import SUFFIXES, as_bytes, find_files, with_tokenizer, write_tokens
from ferryman.data.tokens import Tokens, open_tokens
from ferryman.data.windows import Windows
from ferryman.distributed.ranks import Ranks
from ferryman.runtime import host_memory
from ferryman.runtime.sizes import show_bytes

_TOKEN_ID_BYTES = 8


@dataclass(frozen=True)
class Corpus:
    training: Windows
    validation: Windows | None
    tokens: int
    sequence: int
    tokenizer: Any  # a transformers tokenizer; None if tokens are bytes, or come from token files
    is_bytes: bool
    note: str | None = None  # shown to the user

    def decode(self, ids: list[int]) -> str | None:
        """The text of these tokens; None if there is no way to decode them."""
        if self.is_bytes:
            # A model may generate tokens that are not bytes, if its vocabulary is larger. They are decoded as 0xFF,
            # which is never valid in UTF-8, so that they are shown as replacement characters.
            return bytes(min(token, 0xFF) for token in ids).decode(errors="replace")
        return None if self.tokenizer is None else str(self.tokenizer.decode(ids))


def open_corpus(options: TrainOptions, model: ModelSpec, run: RunDirectory) -> Corpus:
    """Tokenizes text into the run's directory, unless that was done before; token files are mapped in place."""
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
    note = (
        f"no tokenizer in {_directory(model)}: text is read as bytes, which use {BYTE_VOCABULARY} of the {vocabulary} "
        "entries of the vocabulary"
    )
    return _split(tokens, options, sequence, tokenizer, is_bytes, note if is_bytes and not model.is_bytes else None)


def _split(
    tokens: Tokens, options: TrainOptions, sequence: int, tokenizer: Any, is_bytes: bool, note: str | None
) -> Corpus:
    kept = int(len(tokens) * options.validation)
    kept = 0 if options.validation == 0 else max(sequence, kept)
    border = len(tokens) - kept
    if border < sequence:
        raise ValueError(
            f"--data has only {len(tokens)} tokens: a window takes {sequence} (--sequence)"
            + (f", and {kept} are held out for evaluation (--validation)" if kept else "")
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


def _check_bytes(model: ModelSpec, vocabulary: int) -> None:
    if model.weights is not None and vocabulary != BYTE_VOCABULARY:
        raise ValueError(
            f"{model.name!r} is pretrained and has no tokenizer beside its weights, so text cannot be tokenized for "
            "it; put its tokenizer there (tokenizer.json), or give token files (.bin, .npy)"
        )
    if vocabulary < BYTE_VOCABULARY:
        raise ValueError(
            f"without a tokenizer every byte of the text is a token, and {model.name!r} has a vocabulary of only "
            f"{vocabulary}; raise it to {BYTE_VOCABULARY} or more, or give token files (.bin, .npy)"
        )


def _directory(model: ModelSpec) -> Path:
    path = Path(model.name).expanduser()
    return path if path.is_dir() else path.parent


def _tokenizer(model: ModelSpec) -> Any:
    """The tokenizer in the directory of the configuration; None if there is none."""
    directory = _directory(model)
    if model.is_bytes or not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    transformers: Any = importlib.import_module("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged tokenizer files can raise anything
        raise ValueError(f"the tokenizer in {str(directory)!r} cannot be used: {error}") from error


def check_batch(options: TrainOptions, model: ModelSpec, corpus: Corpus, device: torch.device, ranks: Ranks) -> None:
    """Refuses a batch that the data or the host's memory cannot provide. The default fits any data."""
    windows = corpus.training.count
    if options.batch > max(windows, TrainOptions.batch):
        raise ValueError(
            f"--batch {options.batch}: the data has {windows} windows of {corpus.sequence} tokens to train on, so one "
            f"step would see some of them twice. Give --batch {windows} or less, more --data, or a shorter --sequence"
        )
    here = _min_host_bytes(options, model, corpus.sequence, device) * len(ranks.node)
    needed, free = here // ranks.size, host_memory.available()
    if free is not None and needed > free:
        raise ValueError(
            f"--batch {options.batch}: its {options.batch * corpus.sequence:,} tokens take at least "
            f"{show_bytes(needed)} of host memory, and {show_bytes(free)} is free. Give a smaller --batch or a shorter "
            "--sequence" + (", or more --micro-batches" if device.type == "cpu" else "")
        )


def _min_host_bytes(options: TrainOptions, model: ModelSpec, sequence: int, device: torch.device) -> int:
    """A lower bound of the host memory that a batch takes: its tokens, as windows and as a batch; the boundary
    activations of each layer, if they wait on the host; and on the CPU the logits of a micro-batch and their gradient.
    """
    tokens, config = options.batch * sequence, model.config
    needed = 2 * _TOKEN_ID_BYTES * tokens
    if device.type == "cpu" or options.stash == "host":
        width = 2 if options.precision in ("bf16", "fp16") else 4
        needed += tokens * config.hidden_size * config.num_hidden_layers * width
    if device.type == "cpu":
        samples = -(-options.batch // (options.micro_batches or 1))
        needed += 2 * 4 * samples * sequence * config.vocab_size
    return int(needed)
