"""Outside steps the model just works, without gradients, and is the plain model."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from ferryman.engine import Engine
from support.devices import delay_copies
from support.models import CASES, assert_same, build, cut, on, plain_step, step, text
from support.slow import covering


def inputs(name, samples=2):
    batch = CASES[name].batch(samples, seed=9)
    if name != "two losses":  # it knows nothing without labels
        labels = batch.pop("labels")
        if name == "t5":
            batch["decoder_input_ids"] = labels
    return batch


def answer(model, batch):
    with torch.no_grad():
        result = model(**batch)
    return result.logits if "labels" not in batch else result.loss


@covering
@pytest.mark.parametrize("name", CASES)
def test_evaluation_equals_the_plain_model(name, device):
    delay_copies(device, 0.02)
    model = build(CASES[name]).eval()
    plain, batch = copy.deepcopy(model), inputs(name)
    with Engine(model, device=device) as engine:
        for _ in range(2):
            result = answer(model, batch)
            assert result.device.type == "cpu"  # where the batch is
            assert torch.equal(result, answer(plain, batch))
    assert (engine.fetches > 0) == (device.type != "cpu")


@covering
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral"])
def test_generate_equals_the_plain_model(name, beams, device):
    model = build(CASES[name]).eval()
    plain, ids = copy.deepcopy(model), text(2)["input_ids"]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
    with Engine(model, device=device):
        assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))


def test_batches_on_the_device_stay_there(accelerator):
    model = build(CASES["llama"]).eval()
    plain, ids = copy.deepcopy(model), text(2)["input_ids"]
    with Engine(model, device=accelerator):
        result = answer(model, {"input_ids": ids.to(accelerator)})
        assert result.device == accelerator
        assert torch.equal(result.cpu(), answer(plain, {"input_ids": ids}))


def test_inference_mode(device):
    model = build(CASES["llama"]).eval()
    plain, batch = copy.deepcopy(model), inputs("llama")
    with Engine(model, device=device), torch.inference_mode():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)


def test_weights_changed_in_between_are_seen(device):
    model = build(CASES["gpt2"]).eval()
    plain, batch = copy.deepcopy(model), inputs("gpt2")
    with Engine(model, device=device):
        answer(model, batch)
        with torch.no_grad():
            for each in (model, plain):
                for parameter in each.parameters():
                    parameter.mul_(0.5).add_(0.01)
        assert torch.equal(answer(model, batch), answer(plain, batch))
        model.load_state_dict(build(CASES["gpt2"], seed=3).state_dict())
        plain.load_state_dict(model.state_dict())
        assert torch.equal(answer(model, batch), answer(plain, batch))


class Following(nn.Module):
    """Assigns buffers in its forward, also without gradients: of its own, and of a block."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return torch.tanh(self.linear(x - self.mean))

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(self.Block(), self.Block())
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.blocks(x - self.mean)


class Normalized(nn.Module):
    """Edits buffers by functional batch norm, which gives them no new version: its own, and those of its blocks."""

    def __init__(self, blocks=2):
        super().__init__()
        self.blocks = nn.Sequential(*(Normalized(0) for _ in range(blocks)))
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        x = self.linear(self.blocks(x))
        return functional.batch_norm(x, self.mean, self.var, training=self.training)


@pytest.mark.parametrize("kind", [Following, Normalized])
def test_buffers_that_evaluation_changes(kind, device):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(6, 8)
    plain = on(device, model)
    with Engine(model, device=device, loss=lambda model, x: model(x).square().mean()) as engine, torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(engine.evaluate(x), plain(x.to(device)).square().mean())
            torch.testing.assert_close(model(x), plain(x.to(device)).cpu())
        with torch.enable_grad():
            torch.testing.assert_close(engine.forward_backward(x), plain(x.to(device)).square().mean().detach())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer.cpu())


def test_steps_and_evaluation_in_turn(device):
    """Neither disturbs the other: not what is remembered of the order, nor gradients, nor training mode."""
    case = CASES["bert"]
    model = build(case)
    plain = on(device, model)
    with Engine(model, device=device) as engine:
        for number in range(3):
            plain.zero_grad()
            engine.zero_grad()
            torch.manual_seed(number)
            expected = plain_step(plain, cut(case.batch(4), 2))
            torch.manual_seed(number)
            result = step(engine, model, case.batch(4), 2)
            assert_same(result, expected, case.loose)
            model.eval()
            plain.eval()
            there = {key: value.to(device) for key, value in inputs("bert").items()}
            assert torch.equal(answer(model, there), answer(plain, there))
            model.train()
            plain.train()
            for name, parameter in model.named_parameters():
                theirs = result.gradients[name]
                assert parameter.grad is theirs is None or torch.equal(parameter.grad, theirs)
            with torch.no_grad():
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    p.add_(0.01)
                    q.add_(0.01)


def test_state_dict_shows_current_weights(device):
    model = build(CASES["toy"])
    before = copy.deepcopy(model.state_dict())
    with Engine(model, device=device) as engine:
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.forward_backward(text(4), 2)
        optimizer.step()
        assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert {value.device.type for value in model.state_dict().values()} == {"cpu"}


def test_gradients_outside_a_step_are_refused(accelerator):
    model = build(CASES["toy"])
    with Engine(model, device=accelerator) as engine:
        with pytest.raises(ValueError, match=r"torch\.no_grad\(\).*engine\.forward_backward"):
            model(**text(2))
        engine.forward_backward(text(4), 2)


def test_a_failed_evaluation_leaves_the_engine_ready(device):
    model = build(CASES["toy"])
    plain = on(device, model)
    with Engine(model, device=device) as engine:
        with torch.no_grad(), pytest.raises((RuntimeError, TypeError)) as caught:
            model(input_ids=torch.randn(2, 8))
        assert not isinstance(caught.value, ValueError)
        assert all(isinstance(p, torch.nn.Parameter) and p.device.type == "cpu" for p in model.parameters())
        torch.manual_seed(1)
        expected = plain_step(plain, cut(text(4), 2))
        torch.manual_seed(1)
        assert_same(step(engine, model, text(4), 2), expected)


def test_a_block_by_itself_runs_on_the_host(device):
    """For looking at a part of the model: with the host's weights, with or without gradients."""
    model = build(CASES["toy"]).eval()
    plain, x = copy.deepcopy(model), torch.randn(2, 8, 16)
    with Engine(model, device=device):
        assert torch.equal(model.blocks[1](x), plain.blocks[1](x))


def test_a_part_of_the_model_runs_on_the_host(accelerator):
    model = build(CASES["llama"]).eval()
    embed, ids = copy.deepcopy(model.model.embed_tokens), text(2)["input_ids"]
    with Engine(model, device=accelerator), torch.no_grad():
        assert torch.equal(model.model.embed_tokens(ids), embed(ids))
        with pytest.raises(ValueError, match=r"called outside of a step .* pass the input on the CPU"):
            model.model.embed_tokens(ids.to(accelerator))


def test_weights_that_stay_on_the_device_are_copied_again_only_if_they_were_used(accelerator):
    model = build(CASES["gpt2"]).eval()
    batch = inputs("gpt2")
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=accelerator, held=True) as engine:
        engine.step(text(4), 2)
        first, fetches = answer(model, batch), engine.fetches
        assert torch.equal(answer(model, batch), first)
        assert engine.fetches == fetches
        model.transformer.h[0].mlp.c_fc.weight.data.mul_(2)
        assert not torch.equal(answer(model, batch), first)
        assert engine.fetches > fetches
