"""FerrymanTrainer does what transformers' Trainer does."""

import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from transformers import AutoModelForCausalLM, DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

from ferryman.integrations.trainer import FerrymanTrainer
from support.slow import slow
from support.trainers import (
    LateSpy,
    Rows,
    Spy,
    assert_near,
    assert_same_logs,
    build,
    ferryman_trainer,
    nothing_left,
    plain_run,
    trainer,
    weights,
)


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    return tmp_path_factory.mktemp("plain")


EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}


@pytest.mark.parametrize(
    ("model", "accumulation", "spy"),
    [
        ("gpt2", 4, LateSpy),
        *slow(
            ("llama", 4, Spy),
            ("gpt2", 1, LateSpy), ("gpt2", 1, Spy), ("gpt2", 4, Spy),
            ("llama", 1, LateSpy), ("llama", 1, Spy), ("llama", 4, LateSpy),
        ),
    ],
)  # fmt: skip
def test_equals_the_plain_trainer(device, tmp_path, there, model, accumulation, spy):
    """Loss curve, norms, rates, evaluations, callbacks and weights; with dropout (GPT-2) and tokens that do not count.
    An epoch ends with a shorter step."""
    arguments = {"gradient_accumulation_steps": accumulation, **EVALUATING}
    plain, events = plain_run(there, model, spy=spy, **arguments)
    seen = spy()
    made = ferryman_trainer(device, model, tmp_path, callbacks=[seen], **arguments)
    with nothing_left(made):
        result = made.train()
    assert seen.seen == events
    assert_same_logs(made, plain)
    assert_near(weights(made), weights(plain))
    assert result.global_step == 5


def squared(outputs, labels, num_items_in_batch=None):
    scores = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return scores / num_items_in_batch


class OwnLoss:
    """A loss of the user's own, that averages over its micro-batch."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = outputs.logits.logsumexp(-1)[labels != -100].mean()
        return (loss, outputs) if return_outputs else loss


class OwnPlain(OwnLoss, Trainer):
    pass


class OwnFerryman(OwnLoss, FerrymanTrainer):
    pass


BOTH = (Trainer, FerrymanTrainer)


@pytest.mark.parametrize(
    ("arguments", "others", "kinds"),
    [
        pytest.param({"max_grad_norm": 0.0}, {}, BOTH, id="unclipped"),
        pytest.param({"label_smoothing_factor": 0.1, "weight_decay": 0.1}, {}, BOTH, id="smoothed"),
        pytest.param({}, {}, (OwnPlain, OwnFerryman), id="loss method"),
        *(
            pytest.param(arguments, others, BOTH, id=name, marks=pytest.mark.slow)
            for name, arguments, others in (
                ("loss function", {}, {"compute_loss_func": squared}),
                ("sgd", {"optim": "sgd", "optim_args": "momentum=0.9"}, {}),
                ("checkpointing", {"gradient_checkpointing": True}, {}),
                ("plateau", {"lr_scheduler_type": "reduce_lr_on_plateau", **EVALUATING}, {}),
            )
        ),
    ],
)
def test_equals_the_plain_trainer_with_other_arguments(accelerator, tmp_path, arguments, others, kinds):
    plain = trainer(kinds[0], "llama", tmp_path, others=others, **arguments)
    plain.train()
    made = trainer(kinds[1], "llama", tmp_path, engine={"device": accelerator}, others=others, **arguments)
    made.train()
    assert_same_logs(made, plain)
    assert_near(weights(made), weights(plain))


def test_bfloat16_is_near_the_plain_trainer(accelerator, tmp_path, there):
    plain, _ = plain_run(there, "llama", bf16=True)
    made = ferryman_trainer(accelerator, "llama", tmp_path, bf16=True)
    made.train()
    assert_same_logs(made, plain, limit=1e-2)
    assert all(value.dtype == torch.float32 for value in weights(made).values())  # masters, not what was computed with


def test_float16_passes_over_steps_that_overflow(accelerator, tmp_path):
    """And the schedule waits for them, as with the trainer's own scaler."""

    def huge(outputs, labels, num_items_in_batch=None):
        return 20 * squared(outputs, labels, num_items_in_batch)

    made = ferryman_trainer(accelerator, "llama", tmp_path, fp16=True, max_steps=8, others={"compute_loss_func": huge})
    made.train()
    entries = [entry for entry in made.state.log_history if "grad_norm" in entry]
    skipped = [not math.isfinite(entry["grad_norm"]) for entry in entries]
    assert skipped[0]
    assert not skipped[-1]
    rates = [entry["learning_rate"] for entry in entries]
    for was_skipped, before, after in zip(skipped, rates, rates[1:], strict=False):
        assert (before == after) == was_skipped


def test_a_step_fetches_each_block_once_for_all_micro_batches(accelerator, tmp_path):
    class Count(TrainerCallback):
        fetches = ()

        def on_step_end(self, args, state, control, **_):
            self.fetches = (*self.fetches, made.engine.fetches)

    counts = {}
    for accumulation in (1, 4):
        made = ferryman_trainer(
            accelerator, "llama", tmp_path, callbacks=[count := Count()], gradient_accumulation_steps=accumulation
        )
        made.train()
        counts[accumulation] = [b - a for a, b in zip(count.fetches, count.fetches[1:], strict=False)]
    assert counts[1] == counts[4]
    assert max(counts[4]) <= 2 * 4  # embedding, two blocks, head


def test_callbacks_see_gradients_before_the_update(accelerator, tmp_path):
    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            self.seen = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
            self.before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    looks = Look(), Look()
    arguments = {"max_steps": 2, "max_grad_norm": 0.0}
    trainer(Trainer, "llama", tmp_path, callbacks=[looks[0]], **arguments).train()
    ferryman_trainer(accelerator, "llama", tmp_path, callbacks=[looks[1]], **arguments).train()
    assert_near(looks[1].seen, looks[0].seen, 1e-7)
    assert_near(looks[1].before, looks[0].before)


def test_callbacks_read_weights_after_the_update(accelerator, tmp_path):
    """Past state_dict: the trainer waits for them."""

    class Average(TrainerCallback):
        sums = None

        def on_step_end(self, args, state, control, model, **_):
            now = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            self.sums = now if self.sums is None else {name: self.sums[name] + now[name] for name in now}

    averages = Average(), Average()
    trainer(Trainer, "llama", tmp_path, callbacks=[averages[0]]).train()
    ferryman_trainer(accelerator, "llama", tmp_path, callbacks=[averages[1]]).train()
    assert_near(averages[1].sums, averages[0].sums, 1e-5)


def test_evaluates_and_predicts_at_any_time(accelerator, tmp_path):
    plain, made = trainer(Trainer, "llama", tmp_path), ferryman_trainer(accelerator, "llama", tmp_path)
    for _ in range(2):
        with nothing_left(made):
            assert made.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
        ours, theirs = made.predict(Rows(3)), plain.predict(Rows(3))
        assert ours.predictions == pytest.approx(theirs.predictions, abs=1e-5)
        plain.train()
        made.train()


def test_trains_twice_as_the_plain_trainer_does(accelerator, tmp_path):
    """The optimizer's state goes on."""
    plain = trainer(Trainer, "llama", tmp_path, max_steps=2)
    made = ferryman_trainer(accelerator, "llama", tmp_path, max_steps=2)
    for _ in range(2):
        plain.train()
        made.train()
        assert type(made.optimizer) is torch.optim.AdamW
    assert_same_logs(made, plain)
    assert_near(weights(made), weights(plain), 4e-6)


def test_own_optimizers_and_schedulers(accelerator, tmp_path):
    def optimizers(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        return {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step))}

    models = build(), build()
    plain = trainer(Trainer, models[0], tmp_path, others=optimizers(models[0]))
    made = ferryman_trainer(accelerator, models[1], tmp_path, others=optimizers(models[1]))
    plain.train()
    made.train()
    assert_same_logs(made, plain)
    assert_near(weights(made), weights(plain))


def test_engine_options_and_other_mappings(virtual, tmp_path):
    """A budget, which tries the loss out first; batches as a tokenizer makes them."""

    class Plan(TrainerCallback):
        def on_train_end(self, args, state, control, **_):
            self.text = str(made.engine.plan)

    class Tokenizer:
        def pad(self, rows, **_):
            from transformers import BatchEncoding

            return BatchEncoding({key: torch.stack([row[key] for row in rows]) for key in rows[0]})

    plain = trainer(Trainer, "llama", tmp_path)
    made = ferryman_trainer(
        virtual, "llama", tmp_path, callbacks=[plan := Plan()], engine={"memory": "1MiB", "updates": "stride:2"},
        others={"data_collator": DataCollatorWithPadding(Tokenizer())},
    )  # fmt: skip
    plain.train()
    made.train()
    assert_same_logs(made, plain)
    assert "stride" in plan.text


@pytest.mark.parametrize("events", ["on_step_begin", *slow("on_substep_end")])
def test_stopping_within_a_step_leaves_the_weights(accelerator, tmp_path, events):
    class Stop(TrainerCallback):
        pass

    def stop(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 2

    setattr(Stop, events, stop)
    plain = trainer(Trainer, "llama", tmp_path, callbacks=[Stop()])
    made = ferryman_trainer(accelerator, "llama", tmp_path, callbacks=[Stop()])
    assert plain.train().global_step == made.train().global_step == 2
    assert_near(weights(made), weights(plain))


@pytest.mark.parametrize(
    ("arguments", "engine", "told"),
    [
        ({"torch_compile": True}, {}, r"torch_compile.*one at a time"),
        ({"auto_find_batch_size": True}, {}, r"auto_find_batch_size.*memory"),
        ({"bf16_full_eval": True}, {}, r"bf16_full_eval.*bf16=True"),
        ({"enable_jit_checkpoint": True}, {}, r"enable_jit_checkpoint"),
        ({}, {"memroy": "1GiB"}, r"'memroy'.*did you mean 'memory'"),
        ({}, {"max_grad_norm": 1.0}, r"max_grad_norm.*TrainingArguments"),
        ({}, {"precision": "bf16"}, r"precision.*bf16=True"),
        ({}, {"loss": print}, r"loss.*compute_loss"),
    ],
)
def test_refuses_what_cannot_work(tmp_path, arguments, engine, told):
    with pytest.raises(ValueError, match=told):
        trainer(FerrymanTrainer, "llama", tmp_path, engine=engine, **arguments)


def test_refuses_optimizers_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"optim='lion_8bit'.*'adamw_torch'.*'sgd'.*'adafactor'"):
        trainer(FerrymanTrainer, "llama", tmp_path, optim="lion_8bit").train()


def test_adafactor(device, tmp_path):
    """That of transformers, by its own step."""
    plain, made = (
        trainer(Trainer, "llama", tmp_path, optim="adafactor"),
        ferryman_trainer(device, "llama", tmp_path, optim="adafactor"),
    )
    plain.train()
    made.train()
    assert_same_logs(made, plain, 1e-5)
    assert_near(weights(made), weights(plain), 1e-5)


def test_an_error_gives_the_model_back(accelerator, tmp_path):
    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                raise RuntimeError("mine")

    made = ferryman_trainer(accelerator, "llama", tmp_path, callbacks=[Fail()])
    with nothing_left(made), pytest.raises(RuntimeError, match="mine"):
        made.train()


def test_save_model_is_what_from_pretrained_loads(accelerator, tmp_path):
    made = ferryman_trainer(accelerator, "gpt2", tmp_path)
    made.train()
    made.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_near(dict(loaded.state_dict()), weights(made), 0)


def test_takes_no_arguments_as_the_trainer_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = FerrymanTrainer(build(), TrainingArguments(max_steps=1, report_to=[], use_cpu=True), train_dataset=Rows())
    assert FerrymanTrainer(build()).args.output_dir == "tmp_trainer"
    made.train()
