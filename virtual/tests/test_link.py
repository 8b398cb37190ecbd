"""The link: as fast as it was set to be, both ways at once, and without burning a core."""

from __future__ import annotations

import math
import statistics
import time

import pytest
import torch
import torch_virtual

MB = 1 << 20


class Copies:
    """Asynchronous copies of one size on a stream, timed by events."""

    def __init__(self, direction: str, nbytes: int = 4 * MB, stream: torch.Stream | None = None) -> None:
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        on_device = torch.zeros(nbytes, dtype=torch.uint8, device="virtual")
        self.to, self.source = (on_device, host) if direction == "h2d" else (host, on_device)
        self.stream = stream or torch.Stream("virtual")
        self.stream.wait_stream(torch_virtual.current_stream())
        self.begin, self.end = (torch.Event("virtual", enable_timing=True) for _ in range(2))

    def start(self, count: int = 1) -> None:
        with self.stream:
            self.begin.record()
            for _ in range(count):
                self.to.copy_(self.source, non_blocking=True)
            self.end.record()

    def seconds(self) -> float:
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3

    def once(self, count: int = 1) -> float:
        self.start(count)
        return self.seconds()

    def median(self, runs: int = 10) -> float:
        return statistics.median([self.once() for _ in range(runs)][1:])  # the first one warms up


def wall(work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def assert_takes(seconds: float, measure, rel: float = 0.05) -> None:
    """Never less, by what `measure` says; and no more, in one of many tries, since others may have the cores."""
    for _ in range(40):
        found = measure()
        assert found > (1 - rel) * seconds
        if found < (1 + rel) * seconds:
            return
    pytest.fail(f"{found} s in the last of 40 tries, where {seconds} s were expected")


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize("rate", [4e7, 4e8])
def test_a_throttled_copy_takes_bytes_over_bandwidth(direction, rate):
    """Only the direction that was set is throttled."""
    there, back = Copies(direction), Copies("d2h" if direction == "h2d" else "h2d")
    with torch_virtual.link(**{direction: rate}):
        there.once()
        assert_takes(4 * MB / rate, there.once)
        assert min(back.once() for _ in range(20)) < 0.5 * 4 * MB / 4e8

        # Events tell the link's time; the clock on the wall tells whether that is true. Over 0.1 s, because waking a
        # thread takes a good part of 10 ms when others have the cores.
        count = round(rate / 4e7)

        def run() -> None:
            there.start(count)
            there.stream.synchronize()

        assert_takes(count * 4 * MB / rate, lambda: wall(run))


def test_many_small_copies_keep_the_pace():
    """Late wake-ups must not add up, neither in the events' time nor on the wall."""
    copies = Copies("h2d", 4096)
    with torch_virtual.link(h2d=4e6):  # 1 ms each

        def run() -> None:
            copies.start(200)
            copies.stream.synchronize()

        assert_takes(0.2048, lambda: wall(run))
        assert_takes(0.2048, lambda: copies.once(200))


def test_a_link_faster_than_memory_takes_memorys_time():
    """The link's time may not be better than the truth."""
    copies = Copies("h2d", 64 * MB)
    copies.median(2)
    with torch_virtual.link(h2d=1e13):  # 7 us, by the link alone
        assert copies.median(4) > 1e-3


def test_blocking_copies_are_throttled_too():
    x, host = torch.zeros(MB, device="virtual"), torch.zeros(MB)
    with torch_virtual.link(h2d=8e7, d2h=4e7):
        assert_takes(4 * MB / 8e7, lambda: wall(lambda: x.copy_(host)), rel=0.1)
        assert_takes(4 * MB / 4e7, lambda: wall(lambda: host.copy_(x)), rel=0.1)


def test_both_directions_at_once_take_no_longer_than_one():
    down, up = Copies("h2d"), Copies("d2h")
    with torch_virtual.link(h2d=4e7, d2h=6e7):

        def run() -> None:
            down.start()
            up.start()
            down.stream.synchronize()
            up.stream.synchronize()

        run()
        assert_takes(4 * MB / 4e7, lambda: wall(run), rel=0.1)
        assert_takes(4 * MB / 4e7, down.once)
        assert_takes(4 * MB / 6e7, up.once)


def test_two_streams_share_a_direction():
    one, two = Copies("h2d"), Copies("h2d")
    with torch_virtual.link(h2d=8e7):

        def run() -> None:
            one.start()
            two.start()
            one.stream.synchronize()
            two.stream.synchronize()

        run()
        assert_takes(8 * MB / 8e7, lambda: wall(run), rel=0.1)


def test_devices_have_links_of_their_own():
    host = torch.zeros(MB, dtype=torch.uint8)
    x, y = (torch.zeros(MB, dtype=torch.uint8, device=f"virtual:{i}") for i in (0, 1))
    with torch_virtual.link(1, h2d=1e7):
        assert torch_virtual.set_link(0) == torch_virtual.Link()
        assert wall(lambda: y.copy_(host)) > 0.1
        assert min(wall(lambda: x.copy_(host)) for _ in range(10)) < 0.1


def test_waiting_for_a_throttled_copy_burns_no_core():
    copies = Copies("h2d", 3 * MB)
    copies.median(2)

    def burnt() -> float:
        before = time.process_time()
        copies.once()
        return time.process_time() - before

    with torch_virtual.link(h2d=1e7):  # 0.3 s
        assert min(burnt() for _ in range(3)) < 0.06


def test_bytes_arrive_over_time_and_not_at_the_start():
    host = torch.ones(8 * MB, dtype=torch.uint8, pin_memory=True)
    back = torch.zeros(8 * MB, dtype=torch.uint8, pin_memory=True)
    x = host.to("virtual")

    def some_seen() -> bool:
        """Whether a part of the bytes is seen before the others; if others have the cores, it may not be."""
        back.zero_()
        back.copy_(x, non_blocking=True)
        while not (arrived := int(back.sum(dtype=torch.int64))):
            pass
        torch_virtual.synchronize()
        assert int(back.sum(dtype=torch.int64)) == 8 * MB
        return arrived < 8 * MB

    with torch_virtual.link(d2h=4e7):  # 0.2 s
        assert any(some_seen() for _ in range(40))


def test_the_bandwidth_changes_at_run_time():
    copies = Copies("h2d")
    for rate in (4e7, 2e8, 8e7):
        before = torch_virtual.set_link(h2d=rate)
        assert_takes(4 * MB / rate, copies.once)
    assert before.h2d == 2e8

    def set_back() -> float:
        """A copy goes at the pace that was set when it was asked for."""
        torch_virtual.set_link(h2d=4e7)
        copies.start()
        torch_virtual.set_link(h2d=math.inf)
        return copies.seconds()

    assert_takes(4 * MB / 4e7, set_back)


def test_a_latency_is_added_to_each_copy():
    copies = Copies("h2d", 4096)
    with torch_virtual.link(latency=0.02):
        assert_takes(0.02, copies.once, rel=0.1)
        assert_takes(0.1, lambda: copies.once(5), rel=0.1)
        x = torch.zeros(4, device="virtual")
        assert_takes(0.02, lambda: wall(lambda: x.cpu()), rel=0.5)
    with torch_virtual.link(latency=0.02, h2d=4096 / 0.03):
        assert_takes(0.05, copies.once, rel=0.1)


def test_a_delay_comes_before_asynchronous_copies_only(holds_once):
    copies = Copies("d2h", 4096)
    with torch_virtual.link(delay=0.05):
        assert_takes(0.05, copies.once, rel=0.1)
        assert min(wall(lambda: torch.zeros(4, device="virtual").cpu()) for _ in range(10)) < 0.04
        copies.source.fill_(1)
        copies.stream.wait_stream(torch_virtual.current_stream())

    def comes_first() -> bool:
        """Whether the copy was read while it was delayed, when nothing may have moved yet."""
        copies.to.zero_()
        copies.start()
        time.sleep(0.01)
        before = int(copies.to[0])
        was_delayed = not copies.end.query()
        assert before == 0 or not was_delayed
        copies.stream.synchronize()
        assert copies.to[0] == 1
        return was_delayed

    with torch_virtual.link(delay=0.5):
        assert holds_once(comes_first)


def test_unlimited_by_default():
    assert torch_virtual.set_link() == torch_virtual.Link(math.inf, math.inf, 0.0, 0.0)
    assert 64 * MB / Copies("h2d", 64 * MB).median(3) > 3e8


def test_a_block_of_code_leaves_the_link_as_it_was():
    torch_virtual.set_link(h2d=1e9, latency=1e-6)
    before = torch_virtual.set_link()
    with torch_virtual.link(h2d=1e6, delay=0.5):
        assert torch_virtual.set_link() == torch_virtual.Link(h2d=1e6, latency=1e-6, delay=0.5)
    assert torch_virtual.set_link() == before
    with pytest.raises(KeyError), torch_virtual.link(d2h=1.0):
        raise KeyError
    assert torch_virtual.set_link() == before


@pytest.mark.parametrize(
    "wrong",
    [{"h2d": 0}, {"d2h": -1.0}, {"h2d": math.nan}, {"latency": -1e-3}, {"delay": math.inf}, {"delay": math.nan}],
)
def test_what_no_link_can_be_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        torch_virtual.set_link(**wrong)
    with pytest.raises(ValueError, match="h2d, d2h, latency and delay, not bandwidth"):
        torch_virtual.set_link(bandwidth=3)
    with pytest.raises(ValueError, match="virtual:9"):
        torch_virtual.set_link(9, h2d=1.0)
    with pytest.raises(ValueError, match="'cpu'"):
        torch_virtual.set_link("cpu", h2d=1.0)
    assert torch_virtual.set_link() == torch_virtual.Link()
