"""Streams and events mean what they mean on CUDA."""

from __future__ import annotations

import threading

import pytest
import torch
import torch_virtual

COUNT = 100_000


# --- Events and waiting.


def test_wait_event_orders_two_streams(device_tensor, pinned, side):
    host = pinned(COUNT)
    with torch_virtual.link(delay=0.1), side:
        device_tensor.copy_(host, non_blocking=True)
        event = side.record_event()
    assert not event.query()
    torch_virtual.current_stream().wait_event(event)
    doubled = device_tensor * 2  # must see the copy's bytes
    assert event.query()
    assert torch.equal(doubled.cpu(), host * 2)


def test_wait_stream_orders_two_streams(device_tensor, pinned, side):
    host, back = pinned(COUNT), pinned(COUNT)
    with torch_virtual.link(delay=0.1):
        device_tensor.copy_(host, non_blocking=True)
        side.wait_stream(torch_virtual.current_stream())
        with side:
            back.copy_(device_tensor, non_blocking=True)
        back_done = side.record_event()
    back_done.synchronize()
    assert torch.equal(back, host)


def test_without_a_wait_streams_do_not_wait(device_tensor, pinned, side, take_races):
    """The negative control of the two above: the device lets the mistake happen, and the detector tells."""
    host = pinned(COUNT).fill_(1)
    with torch_virtual.link(delay=0.2), side:
        device_tensor.copy_(host, non_blocking=True)
    assert device_tensor.sum().item() == 0
    assert len(take_races()) == 1
    side.synchronize()
    assert device_tensor.sum().item() == COUNT


def test_waiting_for_an_event_does_not_block_the_host(device_tensor, pinned, side):
    host = pinned(COUNT)
    other = torch.Stream("virtual")
    back = pinned(COUNT)
    with torch_virtual.link(delay=0.5):
        with side:
            device_tensor.copy_(host, non_blocking=True)
            event = side.record_event()
        other.wait_event(event)
        with other:
            back.copy_(device_tensor, non_blocking=True)
        assert not event.query()
    other.synchronize()
    assert torch.equal(back, host)


def test_an_event_is_what_it_was_when_last_recorded(device_tensor, pinned, side):
    host = pinned(COUNT)
    event = torch.Event("virtual")
    assert event.query()  # never recorded: nothing to wait for
    event.synchronize()
    torch_virtual.current_stream().wait_event(event)
    event.record(side)
    assert event.query()
    with torch_virtual.link(delay=0.1), side:
        device_tensor.copy_(host, non_blocking=True)
        assert event.query()  # what came later does not count
        event.record(side)
        assert not event.query()  # recorded anew
    event.synchronize()
    assert event.query()


@pytest.mark.parametrize("wait", ["event", "stream", "device"])
def test_synchronize_waits_for_all_before_it(device_tensor, pinned, side, wait):
    host = pinned(COUNT)
    with torch_virtual.link(delay=0.1), side:
        device_tensor.copy_(host, non_blocking=True)
    event = side.record_event()
    target = {"event": event, "stream": side, "device": torch_virtual}[wait]
    target.synchronize()
    assert event.query()
    assert side.query()
    assert torch.equal(device_tensor.cpu(), host)


def test_synchronize_of_an_event_does_not_wait_for_what_follows(device_tensor, pinned, side):
    host = pinned(COUNT)
    with side:
        device_tensor.copy_(host, non_blocking=True)
        event = side.record_event()
        with torch_virtual.link(delay=0.5):
            device_tensor.copy_(host, non_blocking=True)
    event.synchronize()
    assert not side.query()


def test_elapsed_time_is_the_streams(device_tensor, pinned, side, holds_once):
    host = pinned(COUNT)
    begin, end = torch.Event("virtual", enable_timing=True), torch.Event("virtual", enable_timing=True)

    def is_the_copys() -> bool:
        begin.record(side)
        device_tensor.copy_(host, non_blocking=True)
        end.record(side)
        end.synchronize()
        assert end.elapsed_time(begin) == -begin.elapsed_time(end)
        assert begin.elapsed_time(end) > 90
        return begin.elapsed_time(end) < 110

    with torch_virtual.link(h2d=4e6), side:
        assert holds_once(is_the_copys)


def test_time_is_known_once_events_have_passed(device_tensor, pinned, side):
    host = pinned(COUNT)
    begin, end = torch.Event("virtual", enable_timing=True), torch.Event("virtual", enable_timing=True)
    with torch_virtual.link(delay=1.0), side:
        begin.record(side)
        device_tensor.copy_(host, non_blocking=True)
        end.record(side)
        with pytest.raises(RuntimeError, match="must be completed"):
            begin.elapsed_time(end)


def test_times_need_events_made_for_them(side):
    plain, timed = torch.Event("virtual"), torch.Event("virtual", enable_timing=True)
    with pytest.raises(ValueError, match="recorded"):
        timed.elapsed_time(torch.Event("virtual", enable_timing=True))
    plain.record(side)
    timed.record(side)
    with pytest.raises(ValueError, match="enable_timing"):
        plain.elapsed_time(timed)


# --- Streams as objects.


def test_the_33rd_stream_is_the_first_again():
    streams = [torch.Stream("virtual:2") for _ in range(33)]
    assert len({s.stream_id for s in streams}) == 32
    assert streams[32] == streams[0]
    assert torch_virtual.default_stream(2) not in streams


def test_the_current_stream_is_a_threads_own(side):
    default = torch_virtual.default_stream()
    seen = []
    with side:
        assert torch.accelerator.current_stream() == torch_virtual.current_stream() == side
        thread = threading.Thread(target=lambda: seen.append(torch_virtual.current_stream()))
        thread.start()
        thread.join()
        with torch.Stream("virtual") as inner:
            assert torch_virtual.current_stream() == inner
        assert torch_virtual.current_stream() == side
    assert seen == [default]
    assert torch_virtual.current_stream() == default
    torch_virtual.set_stream(side)
    assert torch_virtual.current_stream() == side


def test_devices_have_streams_of_their_own(device_tensor, pinned):
    host = pinned(COUNT)
    x = torch.zeros(COUNT, device="virtual:1")
    torch_virtual.synchronize(1)
    with torch_virtual.link(1, delay=0.5):
        x.copy_(host, non_blocking=True)
        assert torch_virtual.current_stream(0).query()
        torch_virtual.synchronize(0)
        assert not torch_virtual.current_stream(1).query()
        y = x.to("virtual:0")  # ordered with both devices' streams
    assert torch.equal(y.cpu(), host)


def test_the_other_device_waits_for_a_copy_between_devices(pinned):
    """What the source's stream does next comes after the copy."""
    x = torch.ones(COUNT, device="virtual:0")
    y = torch.empty(COUNT, device="virtual:1")
    with torch_virtual.strict():
        y.copy_(x)
        x.fill_(5)
        x.copy_(y)
        y.fill_(5)
    assert x.sum().item() == COUNT


# --- The GIL.


@pytest.mark.parametrize("wait", ["event", "stream", "device", "kernel", "item", "copy", "allocation"])
def test_other_threads_run_while_one_waits(pinned, wait, holds_once):
    def others_run() -> bool:
        host = pinned(COUNT)
        device_tensor = torch.zeros(COUNT, device="virtual")
        ticks = 0
        stop = threading.Event()

        def tick() -> None:
            nonlocal ticks
            while not stop.wait(0.005):
                ticks += 1

        thread = threading.Thread(target=tick, daemon=True)
        side = torch.Stream("virtual")
        if wait == "allocation":
            device_tensor.record_stream(side)
            side.wait_stream(torch_virtual.current_stream())
            torch_virtual.set_capacity(torch_virtual.memory_allocated() + 8)
        stream = side if wait == "allocation" else torch_virtual.current_stream()
        with torch_virtual.link(delay=0.5), stream:
            device_tensor.copy_(host, non_blocking=True)
            event = stream.record_event()
            if wait == "allocation":
                del device_tensor
            thread.start()
            waits = {
                "event": event.synchronize,
                "stream": stream.synchronize,
                "device": torch_virtual.synchronize,
                "kernel": lambda: device_tensor.add_(1),
                "item": lambda: device_tensor[0].item(),
                "copy": lambda: device_tensor.cpu(),
                "allocation": lambda: torch.empty(COUNT, device="virtual"),
            }
            waits[wait]()
            seen = ticks
        stop.set()
        thread.join()
        assert event.query()
        return seen > 3  # a wait that kept Python's lock would allow two: one before it and one after

    assert holds_once(others_run)
