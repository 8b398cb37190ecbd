"""PEFT: adapters train while the model below is streamed and frozen."""

import pytest
import torch
from peft import LoraConfig, PeftModel, VeraConfig, get_peft_model
from transformers import Trainer

import ferryman
from support.devices import torch_virtual
from support.models import cut, on, plain_step, text
from support.slow import covering, slow
from support.trainers import assert_near, assert_same_logs, build, ferryman_trainer, logs, trainer, weights


def adapted(model="llama", **options):
    options = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": "all-linear", **options}
    torch.manual_seed(5)
    model = get_peft_model(build(model), LoraConfig(**options))
    with torch.no_grad():  # or the first steps would train half of each adapter
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.train()


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


KINDS = {
    "LoRA": {},
    "dropout": {"lora_dropout": 0.2},
    "a trained head": {"modules_to_save": ["lm_head"]},
    "DoRA, rsLoRA": {"use_dora": True, "use_rslora": True},
    "one layer, biases": {"layers_to_transform": [1], "bias": "all", "target_modules": None},
}


def assert_trains_as_plain(model, device, max_grad_norm=None):
    """Losses of a few steps, and the weights after them."""
    plain = on(device, model)
    optimizer, theirs = (torch.optim.AdamW(trained(which), lr=1e-2) for which in (model, plain))
    with ferryman.Engine(model, optimizer, device=device, max_grad_norm=max_grad_norm) as engine:
        for step in range(3):
            torch.manual_seed(step)
            loss = engine.step(text(8, step), 4)
            torch.manual_seed(step)
            expected = plain_step(plain, cut(text(8, step), 4)).loss
            assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
            if max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained(plain), max_grad_norm)
            theirs.step()
            theirs.zero_grad()
    assert_near(dict(model.state_dict()), {name: value.cpu() for name, value in plain.state_dict().items()})


@covering
@pytest.mark.parametrize("kind", ["LoRA", "dropout", "one layer, biases", *slow("a trained head", "DoRA, rsLoRA")])
@pytest.mark.parametrize("model", ["llama", *slow("gpt2")])
def test_equals_plain_training(device, model, kind):
    model = adapted(model, **KINDS[kind])
    before = {name: parameter.clone() for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert_trains_as_plain(model, device, 0.5)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters() if name in before)


def test_vera_whose_units_share_their_buffers(device):
    torch.manual_seed(5)
    model = get_peft_model(build("llama"), VeraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()
    assert_trains_as_plain(model, device)


def test_the_frozen_model_has_no_state_and_no_gradients(virtual):
    model = adapted()
    count = sum(parameter.numel() for parameter in trained(model))
    whole = sum(parameter.numel() for parameter in model.parameters())
    with ferryman.Engine(model, torch.optim.AdamW(trained(model)), device=virtual, max_grad_norm=1.0) as engine:
        account = engine.host_account
        assert account["optimizer state"] <= 2 * 4 * (count + 16 * len(trained(model)))  # each padded
        assert account["gradients"] <= 4 * (count + 16 * len(trained(model)))
        engine.step(text(8), 4)
        engine.wait()
        with torch_virtual.watch(virtual) as seen:
            engine.forward_backward(text(2), 1)
        assert seen.counters.h2d_bytes > 4 * whole / 2  # it is streamed: all but what was there already
        assert all((parameter.grad is None) != parameter.requires_grad for parameter in model.parameters())
        # Out: the adapters' gradients and what little the stash and the loss take, not the model's.
        assert seen.counters.d2h_bytes < 4 * whole / 2
        assert engine.units[1].name.endswith("layers.0")


@pytest.mark.parametrize("kind", ["LoRA", *slow("a trained head")])
def test_trainer_saves_adapters_and_resumes(device, tmp_path, kind):
    options = KINDS[kind]
    saving = {"save_strategy": "steps", "save_steps": 3}
    plain = trainer(Trainer, adapted(**options), tmp_path / "plain")
    plain.train()
    made = ferryman_trainer(device, adapted(**options), tmp_path / "run", **saving)
    made.train()
    assert_same_logs(made, plain)
    assert_near(weights(made), weights(plain))
    last = tmp_path / "run" / "checkpoint-5"
    assert not (last / "model.safetensors").exists()
    assert_near(dict(PeftModel.from_pretrained(build(), last).state_dict()), weights(made), 0)
    again = ferryman_trainer(device, adapted(**options), tmp_path / "run", **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert logs(again)[:-1] == logs(made)[:-1]
    assert_near(weights(again), weights(made), 0)


def test_save_pretrained_in_the_engine(device, tmp_path):
    model = adapted()
    with ferryman.Engine(model, torch.optim.AdamW(trained(model), lr=1e-2), device=device) as engine:
        engine.step(text(4), 2)
        model.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(build(), tmp_path)
        assert_near(dict(loaded.state_dict()), dict(model.state_dict()), 0)


def test_adapters_can_be_switched_off_and_merged_between_steps(device):
    """As for DPO's reference: the same streamed model, without its adapters."""
    model, bare = adapted().eval(), build().eval()
    model.enable_input_require_grads()
    with ferryman.Engine(model, torch.optim.AdamW(trained(model), lr=1e-2), device=device) as engine:
        for _ in range(2):
            engine.step(text(4), 2)
            with torch.no_grad():
                with model.disable_adapter():
                    torch.testing.assert_close(model(**text(4)).logits, bare(**text(4)).logits)
                logits = model(**text(4)).logits
                assert not torch.allclose(logits, bare(**text(4)).logits, atol=1e-3)
                model.merge_adapter()
                torch.testing.assert_close(model(**text(4)).logits, logits, rtol=1e-4, atol=1e-5)
                model.unmerge_adapter()
        with model.disable_adapter(), pytest.raises(ValueError, match="frozen since the engine was made"):
            engine.step(text(4), 2)
    torch.testing.assert_close(model.merge_and_unload()(**text(4)).logits, logits, rtol=1e-4, atol=1e-5)


def test_trained_tokens_stay_on_the_device(device):
    """PEFT uses the embedding past its forward for them, which the engine notices."""
    model = adapted(trainable_token_indices=[1, 2], target_modules=["q_proj"])
    optimizer = torch.optim.AdamW(trained(model))
    with (
        ferryman.Engine(model, optimizer, device=device) as engine,
        pytest.warns(UserWarning, match=r"token_adapter.* is used outside its unit .* resident="),
    ):
        engine.step(text(4), 2)
    with ferryman.Engine(model, optimizer, device=device, resident=["*token_adapter*"]) as engine:
        engine.step(text(4), 2)
