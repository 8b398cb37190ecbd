"""A step that several ranks make together: what each has to say before it, and what follows for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ferryman.batch import Part, samples_in
from ferryman.cost.plan import Need
from ferryman.ranks import Ranks


class Word(NamedTuple):
    """What a rank says before a step."""

    error: str | None  # why it cannot make one
    wanted: Need | None  # what its micro-batches take, if that is more than there is room for
    parts: int  # micro-batches
    samples: int | None  # None: they cannot be counted
    seed: int


def speak(ranks: Ranks, mine: Word) -> list[Word]:
    """What all say, in the order of ranks; a ValueError on each if one of them cannot go on."""
    words: list[Word] = [Word(*word) for word in ranks.tell(tuple(mine))]
    failed = [(rank, word.error) for rank, word in enumerate(words) if word.error is not None]
    if failed and mine.error is None:
        raise ValueError(f"rank {failed[0][0]} cannot make this step: {failed[0][1]}")
    return words


def weigh(parts: Sequence[Part], words: Sequence[Word], rank: int, reduction: str) -> list[Part]:
    """Micro-batches by their share of the samples of all ranks; where those cannot be counted, of micro-batches."""
    if reduction == "sum":
        return list(parts)
    counted = all(word.samples is not None for word in words)
    amounts = [(word.samples if counted else word.parts) or 0 for word in words]
    return [Part(part.content, part.weight * amounts[rank] / sum(amounts)) for part in parts]


def count_samples(parts: Sequence[Part]) -> int | None:
    sizes = [samples_in(part.content) for part in parts]
    return None if None in sizes else sum(size for size in sizes if size is not None)
