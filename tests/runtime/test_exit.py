"""Daemon threads that use an engine while the interpreter exits: the process ends as the main program says."""

import pytest

from support.fresh import run_fresh
from support.slow import slow

SCRIPT = """
import sys, threading
import torch
from torch import nn
device, how = sys.argv[1:]
if device == "virtual":
    import torch_virtual
from ferryman.engine import Engine

model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters())
begun, batch = threading.Event(), (torch.ones(64, 256),)

def loss(model, batch):
    return model(batch[0]).square().mean()

engine = Engine(model, optimizer, device=device, loss=loss, max_grad_norm=1.0)

def use():
    while True:
        if how == "evaluation":
            with torch.no_grad():
                model(batch[0])
        else:
            engine.step(batch, 4)
        begun.set()

threading.Thread(target=use, daemon=True).start()
begun.wait()
if how == "exception":
    raise KeyError("of the main program")
sys.exit(3)
"""


@pytest.mark.parametrize("how", ["step", *slow("evaluation", "exception")])
def test_a_daemon_thread_does_not_abort_the_process(how, device):
    for _ in range(3):
        ended = run_fresh(SCRIPT, device.type, how)
        assert ended.returncode == (1 if how == "exception" else 3), ended.stderr
        assert ended.stderr.count("Traceback") == (how == "exception"), ended.stderr
