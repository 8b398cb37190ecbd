"""Helpers for tests of FerrymanTrainer: data with labels that do not count, trainers, plain runs to compare with."""

import contextlib
import functools

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from ferryman.integrations.trainer import FerrymanTrainer
from support.models import VOCABULARY, gpt2, llama

MODELS = {"gpt2": gpt2, "llama": llama}
EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]
TIMES = ("runtime", "per_second")


class Rows(torch.utils.data.Dataset):
    """Rows of tokens; the number of labels that count differs from row to row."""

    def __init__(self, count=22, seed=3):
        self.ids = torch.randint(0, VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(seed))
        self.labels = self.ids.clone()
        for row in range(count):
            self.labels[row, 8 - 5 * row % 7 :] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, row):
        return {"input_ids": self.ids[row], "labels": self.labels[row]}


class Spy(TrainerCallback):
    """Records every callback event, including those between backward and update."""

    def __init__(self):
        self.seen = []


class LateSpy(Spy):
    """A Spy that does not listen between backward and update."""


for name in EVENTS:

    def note(self, args, state, control, name=name, **_):
        self.seen.append((name, state.global_step))

    setattr(Spy, name, note)
    if name in ("on_substep_end", "on_pre_optimizer_step"):
        setattr(LateSpy, name, getattr(TrainerCallback, name))


class Seeded(Trainer):
    """A plain Trainer whose micro-batches draw the same random numbers as those of the engine."""

    def get_batch_samples(self, *args):
        found = super().get_batch_samples(*args)
        self.number = 0
        return found

    def training_step(self, *args):
        if self.number == 0:
            self.step_seed = int(torch.randint(0, 2**62, ()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.step_seed + self.number)
            self.number += 1
            return super().training_step(*args)


def build(model="llama"):
    torch.manual_seed(0)
    return MODELS[model]()


def trainer(kind, model, directory, *, engine=None, callbacks=(), rows=22, others=None, **arguments):
    """A trainer for a model, or for the model of that name."""
    arguments = {
        "max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "max_grad_norm": 0.5, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 1, **arguments,
    }  # fmt: skip
    made = kind(
        model=model if isinstance(model, nn.Module) else build(model),
        args=TrainingArguments(output_dir=str(directory), **arguments),
        train_dataset=Rows(rows),
        eval_dataset=Rows(5, seed=4),
        callbacks=list(callbacks),
        **(others or {}),
        **({} if engine is None else {"engine": engine}),
    )
    made.remove_callback(PrinterCallback)
    return made


def ferryman_trainer(device, model, directory, *, engine=None, **arguments):
    return trainer(FerrymanTrainer, model, directory, engine={"device": device, **(engine or {})}, **arguments)


def logs(made):
    """The logged values, without times."""
    return [{key: value for key, value in entry.items() if not key.endswith(TIMES)} for entry in made.state.log_history]


def assert_same_logs(ours, theirs, limit=1e-6):
    ours, theirs = logs(ours), logs(theirs)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            assert abs(mine[key] - value) <= limit * max(1.0, abs(value)), (key, mine, other)


def weights(made):
    return {name: value.detach().clone() for name, value in made.model.state_dict().items()}


def assert_near(ours, theirs, limit=2e-6):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        off = float((ours[name].float() - value.float()).abs().max())
        assert off <= limit, f"{name} is off by {off}"


@contextlib.contextmanager
def nothing_left(made):
    """Asserts that the model is a plain one after training."""
    yield
    assert made.engine is None
    assert not any("forward" in vars(module) for module in made.model.modules())
    assert all(value.device.type == "cpu" for value in made.model.state_dict().values())


@functools.cache
def plain_run(directory, model, kind=Seeded, spy=Spy, **arguments):
    """The result of a plain Trainer, computed once for all devices."""
    seen = spy()
    made = trainer(kind, model, directory, callbacks=[seen], **arguments)
    made.train()
    return made, seen.seen
