"""No copy in the loop of steps blocks the host, and no wait spins."""

import pytest
import torch

from ferryman.engine import Engine
from ferryman.relay.inputs import Inputs
from support.devices import delay_copies, torch_virtual
from support.models import CASES, build, text
from support.slow import covering
from support.small_models import Model, batches, loss

WAYS = {
    "eager": {},
    "deferred": {"max_grad_norm": 1.0},
    "on the device": {"updates": "static:0.5"},
    "held": {"held": True},
    "float16": {"precision": "fp16"},
}


@covering
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_blocks_after_the_first_steps(way, stash, virtual):
    model = build(CASES["toy"])
    optimizer = torch.optim.AdamW(model.parameters())
    with Engine(model, optimizer, device=virtual, stash=stash, **WAYS[way]) as engine:
        for seed in range(3):  # trials, and steps with checks
            engine.step(text(8, seed), 4)
        delay_copies(virtual, 0.001)
        with torch_virtual.watch() as seen:
            for seed in range(3):
                engine.step(text(8, seed), 4)
        assert (seen.counters.blocking_copies, seen.counters.spinning_waits) == (0, 0)


def test_a_blocking_copy_of_an_input_would_be_found(virtual, monkeypatch):
    monkeypatch.setattr(Inputs, "bring", lambda inputs, part: {name: x.to(virtual) for name, x in part.items()})
    with pytest.raises(AssertionError, match=r"\(24, 0\)"):  # two tensors, four micro-batches, three steps
        test_nothing_blocks_after_the_first_steps("eager", "device", virtual)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_no_memory_waits_for_another_streams_event(stash, virtual, monkeypatch):
    """The engine holds references until an event instead: how late copies are does not change what is reserved."""

    def refuse(tensor, stream):
        raise AssertionError("record_stream was called")

    monkeypatch.setattr(torch.Tensor, "record_stream", refuse)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with Engine(model, optimizer, device=virtual, loss=loss, stash=stash, updates="static:0.5") as engine:
        delay_copies(virtual, 0.002)
        for batch in batches(3):
            engine.step(batch, 2)


def test_inputs_of_any_layout_arrive_as_they_are(virtual):
    given = {
        "strided": torch.arange(24.0).reshape(4, 6)[:, ::2],
        "transposed": torch.arange(24.0).reshape(4, 6).T,
        "expanded": torch.arange(4).expand(3, 4),
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "flags": torch.tensor([True, False]),
        "a scalar": torch.tensor(3.0),
        "none": torch.empty(0, 3),
        "complex": torch.tensor([1 + 2j]).conj(),
        "narrow": torch.rand(5).bfloat16(),
        "a gradient": torch.rand(3, requires_grad=True),
        "there": torch.rand(3, device=virtual),
        "text": "not a tensor",
    }
    model = Model()
    with Engine(model, device=virtual, loss=loss) as engine:
        relay = engine._parts.relay
        with relay.compute.current():
            for _ in range(3):  # the same staging memory again
                here = relay.inputs.bring(given)
                for name, x in given.items():
                    if isinstance(x, torch.Tensor):
                        plain = x.to(virtual)
                        assert here[name].device == virtual
                        assert here[name].stride() == plain.stride(), name
                        assert here[name].dtype == x.dtype
                        assert torch.equal(here[name].cpu(), x.cpu()), name
                    else:
                        assert here[name] is x
            assert here["there"].data_ptr() == given["there"].data_ptr(), "it is not copied"
            here["a gradient"].sum().backward()
            assert torch.equal(given["a gradient"].grad, torch.ones(3))


def test_a_batch_that_is_overwritten_after_a_step_does_not_change_it(virtual):
    """Copies are late. A loader may use the same memory for every batch."""
    losses = []
    for reuse in (False, True):
        torch.manual_seed(0)
        model = Model()
        memory = None
        with Engine(model, torch.optim.AdamW(model.parameters()), device=virtual, loss=loss) as engine:
            delay_copies(virtual, 0.002)
            for x, y in batches(4):
                if reuse:
                    memory = torch.empty_like(x) if memory is None else memory
                    x = memory.copy_(x)
                losses.append(float(engine.step((x, y), 2)))
            delay_copies(virtual, 0)
    assert losses[:4] == losses[4:]
