"""A script that does not close its engine: `python unclosed_script.py how [file]`.

"well": all ranks end after a step. "early": only rank 1 does, and rank 0 goes on; it writes what it hears then to the
file. "raises, early": rank 1 raises, and once torchrun has started the script again, "early". "well, own group": the
script makes the process group; "well, destroyed": and destroys it. "well, dropped": the engine is gone before the end.
"""

import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from ferryman.distributed.ranks import RankError, Ranks
from ferryman.engine import Engine


def loss(model, batch):
    return model(batch[0]).square().mean()


def step(engine):
    engine.step((torch.randn(4, 256),))


def be_late(real=Ranks.barrier):
    def late(ranks):
        time.sleep(0.05)
        real(ranks)

    Ranks.barrier = late


def main(how, *, own_group):
    rank = int(os.environ.get("RANK", "0"))
    if own_group:
        dist.init_process_group("gloo")
    if rank == 0:
        be_late()  # the last update goes on when rank 1 has nothing more to do
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
    engine = Engine(model, torch.optim.AdamW(model.parameters()), device="cpu", loss=loss)
    step(engine)
    if how == "raises" and rank == 1:
        raise ValueError("corrupt record 17")
    if how == "well" or rank == 1:
        return engine
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends those that are left
    if how == "early":
        engine.wait()
    try:
        step(engine)
    except RankError:
        with Path(sys.argv[2]).open("a") as file:
            traceback.print_exc(file=file)
    return engine


if __name__ == "__main__":
    ways = sys.argv[1].split(", ")
    how = ways[int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))]
    kept = main(how, own_group=ways[-1] in ("own group", "destroyed"))
    if "dropped" in ways:
        del kept
    if "destroyed" in ways:
        dist.destroy_process_group()
