"""Small models for the checks: plain `torch.nn` models, and GPT-2 and Llama where transformers is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

VOCABULARY = 128

Batch = dict[str, torch.Tensor]


class Output(NamedTuple):
    loss: torch.Tensor


class Block(nn.Module):
    """A transformer block. Attention is written out, because fused kernels may not be deterministic."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = 4
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.gather = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        queries, keys, values = (
            part.view(samples, length, self.heads, -1).transpose(1, 2)
            for part in self.attend(self.before(x)).chunk(3, dim=-1)
        )
        scores = queries @ keys.transpose(-1, -2) * (width // self.heads) ** -0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        shares = self.dropout(scores.masked_fill(later, -1e4).softmax(-1))
        x = x + self.dropout(self.gather((shares @ values).transpose(1, 2).reshape(x.shape)))
        deeper: torch.Tensor = self.dropout(self.down(F.gelu(self.up(self.between(x)))))
        return x + deeper


class Transformer(nn.Module):
    """A small transformer with dropout. By default its head is tied to the embedding."""

    def __init__(self, blocks: int = 4, width: int = 64, *, tied: bool = True, length: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(length, width, dtype=torch.float32, device="cpu") * 0.02)
        self.blocks = nn.ModuleList(Block(width, dropout=0.1) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.05)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        x = self.embed(input_ids) + self.places[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()))


class Stack(nn.Module):
    """Blocks between two linear layers: more units than the device has slots.

    It has no embedding: in controls that leave out a wait values are wrong, and a wrong index can abort the process.
    """

    def __init__(self, blocks: int = 4, width: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, dropout=0.1) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> Output:
        deep = self.first(x)
        for block in self.blocks:
            deep = block(deep)
        return Output((self.last(deep) - x).square().mean())


def tied() -> nn.Module:
    return Transformer()


def untied() -> nn.Module:
    return Transformer(tied=False)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = "eager"  # written out, as in `Block`
    model = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    model.loss_type = "ForCausalLM"  # the default; set to avoid a warning of transformers
    return model


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """Builds a model with fixed weights, without changing the state of the random generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().train()


def batch(seed: int, samples: int = 4, length: int = 16) -> Batch:
    ids = torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed), device="cpu")
    return {"input_ids": ids, "labels": ids.clone()}


def features(seed: int, samples: int = 4, length: int = 16, width: int = 64) -> Batch:
    """A batch for a `Stack`."""
    return {
        "x": torch.randn(
            samples, length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
        )
    }


def tied_names(model: nn.Module) -> set[str]:
    """Names, as in `named_parameters`, of the parameters that are used in several places."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {found[0] for found in names.values() if len(found) > 1}
