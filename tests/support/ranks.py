"""Ranks for tests: processes with a process group that run one job after the other."""

import contextlib
import gc
import multiprocessing as mp
import os
import sys
import traceback
from multiprocessing import forkserver

import pytest
from torch.distributed import TCPStore


class Ranks:
    """`size` ranks on `nodes` pretended nodes of equal size; or `homes[i]` is the node of rank i."""

    def __init__(self, size, nodes=1, timeout="120", homes=None):
        context = mp.get_context("forkserver")
        # The store is this process's, as it is torchrun's: it takes a port that is free, and outlives every rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _import_once(context)
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            home = homes[rank] if homes else rank * nodes // size
            place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "GROUP_RANK": home}
            store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
            around = {**store, "FERRYMAN_TIMEOUT": timeout, **place}
            process = context.Process(target=_serve, args=(theirs, {k: str(v) for k, v in around.items()}), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def start(self, job, *args, **options):
        for pipe in self.pipes:
            pipe.send((job, args, options))

    def answers(self, timeout=250):
        """For each rank, what the job returned, or its exception."""
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout):
                raise TimeoutError(f"rank {rank} does not answer")
            try:
                found.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                found.append(ProcessLookupError(f"rank {rank} has died"))
        return found

    def run(self, job, *args, **options):
        """Runs a function of a module on each rank. Returns what each returned, or raises the first exception."""
        self.start(job, *args, **options)
        answers = self.answers()
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def close(self):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(10)
            process.kill()


def _import_once(context):
    """Starts the server that ranks are forked from, with what takes long imported already.

    It takes the search path from the environment: until Python 3.12 it did not take that of this process, and where it
    finds no module of that name it goes on without, and each rank imports all of it. The first optimizer of a process
    imports torch._dynamo.
    """
    context.set_forkserver_preload(["support.rank_jobs", "torch._dynamo"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def _serve(pipe, around):
    os.environ.update(around)
    import torch.distributed as dist

    dist.init_process_group("gloo")
    gc.freeze()
    while (asked := pipe.recv()) is not None:
        job, args, options = asked
        try:
            answer = job(*args, **options)
        except BaseException as error:
            error.add_note(traceback.format_exc())
            answer = error
        pipe.send(answer)
        del asked, job, args, options, answer
        gc.collect()  # the threads of process groups end with the last reference to them; until then they use the CPU
    os._exit(0)  # without waiting for each other
