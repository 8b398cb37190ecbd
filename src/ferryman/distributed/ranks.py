"""The processes that train together, over torch.distributed. A single process takes the same path; all communication
is skipped.

Each rank has its own device and its own micro-batches. Ranks of one *node* (a torchrun agent on a host) can share
memory. Collectives are matched by their order, so every rank must call the same ones. Between steps each message names
the operation that it belongs to, so that ranks which call different operations get an error that says so.

A rank that fails writes the reason into the group's store, which the others check while they wait. So does a rank whose
script ends without closing its engine (`runtime/shutdown.py`).
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

from ferryman.runtime import shutdown

_FAILURE_POLL = timedelta(seconds=1)  # how often a rank that waits in a collective checks whether another has failed
_RESULT_POLL = 0.05  # seconds between checks whether the first rank has a result
_GLOO_BOILERPLATE = re.compile(r"^\[\S*\] |\. This is typically .*")  # removed from errors of gloo
_made = itertools.count()  # numbers the instances, for keys in the store


class Share(NamedTuple):
    """The number of a rank, and the number of ranks."""

    rank: int = 0
    size: int = 1

    def bounds(self, total: int, grain: int) -> list[int]:
        """Where each rank's part of `total` elements begins, in multiples of `grain`, and where the last part ends."""
        grains = -(-total // grain)
        return [min(total, (grains * rank // self.size) * grain) for rank in range(self.size)] + [total]


class RankError(RuntimeError):
    """Another rank has failed, or does not answer. `is_reported`: that rank has reported the reason itself."""

    def __init__(self, message: str, *, reason: str = "", is_reported: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.is_reported = is_reported


class Ranks:
    """The communication between ranks.

    The process group `main` is used between steps. Gradients and weights have groups of their own, since collectives
    of one group must have the same order on all ranks, and their lanes run concurrently.
    """

    def __init__(self) -> None:
        self.share = Share()
        self.node = [0]  # the ranks that share memory with this one
        self.leaders = [0]  # the first rank of each node
        self._leader_of = [0]  # for each rank, the first rank of its node
        self._node_groups: list[Any] = []  # for each owner, the group of it and the other nodes' leaders
        self._groups: list[Any] = []
        self.has_failed = False
        self._first_calls = itertools.count()
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in os.environ:
            _join()  # torchrun has started a script that does not initialize torch.distributed itself
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self.share = Share(dist.get_rank(), dist.get_world_size())
        seconds = os.environ.get("FERRYMAN_TIMEOUT", "600")
        try:
            self._timeout = timedelta(seconds=float(seconds))
        except ValueError:
            raise ValueError(f"FERRYMAN_TIMEOUT={seconds!r}: a number of seconds is required, such as 600") from None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"ferryman/{attempt}/{next(_made)}", _get_default_store())
        shutdown.open_ranks.add(self)
        self.main, self.gradients, self.weights = (
            dist.new_group(backend="gloo", timeout=self._timeout) for _ in range(3)
        )
        where = self.all_gather_object("making an engine", [socket.gethostname(), os.environ.get("GROUP_RANK", "0")])
        self._leader_of = [where.index(place) for place in where]
        self.node = [rank for rank, home in enumerate(self._leader_of) if home == self._leader_of[self.rank]]
        self.leaders = sorted(set(self._leader_of))
        # An owner's updates go to the nodes that do not share its memory. All ranks must create every group.
        routes = [[owner, *self.elsewhere(owner)] for owner in range(self.size)] if len(self.leaders) > 1 else []
        self._node_groups = [dist.new_group(sorted(route), backend="gloo", timeout=self._timeout) for route in routes]
        mine = [group for group in self._node_groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
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
        """The position among the ranks of its node; None for a single process, which may use any device."""
        return None if self.alone else self.node.index(self.rank)

    def threads(self, cpus: int) -> int:
        """The number of threads for updates on the host: ranks of a node share its CPUs."""
        return max(1, cpus // len(self.node))

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.rank == self.node[0]

    @property
    def share_memory(self) -> bool:
        """Whether any ranks share memory; the same on all ranks."""
        return len(self.leaders) < self.size

    # Between steps.

    def all_gather_object(self, doing: str, what: Any = None) -> list[Any]:
        """Gathers a JSON value from every rank, in the order of ranks. Every rank waits for all others.

        Raises a ValueError if ranks do not name the same operation (`doing`).
        """
        if self.alone:
            return [what]
        message = torch.frombuffer(bytearray(json.dumps([doing, what]).encode()), dtype=torch.uint8)
        lengths = [int(length) for (length,) in self.all_gather([len(message)])]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: len(message)] = message
        gathered = [torch.empty_like(padded) for _ in lengths]
        self._do(lambda: dist.all_gather(gathered, padded, group=self.main, async_op=True))
        said = [json.loads(bytes(one[:length].numpy())) for one, length in zip(gathered, lengths, strict=True)]
        for rank, (theirs, _) in enumerate(said):
            if theirs != said[0][0]:
                raise ValueError(
                    f"the ranks call different operations: rank 0 is {said[0][0]}, rank {rank} is {theirs}. All ranks "
                    "must make the same number of steps, and save, load and close together; engine.agree(steps=...) "
                    "compares numbers beforehand. A rank without data passes an empty batch: engine.step([])"
                )
        return [content for _, content in said]

    def all_gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Gathers a few numbers from every rank, faster than `all_gather_object`."""
        if self.alone:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        said = [torch.empty_like(mine) for _ in range(self.size)]
        self._do(lambda: dist.all_gather(said, mine, group=self.main, async_op=True))
        return [one.tolist() for one in said]

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        """Sums a scalar over all ranks, in the order of ranks."""
        if self.alone:
            return value
        return torch.full_like(value, sum(said for (said,) in self.all_gather([value.item()])))

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raises a ValueError on every rank if a fact differs between ranks. The error names it."""
        said = self.all_gather_object("comparing settings", dict(facts))
        for rank, theirs in enumerate(said):
            for name in [*said[0], *theirs]:
                first, other = said[0].get(name, "none"), theirs.get(name, "none")
                if first != other:
                    raise ValueError(
                        f"the ranks do not agree on {name}: rank 0 has {first}, rank {rank} has {other}. Start all of "
                        "them with the same script and the same settings"
                    )

    def run_on_all(self, doing: str, work: Callable[[], Any]) -> list[Any]:
        """Runs `work` on every rank, and returns the results of all ranks, which must be JSON.

        If it fails on one rank, all ranks raise. They stay in the same state, and can continue.
        """
        result, failed = None, None
        try:
            result = work()
        except Exception as error:
            failed = error
        if not self.alone:
            said = self.all_gather_object(doing, [result, failed and f"{type(failed).__name__}: {failed}"])
        if failed is not None:
            raise failed
        if self.alone:
            return [result]
        for rank, (_, why) in enumerate(said):
            if why is not None:
                raise RankError(f"rank {rank} failed while {doing}: {why}")
        return [found for found, _ in said]

    def run_on_first(self, doing: str, work: Callable[[], Any]) -> Any:
        """Runs `work` on the first rank only, without a timeout. Returns its result, which must be JSON, on all ranks.

        A ValueError or OSError is raised on all ranks.
        """
        if self.alone:
            return work()
        key = f"first/{next(self._first_calls)}"
        if self.rank == 0:
            try:
                result = work()
            except BaseException as error:
                if isinstance(error, ValueError | OSError):
                    self._store.set(key, json.dumps([doing, None, str(error)]))
                else:
                    self.fail(error)
                raise
            self._store.set(key, json.dumps([doing, result, None]))
            return result
        try:
            while not self._store.check([key]):
                stopped = self._store.check(["failed"]) or self._store.check(["ended"])
                if stopped and not self._store.check([key]):  # it may have finished the work before it stopped
                    raise self._lost("")
                time.sleep(_RESULT_POLL)
            theirs, result, why = json.loads(self._store.get(key))
        except RankError:
            raise
        except RuntimeError as error:
            raise self._lost(str(error)) from None  # the new message includes the original one
        assert theirs == doing, "all ranks call the same operation"
        if why is not None:
            raise ValueError(why)
        return result

    def broadcast(self, values: torch.Tensor, owner: int = 0) -> torch.Tensor:
        """Copies the owner's values to all ranks, in place."""
        if not self.alone and values.numel():
            self._do(lambda: dist.broadcast(_bytes(values), owner, group=self.main, async_op=True))
        return values

    def shared_bytes(self, nbytes: int) -> torch.Tensor:
        """Zeroed memory that the ranks of a node share. It has no name, so it is freed when the last of them ends."""
        handle = os.memfd_create("ferryman") if self.leads else -1
        if self.leads:
            os.ftruncate(handle, max(nbytes, 1))
        places = self.all_gather_object("taking memory", [os.getpid(), handle])
        pid, number = places[self.node[0]]
        if not self.leads:
            handle = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        memory = mmap.mmap(handle, max(nbytes, 1))
        self.all_gather_object("taking memory")  # a barrier: all ranks have opened it
        os.close(handle)
        memory.madvise(mmap.MADV_DONTFORK)  # a forked child must not write to memory that other ranks use
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]

    # On lanes.

    def gather(self, values: torch.Tensor, owner: int, into: list[torch.Tensor] | None) -> None:
        """Gathers bytes of all ranks on the owner, in the order of ranks."""
        assert (into is not None) == (owner == self.rank)
        self._do(lambda: dist.gather(values, into, dst=owner, group=self.gradients, async_op=True))

    def broadcast_weights(self, values: torch.Tensor, owner: int, *, to_all: bool) -> None:
        """Copies the owner's values, in place, to all ranks or to the nodes that do not share its memory."""
        if to_all:
            self._do(lambda: dist.broadcast(values, owner, group=self.weights, async_op=True))
        elif self._node_groups and (self.rank == owner or self.rank in self.elsewhere(owner)):
            self._do(lambda: dist.broadcast(values, owner, group=self._node_groups[owner], async_op=True))

    def barrier(self) -> None:
        """A barrier of the weights' group."""
        self._do(
            lambda: dist.all_reduce(
                torch.zeros(1, dtype=torch.float32, device="cpu"), group=self.weights, async_op=True
            )
        )

    def elsewhere(self, owner: int) -> list[int]:
        """The first ranks of nodes that do not share the owner's memory."""
        return [leader for leader in self.leaders if leader != self._leader_of[owner]]

    # Failures.

    def fail(self, error: BaseException) -> bool:
        """Reports to waiting ranks that this one has failed. Returns whether it is the first to report a failure."""
        if self.alone:
            return True
        self.has_failed = True
        reason = f"rank {self.rank} has failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if isinstance(error, RankError):
            if error.is_reported:
                return False
            reason = error.reason
        try:
            return bool(self._store.compare_set("failed", "", reason) == reason.encode())
        except RuntimeError:  # the process that hosts the store may have ended
            return True

    def leave(self) -> None:
        """Reports that this rank's script has ended without closing its engine, while others may wait for it."""
        if not self.has_failed:
            reason = f"rank {self.rank}'s script has ended, but all ranks must make the same calls until the last one"
            with contextlib.suppress(RuntimeError):  # the process that has the store may be gone
                self._store.compare_set("ended", "", reason)

    def close(self) -> None:
        """Ends the communication, on all ranks."""
        shutdown.open_ranks.discard(self)
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    def _do(self, begin: Callable[[], Any]) -> None:
        """Starts a collective and waits for its end, or until another rank has failed."""
        waited = timedelta()
        try:
            work = begin()
            while True:
                started = time.monotonic()
                try:
                    work.wait(_FAILURE_POLL)
                    return
                except RuntimeError:
                    if work.is_completed():  # in the meantime, or with an error, which the next line raises
                        work.wait()
                        return
                waited += timedelta(seconds=time.monotonic() - started)
                if waited > self._timeout:
                    raise self._lost(f"no answer for {waited.total_seconds():.0f} s; FERRYMAN_TIMEOUT sets the limit")
                if self._store.check(["failed"]):
                    raise self._lost("")
        except RankError:
            raise
        except RuntimeError as error:
            raise self._lost(str(error)) from None  # the new message includes the original one

    def _lost(self, why: str) -> RankError:
        """The error for a rank whose wait for the others has failed. `why`: the first line of an error of gloo."""
        reported = self._reported("failed")
        mine = f"one of the {self.size} ranks has stopped or does not answer, according to rank {self.rank}"
        reason = (
            reported
            or self._reported("ended")
            or f"{mine} ({_GLOO_BOILERPLATE.sub('', (why.splitlines() or [''])[0])})"
        )
        return RankError(
            f"rank {self.rank} cannot continue without the others: {reason}. See the output of the rank that stopped "
            "first. Under torchrun --max-restarts, a script that loads its last checkpoint continues from there",
            reason=reason,
            is_reported=bool(reported),
        )

    def _reported(self, key: str) -> str:
        """The message that another rank has written under this key; empty if there is none."""
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError:  # the process that has the store may be gone
            return ""


def _join() -> None:
    """Initializes torch.distributed.

    torchrun's store outlives restarts, and contains addresses and reports of processes that have ended. So each attempt
    uses keys of its own.
    """
    store, rank, size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group("gloo", store=PrefixStore(f"attempt/{attempt}", store), rank=rank, world_size=size)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    assert values.is_contiguous(), "it is written in place"
    return values.view(-1).view(torch.uint8)
