"""A script that does not close its engine: `python unclosed.py how directory`.

Started again by torchrun, it ends otherwise: first with an exception on rank 1, which rank 0 hears of in a step; then
rank 1 ends before rank 0 does; then both end well. What rank 0 heard is written to the directory.
"""

import os
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from ferryman.engine import Engine
from ferryman.ranks import RankError


def loss(model, batch):
    return model(batch[0]).square().mean()


def main(how, directory):
    rank, attempt = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if how in ("own group", "destroyed"):
        dist.init_process_group("gloo")
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
    engine = Engine(model, torch.optim.AdamW(model.parameters()), device="cpu", loss=loss)
    engine.step((torch.randn(4, 256),))
    ending = ["raises", "ends", "well"][attempt] if how == "all" else "well"
    if ending == "raises" and rank == 1:
        raise ValueError("corrupt record 17")
    if ending != "well" and rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends those that are left
        try:
            engine.step((torch.randn(4, 256),))
        except RankError:
            (directory / ending).write_text(traceback.format_exc())
            raise
    if how == "destroyed":
        dist.destroy_process_group()
    if how == "stopped" and rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return engine if how != "dropped" else None


if __name__ == "__main__":
    kept = main(sys.argv[1], Path(sys.argv[2]))
