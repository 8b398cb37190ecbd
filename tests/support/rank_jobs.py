"""Functions that tests run on every rank (`support.ranks.Ranks.run`); each returns what the test compares."""

import copy
import math
import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer

from ferryman.cli import training_run
from ferryman.distributed.ranks import RankError, Ranks
from ferryman.engine import Engine
from ferryman.observe.trace import Trace, trace_path
from ferryman.runtime import host_memory
from ferryman.training import preparation
from support.commands import train as train_command
from support.devices import chosen_accelerator, delay_copies, torch_virtual
from support.models import CASES, build
from support.own_steps import OWN_STEPS, ScheduleFree
from support.trainers import ferryman_trainer, logs, trainer, weights
from support.updates import adamw, slow_kernels


def my_part(batch, counts, samples):
    """This rank's part of a batch: `counts[rank]` micro-batches of `samples` samples each."""
    rank = dist.get_rank()
    first = sum(counts[:rank]) * samples
    mine = slice(first, first + counts[rank] * samples)
    return {name: value[mine] for name, value in batch.items()} if counts[rank] else []


def train(name, device, counts, steps=3, samples=2, make=adamw, late=None, **options):
    """Trains a model on all ranks, rank i with `counts[i]` micro-batches. Returns losses, norms and weights.

    `late`: a rank whose updates, copies and messages are delayed.
    """
    with pytest.MonkeyPatch.context() as patch:
        if late == dist.get_rank():
            slow_kernels(patch, 0.01)
            patch.setattr(Ranks, "gather", _after_a_while(Ranks.gather))
            patch.setattr(Ranks, "barrier", _after_a_while(Ranks.barrier))
            delay_copies(torch.device(device, dist.get_rank()), 0.01)
        try:
            return _train(name, device, counts, steps, samples, make, options)
        finally:
            delay_copies(torch.device(device, dist.get_rank()), 0)


def _after_a_while(real):
    def late(*args):
        time.sleep(0.01)
        return real(*args)

    return late


def train_alone(name, device, counts, steps=3, samples=2, make=adamw, late=None, **options):
    """The same training in one process."""
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
    """Steps of two calls of `forward_backward` and one of `update`."""
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


def edited_by_one_rank(name, device, told=True, **options):
    """Between steps, one rank edits the weights that the ranks share, after all have fetched them for the next step.

    Returns the number of units that were fetched ahead, and the weights. `told`: whether ranks tell each other.
    """
    case, alone = CASES[name], not dist.is_initialized()
    model = build(case)
    optimizer, _ = adamw(model)
    ahead = []
    with pytest.MonkeyPatch.context() as patch:
        if not told:
            patch.setattr(preparation, "exchange_status", _without_uses(preparation.exchange_status))
        with Engine(model, optimizer, device=device, held=False, slots=2, **options) as engine:
            for seed in range(4):
                torch.manual_seed(seed)
                batch = case.batch(4, seed=seed)
                engine.step(batch if alone else my_part(batch, (1, 1), 2), 2 if alone else 1)
                slots = [slot for slot in engine._parts.relay.weights._slots if slot.ahead is not None]
                ahead.append(len(slots))
                for slot in slots:
                    slot.fetched.wait()
                if not alone:
                    dist.barrier()
                if alone or dist.get_rank() == 0:
                    for unit in engine._parts.relay.order[:2]:
                        for item in unit.trained:
                            item.tensor.data.mul_(1.05)
    return ahead, copy.deepcopy(model.state_dict())


def _without_uses(real):
    def exchange(ranks, mine):
        return [status._replace(used=False) for status in real(ranks, mine)]

    return exchange


def with_infinite_gradients(device, bad_rank, **options):
    """Three steps, of which the second has infinite gradients on one rank. Returns, for each step, the error, whether
    weights changed, and the loss scale."""
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


def several(model):
    """A step of the user's own for matrices, which counts in its group, and AdamW for the others, in the same units."""
    wide = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    first = ScheduleFree(wide, lr=1e-3)
    return [first, torch.optim.AdamW(rest, lr=1e-3)], torch.optim.lr_scheduler.ExponentialLR(first, 0.9)


def decays_all(model):
    optimizer = OWN_STEPS["decays all"](model)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train_and_save(device, steps, load=None, save=None, keep=None, adapt=None, **options):
    """Trains for some steps, from a checkpoint if `load` names one. Returns losses and weights."""
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
    """A position in the data that is saved with a checkpoint."""

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
    with Engine(model, optimizer, device=chosen_accelerator(), precision="bf16") as engine:
        engine.load_weights(directory)
    return {name: value.clone() for name, value in model.state_dict().items()}


def the_same_data():
    """Gives all ranks the same batches. Returns the warnings about that."""
    model = build(CASES["llama"])
    with Engine(model, adamw(model)[0], device="cpu") as engine, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(2):
            engine.step(CASES["llama"].batch(2, seed=number))
    return [(str(one.message), one.filename) for one in told if "ranks" in str(one.message)]


def for_ever(sign):
    """Makes steps, and creates the file `sign` after three."""
    model = build(CASES["llama"])
    with Engine(model, adamw(model)[0], device=chosen_accelerator()) as engine:
        while True:
            engine.step(CASES["llama"].batch(2, seed=dist.get_rank()))
            if engine.steps == 3:
                sign.touch()


def one_copy(device):
    """Bytes of this rank alone, bytes that its node shares, whether weights are in the latter, and the number of
    parameters."""
    model = build(CASES["llama"])
    with Engine(model, adamw(model)[0], device=device) as engine:
        store = engine._parts.store
        states = [store.state(unit) for unit in engine._parts.all_units]
        own = sum(array.nbytes for state in states for array in (state._masters, *state._states))
        shared = sum(store.weights(unit).nbytes for unit in engine.units)
        places = {item.tensor.data_ptr() for unit in engine.units for item in unit.items}
        maps = open("/proc/self/maps").read().splitlines()  # noqa: SIM115, PTH123
        common = [line.split()[0].split("-") for line in maps if "memfd:ferryman" in line]
        inside = all(any(int(low, 16) <= place < int(high, 16) for low, high in common) for place in places)
    return own, shared, inside, sum(p.numel() for p in model.parameters())


def what_is_taken(steps=2, **options):
    """The account of host memory, the plan's account, what the store has allocated, and bytes moved by each lane in the
    last step."""
    model = build(CASES["llama"])
    optimizer, _ = adamw(model)
    trace = Trace()
    with Engine(model, optimizer, device=chosen_accelerator(), trace=trace, **options) as engine:
        for seed in range(steps):
            engine.step(CASES["llama"].batch(2, seed=seed), 1)
            engine._parts.lanes.wait()  # each step's bytes have those that are fetched ahead of the next one
        store = engine._parts.store
        states = [array for state in store._states.values() for array in (state._masters, *state._states)]
        taken = {
            "common": sum(memory.bytes.nbytes for unit, memory in store._weights.items() if unit.modules),
            "own": sum(array.nbytes for array in states)
            + sum(
                memory.bytes.nbytes
                for memory in (
                    *(memory for unit, memory in store._weights.items() if not unit.modules),
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
    """Makes an engine for a model on meta where the host has `nbytes` free. Returns the refusal, or None."""
    with torch.device("meta"):
        model = build(CASES["llama"])
    optimizer, _ = adamw(model)
    found, host_memory.available = host_memory.available, lambda: nbytes
    try:
        Engine(model, optimizer, device=chosen_accelerator(), **options).close()
    except (ValueError, RankError) as error:
        return str(error)
    finally:
        host_memory.available = found
    return None


def record(path, counts, **options):
    """Trains with a trace and saves it, each rank beside the first."""
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
    """Runs `ferryman train`. Returns exit code, output and error. `of_rank`: further arguments for each rank."""
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
    """Trains with FerrymanTrainer, or with a plain Trainer without a device. Returns logs and weights."""
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
    """Saves, loads, trains and saves again with an optimizer that is updated by its own step. Returns the weights."""
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
    """Makes two steps; the second has fewer samples than there are ranks."""
    model = build(CASES["llama"])
    with Engine(model, adamw(model)[0], device=device) as engine:
        rank, size = engine.share
        for samples in (4, 1):
            loss = engine.step({name: rows[rank::size] for name, rows in CASES["llama"].batch(samples).items()})
    return loss.item()


def by_tokens(rows, counted_alone=False):
    """Trains with a mean over the labels that count, as in docs/transformers.md. Returns losses and weights."""
    model = build(CASES["llama"])
    losses = []
    with Engine(model, adamw(model)[0], device=chosen_accelerator(), reduction="sum") as engine:
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
    """Sums one number of each rank, for each of the pairs."""
    model = build(CASES["llama"])
    with Engine(model, device="cpu") as engine:
        return [engine.total(pair[engine.share.rank]) for pair in pairs]


def train_compact(kept, first=0, steps=3, load=None, save=None):
    """Trains with compact optimizer state, in tensors that ranks share; also alone. Returns the weights."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 200), torch.nn.ReLU(), torch.nn.Linear(200, 64))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    engine = Engine(network, optimizer, device="cpu", state=kept, loss=lambda model, rows: model(rows).square().mean())
    if load is not None:
        engine.load(load)
    for number in range(first, first + steps):
        rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        engine.step(rows.chunk(size)[rank], micro_batches=1)
    if save is not None:
        engine.save(save)
    weights = {name: value.detach().clone() for name, value in network.named_parameters()}
    engine.close()
    return weights
