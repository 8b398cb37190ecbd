"""What tests have ranks do."""

import copy
import math
import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch_virtual
from commands import train as train_command
from models import CASES, build
from trainers import ferryman_trainer, logs, trainer, weights
from transformers import Trainer
from updates import adamw, slow_kernels

from ferryman.cli import training_run
from ferryman.distributed.ranks import RankError, Ranks
from ferryman.engine import Engine
from ferryman.observe.trace import Trace, trace_path
from ferryman.runtime import host_memory


def my_part(batch, counts, samples):
    """Of a batch of micro-batches of `samples` samples each, as many as `counts` says."""
    rank = dist.get_rank()
    first = sum(counts[:rank]) * samples
    mine = slice(first, first + counts[rank] * samples)
    return {name: value[mine] for name, value in batch.items()} if counts[rank] else []


def train(name, device, counts, steps=3, samples=2, make=adamw, late=None, **options):
    """A model on all ranks, each with its number of micro-batches; losses, norms and weights.

    `late`: a rank whose updates, copies and messages are.
    """
    with pytest.MonkeyPatch.context() as patch:
        if late == dist.get_rank():
            slow_kernels(patch, 0.01)
            patch.setattr(Ranks, "gather", _after_a_while(Ranks.gather))
            patch.setattr(Ranks, "all_here", _after_a_while(Ranks.all_here))
            torch_virtual.set_link(torch.device("virtual", dist.get_rank()), delay=0.01)
        try:
            return _train(name, device, counts, steps, samples, make, options)
        finally:
            torch_virtual.set_link(torch.device("virtual", dist.get_rank()), delay=0)


def _after_a_while(real):
    def late(*args):
        time.sleep(0.01)
        return real(*args)

    return late


def train_alone(name, device, counts, steps=3, samples=2, make=adamw, late=None, **options):
    """The same in one process."""
    return _train(name, device, counts, steps, samples, make, options)


def _train(name, device, counts, steps, samples, make, options):
    alone = not dist.is_initialized()
    case, rank = CASES[name], 0 if alone else dist.get_rank()
    torch.manual_seed(rank)  # the first one's weights, and random numbers, count
    model = build(case, seed=rank)
    optimizer, scheduler = make(model)
    losses, norms = [], []
    with Engine(model, optimizer, device=device, **options) as engine:
        for seed in range(steps):
            torch.manual_seed(seed)
            batch = case.batch(sum(counts) * samples, seed=seed)
            mine, count = (batch, sum(counts)) if alone else (my_part(batch, counts, samples), counts[rank])
            losses.append(engine.step(mine, count or None).item())
            norms.append(engine.grad_norm)
            scheduler.step()
    return losses, norms, copy.deepcopy(model.state_dict())


def in_two_parts(name, device, counts, steps=2, samples=2, **options):
    """forward_backward twice, then update."""
    case = CASES[name]
    alone = not dist.is_initialized()
    model = build(case)
    optimizer, _ = adamw(model)
    losses = []
    with Engine(model, optimizer, device=device, **options) as engine:
        for seed in range(2 * steps):
            batch = case.batch(sum(counts) * samples, seed=seed)
            torch.manual_seed(seed)
            count = sum(counts) if alone else counts[dist.get_rank()]
            losses.append(
                engine.forward_backward(batch if alone else my_part(batch, counts, samples), count or None).item()
            )
            if seed % 2:
                engine.update()
    return losses, [], copy.deepcopy(model.state_dict())


def with_infinite_gradients(device, bad_rank, **options):
    """The second of three steps has them on one rank: what was raised, and whether each step changed anything."""
    model = build(CASES["llama"])
    optimizer, _ = adamw(model)
    seen = []

    def loss(model, part):
        value = model(**{name: part[name] for name in ("input_ids", "labels")}).loss
        return value * part["factor"].mean()

    with Engine(model, optimizer, device=device, loss=loss, **options) as engine:
        for number in range(3):
            batch = CASES["llama"].batch(4, seed=number)
            batch["factor"] = torch.ones(4)
            if number == 1 and dist.get_rank() == bad_rank:
                batch["factor"][:] = 1e38 if "on_nonfinite" in options or "deferred" in options else float("inf")
                batch["factor"] = batch["factor"] * 1e3
            before = {name: value.clone() for name, value in model.state_dict().items()}
            error = None
            try:
                engine.step(batch, 2)
            except (ValueError, RuntimeError) as caught:
                error = f"{type(caught).__name__}: {caught}"
            after = model.state_dict()
            seen.append((error, any(not torch.equal(before[name], after[name]) for name in before), engine.loss_scale))
    return seen


def failing(device):
    """A rank fails in the middle of a step."""
    model = build(CASES["llama"])
    optimizer, _ = adamw(model)

    def loss(model, part):
        if dist.get_rank() == 1 and engine.steps == 1:
            raise KeyError("no such thing")
        return model(**part).loss

    with Engine(model, optimizer, device=device, loss=loss) as engine:
        for number in range(3):
            engine.step(CASES["llama"].batch(4, seed=number), 2)


def disagreeing(about):
    rank = dist.get_rank()
    model = build(CASES["gpt2" if about == "model" and rank else "llama"])
    if about == "layers" and rank:
        model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    if about == "frozen" and rank:
        model.lm_head.weight.requires_grad_(False)
    lr = 1e-3 * (1 + rank) if about == "lr" else 1e-3
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    options = {"max_grad_norm": float(rank)} if about == "max_grad_norm" and rank else {}
    with Engine(model, optimizer, device="cpu", **options) as engine:
        if about == "agree":
            engine.agree(steps=10 + rank)
        for number in range(2 + (rank if about == "steps" else 0)):
            engine.step(CASES["llama"].batch(2, seed=number))
        if about == "saving" and rank:
            engine.save(os.devnull)


def rmsprop(model):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def train_and_save(device, steps, load=None, save=None, keep=None, adapt=None, **options):
    """From a checkpoint, or from the start, so many steps; losses and weights."""
    model = build(CASES["llama"], seed=3)
    optimizer, scheduler = adamw(model)
    data = Position()
    losses = []
    with Engine(model, optimizer, device=device, **options) as engine:
        objects = {"scheduler": scheduler, "data": data}
        if load is not None:
            engine.load(load, objects=objects)
        rank, size = engine.share
        for _ in range(steps):
            batch = CASES["llama"].batch(4, seed=data.at)
            each = 4 // size
            losses.append(engine.step({k: v[rank * each : (rank + 1) * each] for k, v in batch.items()}, each).item())
            scheduler.step()
            data.at += 1
        if save is not None:
            engine.save(save, objects=objects, keep=keep)
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


class Position:
    """In the data."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def load_pretrained(directory):
    with torch.device("meta"):
        model = build(CASES["llama"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Engine(model, optimizer, device="virtual", precision="bf16") as engine:
        engine.load_weights(directory)
    return {name: value.clone() for name, value in model.state_dict().items()}


def the_same_data():
    """What they are told."""
    model = build(CASES["llama"])
    with Engine(model, adamw(model)[0], device="cpu") as engine, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(2):
            engine.step(CASES["llama"].batch(2, seed=number))
    return [(str(one.message), one.filename) for one in told if "ranks" in str(one.message)]


def for_ever(sign):
    """Makes steps; the file `sign` is there after three."""
    model = build(CASES["llama"])
    with Engine(model, adamw(model)[0], device="virtual") as engine:
        while True:
            engine.step(CASES["llama"].batch(2, seed=dist.get_rank()))
            if engine.steps == 3:
                sign.touch()


def one_copy(device):
    """Bytes that this rank has by itself, and those that its node shares, with the model's parameters."""
    model = build(CASES["llama"])
    with Engine(model, adamw(model)[0], device=device) as engine:
        store = engine._parts.store
        own = sum(memory.bytes.nbytes for unit in engine._parts.all_units for memory in store.state(unit).memories)
        shared = sum(store.weights(unit).nbytes for unit in engine.units)
        places = {item.tensor.data_ptr() for unit in engine.units for item in unit.items}
        maps = open("/proc/self/maps").read().splitlines()  # noqa: SIM115, PTH123
        common = [line.split()[0].split("-") for line in maps if "memfd:ferryman" in line]
        inside = all(any(int(low, 16) <= place < int(high, 16) for low, high in common) for place in places)
    return own, shared, inside, sum(p.numel() for p in model.parameters())


def what_is_taken(steps=2, **options):
    """What a rank says of its host's memory, what its store has in fact, and what lanes have moved in the last step."""
    model = build(CASES["llama"])
    optimizer, _ = adamw(model)
    trace = Trace()
    with Engine(model, optimizer, device="virtual", trace=trace, **options) as engine:
        for seed in range(steps):
            engine.step(CASES["llama"].batch(2, seed=seed), 1)
        engine.wait()
        store = engine._parts.store
        states = [memory for state in store._states.values() for memory in state.memories]
        taken = {
            "common": sum(memory.bytes.nbytes for unit, memory in store._weights.items() if unit.modules),
            "own": sum(
                memory.bytes.nbytes
                for memory in (
                    *(memory for unit, memory in store._weights.items() if not unit.modules),
                    *states,
                    *store._gradients.values(),
                    *store._sums.values(),
                )
            ),
        }
        account, plan = engine.host_account, engine.plan.account
    begin = trace.steps()[-1].start
    moved = {}
    for span in trace.spans():
        if span.start >= begin:
            moved[span.lane] = moved.get(span.lane, 0) + span.nbytes
    return account, plan, taken, moved


def with_host_memory(nbytes, **options):
    """A model on meta where the host has so much: what was refused."""
    with torch.device("meta"):
        model = build(CASES["llama"])
    optimizer, _ = adamw(model)
    found, host_memory.available = host_memory.available, lambda: nbytes
    try:
        Engine(model, optimizer, device="virtual", **options).close()
    except (ValueError, RankError) as error:
        return str(error)
    finally:
        host_memory.available = found
    return None


def record(path, counts, **options):
    """A training whose traces are saved, each rank's beside the first one's."""
    model = build(CASES["gpt2"])
    optimizer, _ = adamw(model)
    trace = Trace()
    torch_virtual.set_link("virtual:0", h2d=30e6, d2h=30e6)
    try:
        with Engine(model, optimizer, device="virtual:0", trace=trace, **options) as engine:
            for seed in range(4):
                batch = CASES["gpt2"].batch(sum(counts) * 2, seed=seed)
                engine.step(my_part(batch, counts, 2), counts[engine.share.rank] or None)
            engine.wait()
            trace.save(trace_path(path, engine.share.rank))
    finally:
        torch_virtual.set_link("virtual:0", h2d=math.inf, d2h=math.inf)
    return time.time()


def command(*arguments, of_rank=(), fails=False):
    """`ferryman train`: how it ended, and what it has shown; `of_rank` has arguments that are each rank's own."""
    arguments = [*arguments, *(of_rank[dist.get_rank()] if of_rank else ())]
    before = training_run.evaluate
    if fails and dist.get_rank() == 1:
        training_run.evaluate = _no_room
    try:
        result = train_command(*arguments)
    finally:
        training_run.evaluate = before
    told = f"{type(result.exception).__name__}: {result.exception}"
    return result.exit_code, result.output, told if result.exception else None


def _no_room(*arguments):
    raise torch.OutOfMemoryError("no room")


def fit(model, directory, *, device=None, resume=None, **arguments):
    """The Trainer, a plain one without a device: what it has logged while it trained, and its weights."""
    if device is None:
        made = trainer(Trainer, model, directory, **arguments)
    else:
        made = ferryman_trainer(device, model, directory, **arguments)
    made.train(resume_from_checkpoint=resume)
    steps = [entry for entry in logs(made) if "loss" in entry]
    if device is not None:
        assert made.model_wrapped is made.model
        plain = trainer(Trainer, copy.deepcopy(made.model), directory, **arguments)
        mine, theirs = made.predict(made.eval_dataset), plain.predict(plain.eval_dataset)
        assert mine.predictions.shape == theirs.predictions.shape
        assert abs(mine.predictions - theirs.predictions).max() < 1e-4
        assert abs(mine.metrics["test_loss"] - theirs.metrics["test_loss"]) < 1e-4
    return steps, weights(made)


def rmsprop_again(directory):
    """Saved, loaded, trained on and saved again: the state of tensors that torch's own optimizer updates, loaded."""
    batches = [CASES["llama"].batch(2, seed=seed) for seed in range(8)]
    found = []
    for turn in range(3):
        model = build(CASES["llama"])
        optimizer, _ = rmsprop(model)
        with Engine(model, optimizer, device="cpu") as engine:
            if turn:
                engine.load(directory / str(turn - 1))
            for _ in range(2):
                rank = engine.share.rank
                engine.step({name: rows[rank :: engine.share.size] for name, rows in batches[engine.steps].items()})
            engine.save(directory / str(turn))
        found = {name: value.clone() for name, value in model.state_dict().items()}
    return found


def other_rates():
    model = build(CASES["llama"])
    optimizer, _ = rmsprop(model)
    with Engine(model, optimizer, device="cpu") as engine:
        for number in range(2):
            engine.step(CASES["llama"].batch(2, seed=dist.get_rank()))
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + number * dist.get_rank())
        engine.step(CASES["llama"].batch(2, seed=dist.get_rank()))


def no_rows(device):
    """The last batch is smaller than the number of ranks."""
    model = build(CASES["llama"])
    with Engine(model, adamw(model)[0], device=device) as engine:
        rank, size = engine.share
        for samples in (4, 1):
            loss = engine.step({name: rows[rank::size] for name, rows in CASES["llama"].batch(samples).items()})
    return loss.item()


def by_tokens(rows, counted_alone=False):
    """Losses and weights, where losses are the mean over labels that count: as docs/transformers.md does it."""
    model = build(CASES["llama"])
    losses = []
    with Engine(model, adamw(model)[0], device="virtual", reduction="sum") as engine:
        rank, size = engine.share
        for seed in range(2):
            batch = CASES["llama"].batch(rows, seed=seed)
            for row, labels in enumerate(batch["labels"]):
                labels[(2, 7)[row % 2] + row // 2 :] = -100
            batch = {name: values[rank::size] for name, values in batch.items()}
            counted = (batch["labels"][:, 1:] != -100).sum()
            items = int(counted) if counted_alone else engine.total(counted)
            losses.append(engine.step({**batch, "num_items_in_batch": items}).item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def totals(pairs):
    """Of each pair, a number of each rank's."""
    model = build(CASES["llama"])
    with Engine(model, device="cpu") as engine:
        return [engine.total(pair[engine.share.rank]) for pair in pairs]
