"""Windows: sequences of equal length, each drawn once per epoch, in a random order that can be resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from ferryman.data.tokens import Tokens
from ferryman.distributed.ranks import Share

Batch = dict[str, torch.Tensor]


class Windows:
    """Draws batches of windows from the tokens between `start` and `stop`.

    Every epoch cuts the tokens into windows at other offsets and draws them in another order, both of which follow from
    the seed and the epoch. So the position is three numbers, and no memory grows with the data: the order is a computed
    permutation, not a list.
    """

    def __init__(self, tokens: Tokens, length: int, *, start: int = 0, stop: int | None = None, seed: int = 0) -> None:
        self._tokens = tokens
        self._length = length
        self._start = start
        self._stop = len(tokens) if stop is None else stop
        self._seed = seed
        self._epoch = 0
        self._index = 0  # of the next window in the epoch
        if self._stop - start < length:
            raise ValueError(
                f"the data has {self._stop - start} tokens, fewer than the {length} of one window (--sequence); give "
                "more data or a shorter --sequence"
            )

    @property
    def count(self) -> int:
        """The number of windows per epoch, which does not depend on the offset."""
        tokens = self._stop - self._start
        return max(1, (tokens - self._length + 1) // self._length)

    @property
    def seen(self) -> int:
        """The number of windows drawn so far, in all epochs."""
        return self._epoch * self.count + self._index

    @property
    def epoch(self) -> float:
        """How often the data has been seen, as a fraction."""
        return self._epoch + self._index / self.count

    def batch(self, size: int, mine: slice = slice(None)) -> Batch | list[Any]:
        """The next batch. Every rank draws all windows and reads its own; a rank without any gets an empty list."""
        starts = [self._next() for _ in range(size)][mine]
        return _batch([self._tokens.read(at, at + self._length) for at in starts]) if starts else []

    def in_order(self, size: int, most: int, share: Share | None = None) -> Iterator[Batch]:
        """Batches of the first `most` windows, without moving the position. `share` selects the batches of one rank."""
        rank, ranks = share or Share()
        starts = [self._start + i * self._length for i in range(min(most, self.count))]
        for i in range(rank * size, len(starts), ranks * size):
            yield _batch([self._tokens.read(at, at + self._length) for at in starts[i : i + size]])

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "index": self._index,
            "length": self._length,
            "tokens": self._stop - self._start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = self.state_dict()
        for key, name in (("length", "--sequence"), ("tokens", "tokens in the data")):
            if state[key] != mine[key]:
                raise ValueError(
                    f"the position in the data cannot be resumed: it was saved with {state[key]} {name}, but now "
                    f"there are {mine[key]}. Give the same data and --sequence, or start a new run"
                )
        self._seed, self._epoch, self._index = state["seed"], state["epoch"], state["index"]

    def _next(self) -> int:
        """Moves the position by one window and returns its first token's index."""
        draw = random.Random(f"{self._seed}/{self._epoch}")
        room = self._stop - self._start - self.count * self._length
        start = self._start + draw.randrange(min(room + 1, self._length))
        start += permuted(self._index, self.count, [draw.getrandbits(64) for _ in range(4)]) * self._length
        self._index += 1
        if self._index == self.count:
            self._epoch, self._index = self._epoch + 1, 0
        return start


def _batch(windows: list[torch.Tensor]) -> Batch:
    ids = torch.stack(windows)
    return {"input_ids": ids, "labels": ids}


def permuted(index: int, count: int, keys: list[int]) -> int:
    """The image of `index` in a permutation of `count` numbers that the keys select: a Feistel network over the next
    power of four, applied until the result is below `count`."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        index = left << half | right
        if index < count:
            return index


def _mixed(number: int) -> int:
    """Mixes 64 bits so that each result bit depends on all of them (splitmix64)."""
    number = (number * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ number >> 31) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return number ^ number >> 33
