"""The detector and the host: pinned buffers that the host uses, and host threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch_virtual

N = 1000


@pytest.fixture
def side() -> torch.Stream:
    return torch.Stream("virtual")


@pytest.fixture
def buffer() -> torch.Tensor:
    return torch_virtual.label(torch.zeros(N, pin_memory=True), "gradients of layer 7")


@pytest.fixture
def x() -> torch.Tensor:
    x = torch.zeros(N, device="virtual")
    torch_virtual.synchronize()
    return x


def run_thread(work: Callable[[], None]) -> None:
    """Runs `work` on another thread and raises here what it raised there."""
    errors = []

    def target() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


# --- Pinned buffers.


@pytest.mark.parametrize("use", ["reads", "writes"])
@pytest.mark.parametrize("wait", ["none", "event", "query", "stream", "device", "wrong event"])
def test_the_host_must_wait_before_it_uses_what_a_copy_writes(x, buffer, side, take_races, use, wait):
    host_use = torch_virtual.host_reads if use == "reads" else torch_virtual.host_writes
    before = side.record_event()
    with side:
        buffer.copy_(x, non_blocking=True)
    event = side.record_event()
    if wait == "event":
        event.synchronize()
    elif wait == "query":
        while not event.query():
            pass
    elif wait == "stream":
        side.synchronize()
    elif wait == "device":
        torch_virtual.synchronize()
    elif wait == "wrong event":
        before.synchronize()
    if wait in ("none", "wrong event"):
        with pytest.raises(RuntimeError, match="optimizer step"), torch_virtual.strict():
            host_use(buffer, "optimizer step")
        take_races()
        host_use(buffer, "optimizer step")
        (report,) = take_races()
        for part in ("'optimizer step' on the host", use, "copy device to host", f"stream {side.stream_id}", "layer 7"):
            assert part in report
        torch_virtual.synchronize()
    with torch_virtual.strict():
        host_use(buffer, "optimizer step")


def test_the_host_may_read_but_not_write_what_a_copy_reads(x, buffer, side, take_races):
    with torch_virtual.strict():
        with side:
            x.copy_(buffer, non_blocking=True)
        torch_virtual.host_reads(buffer)
        with pytest.raises(RuntimeError, match="'host write' on the host writes what 'copy host to device'"):
            torch_virtual.host_writes(buffer)
        side.synchronize()
        torch_virtual.host_writes(buffer)
        with side:
            x.copy_(buffer, non_blocking=True)  # launched after the host wrote: in order
    assert len(take_races()) == 1


def test_memory_that_is_not_pinned_is_never_copied_behind_the_hosts_back(x, side):
    plain = torch.zeros(N)
    with torch_virtual.strict():
        with side:
            plain.copy_(x, non_blocking=True)
        torch_virtual.host_writes(plain)
    with pytest.raises(ValueError, match="host memory"):
        torch_virtual.host_reads(x)


def test_the_hosts_part_of_a_copy_counts_as_its_use(x, buffer, side, take_races):
    """A copy that converts reads the pinned buffer on the host, at once, whatever stream it is for."""
    with side:
        buffer.copy_(x, non_blocking=True)
    y = torch.empty(N, dtype=torch.float64, device="virtual")
    y.copy_(buffer, non_blocking=True)
    (report,) = take_races()
    assert "the host's part of a copy to the device" in report
    side.synchronize()
    with side:
        x.copy_(buffer, non_blocking=True)
    buffer.view(10, 100)[:, ::2].copy_(torch.zeros(10, 50, device="virtual"))
    (report,) = take_races()
    assert "the host's part of a copy from the device" in report
    torch_virtual.synchronize()


# --- Host threads.


def test_threads_are_one_host_unless_they_ask(x, buffer, side):
    with side:
        buffer.copy_(x, non_blocking=True)
    run_thread(side.synchronize)
    with torch_virtual.strict():
        torch_virtual.host_reads(buffer)


def test_a_thread_with_its_own_clock_knows_only_what_it_waited_for(x, buffer, side, take_races):
    with side:
        buffer.copy_(x, non_blocking=True)
    event = side.record_event()
    with torch_virtual.own_clock("update thread"):
        run_thread(event.synchronize)  # others did wait, but nobody told this one
        torch_virtual.host_reads(buffer, "update")
        (report,) = take_races()
        assert "'update' on update thread" in report
        event.synchronize()
        torch_virtual.host_reads(buffer, "update")
    assert take_races() == []


def test_knowledge_is_handed_over_by_now_and_learn(x, buffer, side, take_races):
    told = []

    def waiter() -> None:
        with torch_virtual.own_clock("waiter"):
            side.synchronize()
            told.append(torch_virtual.now())

    with torch_virtual.own_clock("worker"):
        early = torch_virtual.now()
        with side:
            buffer.copy_(x, non_blocking=True)
        run_thread(waiter)
        torch_virtual.learn(early)  # from before the copy: worth nothing
        torch_virtual.host_writes(buffer)
        assert len(take_races()) == 1
        torch_virtual.learn(told[0])
        torch_virtual.host_writes(buffer)
        assert take_races() == []


@pytest.mark.parametrize("handed_over", [False, True])
def test_two_threads_with_clocks_of_their_own_race_for_a_buffer(buffer, take_races, handed_over):
    """Also when the first has ended and the second took its place: the detector may not mix them up."""
    told = []

    def writer() -> None:
        with torch_virtual.own_clock("writer"):
            torch_virtual.host_writes(buffer)
            told.append(torch_virtual.now())

    def reader() -> None:
        with torch_virtual.own_clock("reader"):
            if handed_over:
                torch_virtual.learn(told[0])
            torch_virtual.host_reads(buffer)

    run_thread(writer)
    run_thread(reader)
    found = take_races()
    assert len(found) == (0 if handed_over else 1)
    if found:
        assert "'host read' on reader reads what 'host write' on writer wrote" in found[0]


def test_what_a_thread_launches_comes_after_what_it_knows(x, buffer, side, take_races):
    """The host's write is known to a copy launched by the same thread, not to one launched by another."""

    def write_and_launch() -> None:
        with torch_virtual.own_clock("writer"):
            torch_virtual.host_writes(buffer)
            with side:
                x.copy_(buffer, non_blocking=True)

    run_thread(write_and_launch)
    assert take_races() == []
    other = torch.Stream("virtual")
    y = torch.zeros(N, device="virtual")
    other.wait_stream(torch_virtual.current_stream())
    with other:
        y.copy_(buffer, non_blocking=True)
    (report,) = take_races()
    assert "on writer" in report
    torch_virtual.synchronize()


def test_waiting_for_a_stream_does_not_cover_what_others_launch_meanwhile(x, buffer, take_races, holds_once):
    """One thread waits for a stream on which another launches a copy after that: the copy was not waited for."""
    stream = torch_virtual.current_stream()

    def is_reported() -> bool:
        x.copy_(torch.zeros(N, pin_memory=True), non_blocking=True)
        waiter = threading.Thread(target=stream.synchronize)
        waiter.start()
        time.sleep(0.1)  # it waits by now, unless others have the cores: then it waits for both copies
        buffer.copy_(x, non_blocking=True)
        waiter.join()
        torch_virtual.host_reads(buffer)
        torch_virtual.synchronize()
        found = take_races()
        assert len(found) <= 1
        return len(found) == 1

    with torch_virtual.link(delay=0.3):
        assert holds_once(is_reported)
