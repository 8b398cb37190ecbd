"""What compiling units saves, on the CPU with Inductor, and how often something is compiled.

    python benchmarks/compile.py

Blocks of GPT-2 and Llama of width 256. A step of an engine with `compile=True` is compared with a step of one without,
and plain PyTorch with compiled blocks with plain PyTorch, in turn, by their medians. Compilations are counted by Dynamo
at 12 and at 24 blocks: the numbers should be equal.
"""

import copy
from collections.abc import Callable

import torch
from _bench import machine, medians
from torch import nn
from torch._dynamo.utils import counters
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, logging

from ferryman.engine import Engine

WIDTH, CONTEXT, VOCABULARY, MICRO_BATCHES, ROUNDS = 256, 128, 256, 4, 5


def gpt2(layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=layers, n_head=4, n_positions=CONTEXT, use_cache=False
    )
    return GPT2LMHeadModel(config)


def llama(layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDTH * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (MICRO_BATCHES, CONTEXT), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def engine(model: nn.Module, *, compiled: bool) -> Engine:
    model = copy.deepcopy(model)
    return Engine(model, torch.optim.AdamW(model.parameters()), device="cpu", compile=compiled)


def plain(model: nn.Module, *, compiled: bool) -> Callable[[], None]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if compiled:
        for block in model.get_submodule("model.layers" if hasattr(model, "model") else "transformer.h").children():
            block.compile()

    def step() -> None:
        for ids in batch()["input_ids"].chunk(MICRO_BATCHES):
            (model(input_ids=ids, labels=ids).loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compilations(make: Callable[[int], PreTrainedModel], layers: int) -> int:
    torch._dynamo.reset()
    counters.clear()
    with engine(make(layers), compiled=True) as made:
        for _ in range(3):
            made.step(batch(), MICRO_BATCHES)
    return counters["stats"]["unique_graphs"]


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(f"one thread on {machine()}; {MICRO_BATCHES} micro-batches of {CONTEXT} tokens, seconds per step")
    print(
        f"{'blocks':10}{'plain':>8}{'compiled':>10}{'ratio':>8}{'engine':>10}{'compiled':>10}{'ratio':>8}  compilations"
    )
    for make in (gpt2, llama):
        counts = {layers: compilations(make, layers) for layers in (12, 24)}
        torch._dynamo.reset()
        model = make(12)
        engines = {"engine": engine(model, compiled=False), "engine compiled": engine(model, compiled=True)}
        ways: dict[str, Callable[[], object]] = {
            "plain": plain(model, compiled=False),
            "plain compiled": plain(model, compiled=True),
            **{name: lambda made=made: made.step(batch(), MICRO_BATCHES) for name, made in engines.items()},
        }
        took = medians(ways, rounds=ROUNDS, warm=3)
        row = f"{make.__name__:10}"
        for name in ("plain", "engine"):
            row += f"{took[name]:>{8 if name == 'plain' else 10}.3f}{took[f'{name} compiled']:>10.3f}"
            row += f"{took[f'{name} compiled'] / took[name]:>8.2f}"
        print(f"{row}  " + ", ".join(f"{count} at {layers} blocks" for layers, count in counts.items()), flush=True)
        for made in engines.values():
            made.close()


if __name__ == "__main__":
    main()
