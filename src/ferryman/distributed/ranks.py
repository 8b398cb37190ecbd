"""The processes that train together, over torch.distributed; one by itself is the same with nothing to say.

Each rank has its own device and its own micro-batches. Ranks of one *node* (a torchrun agent on a host) can share
memory. Collectives are matched by their order, so whoever calls one here is certain that all others do; what is said
between steps carries what it is said for, so that ranks which go different ways are told so.

A rank that fails leaves word in the group's store, where the others look while they wait; one whose script has ended
without closing does, too (`runtime/shutdown.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from ferryman.runtime import shutdown as ending

_LOOK = timedelta(seconds=1)  # how often a rank that waits looks whether another has failed
_GLANCE = 0.05  # seconds: the same for one that waits for what the first does
_GLOO = re.compile(r"^\[\S*\] |\. This is typically .*")  # what its errors have around what happened
_made = itertools.count()


class Share(NamedTuple):
    """Which part of everything is this rank's."""

    rank: int = 0
    size: int = 1

    def bounds(self, total: int, grain: int) -> list[int]:
        """Where the parts of `total` elements begin and end, each a multiple of the grain."""
        grains = -(-total // grain)
        return [min(total, (grains * rank // self.size) * grain) for rank in range(self.size)] + [total]


class RankError(RuntimeError):
    """Another rank has failed, or does not answer; `is_told`: it has left word why, and tells its user itself."""

    def __init__(self, message: str, *, reason: str = "", is_told: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.is_told = is_told


class Ranks:
    """`main` is for what is said between steps; gradients and weights each have a group, and so an order, of their own,
    since they run on lanes of their own."""

    def __init__(self) -> None:
        self.share = Share()
        self.node = [0]  # the ranks that share memory with this one
        self.leaders = [0]  # the first of each node
        self._homes = [0]
        self._routes: list[Any] = []
        self._groups: list[Any] = []
        self.has_failed = False
        self._firsts = itertools.count()
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in os.environ:
            _join()  # torchrun has started this script, which says nothing of it
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self.share = Share(dist.get_rank(), dist.get_world_size())
        seconds = os.environ.get("FERRYMAN_TIMEOUT", "600")
        try:
            self._patience = timedelta(seconds=float(seconds))
        except ValueError:
            raise ValueError(f"FERRYMAN_TIMEOUT={seconds!r}: seconds are needed, such as 600") from None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._words = PrefixStore(f"ferryman/{attempt}/{next(_made)}", _get_default_store())
        ending.open_ranks.add(self)
        self.main, self.gradients, self.weights = (
            dist.new_group(backend="gloo", timeout=self._patience) for _ in range(3)
        )
        where = self.tell("making an engine", [socket.gethostname(), os.environ.get("GROUP_RANK", "0")])
        self._homes = [where.index(place) for place in where]  # the first rank of each one's node
        self.node = [rank for rank, home in enumerate(self._homes) if home == self._homes[self.rank]]
        self.leaders = sorted(set(self._homes))
        # Of what each owner updates, to the nodes that do not share its memory: a group for each, made by all.
        routes = [[owner, *self.elsewhere(owner)] for owner in range(self.size)] if len(self.leaders) > 1 else []
        self._routes = [dist.new_group(sorted(route), backend="gloo", timeout=self._patience) for route in routes]
        mine = [group for group in self._routes if group is not dist.GroupMember.NON_GROUP_MEMBER]
        self._groups = [self.main, self.gradients, self.weights, *mine]

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
    def place(self) -> int | None:
        """Which of its node's ranks it is; None if it is alone, and any device is its."""
        return None if self.alone else self.node.index(self.rank)

    def threads(self, cpus: int) -> int:
        """For updates on the host: ranks of a node have its CPUs in common."""
        return max(1, cpus // len(self.node))

    @property
    def leads(self) -> bool:
        """Whether it is the first of its node."""
        return self.rank == self.node[0]

    @property
    def share_memory(self) -> bool:
        """Whether any do; all must say the same."""
        return len(self.leaders) < self.size

    # Between steps.

    def tell(self, doing: str, what: Any = None) -> list[Any]:
        """What each rank says, in their order; JSON can write it. A ValueError if they are doing different things."""
        if self.alone:
            return [what]
        message = torch.frombuffer(bytearray(json.dumps([doing, what]).encode()), dtype=torch.uint8)
        lengths = [int(length) for (length,) in self.count([len(message)])]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(message)] = message
        heard = [torch.empty_like(padded) for _ in lengths]
        self._do(lambda: dist.all_gather(heard, padded, group=self.main, async_op=True))
        said = [json.loads(bytes(one[:length].numpy())) for one, length in zip(heard, lengths, strict=True)]
        for rank, (theirs, _) in enumerate(said):
            if theirs != said[0][0]:
                raise ValueError(
                    f"the ranks do not do the same: rank 0 is {said[0][0]}, rank {rank} is {theirs}. All ranks must "
                    "make the same number of steps, and save, load and close together; engine.agree(steps=...) "
                    "compares numbers beforehand. A rank that has no more data gives an empty batch: engine.step([])"
                )
        return [content for _, content in said]

    def count(self, numbers: Sequence[float]) -> list[list[float]]:
        """The same for a few numbers, quicker."""
        if self.alone:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        said = [torch.empty_like(mine) for _ in range(self.size)]
        self._do(lambda: dist.all_gather(said, mine, group=self.main, async_op=True))
        return [one.tolist() for one in said]

    def add(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' numbers, in their order."""
        if self.alone:
            return value
        return torch.full_like(value, sum(said for (said,) in self.count([value.item()])))

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuses, on every rank and by name, what is not the same on all."""
        said = self.tell("comparing settings", dict(facts))
        for rank, theirs in enumerate(said):
            for name in [*said[0], *theirs]:
                first, other = said[0].get(name, "none"), theirs.get(name, "none")
                if first != other:
                    raise ValueError(
                        f"the ranks do not agree on {name}: rank 0 has {first}, rank {rank} has {other}. Start all of "
                        "them with the same script and the same settings"
                    )

    def jointly(self, doing: str, work: Callable[[], Any]) -> list[Any]:
        """Something that each rank does by itself, and that is done only if all succeed: what each has returned.

        A failure of one is a failure of all, after which they are still together.
        """
        result, failed = None, None
        try:
            result = work()
        except Exception as error:
            failed = error
        if not self.alone:
            said = self.tell(doing, [result, failed and f"{type(failed).__name__}: {failed}"])
        if failed is not None:
            raise failed
        if self.alone:
            return [result]
        for rank, (_, why) in enumerate(said):
            if why is not None:
                raise RankError(f"rank {rank} has failed in {doing}: {why}")
        return [found for found, _ in said]

    def first(self, doing: str, work: Callable[[], Any]) -> Any:
        """Something that the first rank does for all, however long it takes: what it has returned, which JSON can
        write. A mistake of the user that it finds is one on all."""
        if self.alone:
            return work()
        key = f"first/{next(self._firsts)}"
        if self.rank == 0:
            try:
                result = work()
            except BaseException as error:
                if isinstance(error, ValueError | OSError):
                    self._words.set(key, json.dumps([doing, None, str(error)]))
                else:
                    self.fail(error)
                raise
            self._words.set(key, json.dumps([doing, result, None]))
            return result
        try:
            while not self._words.check([key]):
                stopped = self._words.check(["failed"]) or self._words.check(["ended"])
                if stopped and not self._words.check([key]):  # it may have done this before
                    raise self._lost("")
                time.sleep(_GLANCE)
            theirs, result, why = json.loads(self._words.get(key))
        except RankError:
            raise
        except RuntimeError as error:
            raise self._lost(str(error)) from None  # which says what happened
        assert theirs == doing, "all do the same"
        if why is not None:
            raise ValueError(why)
        return result

    def broadcast(self, values: torch.Tensor, owner: int = 0) -> torch.Tensor:
        """One rank's values, on every rank, in place."""
        if not self.alone and values.numel():
            self._do(lambda: dist.broadcast(_bytes(values), owner, group=self.main, async_op=True))
        return values

    def shared_bytes(self, nbytes: int) -> torch.Tensor:
        """Zeroed memory that all ranks of a node have in common. It has no name: it ends with the last of them."""
        handle = os.memfd_create("ferryman") if self.leads else -1
        if self.leads:
            os.ftruncate(handle, max(nbytes, 1))
        places = self.tell("taking memory", [os.getpid(), handle])
        pid, number = places[self.node[0]]
        if not self.leads:
            handle = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        memory = mmap.mmap(handle, max(nbytes, 1))
        self.tell("taking memory")  # all have opened it
        os.close(handle)
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]

    # On lanes.

    def gather(self, values: torch.Tensor, owner: int, into: list[torch.Tensor] | None) -> None:
        """Bytes of all ranks, in their order, into memories of the owner's."""
        assert (into is not None) == (owner == self.rank)
        self._do(lambda: dist.gather(values, into, dst=owner, group=self.gradients, async_op=True))

    def pass_on(self, values: torch.Tensor, owner: int, *, to_all: bool) -> None:
        """The owner's values, in place, to all ranks, or to the nodes that do not share its memory."""
        if to_all:
            self._do(lambda: dist.broadcast(values, owner, group=self.weights, async_op=True))
        elif self._routes and (self.rank == owner or self.rank in self.elsewhere(owner)):
            self._do(lambda: dist.broadcast(values, owner, group=self._routes[owner], async_op=True))

    def all_here(self) -> None:
        """Blocks until all have come to this point of the order of weights."""
        self._do(lambda: dist.all_reduce(torch.zeros(1), group=self.weights, async_op=True))

    def elsewhere(self, owner: int) -> list[int]:
        """The first ranks of nodes that do not share the owner's memory."""
        return [leader for leader in self.leaders if leader != self._homes[owner]]

    # Failures.

    def fail(self, error: BaseException) -> bool:
        """This rank cannot go on: the others, who wait for it, are told why. Whether it is the first that cannot."""
        if self.alone:
            return True
        self.has_failed = True
        word = f"rank {self.rank} has failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if isinstance(error, RankError):
            if error.is_told:
                return False
            word = error.reason
        try:
            return bool(self._words.compare_set("failed", "", word) == word.encode())
        except RuntimeError:  # the store may have gone with its process
            return True

    def leave(self) -> None:
        """This rank's script has ended, while others may go on, which find its connections closed."""
        if not self.has_failed:
            word = f"rank {self.rank}'s script has ended, and all ranks must make the same calls to the end"
            with contextlib.suppress(RuntimeError):  # the store may have gone with its process
                self._words.compare_set("ended", "", word)

    def close(self) -> None:
        """All ranks have ended what they do together."""
        ending.open_ranks.discard(self)
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    def _do(self, begin: Callable[[], Any]) -> None:
        """A collective, to its end."""
        waited = timedelta()
        try:
            work = begin()
            while True:
                started = time.monotonic()
                try:
                    work.wait(_LOOK)
                    return
                except RuntimeError:
                    if work.is_completed():  # by now, or with an error, which this raises
                        work.wait()
                        return
                waited += timedelta(seconds=time.monotonic() - started)
                if waited > self._patience:
                    raise self._lost(f"no answer for {waited.total_seconds():.0f} s; FERRYMAN_TIMEOUT sets how long")
                if self._words.check(["failed"]):
                    raise self._lost("")
        except RankError:
            raise
        except RuntimeError as error:
            raise self._lost(str(error)) from None  # which says what happened

    def _lost(self, why: str) -> RankError:
        told = self._word("failed")
        mine = f"one of the {self.size} ranks has stopped or does not answer, as rank {self.rank} finds"
        reason = told or self._word("ended") or f"{mine} ({_GLOO.sub('', (why.splitlines() or [''])[0])})"
        return RankError(
            f"rank {self.rank} cannot go on without the others: {reason}. Look at what the rank that stopped first has "
            "printed; under torchrun --max-restarts a script that loads its last checkpoint goes on from there",
            reason=reason,
            is_told=bool(told),
        )

    def _word(self, key: str) -> str:
        """That another has left, if it has."""
        try:
            return self._words.get(key).decode() if self._words.check([key]) else ""
        except RuntimeError:  # the store may have gone with its process
            return ""


def _join() -> None:
    """torchrun's store outlives restarts, and with it the addresses of processes that are gone, and what they said:
    each attempt has a place of its own there."""
    store, rank, size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group("gloo", store=PrefixStore(f"attempt/{attempt}", store), rank=rank, world_size=size)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    assert values.is_contiguous(), "it is written in place"
    return values.view(-1).view(torch.uint8)
