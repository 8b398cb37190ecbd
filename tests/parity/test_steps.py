"""A step equals plain accumulation: bitwise, or where sums must associate differently, to the last bits."""

import pytest
import torch
import transformers
from torch import nn

from ferryman.engine import Engine
from support.devices import delay_copies
from support.models import CASES, Block, Toy, assert_same, build, compare_steps, cut, on, plain_step, step, text
from support.slow import covering, slow


def assert_parity(device, model, batch, *, micro_batches=4, loose=(), steps=2, **options):
    """Some steps of the same model, plain and by an engine."""
    plain = on(device, model)
    with Engine(model, device=device, **options) as engine:
        for _ in compare_steps(engine, model, plain, batch, [micro_batches] * steps, loose):
            pass


@covering
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recompute", ["auto", "always", "never"])
def test_every_model(name, recompute, device):
    case = CASES[name]
    delay_copies(device)
    assert_parity(device, build(case), case.batch(8), loose=case.loose, recompute=recompute)


@covering
@pytest.mark.parametrize("name", ["t5", *slow("reused", "skipping")])
@pytest.mark.parametrize("slots", [3, 16])
def test_any_number_of_slots(name, slots, virtual):
    case = CASES[name]
    delay_copies(virtual)
    assert_parity(virtual, build(case), case.batch(8), loose=case.loose, slots=slots)


@covering
@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("llama", ["*_proj", "*norm", "*embed_tokens", "lm_head"]),
        ("llama", ["*.self_attn", "*.mlp"]),
        ("bert", ["*.dense", "*.query", "*.key", "*.value", "*.word_embeddings", "*.decoder"]),
        ("t5", ["*.SelfAttention", "*.EncDecAttention", "*.DenseReluDense"]),
        ("mixtral", ["*.experts", "*.self_attn", "*.gate"]),
        ("toy", ["*.up", "*.down"]),
    ],
)
def test_units_cut_as_the_user_says(name, units, device):
    case = CASES[name]
    # Within a block one tensor now feeds several units: queries, keys and values.
    loose = ("*",) if name != "toy" else ()
    assert_parity(device, build(case), case.batch(8), units=units, loose=loose)


@covering
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_any_number_of_micro_batches(micro_batches, device):
    case = CASES["bert"]
    assert_parity(device, build(case), case.batch(8), micro_batches=micro_batches, loose=case.loose)


@covering
@pytest.mark.parametrize(("samples", "micro_batches"), [(7, 4), (5, 2), (3, 2)])
def test_a_ragged_last_micro_batch(samples, micro_batches, device):
    assert_parity(device, build(CASES["toy"]), text(samples), micro_batches=micro_batches)


@covering
@pytest.mark.parametrize("kind", ["tuple", "list of dicts", "list of tuples", "mapping"])
def test_kinds_of_batches(kind, device):
    model = build(CASES["toy"])
    plain, parts = on(device, model), cut(text(7), 4)
    torch.manual_seed(5)
    expected = plain_step(plain, parts)
    whole = text(7)
    batch, micro_batches = {
        "tuple": (tuple(whole.values()), 4),
        "list of dicts": (parts, None),
        "list of tuples": ([tuple(part.values()) for part in parts], 4),
        "mapping": (transformers.BatchEncoding(whole), 4),
    }[kind]
    with Engine(model, device=device) as engine:
        torch.manual_seed(5)
        assert_same(step(engine, model, batch, micro_batches), expected)


def test_a_loss_of_the_users(device):
    def loss(model, part):
        logits = model(part["input_ids"]).logits
        return logits.log_softmax(-1).square().mean() + 0.1 * logits.float().std()

    model = build(CASES["llama"])
    plain, batch = on(device, model), text(8)
    torch.manual_seed(5)
    expected = plain_step(plain, cut(batch, 4), loss)
    with Engine(model, device=device, loss=loss) as engine:
        torch.manual_seed(5)
        assert_same(step(engine, model, batch), expected)


@covering
@pytest.mark.parametrize("name", ["bert", "skipping", *slow("frozen")])
def test_training_with_an_ordinary_optimizer(name, device):
    case = CASES[name]
    delay_copies(device)
    model = build(case)
    plain = on(device, model)
    theirs, ours = (torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (plain, model))
    with Engine(model, device=device) as engine:
        for number in range(3):
            batch = case.batch(8, seed=number)
            torch.manual_seed(number)
            expected = plain_step(plain, cut(batch, 4))
            torch.manual_seed(number)
            loss = engine.forward_backward(batch, 4)
            if not case.loose:
                assert torch.equal(loss.cpu(), expected.loss)
            theirs.step()
            ours.step()
            plain.zero_grad()
            engine.zero_grad()
    for (parameter, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if case.loose:
            torch.testing.assert_close(p, q.cpu(), rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(p, q.cpu()), parameter


def test_accumulation_over_calls(device):
    """Until zero_grad, gradients add up, as they do in plain PyTorch."""
    delay_copies(device)
    model = build(CASES["llama"])
    plain = on(device, model)
    with Engine(model, device=device) as engine:
        for seed, samples in enumerate((8, 6, 8)):
            torch.manual_seed(seed)
            expected = plain_step(plain, cut(text(samples, seed), 2))
            torch.manual_seed(seed)
            assert_same(step(engine, model, text(samples, seed), 2), expected)


def test_gradients_of_other_parts_of_the_model_in_turn(device):
    """A unit that one call has skipped keeps the gradients of the call before."""
    model = build(CASES["skipping"])
    plain = on(device, model)
    with Engine(model, device=device) as engine:
        for first in (0, 2, 4):
            batch = text(4)
            batch["input_ids"][:, 0] = first
            torch.manual_seed(first)
            expected = plain_step(plain, cut(batch, 2))
            torch.manual_seed(first)
            assert_same(step(engine, model, batch, 2), expected)


@covering
@pytest.mark.parametrize("where", ["around the step", "in the loss"])
def test_autocast(where, device):
    """What runs again runs in the same precision, also if the user's code has left its autocast by then."""

    def cast(model, part):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return model(**part).loss

    model = build(CASES["llama"])
    plain, batch = on(device, model), text(8)
    with Engine(model, device=device, **({"loss": cast} if where == "in the loss" else {})) as engine:
        for number in range(2):
            plain.zero_grad()
            engine.zero_grad()
            torch.manual_seed(number)
            expected = plain_step(plain, cut(batch, 4), cast)
            torch.manual_seed(number)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=where == "around the step"):
                assert_same(step(engine, model, batch), expected)
            with torch.no_grad():
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    p.mul_(0.9)
                    q.mul_(0.9)


def test_a_model_that_checkpoints_its_activations_itself(device):
    model = build(CASES["llama"])
    model.gradient_checkpointing_enable()
    assert_parity(device, model, text(8))


def test_a_unit_with_a_parameter_that_it_does_not_use(device):
    model = build(CASES["toy"])
    model.blocks[1].unused = nn.Linear(4, 4)
    assert_parity(device, model, text(8))


def test_a_unit_that_returns_a_tensor_twice_its_input_and_constants(device):
    class Odd(Block):
        def forward(self, x):
            y = super().forward(x)
            return {"twice": (y, y), "input": x, "none": None, "number": 3}

    class Model(Toy):
        def hidden(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                out = block(x=x)
                assert out["none"] is None
                x = out["twice"][0] + 0.5 * out["twice"][1] + out["number"] * out["input"]
            return x

    torch.manual_seed(0)
    model = Model()
    model.blocks = nn.ModuleList(Odd() for _ in range(3))
    assert_parity(device, model, text(8), loose=("embed.weight", "blocks.*"))


def test_a_loss_of_two_forwards(device):
    class Twice(Toy):
        def forward(self, input_ids, labels):
            first, second = super().forward(input_ids, labels), super().forward(labels, input_ids)
            first.loss = first.loss + 0.5 * second.loss
            return first

    torch.manual_seed(0)
    assert_parity(device, Twice(), text(8), loose=("*",))


def test_a_unit_that_nobody_calls_has_no_gradient(device):
    class Unused(Toy):
        def hidden(self, ids):
            return self.blocks[0](self.embed(ids))

    torch.manual_seed(0)
    assert_parity(device, Unused(), text(4), micro_batches=2)


def test_outputs_of_which_none_is_used(device):
    """A unit that goes forward and never backward."""

    class Unused(Toy):
        def hidden(self, ids):
            x = self.blocks[0](self.embed(ids))
            self.blocks[1](x)
            with torch.no_grad():
                weight = self.blocks[2](x).mean()
            return x * weight

    torch.manual_seed(0)
    assert_parity(device, Unused(), text(4), micro_batches=2)
