"""Ctrl-C in the middle of a step: it comes out as itself, and the next step is as if nothing had been."""

import os
import signal
import threading

import pytest
import torch

from ferryman.engine import Engine
from support.devices import delay_copies
from support.models import CASES, assert_same, build, cut, plain_step, step, text
from support.slow import slow


@pytest.fixture(autouse=True)
def ctrl_c():
    """As in a terminal: started in the background, a process ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("options", [{"deferred": True}, *slow({}, {"stash": "host", "slots": 1})], ids=str)
def test_the_next_step_is_right(options, device):
    delay_copies(device, 0.005)
    model, plain = build(CASES["toy"]), build(CASES["toy"])
    with Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), device=device, **options) as engine:
        engine.step(text(8), 4)
        interrupted = 0
        for number in range(8):
            timer = threading.Timer(0.004 * number + 0.001, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                for seed in range(20):
                    engine.step(text(8, seed), 4)
                timer.join()
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            plain.load_state_dict(model.state_dict())
            plain.zero_grad()
            torch.manual_seed(number)
            result = step(engine, model, text(8, number), 4)
            torch.manual_seed(number)
            assert_same(result, plain_step(plain, cut(text(8, number), 4)))
            engine.zero_grad()
    assert interrupted >= 4


class TimeoutReachedError(Exception):
    pass


def test_an_exception_of_a_signal_handler_waits_for_the_micro_batch(device):
    """It is raised in the driver's thread while a micro-batch runs: the step ends when that one has parked."""

    def reached(*_):
        raise TimeoutReachedError

    def signalling(model, batch):
        if engine.steps == 1:
            os.kill(os.getpid(), signal.SIGALRM)
        return model(**batch).loss

    before = signal.signal(signal.SIGALRM, reached)
    model = build(CASES["toy"])
    try:
        with Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), device=device, loss=signalling) as engine:
            engine.step(text(8), 4)
            with pytest.raises(TimeoutReachedError):
                engine.step(text(8), 4)
            assert engine.steps == 1
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            engine.step(text(8), 4)
            assert engine.steps == 2
    finally:
        signal.signal(signal.SIGALRM, before)
