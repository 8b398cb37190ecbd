"""Models to train, batches for them, and the plain PyTorch loop that the engine must equal."""

from __future__ import annotations

import copy
import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from transformers.modeling_outputs import CausalLMOutput

from ferryman.engine import Engine

WIDTH, VOCABULARY, LENGTH = 16, 64, 8

# Transformers, with random weights.

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT_SIZES = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 32}


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT_SIZES, num_key_value_heads=2))


def bert() -> nn.Module:
    config = hf.BertConfig(**TEXT_SIZES)
    assert config.hidden_dropout_prob > 0
    return hf.BertForMaskedLM(config)


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 4, "num_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0))


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT_SIZES, num_key_value_heads=2, num_local_experts=4))


def vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=16, patch_size=8, num_labels=5))


# Written by hand.


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Toy(nn.Module):
    """A stack of blocks between an embedding and a head; the others vary how the blocks are used."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> CausalLMOutput:
        logits = self.head(self.norm(self.hidden(input_ids)))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)


class Skips(Toy):
    """A U-net: activations of the first blocks are inputs of the last ones."""

    def __init__(self) -> None:
        super().__init__(6)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x, held = self.embed(ids), []
        for block in self.blocks[:3]:
            x = block(x)
            held.append(x)
        for block in self.blocks[3:]:
            x = block(x + 0.5 * held.pop())
        return x


class Reused(Toy):
    """Its two blocks are used at three depths each."""

    def __init__(self) -> None:
        super().__init__(2)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return x


class Skipping(Toy):
    """The first token of a micro-batch decides which blocks it skips."""

    def __init__(self) -> None:
        super().__init__(4)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x, skipped = self.embed(ids), int(ids[0, 0]) % 5
        for number, block in enumerate(self.blocks):
            if number not in (skipped, skipped + 1):
                x = block(x)
        return x


class Frozen(Toy):
    """The embedding and half of the blocks do not train."""

    def __init__(self) -> None:
        super().__init__(4)
        self.embed.requires_grad_(False)
        self.blocks[:2].requires_grad_(False)


class FrozenTop(Toy):
    """Its upper blocks are frozen, so gradients pass through them."""

    def __init__(self) -> None:
        super().__init__(4)
        self.head.requires_grad_(False)
        self.blocks[2:].requires_grad_(False)


class TwoLosses(Toy):
    """A second head, in the middle."""

    def __init__(self) -> None:
        super().__init__(4)
        self.early = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        x, losses = self.embed(input_ids), []
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in (1, 3):
                logits = (self.early if number == 1 else self.head)(x)
                losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        return CausalLMOutput(loss=losses[0] * 0.3 + losses[1])


def text(samples: int, seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def images(samples: int, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(samples, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (samples,), generator=generator)}


@dataclass(frozen=True)
class Case:
    """A model, and which of its gradients may differ in the last bits: their terms are summed in another order."""

    make: Callable[[], nn.Module]
    batch: Callable[..., dict[str, torch.Tensor]] = text
    loose: tuple[str, ...] = ()  # patterns of parameters' names


CASES = {
    "gpt2": Case(gpt2, loose=("transformer.wte.weight",)),  # tied: embedding and head
    "llama": Case(llama),
    "bert": Case(bert, loose=("bert.embeddings.word_embeddings.weight",)),
    # Tied as well; all decoder blocks use the encoder's output, and all blocks the first one's position bias.
    "t5": Case(t5, loose=("shared.weight", "encoder.*", "*.relative_attention_bias.weight")),
    "mixtral": Case(mixtral),
    "vit": Case(vit, images),
    "toy": Case(Toy),
    # What goes down feeds two blocks.
    "skips": Case(Skips, loose=("embed.weight", "blocks.[0-2].*")),
    "reused": Case(Reused, loose=("blocks.*",)),
    "skipping": Case(Skipping),
    "frozen": Case(Frozen),
    "frozen top": Case(FrozenTop),
    "two losses": Case(TwoLosses),
}


def build(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return case.make().train()


# The reference.


class Result(NamedTuple):
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]


def model_loss(model: nn.Module, part: Any) -> torch.Tensor:
    return model(**part).loss


def cut(batch: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    columns = [value.chunk(count) for value in batch.values()]
    return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.cpu().clone() for name, p in model.named_parameters()}


def plain_step(plain: nn.Module, parts: list[Any], loss: Callable[..., torch.Tensor] = model_loss) -> Result:
    """Accumulates over the micro-batches, weighted by samples, each seeded as the engine does."""
    device = next(plain.parameters()).device
    seed = int(torch.randint(0, 2**62, ()))
    sizes = [len(next(iter(part.values() if isinstance(part, dict) else part))) for part in parts]
    losses = []
    with torch.random.fork_rng(devices=[]):
        for number, part in enumerate(parts):
            torch.manual_seed(seed + number)
            here = torch.utils._pytree.tree_map(lambda x: x.to(device), part)
            losses.append(loss(plain, here) * (sizes[number] / sum(sizes)))
            losses[-1].backward()
    return Result(functools.reduce(torch.add, losses).detach().cpu(), gradients(plain))


def step(engine: Engine, model: nn.Module, batch: Any, micro_batches: int | None = 4) -> Result:
    return Result(engine.forward_backward(batch, micro_batches).cpu(), gradients(model))


def on(device: torch.device, model: nn.Module) -> nn.Module:
    """A deep copy of the model on the device: the plain model."""
    return copy.deepcopy(model).to(device)


def compare_steps(
    engine: Engine, model: nn.Module, plain: nn.Module, batch: Any, counts: Iterable[int], loose: tuple[str, ...] = ()
) -> Iterator[int]:
    """Makes steps with these numbers of micro-batches, each also with the plain copy of the model, which must give the
    same. Yields the number of each step after it."""
    for number, count in enumerate(counts):
        plain.zero_grad()
        engine.zero_grad()
        torch.manual_seed(number)
        expected = plain_step(plain, cut(batch, count))
        torch.manual_seed(number)
        assert_same(step(engine, model, batch, count), expected, loose)
        yield number


def assert_same(result: Result, plain: Result, loose: tuple[str, ...] = ()) -> None:
    assert torch.equal(result.loss, plain.loss), (result.loss.item(), plain.loss.item())
    largest = max(float(g.abs().max()) for g in plain.gradients.values() if g is not None)
    assert result.gradients.keys() == plain.gradients.keys()
    for name, theirs in plain.gradients.items():
        ours = result.gradients[name]
        assert (ours is None) == (theirs is None), name
        if ours is None or theirs is None or torch.equal(ours, theirs):
            continue
        off = float((ours - theirs).abs().max()) / largest
        assert any(fnmatch.fnmatch(name, pattern) for pattern in loose), f"{name} is off by {off}"
        assert off <= 1e-6, name
