"""Gradients between steps mean what they mean in plain PyTorch: they can be read, edited, replaced and cleared."""

import copy

import pytest
import torch

from ferryman.engine import Engine
from support.models import CASES, Toy, assert_same, build, cut, on, plain_step, step, text
from support.slow import covering


def pair(device, dtype=torch.float32):
    torch.manual_seed(0)
    model = Toy().to(dtype).train()
    return model, on(device, model)


def both(engine, model, plain, seed):
    torch.manual_seed(seed)
    result = step(engine, model, text(4, seed), 2)
    torch.manual_seed(seed)
    return result, plain_step(plain, cut(text(4, seed), 2))


@covering
@pytest.mark.parametrize(
    "change",
    [
        lambda gradient: gradient.mul_(0.5),
        lambda gradient: gradient.zero_(),
        lambda gradient: torch.ones_like(gradient),
        lambda gradient: None,
    ],
    ids=["scaled", "zeroed", "replaced", "cleared"],
)
def test_what_the_user_does_with_them_counts(change, device):
    model, plain = pair(device)
    with Engine(model, device=device) as engine:
        both(engine, model, plain, 1)
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.grad = change(parameter.grad)
        assert_same(*both(engine, model, plain, 2))


def test_gradients_given_before_the_first_step_are_added_to(device):
    model, plain = pair(device)
    with Engine(model, device=device) as engine:
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.grad = torch.ones_like(parameter)
        assert_same(*both(engine, model, plain, 1))


def test_edits_in_bfloat16_count(device):
    model, _ = pair(device, torch.bfloat16)
    with Engine(model, device=device) as engine:
        engine.forward_backward(text(4, 1), 2)
        once = {name: p.grad.clone() for name, p in model.named_parameters()}
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
        for parameter in model.parameters():
            parameter.grad.zero_()
        torch.manual_seed(3)
        engine.forward_backward(text(4, 1), 2)
        assert all(p.grad.norm() < 1.5 * once[name].norm() for name, p in model.named_parameters())


def test_a_copy_of_the_model_is_a_model_of_its_own(device):
    model, plain = pair(device)
    with Engine(model, device=device) as engine:
        copied = copy.deepcopy(model)
        torch.nn.init.zeros_(copied.head.weight)
        with torch.no_grad():
            assert not torch.equal(copied(**text(2)).logits, model(**text(2)).logits)
        copied(**text(2)).loss.backward()  # plain, also with gradients
        assert_same(*both(engine, model, plain, 1))
    assert copy.deepcopy(copied).head is not copied.head


@covering
@pytest.mark.parametrize(("before", "after", "word"), [(False, True, "unfrozen"), (True, False, "frozen")])
def test_freezing_and_unfreezing_in_between_is_refused(before, after, word, device):
    model = Toy()
    model.blocks[1].requires_grad_(before)
    with Engine(model, device=device) as engine:
        engine.forward_backward(text(4), 2)
        model.blocks[1].requires_grad_(after)
        with pytest.raises(ValueError, match=rf"'blocks.1.norm.weight' has been {word} since"):
            engine.forward_backward(text(4), 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resident": None}, "resident=None: it must be a list"),
        ({"loss": None}, "loss= must be a function .* NoneType"),
        ({"loss": torch.nn.CrossEntropyLoss()}, "loss= must be a function .* CrossEntropyLoss"),
        ({"units": []}, r"units=\[\] names no module"),
    ],
)
def test_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        Engine(Toy(), device="cpu", **options)


def test_a_list_of_tensors_is_no_list_of_micro_batches(device):
    ids = text(4)["input_ids"]
    with (
        Engine(build(CASES["toy"]), device=device) as engine,
        pytest.raises(ValueError, match=r"a list of 2 tensors.*pass a tuple"),
    ):
        engine.forward_backward([ids, ids])
