"""The race detector: every kind of race is reported, by logic and not by timing, and its corrected twin is not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch_virtual

N = 1000


class Stage:
    """Two streams, device tensors and a pinned buffer, all idle and known to the host."""

    def __init__(self) -> None:
        self.one, self.two, self.three = (torch.Stream("virtual") for _ in range(3))
        self.x, self.y, self.z = (torch.zeros(N, device="virtual") for _ in range(3))
        self.buffer = torch.zeros(N, pin_memory=True)
        self.other_buffer = torch.zeros(N, pin_memory=True)
        torch_virtual.label(self.x, "weights of layer 3")
        torch_virtual.label(self.buffer, "staging")
        torch_virtual.synchronize()


@pytest.fixture
def stage() -> Stage:
    return Stage()


def copy_in(s: Stage) -> None:
    s.x.copy_(s.buffer, non_blocking=True)


def copy_out(s: Stage) -> None:
    s.buffer.copy_(s.x, non_blocking=True)


def copy_in_again(s: Stage) -> None:
    s.x.copy_(s.other_buffer, non_blocking=True)


def copy_out_again(s: Stage) -> None:
    s.other_buffer.copy_(s.x, non_blocking=True)


def fill_buffer(s: Stage) -> None:
    s.buffer.copy_(s.y, non_blocking=True)


def send_buffer(s: Stage) -> None:
    s.z.copy_(s.buffer, non_blocking=True)


def read(s: Stage) -> None:
    s.y.add_(s.x)


def write(s: Stage) -> None:
    s.x.mul_(2)


def foreach(s: Stage) -> None:
    torch._foreach_add_([s.z, s.x], 1.0)


def out(s: Stage) -> None:
    torch.add(s.z, s.z, out=s.x)


def within(s: Stage) -> None:
    s.x.copy_(s.z)


def scalar(s: Stage) -> None:
    s.x[3].item()


def scatter(s: Stage) -> None:
    s.x[torch.tensor([1, 2])] = 1.0


# First on stream one, then on stream two; the tensor that both touch; what the second does to what the first did.
RACES = {
    "copy, kernel reads": (copy_in, read, "weights", "reads what 'copy host to device'"),
    "copy, kernel writes": (copy_in, write, "weights", "writes what 'copy host to device'"),
    "kernel, kernel reads": (write, read, "weights", "reads what 'aten::mul_.Tensor'"),
    "kernel reads, kernel writes": (read, write, "weights", "writes what 'aten::add_.Tensor'"),
    "kernel, kernel writes": (write, write, "weights", "writes what 'aten::mul_.Tensor'"),
    "kernel, copy out": (write, copy_out, "weights", "reads what 'aten::mul_.Tensor'"),
    "kernel reads, copy in": (read, copy_in, "weights", "writes what 'aten::add_.Tensor'"),
    "copy out, kernel writes": (copy_out, write, "weights", "writes what 'copy device to host'"),
    "copy in, copy in": (copy_in, copy_in_again, "weights", "writes what 'copy host to device'"),
    "copy in, copy out": (copy_in, copy_out_again, "weights", "reads what 'copy host to device'"),
    "copy out, copy in": (copy_out, copy_in_again, "weights", "writes what 'copy device to host'"),
    "buffer filled, sent": (fill_buffer, send_buffer, "staging", "reads what 'copy device to host'"),
    "buffer sent, filled": (send_buffer, fill_buffer, "staging", "writes what 'copy host to device'"),
    "foreach, kernel": (foreach, read, "weights", "reads what 'aten::add_.Tensor'"),
    "copy, foreach": (copy_in, foreach, "weights", "writes what 'copy host to device'"),
    "out=, kernel": (out, read, "weights", "reads what 'aten::add.out'"),
    "copy, out=": (copy_in, out, "weights", "writes what 'copy host to device'"),
    "copy, copy within the device": (copy_in, within, "weights", "'copy within the device'"),
    "copy, item": (copy_in, scalar, "weights", "reads what 'copy host to device'"),
    "copy, index_put": (copy_in, scatter, "weights", "writes what 'copy host to device'"),
}

NO_RACES = {
    "two reads": (read, copy_out),
    "two copies out": (copy_out, copy_out_again),
    "buffer sent twice": (send_buffer, copy_in),
    "different tensors": (read, send_buffer),
}


def by_nothing(s: Stage) -> None:
    pass


def by_event(s: Stage) -> None:
    s.two.wait_event(s.one.record_event())


def by_stream(s: Stage) -> None:
    s.two.wait_stream(s.one)


def by_host_event(s: Stage) -> None:
    s.one.record_event().synchronize()


def by_host_stream(s: Stage) -> None:
    s.one.synchronize()


def by_host_device(s: Stage) -> None:
    torch_virtual.synchronize()


def by_query(s: Stage) -> None:
    event = s.one.record_event()
    while not event.query():
        pass


def by_stream_query(s: Stage) -> None:
    while not s.one.query():
        pass


def by_third_stream(s: Stage) -> None:
    s.three.wait_stream(s.one)
    s.two.wait_event(s.three.record_event())


def by_blocking_copy(s: Stage) -> None:
    with s.one:
        torch.zeros(1, device="virtual").cpu()


def by_other_device(s: Stage) -> None:
    far = torch_virtual.default_stream(1)
    far.wait_stream(s.one)
    s.two.wait_stream(far)


ORDERS = [
    by_event, by_stream, by_host_event, by_host_stream, by_host_device, by_query, by_stream_query, by_third_stream,
    by_blocking_copy, by_other_device,
]  # fmt: skip


def perform(s: Stage, first: Callable, second: Callable, order: Callable) -> None:
    with s.one:
        first(s)
    order(s)
    with s.two:
        second(s)


@pytest.mark.parametrize("kind", RACES)
def test_a_race_is_counted_once_with_both_operations_streams_and_label(stage, take_races, kind):
    first, second, label, deed = RACES[kind]
    perform(stage, first, second, by_nothing)
    (report,) = take_races()
    assert deed in report
    assert label in report
    assert f"on stream {stage.one.stream_id} of virtual:0" in report
    assert f"on stream {stage.two.stream_id} of virtual:0" in report


@pytest.mark.parametrize("kind", RACES)
def test_a_race_raises_in_strict_mode(stage, take_races, kind):
    first, second, label, deed = RACES[kind]
    with torch_virtual.strict():
        with stage.one:
            first(stage)
        with pytest.raises(RuntimeError, match=label) as error, stage.two:
            second(stage)
        assert deed in str(error.value)
    assert len(take_races()) == 1
    by_event(stage)
    with torch_virtual.strict(), stage.two:
        second(stage)  # after the wait it may run


@pytest.mark.parametrize("kind", RACES)
def test_a_wait_between_the_two_makes_it_right(stage, kind):
    first, second, _, _ = RACES[kind]
    with torch_virtual.strict():
        perform(stage, first, second, by_event)
        by_event(stage)


@pytest.mark.parametrize("order", ORDERS)
def test_every_kind_of_wait_counts(stage, order):
    with torch_virtual.strict():
        perform(stage, copy_in, write, order)


@pytest.mark.parametrize("kind", NO_RACES)
def test_what_cannot_collide_is_no_race(stage, kind):
    with torch_virtual.strict():
        perform(stage, *NO_RACES[kind], by_nothing)


def test_timing_does_not_matter(stage, take_races):
    """The copy has long ended when the kernel starts. Nothing but luck made it so."""
    with stage.one:
        copy_in(stage)
    time.sleep(0.1)
    with stage.two:
        read(stage)
    assert len(take_races()) == 1


def test_waiting_the_wrong_way_does_not_count(stage, take_races):
    wrong = {
        "the event is from before": lambda: stage.two.wait_event(early),
        "the other stream waits": lambda: stage.one.wait_stream(stage.two),
        "another stream is waited for": lambda: stage.two.wait_stream(stage.three),
        "the host waits for another": stage.three.synchronize,
        "only the recording": stage.one.record_event,
    }
    for wait in wrong.values():
        torch_virtual.synchronize()
        early = stage.one.record_event()
        perform(stage, copy_in, write, lambda _, wait=wait: wait())
        assert len(take_races()) == 1
    torch_virtual.synchronize()


def test_an_event_carries_what_its_stream_had_waited_for(stage, take_races):
    """Order is transitive, and only as old as the recording."""
    with stage.one:
        write(stage)
    stage.three.wait_stream(stage.one)
    event = stage.three.record_event()
    with stage.one:
        copy_out(stage)
    stage.two.wait_event(event)
    with stage.two:
        read(stage)  # the write is ordered, and the copy only reads
    assert take_races() == []
    with stage.two:
        write(stage)  # the copy is not ordered
    (report,) = take_races()
    assert "copy device to host" in report
    torch_virtual.synchronize()


def test_a_waited_event_that_was_recorded_again_counts_as_it_was(stage, take_races):
    event = stage.one.record_event()
    with stage.one:
        copy_in(stage)
    stage.two.wait_event(event)
    event.record(stage.one)
    with stage.two:
        read(stage)
    assert len(take_races()) == 1
    stage.two.wait_event(event)
    with stage.two:
        read(stage)
    torch_virtual.synchronize()


def test_strict_mode_ends_with_its_block(stage, take_races):
    with torch_virtual.strict():
        with torch_virtual.strict(False):
            perform(stage, copy_in, write, by_nothing)
        with pytest.raises(RuntimeError, match="race"), stage.one:
            stage.x.fill_(7)
        torch_virtual.synchronize()
        assert stage.x.sum().item() == 0  # what raises does not run
    perform(stage, copy_in, write, by_nothing)
    assert len(take_races()) == 3
    torch_virtual.synchronize()
