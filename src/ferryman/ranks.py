"""The processes that train together, over torch.distributed; one by itself is the same with nothing to say.

Each rank has its own device and its own micro-batches. Ranks of one *node* (a torchrun agent on a host) can share
memory. Collectives are matched by their order, so whoever calls one here is certain that all others do.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Share(NamedTuple):
    """Which part of everything is this rank's."""

    rank: int = 0
    size: int = 1

    def bounds(self, total: int, grain: int) -> list[int]:
        """Where the parts of `total` elements begin and end, each a multiple of the grain."""
        grains = -(-total // grain)
        return [min(total, (grains * rank // self.size) * grain) for rank in range(self.size)] + [total]


class RankError(RuntimeError):
    """Another rank has stopped, or does not answer."""


class Ranks:
    """`main` is for what happens between steps; gradients, weights and words each have a group, and so an order, of
    their own, since they run on lanes of their own."""

    def __init__(self) -> None:
        self.share = Share()
        self.node = [0]  # the ranks that share memory with this one
        self.leaders = [0]  # the first of each node
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        self.share = Share(dist.get_rank(), dist.get_world_size())
        wait = timedelta(seconds=float(os.environ.get("FERRYMAN_TIMEOUT", "600")))
        self.main, self.gradients, self.weights = (dist.new_group(backend="gloo", timeout=wait) for _ in range(3))
        where = self.tell((socket.gethostname(), os.environ.get("GROUP_RANK", "0")))
        self.node = [rank for rank, place in enumerate(where) if place == where[self.rank]]
        self.leaders = [where.index(place) for place in dict.fromkeys(where)]

    @property
    def rank(self) -> int:
        return self.share.rank

    @property
    def size(self) -> int:
        return self.share.size

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether it is the first of its node."""
        return self.rank == self.node[0]

    def tell(self, what: Any) -> list[Any]:
        """What each rank says, in their order."""
        if self.alone:
            return [what]
        said: list[Any] = [None] * self.size
        with self._stopped():
            dist.all_gather_object(said, what, group=self.main)
        return said

    def count(self, numbers: Sequence[float]) -> list[list[float]]:
        """The same for a few numbers, quicker."""
        if self.alone:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        said = [torch.empty_like(mine) for _ in range(self.size)]
        with self._stopped():
            dist.all_gather(said, mine, group=self.main)
        return [one.tolist() for one in said]

    def add(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' numbers, in their order."""
        if self.alone:
            return value
        total = sum(said for (said,) in self.count([value.item()]))
        return torch.full_like(value, total)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuses, on every rank and by name, what is not the same on all."""
        said = self.tell(dict(facts))
        for name, mine in said[0].items():
            for rank, other in enumerate(said):
                if other.get(name) != mine:
                    raise ValueError(
                        f"the ranks do not agree on {name}: rank 0 has {mine}, rank {rank} has {other.get(name)}. Start "
                        "all of them with the same script and the same settings"
                    )

    def meet(self) -> None:
        """Blocks until all are here."""
        self.count([0.0])

    def broadcast(self, values: torch.Tensor, owner: int = 0) -> torch.Tensor:
        """One rank's values, on every rank, in place."""
        if not self.alone:
            with self._stopped():
                dist.broadcast(values, owner, group=self.main)
        return values

    def gather(self, values: torch.Tensor, owner: int) -> list[torch.Tensor]:
        """Bytes of all ranks, in their order; to the owner alone."""
        into = [torch.empty_like(values) for _ in range(self.size)] if owner == self.rank else None
        with self._stopped():
            dist.gather(values, into, dst=owner, group=self.gradients)
        return into or []

    def pass_on(self, values: torch.Tensor, owner: int) -> None:
        """To nodes that do not share the owner's memory: their first ranks get the owner's values, in place."""
        others = [leader for leader in self.leaders if self.rank_node(leader) != self.rank_node(owner)]
        with self._stopped():
            if self.rank == owner:
                for other in others:
                    dist.send(values, other, group=self.weights)
            elif self.rank in others:
                dist.recv(values, owner, group=self.weights)

    def all_here(self) -> None:
        """As `meet`, in the order of weights."""
        with self._stopped():
            dist.all_reduce(torch.zeros(1), group=self.weights)

    def rank_node(self, rank: int) -> int:
        """The first rank of a rank's node."""
        return max(leader for leader in self.leaders if leader <= rank)

    def shared_bytes(self, nbytes: int) -> torch.Tensor:
        """Zeroed memory that all ranks of a node have in common. It has no name: it ends with the last of them."""
        handle = os.memfd_create("ferryman") if self.leads else -1
        if self.leads:
            os.ftruncate(handle, max(nbytes, 1))
        places = self.tell((os.getpid(), handle))
        pid, number = places[self.node[0]]
        if not self.leads:
            handle = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        memory = mmap.mmap(handle, max(nbytes, 1))
        self.meet()  # all have opened it
        os.close(handle)
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]

    @contextlib.contextmanager
    def _stopped(self) -> Any:
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} lost the others: one of the {self.size} ranks has stopped or does not answer "
                f"({str(error).splitlines()[0]}). Look at what the rank that stopped first has printed; torchrun "
                "--max-restarts begins again from the last checkpoint"
            ) from error
