"""Threads of the host that wait for the device sleep: a wait that spins keeps a core from the updates."""

import torch

from ferryman.engine import Engine
from ferryman.runtime.lanes import Lanes
from ferryman.runtime.marks import new_event
from support.devices import delay_copies, torch_virtual
from support.small_models import Model, batches, loss


def test_no_wait_of_a_step_spins(virtual):
    """Copies are late, so that whatever waits for one has to."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with Engine(model, optimizer, device=virtual, loss=loss, stash="host", max_grad_norm=1.0) as engine:
        first, *later = batches(3)
        engine.step(first, 2)  # trials look at the device as a whole
        delay_copies(virtual, 0.002)
        with torch_virtual.watch() as seen:
            for batch in later:
                engine.step(batch, 2)
            engine.forward_backward(first, 2)
            engine.update()
            engine.wait()
            model.state_dict()
            with torch.no_grad():
                model(first[0])
    assert seen.counters.spinning_waits == 0


def test_a_wait_after_a_failure_does_not_spin(virtual):
    host, there = torch.ones(1000).pin_memory(), torch.zeros(1000, device=virtual)
    delay_copies(virtual, 0.002)
    with Lanes(virtual) as lanes, torch_virtual.watch() as seen:
        lanes.device("h2d").copy([(there, host)], after=[lanes.here()], label="late")
        lanes.drain()
    assert seen.counters.spinning_waits == 0


def test_the_counter_counts(virtual):
    host, there = torch.ones(1000).pin_memory(), torch.zeros(1000, device=virtual)
    delay_copies(virtual, 0.05)
    stream = torch.accelerator.current_stream(virtual)
    for event, spins in ((torch.Event(virtual, blocking=True), 1), (new_event(virtual), 0)):
        with torch_virtual.watch() as seen:
            there.copy_(host, non_blocking=True)
            event.record(stream)
            event.synchronize()
        assert seen.counters.spinning_waits == spins
