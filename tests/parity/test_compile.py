"""Compiled units: each kind is compiled once, and steps equal those of the uncompiled model."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn
from torch._dynamo.utils import counters

from ferryman.engine import Engine
from support.models import on

VOCABULARY, LENGTH = 64, 8
WAYS = {"eager": {}, "deferred": {"max_grad_norm": 0.5}}


@pytest.fixture(autouse=True)
def _compiles_anew():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# Eager attention: the virtual device's fused one is not known to Dynamo.
def llama(layers, dropout=0.0):
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=2, attention_dropout=dropout, use_cache=False,
            attn_implementation="eager",
        )
    )  # fmt: skip


def gpt2(layers, dropout=0.0):
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=layers, n_head=2, n_positions=LENGTH, use_cache=False,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, attn_implementation="eager",
        )
    )  # fmt: skip


def blocks_of(model):
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def batch_of(samples, seed=0):
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def plain_step(model, optimizer, batch, micro_batches, max_grad_norm=None):
    device, total = next(model.parameters()).device, 0.0
    for ids in batch["input_ids"].chunk(micro_batches):
        loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss / micro_batches
        loss.backward()
        total += loss.item()
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total


def assert_trains_like_plain(engine, model, plain, steps, micro_batches=2, max_grad_norm=None):
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    for seed in range(steps):
        loss = engine.step(batch_of(4, seed), micro_batches).item()
        expected = plain_step(plain, theirs, batch_of(4, seed), micro_batches, max_grad_norm)
        assert loss == pytest.approx(expected, rel=1e-5)
    for (name, ours), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), other.detach().cpu(), rtol=1e-4, atol=1e-5, msg=name)


def graphs():
    return counters["stats"]["unique_graphs"]


class Backend:
    """A backend of the user's own, which runs what Dynamo has captured as it is."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def in_place(model, backend):
    for block in blocks_of(model):
        block.compile(backend=backend)


def wrapped(model, backend):
    blocks = blocks_of(model)
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, backend=backend)


def as_a_whole_in_place(model, backend):
    model.compile(backend=backend)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compile_it", [in_place, wrapped, as_a_whole_in_place], ids=lambda made: made.__name__)
@pytest.mark.parametrize("make", [llama, gpt2], ids=lambda make: make.__name__)
def test_what_the_user_has_compiled_stays_compiled(make, compile_it, way, device):
    counted = []
    for layers in (2, 4):
        torch._dynamo.reset()
        backend = Backend()
        model = make(layers)
        plain = on(device, model)
        compile_it(model, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with Engine(model, optimizer, device=device, **WAYS[way]) as engine:
            assert_trains_like_plain(engine, model, plain, 3, **WAYS[way])
        counted.append(backend.graphs)
    assert counted[0] == counted[1] > 0, "equal blocks share what is compiled"


def test_nothing_is_compiled_again_when_slots_steps_or_micro_batches_change(accelerator):
    model, backend = llama(4), Backend()
    plain = on(accelerator, model)
    in_place(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first = None
    for slots in (2, 3):
        with Engine(model, optimizer, device=accelerator, slots=slots, held=False) as engine:
            theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
            for seed, count in enumerate((1, 1, 3, 2, 2)):  # micro-batches of the same shape
                loss = engine.step(batch_of(2 * count, seed), count).item()
                assert loss == pytest.approx(plain_step(plain, theirs, batch_of(2 * count, seed), count), rel=1e-4)
                first = backend.graphs if first is None else first
    assert backend.graphs == first


@pytest.mark.parametrize("make", [gpt2], ids=["gpt2"])
def test_the_engine_compiles_units(make):
    """With Inductor, which needs a C++ compiler; dropout draws the same numbers when a unit runs again."""
    counted = []
    for layers in (2, 4):
        torch._dynamo.reset()
        counters.clear()
        model = make(layers)
        plain = on(torch.device("cpu"), model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with Engine(model, optimizer, device="cpu", compile=True) as engine:
            assert_trains_like_plain(engine, model, plain, 3)
            counted.append(graphs())
            engine.step(batch_of(4, 1), 2)
            assert graphs() == counted[-1]
            with torch.no_grad():
                ids = batch_of(2)["input_ids"]
                torch.testing.assert_close(model(ids).logits, copy.deepcopy(model)(ids).logits, rtol=1e-4, atol=1e-5)
    assert counted[0] == counted[1] > 0
    model = make(2, dropout=0.2)
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.5), device="cpu", compile=True) as engine:
        losses = [engine.step(batch_of(4), 2).item() for _ in range(8)]
    assert losses[-1] < losses[0]


def test_closing_gives_compiled_modules_back(device):
    model, backend = llama(2), Backend()
    in_place(model, backend)
    blocks = [*blocks_of(model)]
    compiled = [block._compiled_call_impl for block in blocks]
    wrapper = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend=backend)
    holder = nn.ModuleList([wrapper, torch.compile(nn.Sequential(nn.Linear(4, 4)), backend=backend)])
    forwards = [one.forward for one in holder]
    with Engine(model, device=device):
        pass
    assert [block._compiled_call_impl for block in blocks] == compiled

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = holder

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    chain = Chain()
    with Engine(chain, device=device, loss=lambda model, x: model(x)) as engine:
        engine.forward_backward(torch.randn(4, 4), 2)
    assert [one.forward for one in holder] == forwards
    before = backend.graphs
    chain(torch.randn(4, 4))
    assert backend.graphs > before, "the wrapper compiles as before"


def test_a_model_that_was_compiled_as_a_whole_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"compiled as a whole.*Engine\(model\._orig_mod, \.\.\., compile=True\)"):
        Engine(torch.compile(llama(1)), device="cpu")


def test_a_device_without_a_backend_is_refused(virtual):
    with pytest.raises(ValueError, match=r"compile=True: torch\.compile has no backend for the device 'virtual:0'"):
        Engine(llama(1), device=virtual, compile=True)
