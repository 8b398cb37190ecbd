"""A loss that is computed in chunks of the vocabulary equals the plain one; what needs logits is refused by name."""

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from ferryman.engine import Engine
from ferryman.model import chunked_cross_entropy
from ferryman.model.chunked_cross_entropy import COLUMNS
from support.devices import delay_copies
from support.models import SIZES, Toy, cut, on, plain_step, step
from support.slow import covering, slow

VOCABULARY = 2 * COLUMNS + 300  # three chunks, the last one smaller
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
HEADS = {"num_key_value_heads": 2}


def gpt2(**options):
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options))


def phi():
    model = hf.PhiForCausalLM(hf.PhiConfig(**TEXT))
    assert model.lm_head.bias is not None
    return model


def gemma2():
    config = hf.Gemma2Config(**TEXT, **HEADS, head_dim=4, final_logit_softcapping=0.5)
    return hf.Gemma2ForCausalLM(config)


def cohere():
    return hf.CohereForCausalLM(hf.CohereConfig(**TEXT, **HEADS, logit_scale=0.25))


def granite():
    return hf.GraniteForCausalLM(hf.GraniteConfig(**TEXT, **HEADS, logits_scaling=3.0))


def mixtral():
    config = hf.MixtralConfig(**TEXT, **HEADS, num_local_experts=4, output_router_logits=True)
    return hf.MixtralForCausalLM(config)


def bart():
    sizes = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
    config = hf.BartConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes, is_decoder=True)
    return hf.BartForCausalLM(config)


def lora():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **HEADS))
    return get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear"))


class Shifting(Toy):
    """Slices its logits itself, as older models do."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def get_output_embeddings(self):
        return self.head

    def loss(self, logits, labels):
        shifted = logits[..., :-1, :].contiguous()
        return nn.CrossEntropyLoss()(shifted.view(-1, shifted.size(-1)), labels[..., 1:].reshape(-1))

    def forward(self, input_ids, labels=None):
        logits = self.head(self.norm(self.hidden(input_ids)))
        return hf.modeling_outputs.CausalLMOutput(loss=self.loss(logits, labels), logits=logits)


MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **HEADS)),
    "gpt2, tied": gpt2,
    "a bias": phi,
    "soft-capping": gemma2,
    "logit_scale": cohere,
    "logits_scaling": granite,
    "router loss": mixtral,
    "a loss of its own": bart,
    "slices": Shifting,
    "LoRA": lora,
}


def make(name="llama"):
    torch.manual_seed(0)
    return MODELS[name]().train()


def tokens(samples=8, length=8, ignored=3):
    ids = torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def optimizer(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def assert_near(ours, plain, tolerance=2e-6):
    assert ours.loss.item() == pytest.approx(plain.loss.item(), rel=tolerance)
    largest = max(gradient.norm() for gradient in plain.gradients.values() if gradient is not None)
    for name, theirs in plain.gradients.items():
        mine = ours.gradients[name]
        assert (mine is None) == (theirs is None), name
        if theirs is not None:
            # Some gradients are nothing but rounding, such as those of the biases of keys.
            off = (mine - theirs).norm() / (theirs.norm() + 1e-2 * largest)
            assert off <= tolerance, f"{name} is off by {off}"


def counting(counts, name, real):
    def counted(*args):
        counts[name] += 1
        return real(*args)

    return counted


@pytest.fixture
def calls(monkeypatch):
    """How often chunked losses went forward and backward."""
    counts = {"forward": 0, "backward": 0}
    function = chunked_cross_entropy._TokenLosses
    for name in counts:
        monkeypatch.setattr(function, name, staticmethod(counting(counts, name, getattr(function, name))))
    return counts


@pytest.mark.parametrize(("name", "late"), [*((name, False) for name in MODELS), *slow(("gpt2, tied", True))])
def test_equals_the_plain_loss(name, late, device, calls):
    model = make(name)
    plain = on(device, model)
    with Engine(model, optimizer(model), device=device, chunked_loss=True) as engine:
        if late:
            delay_copies(device)
        for seed in range(2):  # in the second one, the graph is kept at the turn
            torch.manual_seed(seed)
            ours = step(engine, model, tokens(), 4)
            torch.manual_seed(seed)
            assert_near(ours, plain_step(plain, cut(tokens(), 4)))
            engine.zero_grad()
            plain.zero_grad()
    assert calls["forward"] >= 8, "the chunked loss was used"


def test_nothing_is_computed_twice_at_the_turn(device, calls):
    model = make()
    with Engine(model, optimizer(model), device=device, chunked_loss=True) as engine:
        engine.step(tokens(), 4)
        calls.update(forward=0, backward=0)
        engine.step(tokens(), 4)
    assert calls == {"forward": 4, "backward": 4}


@covering
@pytest.mark.parametrize("name", ["llama", *slow("soft-capping")])
def test_bfloat16_is_as_precise_as_the_plain_loss(name, device):
    exact, model = make(name), make(name).bfloat16()
    with torch.no_grad():
        for ours, theirs in zip(exact.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    plain = on(device, model)
    truth, expected = plain_step(exact, cut(tokens(), 4)), plain_step(plain, cut(tokens(), 4))
    with Engine(model, optimizer(model), device=device, chunked_loss=True) as engine:
        ours = step(engine, model, tokens(), 4)
    assert ours.loss.dtype == torch.float32
    assert ours.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    for key, true in truth.gradients.items():
        off, plain_off = ((result.gradients[key].float() - true).norm() for result in (ours, expected))
        assert off <= 1.5 * plain_off + 1e-3 * true.norm(), key


def test_updates_with_a_budget(accelerator):
    model = make()
    plain = on(accelerator, model)
    theirs = optimizer(plain)
    engine = Engine(model, optimizer(model), device=accelerator, chunked_loss=True, memory="64MiB", max_grad_norm=1.0)
    with engine:
        for _ in range(2):
            loss = engine.step(tokens())
            count = engine.choice.micro_batches
            assert loss.item() == pytest.approx(plain_step(plain, cut(tokens(), count)).loss.item(), rel=1e-5)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            theirs.step()
            theirs.zero_grad()
    for (name, ours), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, other.cpu(), rtol=1e-4, atol=1e-6, msg=name)


def test_num_items_in_batch(device):
    model, batch = make(), tokens()
    batch["labels"][:2, :6] = -100  # micro-batches have different numbers of labels
    items = (batch["labels"][:, 1:] != -100).sum()
    plain = on(device, model)
    plain(**{k: v.to(device) for k, v in batch.items()}).loss.backward()  # the mean over all labels
    with Engine(model, optimizer(model), device=device, chunked_loss=True, reduction="sum") as engine:
        engine.forward_backward({**batch, "num_items_in_batch": items}, 4)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(engine.gradient(name), parameter.grad.cpu(), rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_of_the_users_own(reduction, device, calls):
    def loss(model, batch):
        logits = model(input_ids=batch["input_ids"]).logits.float()
        found = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=7, reduction=reduction)
        return found.square().mean()

    model, batch = make(), tokens(ignored=0)
    batch["labels"][:, 2] = 7
    plain = on(device, model)
    with Engine(model, optimizer(model), device=device, chunked_loss=True, loss=loss) as engine:
        assert_near(step(engine, model, batch, 4), plain_step(plain, cut(batch, 4), loss), 1e-5)
    assert calls["backward"] >= 4


def test_ignored_tokens_do_not_contribute_whatever_they_are():
    hidden = torch.randn(4, 8)
    hidden[1] = torch.inf
    hidden.requires_grad_()
    weight = torch.randn(VOCABULARY, 8, requires_grad=True)
    target = torch.tensor([3, -100, VOCABULARY - 1, 5000])
    loss = chunked_cross_entropy.chunked_cross_entropy(hidden, weight, None, target, (), -100, "mean")
    loss.backward()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()
    kept = torch.tensor([0, 2, 3])
    assert loss.item() == pytest.approx(F.cross_entropy(hidden[kept] @ weight.t(), target[kept]).item(), rel=1e-6)
    nothing = torch.full((4,), -100)
    assert chunked_cross_entropy.chunked_cross_entropy(hidden, weight, None, nothing, (), -100, "mean").isnan()


def test_autocast(calls):
    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**batch).loss

    model = make()
    plain = on(torch.device("cpu"), model)
    with Engine(model, optimizer(model), device="cpu", chunked_loss=True, loss=loss) as engine:
        assert_near(step(engine, model, tokens(), 2), plain_step(plain, cut(tokens(), 2), loss), 2e-2)
    assert calls["backward"] >= 2


def test_outside_of_steps_the_model_has_logits(device, calls):
    model = make()
    plain = on(device, model)
    batch, here = tokens(), {name: value.to(device) for name, value in tokens().items()}
    with Engine(model, optimizer(model), device=device, chunked_loss=True) as engine:
        engine.forward_backward(batch, 2)
        with torch.no_grad():
            torch.testing.assert_close(model(**batch).logits, plain(**here).logits.cpu())
        prompt = batch["input_ids"][:1]
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
        assert found.shape == (1, 12)
        before = calls["forward"]
        assert engine.evaluate(batch).item() == pytest.approx(plain(**here).loss.item(), rel=1e-6)
        assert calls["forward"] == before + 1
        assert calls["backward"] > 0


def test_closing_gives_the_model_back(device):
    model = make("gpt2, tied")
    before = [dict(vars(module)) for module in model.modules()]
    engine = Engine(model, optimizer(model), device=device, chunked_loss=True)
    assert "forward" in vars(model.lm_head)
    engine.close()
    assert [vars(module).keys() for module in model.modules()] == [members.keys() for members in before]
    assert model(**tokens()).logits.shape == (8, 8, VOCABULARY)


def test_a_small_vocabulary_is_a_single_chunk(device, calls):
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**TEXT, "vocab_size": COLUMNS}, **HEADS))
    batch = {name: values.clamp_max(COLUMNS - 1) for name, values in tokens().items()}
    plain = on(device, model)
    with Engine(model, optimizer(model), device=device, chunked_loss=True) as engine:
        ours, theirs = step(engine, model, batch, 2), plain_step(plain, cut(batch, 2))
    assert torch.equal(ours.loss, theirs.loss)
    assert calls["forward"] == 0


# Refused.


def uses(change):
    def loss(model, batch):
        logits = model(input_ids=batch["input_ids"]).logits.flatten(0, 1)
        return change(logits, batch["labels"].flatten())

    return loss


USES = {
    "label_smoothing=0.1": lambda z, t: F.cross_entropy(z, t, label_smoothing=0.1),
    "weight=": lambda z, t: F.cross_entropy(z, t, weight=torch.ones(VOCABULARY)),
    r"log_softmax": lambda z, t: F.log_softmax(z, -1)[0, 0],
    "Tensor.mean": lambda z, t: z.mean(),
    r"the operator __add__": lambda z, t: F.cross_entropy(z + 1, t),
    "multiplied by a Tensor": lambda z, t: F.cross_entropy(z * torch.ones(()), t),
    "selects some of the vocabulary": lambda z, t: F.cross_entropy(z[:, :100], t),
    r"logits of the shape \(64, .* a target of the shape \(32,\)": lambda z, t: F.cross_entropy(z, t[::2]),
    r"a view of the shape \(-1,\)": lambda z, t: z.view(-1),
}


@pytest.mark.parametrize("message", USES)
def test_other_uses_of_logits_are_refused_by_name(message):
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = Engine(model, optimizer(model), device="cpu", chunked_loss=True, loss=uses(USES[message]))
    with engine, pytest.raises(ValueError, match=f"chunked_loss=True: .*{message}.*chunked_loss=False"):
        engine.step(tokens(), 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_heads_that_cannot_be_cut_are_refused_by_name():
    with pytest.raises(ValueError, match=r"needs to know which module computes the logits.*get_output_embeddings"):
        Engine(Toy(), device="cpu", chunked_loss=True)
    base = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **HEADS))
    adapted = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["lm_head", "q_proj"]))
    with pytest.raises(ValueError, match=r"'base_model.model.lm_head' is a peft.*lora.*Linear.*target_modules="):
        Engine(adapted, device="cpu", chunked_loss=True)
    assert all("forward" not in vars(module) for module in adapted.modules())
    with pytest.raises(ValueError, match="inside the unit 'inner'"):
        Engine(Wrapped(), device="cpu", chunked_loss=True, units=["inner"])


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make()

    def get_output_embeddings(self):
        return self.inner.lm_head


def test_hooks_on_the_head_are_refused():
    model = make()
    model.lm_head.register_forward_hook(lambda *_: None)
    with (
        Engine(model, device="cpu", chunked_loss=True) as engine,
        pytest.raises(ValueError, match="the head has a hook"),
    ):
        engine.forward_backward(tokens(), 1)
