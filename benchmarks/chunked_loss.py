"""What a loss in chunks of the vocabulary saves and costs, on the virtual accelerator.

    python benchmarks/chunked_loss.py

A Llama of two small blocks with a vocabulary of 128,256 trains on one micro-batch of 1,024 tokens, with
`chunked_loss=True` and without. *Above the rest* is the peak of device memory minus the peak of a step with 16
tokens: the part that grows with the tokens, most of which are the logits. The target is a tenth of the logits in
float32.

The width is small, so that a step takes seconds here; matrix products are small, too, so most of the time of a step
goes into elementwise operations on the logits. Both variants run in turn, and medians are compared.
"""

import copy
from collections.abc import Callable

import torch
import torch_virtual
from _bench import machine, medians_of
from transformers import LlamaConfig, LlamaForCausalLM

from ferryman.engine import Engine

DEVICE = "virtual:0"
VOCABULARY, TOKENS, FEW_TOKENS, WIDTH, ROUNDS = 128_256, 1024, 16, 64, 3
TARGET_SHARE = 0.1  # of the logits' size


def make() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
    )
    return LlamaForCausalLM(config).train()


def batch_of(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def step(engine: Engine, tokens: int) -> None:
    engine.forward_backward(batch_of(tokens), 1)
    engine.zero_grad()
    torch_virtual.synchronize()


def peak(engine: Engine, tokens: int) -> int:
    step(engine, tokens)  # a trial precedes the first step of a kind
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    step(engine, tokens)
    return torch.accelerator.max_memory_allocated(DEVICE)


def compare() -> None:
    model = make()
    logits = TOKENS * VOCABULARY * 4
    above, engines = {}, {}
    for name, chunked in (("whole logits", False), ("chunks", True)):
        engines[name] = Engine(copy.deepcopy(model), device=DEVICE, chunked_loss=chunked, recompute="always")
        above[name] = peak(engines[name], TOKENS) - peak(engines[name], FEW_TOKENS)
    ways: dict[str, Callable[[], object]] = {
        name: lambda engine=engine: step(engine, TOKENS) for name, engine in engines.items()
    }
    elapsed, processor = medians_of(ways, rounds=ROUNDS, warm=0)  # steps above have warmed it up
    for engine in engines.values():
        engine.close()
    print(f"\nlogits of {logits / 1e6:.0f} MB; target: at most {TARGET_SHARE:.0%} of that above the rest")
    print(f"{'':14}{'above the rest':>16}{'of the logits':>15}{'step':>10}{'ratio':>8}{'processor':>12}{'ratio':>8}")
    for name in ways:
        ratios = [took[name] / took["whole logits"] for took in (elapsed, processor)]
        print(
            f"{name:14}{above[name] / 1e6:>13.1f} MB{above[name] / logits:>15.3f}"
            f"{elapsed[name]:>8.2f} s{ratios[0]:>8.2f}{processor[name]:>10.2f} s{ratios[1]:>8.2f}"
        )


if __name__ == "__main__":
    print(machine())
    print(f"{TOKENS:,} tokens, a vocabulary of {VOCABULARY:,}, width {WIDTH}, float32, forward and backward")
    compare()
