"""A step that several ranks make together: what each has to say before it, and what follows for all."""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ferryman.distributed.ranks import Ranks
from ferryman.plan.batch import Part, samples_in
from ferryman.plan.fit import Choice
from ferryman.plan.plan import Need


def compare(
    ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Mapping[str, Any]
) -> None:
    """Refuses what must be the same on all ranks, and is not. The model is first: with it an optimizer differs, too."""
    tensors = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        trains = "" if tensor.requires_grad else ", which does not train"
        tensors[f"the model's {name!r}"] = f"{tuple(tensor.shape)} in {tensor.dtype}{trains}"
    ranks.agree(tensors)
    others = {f"{name}=": repr(value) for name, value in settings.items()}
    if optimizer is not None:
        others["the optimizer"] = type(optimizer).__name__
        others["the number of parameter groups"] = str(len(optimizer.param_groups))
        for number, (group, options) in enumerate(zip(optimizer.param_groups, _groups(optimizer), strict=True)):
            others[f"how many tensors the optimizer's group {number} has"] = str(len(group["params"]))
            others |= {f"{name!r} of the optimizer's group {number}": value for name, value in options.items()}
    ranks.agree(others)


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """The options of each."""
    return [{name: repr(value) for name, value in g.items() if name != "params"} for g in optimizer.param_groups]


class RankStatus(NamedTuple):
    """What a rank says before a step."""

    error: str | None  # why it cannot make one
    wanted: Need | None  # what its micro-batches take, if that is more than there is room for
    parts: int  # micro-batches
    samples: float | None  # or what else micro-batches weigh by; None: they cannot be counted
    seed: int
    digest: int | None  # of what it was given
    groups: list[dict[str, str]]  # of the optimizer: their options
    items: float | None  # what the whole step counts, as its micro-batches are told


def exchange_status(
    ranks: Ranks,
    found: Choice | Need | ValueError,
    parts: Sequence[Part],
    seed: int,
    optimizer: torch.optim.Optimizer | None,
    reduction: str,
    *,
    first: bool,
) -> list[RankStatus]:
    """What all say, in the order of ranks; a ValueError on each if one of them cannot go on.

    Before the first step they are also warned if they were all given the same: then nobody has shared the data out.
    """
    if ranks.alone and isinstance(found, ValueError):
        raise found
    mine = RankStatus(
        error=str(found) if isinstance(found, ValueError) else None,
        wanted=found if isinstance(found, Need) else None,
        parts=len(parts),
        samples=_count_samples(parts),
        seed=seed,
        digest=_digest(parts) if first and not ranks.alone else None,
        groups=[] if optimizer is None or ranks.alone else _groups(optimizer),
        items=_count_items(parts) if reduction == "sum" and not ranks.alone else None,
    )
    words = [
        RankStatus(error, wanted and Need(*wanted), *rest) for error, wanted, *rest in ranks.tell("making a step", mine)
    ]
    if isinstance(found, ValueError):
        raise found
    for rank, word in enumerate(words):
        if word.error is not None:
            raise ValueError(f"rank {rank} cannot make this step: {word.error}")
    _check_groups(words)
    _check_items(words)
    if not any(word.parts or word.wanted for word in words):
        raise ValueError("no rank has a micro-batch for this step: at least one must")
    if ranks.rank == 0 and mine.digest is not None and all(word.digest == mine.digest for word in words):
        warnings.warn(
            f"all {ranks.size} ranks were given the same batch, so each sample counts {ranks.size} times. Give each "
            "rank its own: engine.share says which it is, torch.utils.data.DistributedSampler shares a dataset out",
            stacklevel=6,  # who has called the engine
        )
    return words


def _check_groups(words: Sequence[RankStatus]) -> None:
    missing: dict[str, str] = {}
    for rank, word in enumerate(words):
        pairs = itertools.zip_longest(words[0].groups, word.groups, fillvalue=missing)
        for number, (first, other) in enumerate(pairs):
            different = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            if different:
                one, two = (
                    ", ".join(f"{name}={group[name]}" for name in different if name in group) or "is not there"
                    for group in (first, other)
                )
                raise ValueError(
                    f"the optimizer's group {number}: {one} on rank 0, {two} on rank {rank}, and each rank updates a "
                    "part of every tensor; have schedulers follow what is the same on all ranks, such as the loss that "
                    "engine.step returns"
                )


def _check_items(words: Sequence[RankStatus]) -> None:
    told = [(rank, word.items) for rank, word in enumerate(words) if word.items is not None]
    for rank, items in told:
        if items != told[0][1]:
            raise ValueError(
                f"num_items_in_batch is {told[0][1]} on rank {told[0][0]} and {items} on rank {rank}: with "
                'reduction="sum" it counts what is in the whole step on all ranks; engine.total(...) adds up what each '
                "has counted"
            )


def most_wanted(words: Sequence[RankStatus]) -> Need | None:
    """What the smaller plan that some rank asks for must leave room for."""
    return max((word.wanted for word in words if word.wanted is not None), key=lambda need: need.nbytes, default=None)


def add_up(ranks: Ranks, value: Any) -> float:
    """The sum of all ranks' numbers; a value that is none is refused on all."""

    def number() -> float:
        found = _as_number(value)
        if found is None:
            raise ValueError(f"engine.total: an int, a float or a tensor with one element is needed, this is {value!r}")
        return found

    told: list[float] = ranks.jointly("adding up a total", number)
    return sum(told)


def is_nothing(batch: Any) -> bool:
    """What a rank gives that has no data where others have some."""
    if batch is None or (isinstance(batch, Sequence | Mapping) and not batch):
        return True
    return not isinstance(batch, list) and samples_in(batch) == 0


def weigh(parts: Sequence[Part], words: Sequence[RankStatus], rank: int, reduction: str) -> list[Part]:
    """Micro-batches by their share of the samples of all ranks; where those cannot be counted, of micro-batches."""
    if reduction == "sum":
        return list(parts)
    counted = all(word.samples is not None for word in words)
    amounts = [(word.samples if counted else word.parts) or 0 for word in words]
    return [part._replace(weight=part.weight * amounts[rank] / sum(amounts)) for part in parts]


def _digest(parts: Sequence[Part]) -> int | None:
    """Of the tensors that are on the host."""
    leaves = pytree.tree_leaves([part.content for part in parts])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.numel()]
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found if tensors else None


def _count_samples(parts: Sequence[Part]) -> float | None:
    amounts = [part.amount for part in parts]
    return None if None in amounts else sum(amount for amount in amounts if amount is not None)


def _count_items(parts: Sequence[Part]) -> float | None:
    """What transformers' models are told, if it is one number for all micro-batches."""
    told = {
        _as_number(part.content["num_items_in_batch"])
        for part in parts
        if isinstance(part.content, Mapping) and "num_items_in_batch" in part.content
    }
    return told.pop() if len(told) == 1 else None


def _as_number(value: Any) -> float | None:
    """An int or a float, also from a tensor with one element; None if it is no number."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None
