"""What ranks compare: settings when an engine is made, and a status before each step."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ferryman.distributed.ranks import Ranks
from ferryman.plan.batch import Part, samples_in
from ferryman.plan.plan import Need, PlanTooLargeError


def compare(
    ranks: Ranks, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], settings: Mapping[str, Any]
) -> None:
    """Raises if model, settings or optimizers differ between ranks.

    The model is compared first: if it differs, so does the optimizer.
    """
    tensors = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        trains = "" if tensor.requires_grad else ", frozen"
        tensors[f"the model's {name!r}"] = f"{tuple(tensor.shape)} in {tensor.dtype}{trains}"
    ranks.agree(tensors)
    others = {f"{name}=": repr(value) for name, value in settings.items()}
    if optimizers:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        others["the optimizer"] = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        others["the number of parameter groups"] = str(len(groups))
        for number, (group, options) in enumerate(zip(groups, _groups(optimizers), strict=True)):
            others[f"the number of tensors in the optimizer's group {number}"] = str(len(group["params"]))
            others |= {f"{name!r} of the optimizer's group {number}": value for name, value in options.items()}
    ranks.agree(others)


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, str]]:
    """The options of each parameter group, one optimizer after the other."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [{name: repr(value) for name, value in group.items() if name != "params"} for group in groups]


class RankStatus(NamedTuple):
    """What a rank reports before a step."""

    error: str | None = None  # why it cannot make the step
    need: Need | None = None  # the memory that its micro-batches need, if the plan leaves less
    parts: int = 0  # the number of micro-batches
    samples: float | None = 0  # the sum of their weights, usually samples; None: they cannot be counted
    seed: int = 0
    digest: int | None = None  # a checksum of its batch
    groups: Sequence[dict[str, str]] = ()  # the options of the optimizer's parameter groups
    items: float | None = None  # `num_items_in_batch`, if its micro-batches have it
    used: bool = False  # since its last step, somebody may have edited weights, which the ranks of a node share


def status_of(
    ranks: Ranks,
    parts: Sequence[Part],
    seed: int,
    optimizers: Sequence[torch.optim.Optimizer],
    reduction: str,
    *,
    first: bool,
    used: bool,
) -> RankStatus:
    """The status of a rank that can make the step; `first`: no step was made before. `used`: see `RankStatus`."""
    if ranks.alone:
        return RankStatus(parts=len(parts), samples=_count_samples(parts), seed=seed)
    return RankStatus(
        parts=len(parts),
        samples=_count_samples(parts),
        seed=seed,
        digest=_digest(parts) if first else None,
        groups=_groups(optimizers),
        items=_count_items(parts) if reduction == "sum" else None,
        used=used,
    )


def exchange_status(ranks: Ranks, mine: RankStatus) -> list[RankStatus]:
    """The status of every rank, in the order of ranks.

    All ranks raise the same kind of error: a ValueError if one of them cannot make the step, else a PlanTooLargeError
    with the largest need if the plan leaves too little room on one of them. Before the first step the user is warned if
    all ranks have the same batch: then the data was not divided among them.
    """
    told = ranks.all_gather_object("making a step", mine)
    statuses = [RankStatus(error, need and Need(*need), *rest) for error, need, *rest in told]
    for rank, status in enumerate(statuses):
        if status.error is not None:
            raise ValueError(f"rank {rank} cannot make this step: {status.error}")
    needs = [status.need for status in statuses if status.need is not None]
    if needs:
        raise PlanTooLargeError(max(needs, key=lambda need: need.nbytes))
    _check_groups(statuses)
    _check_items(statuses)
    if not any(status.parts for status in statuses):
        raise ValueError("no rank has a micro-batch for this step: at least one must")
    if ranks.rank == 0 and mine.digest is not None and all(status.digest == mine.digest for status in statuses):
        warnings.warn(
            f"all {ranks.size} ranks were given the same batch, so each sample counts {ranks.size} times. Give each "
            "rank its own part: engine.share has its number, and torch.utils.data.DistributedSampler divides a dataset",
            stacklevel=7,  # the caller of engine.step or engine.forward_backward
        )
    return statuses


@contextlib.contextmanager
def errors_on_all_ranks(ranks: Ranks) -> Iterator[None]:
    """Context whose ValueError or PlanTooLargeError on one rank is raised on the other ranks as well, by their
    `exchange_status`."""
    try:
        yield
    except PlanTooLargeError as error:
        exchange_status(ranks, RankStatus(need=error.need))  # raises the largest need of all ranks
        raise
    except ValueError as error:
        ranks.all_gather_object("making a step", RankStatus(error=str(error)))
        raise


def _check_groups(statuses: Sequence[RankStatus]) -> None:
    missing: dict[str, str] = {}
    for rank, status in enumerate(statuses):
        pairs = itertools.zip_longest(statuses[0].groups, status.groups, fillvalue=missing)
        for number, (first, other) in enumerate(pairs):
            different = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            if different:
                one, two = (
                    ", ".join(f"{name}={group[name]}" for name in different if name in group) or "is missing"
                    for group in (first, other)
                )
                raise ValueError(
                    f"the optimizer's group {number} differs between ranks: {one} on rank 0, {two} on rank {rank}. "
                    "Each rank updates a part of every tensor, so all must use the same options: schedulers may depend "
                    "only on values that are the same on all ranks, such as the loss that engine.step returns"
                )


def _check_items(statuses: Sequence[RankStatus]) -> None:
    known = [(rank, status.items) for rank, status in enumerate(statuses) if status.items is not None]
    for rank, items in known:
        if items != known[0][1]:
            raise ValueError(
                f"num_items_in_batch is {known[0][1]} on rank {known[0][0]} and {items} on rank {rank}: with "
                'reduction="sum" it must be the count over the whole step, on all ranks; engine.total(...) adds up the '
                "counts of the ranks"
            )


def add_up(ranks: Ranks, value: Any) -> float:
    """The sum of all ranks' numbers. Raises on all ranks if one of the values is not a number."""

    def number() -> float:
        found = _as_number(value)
        if found is None:
            raise ValueError(f"engine.total takes an int, a float or a tensor with one element; this is {value!r}")
        return found

    known: list[float] = ranks.run_on_all("adding up a total", number)
    return sum(known)


def is_nothing(batch: Any) -> bool:
    """Whether a batch is empty. A rank that has no data in a step in which others have some passes such a batch."""
    if batch is None or (isinstance(batch, Sequence | Mapping) and not batch):
        return True
    return not isinstance(batch, list) and samples_in(batch) == 0


def weigh(parts: Sequence[Part], statuses: Sequence[RankStatus], rank: int, reduction: str) -> list[Part]:
    """Micro-batches weighted by their share of all ranks' samples or, if these cannot be counted, of micro-batches."""
    if reduction == "sum":
        return list(parts)
    counted = all(status.samples is not None for status in statuses)
    amounts = [(status.samples if counted else status.parts) or 0 for status in statuses]
    return [part._replace(weight=part.weight * amounts[rank] / sum(amounts)) for part in parts]


def _digest(parts: Sequence[Part]) -> int | None:
    """A checksum of the tensors that are on the host; None if there are none."""
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
    """The `num_items_in_batch` of transformers' models, if it is one number for all micro-batches."""
    known = {
        _as_number(part.content["num_items_in_batch"])
        for part in parts
        if isinstance(part.content, Mapping) and "num_items_in_batch" in part.content
    }
    return known.pop() if len(known) == 1 else None


def _as_number(value: Any) -> float | None:
    """An int or a float, also from a tensor with one element; None if the value is not a number."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None
