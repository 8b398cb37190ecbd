"""What tests have ranks do."""

import copy
import os

import torch
import torch.distributed as dist
import torch_virtual  # noqa: F401 - the virtual device
from models import CASES, build
from updates import adamw

from ferryman.engine import Engine


def my_part(batch, counts, samples):
    """Of a batch of micro-batches of `samples` samples each, as many as `counts` says."""
    rank = dist.get_rank()
    first = sum(counts[:rank]) * samples
    mine = slice(first, first + counts[rank] * samples)
    return {name: value[mine] for name, value in batch.items()} if counts[rank] else []


def train(name, device, counts, steps=3, samples=2, make=adamw, **options):
    """A model on all ranks, each with its number of micro-batches; losses, norms and weights."""
    torch.manual_seed(dist.get_rank())  # the first one's weights, and random numbers, count
    case = CASES[name]
    model = build(case, seed=dist.get_rank())
    optimizer, scheduler = make(model)
    losses, norms = [], []
    with Engine(model, optimizer, device=device, **options) as engine:
        for seed in range(steps):
            torch.manual_seed(seed)
            batch = case.batch(sum(counts) * samples, seed=seed)
            count = counts[dist.get_rank()]
            losses.append(engine.step(my_part(batch, counts, samples), count or None).item())
            norms.append(engine.grad_norm)
            scheduler.step()
    return losses, norms, {name: value.clone() for name, value in model.state_dict().items()}


def train_alone(name, device, counts, steps=3, samples=2, make=adamw, **options):
    """The same in one process."""
    torch.manual_seed(0)
    case = CASES[name]
    model = build(case)
    optimizer, scheduler = make(model)
    losses, norms = [], []
    with Engine(model, optimizer, device=device, **options) as engine:
        for seed in range(steps):
            torch.manual_seed(seed)
            batch = case.batch(sum(counts) * samples, seed=seed)
            losses.append(engine.step(batch, sum(counts)).item())
            norms.append(engine.grad_norm)
            scheduler.step()
    return losses, norms, copy.deepcopy(model.state_dict())
