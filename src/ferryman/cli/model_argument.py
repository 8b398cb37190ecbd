"""The MODEL argument of the commands: a transformers configuration, or a size of the built-in byte-level GPT.

Nothing is downloaded, and code that comes with a model is not run.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ferryman.checkpoint.pretrained import has_weights

BYTE_VOCABULARY = 256  # vocabulary size of a model whose tokens are bytes

_FORM = "gpt:layers=12,width=768,heads=12,context=1024"


@dataclass(frozen=True)
class GptSize:
    """A size of the built-in GPT."""

    layers: int
    width: int
    heads: int
    context: int

    @property
    def parameters(self) -> int:
        layer = 12 * self.width**2 + 13 * self.width
        return self.layers * layer + (BYTE_VOCABULARY + self.context + 2) * self.width


SIZES = {
    "tiny": GptSize(layers=2, width=64, heads=2, context=128),
    "mini": GptSize(layers=4, width=128, heads=4, context=256),
    "small": GptSize(layers=6, width=256, heads=8, context=512),
    "medium": GptSize(layers=12, width=384, heads=6, context=512),
    "base": GptSize(layers=12, width=768, heads=12, context=1024),
    "large": GptSize(layers=24, width=1024, heads=16, context=1024),
    "xl": GptSize(layers=36, width=1536, heads=16, context=1024),
}


@dataclass(frozen=True)
class ModelSpec:
    """The model that MODEL names, before it is built."""

    name: str  # as the user wrote it
    config: Any  # a transformers PretrainedConfig
    weights: Path | None = None  # the directory with pretrained weights, if there are any
    is_bytes: bool = False  # whether tokens are bytes, so that no tokenizer is needed

    def on_meta(self) -> nn.Module:
        """The model in training mode, on the meta device: no memory is allocated for its weights."""
        transformers = _transformers()
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(self.config, trust_remote_code=False)
        return model.train()

    def on_host(self) -> nn.Module:
        """The model in training mode, with newly initialized weights."""
        model: nn.Module = _transformers().AutoModelForCausalLM.from_config(self.config, trust_remote_code=False)
        return model.train()

    @property
    def context(self) -> int | None:
        """The longest sequence that the model accepts; None if its configuration does not say."""
        longest = getattr(self.config, "max_position_embeddings", None)
        return longest if isinstance(longest, int) else None


def parse_model(model: str) -> ModelSpec:
    """Reads the MODEL argument. A ValueError says what is required and what was found."""
    if model.startswith("gpt:"):
        return _gpt(model)
    path = Path(model).expanduser()
    if not path.exists():
        meant = _meant(model.removeprefix("gpt"), SIZES, "gpt:")
        raise ValueError(
            f"there is no model {model!r}{meant}: MODEL must be a transformers directory or config.json on this "
            f"machine, or a built-in GPT: {_known_sizes()}"
        )
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        inside = ", ".join(sorted(entry.name for entry in path.iterdir())[:4]) or "nothing"
        raise ValueError(f"{model!r} has no config.json, so it is not a transformers model; it contains {inside}")
    config = _read(file)
    _check_causal(config, file)
    return ModelSpec(model, config, weights=path if path.is_dir() and has_weights(path) else None)


def _gpt(model: str) -> ModelSpec:
    size = model.removeprefix("gpt:")
    gpt = SIZES[size] if size in SIZES else _free_form(model, size)
    config = _transformers().GPT2Config(
        vocab_size=BYTE_VOCABULARY,
        n_layer=gpt.layers,
        n_embd=gpt.width,
        n_head=gpt.heads,
        n_positions=gpt.context,
        # No dropout: training from scratch sees each byte about once.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return ModelSpec(model, config, is_bytes=True)


def _free_form(model: str, text: str) -> GptSize:
    if "=" not in text:
        meant = _meant(text, SIZES, "gpt:")
        raise ValueError(f"{model!r} is not a size of the built-in GPT{meant}; there are {_known_sizes()}")
    names = [field.name for field in dataclasses.fields(GptSize)]
    given: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in names:
            meant = _meant(name, names)
            raise ValueError(f"{model!r}: {name!r} is not one of {', '.join(names)}{meant}; the form is {_FORM}")
        if name in given:
            raise ValueError(f"{model!r}: {name!r} is given twice")
        if not (value.isascii() and value.isdigit() and int(value) > 0):
            raise ValueError(f"{model!r}: {name}={value!r} must be a positive integer; the form is {_FORM}")
        given[name] = int(value)
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"{model!r}: {' and '.join(missing)} must be given as well; the form is {_FORM}")
    gpt = GptSize(**given)
    if gpt.width % gpt.heads:
        raise ValueError(
            f"{model!r}: width={gpt.width} is not divisible by heads={gpt.heads}; it must be a multiple of it"
        )
    return gpt


def model_help() -> str:
    """The help text of the MODEL argument."""
    sizes = ", ".join(f"{name} {gpt.parameters / 1e6:.1f}" for name, gpt in SIZES.items())
    return (
        "A transformers directory or config.json, or gpt:SIZE, the built-in byte-level GPT. "
        f"SIZE is {sizes} (million parameters), or any other as {_FORM}."
    )


def _meant(given: str, names: Iterable[str], prefix: str = "") -> str:
    """A suggestion of the closest name, for error messages; empty if none is close."""
    near = difflib.get_close_matches(given, list(names), n=1)
    return f" (did you mean {prefix + near[0]!r}?)" if near else ""


def _known_sizes() -> str:
    return f"{', '.join(f'gpt:{size}' for size in SIZES)}, or any other as {_FORM}"


def _read(file: Path) -> Any:
    try:
        content = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{str(file)!r} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError(f"{str(file)!r} has no 'model_type', so it is not a transformers configuration")
    transformers = _transformers()
    kinds: dict[str, Any] = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    kind = content["model_type"]
    if kind not in kinds:
        meant = _meant(str(kind), kinds)
        own = ". It comes with its own code, which is not run" if "auto_map" in content else ""
        raise ValueError(
            f"{str(file)!r} has the model_type {kind!r}, which transformers {transformers.__version__} does not "
            f"know{meant}{own}"
        )
    try:
        # By the path of the file: a directory's name could be mistaken for a model on the hub.
        return transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a configuration's own checks can raise anything
        raise ValueError(f"transformers cannot use {str(file)!r}: {error}") from error


def _check_causal(config: Any, file: Path) -> None:
    kinds = _transformers()
    # Masked language models can be configured as decoders; otherwise they attend to later tokens as well.
    sees_all = type(config) in kinds.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if type(config) not in kinds.MODEL_FOR_CAUSAL_LM_MAPPING or sees_all:
        made_for = " and ".join(config.architectures or []) or type(config).__name__
        raise ValueError(
            f"{str(file)!r} is a {config.model_type!r} ({made_for}); a causal language model is required, which "
            "predicts the next token, such as 'gpt2', 'llama', 'mistral' or 'qwen3'"
        )


def _transformers() -> Any:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            "this command needs transformers, which is not installed: pip install 'ferryman[transformers]'"
        ) from error
    return transformers
