"""What real devices do that hurts: workspaces, waits that spin, pages, contexts, forks, no float64."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch_virtual

KB = 1 << 10


@pytest.fixture
def base() -> int:
    return torch_virtual.memory_allocated()


def product() -> None:
    x = torch.ones(4, 4, device="virtual")
    x @ x


def living_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def in_threads(count: int, at_once: bool) -> None:
    """Runs `product` in threads, which all live at the same time or one after the other."""
    barrier = threading.Barrier(count if at_once else 1)

    def work() -> None:
        product()
        barrier.wait(30)

    threads = [threading.Thread(target=work) for _ in range(count)]
    running = living_threads()
    for thread in threads:
        thread.start()
        while not at_once and living_threads() > running:
            time.sleep(0.001)  # a thread gives its handle back when it is gone, which is after `join`
    for thread in threads:
        thread.join()


def test_each_thread_and_stream_that_multiplies_has_a_workspace(base, side):
    with torch_virtual.workspace(64 * KB):
        product()
        product()
        assert torch_virtual.memory_allocated() - base == 64 * KB
        with side:
            product()
        assert torch_virtual.memory_allocated() - base == 128 * KB
        in_threads(4, at_once=True)
        assert torch_virtual.memory_allocated() - base == (2 + 4) * 64 * KB  # and they stay
    assert torch_virtual.memory_allocated() == base


def test_a_thread_takes_over_the_workspace_of_one_that_has_ended(base):
    with torch_virtual.workspace(64 * KB):
        in_threads(8, at_once=False)
        assert torch_virtual.memory_allocated() - base == 64 * KB


def test_other_operators_need_no_workspace(base):
    with torch_virtual.workspace(64 * KB):
        x = torch.ones(100, device="virtual").exp().sum()
        del x
        assert torch_virtual.memory_allocated() == base


@pytest.mark.parametrize(
    "multiply",
    [
        lambda x: torch.nn.functional.linear(x, x),
        lambda x: torch.addmm(x, x, x),
        lambda x: torch.bmm(x[None], x[None]),
        lambda x: x @ x[0],
        lambda x: torch.einsum("ij,kj->ik", x, x),
    ],
    ids=["linear", "addmm", "bmm", "mv", "einsum"],
)
def test_every_way_to_multiply_has_one(base, multiply):
    x = torch.ones(4, 4, device="virtual")
    with torch_virtual.workspace(64 * KB):
        before = torch_virtual.memory_allocated()
        result = multiply(x)
        assert torch_virtual.memory_allocated() - before >= 64 * KB
        del result


def spins(wait) -> int:
    """How many waits of `wait(event)` keep a core busy, for a copy that takes 0.1 s."""
    x, host = torch.zeros(25_000, device="virtual"), torch.empty(25_000, pin_memory=True)
    torch_virtual.synchronize()
    before = torch_virtual.counters().spinning_waits
    with torch_virtual.link(d2h=1e6):
        host.copy_(x, non_blocking=True)
        wait()
    return torch_virtual.counters().spinning_waits - before


def test_waits_of_torch_events_and_streams_spin():
    def event() -> None:
        event = torch.Event("virtual")
        event.record()
        event.synchronize()

    assert spins(event) == 1
    assert spins(lambda: torch_virtual.current_stream().synchronize()) == 1
    assert spins(torch_virtual.synchronize) == 1


@pytest.mark.parametrize("blocking", [True, False])
def test_a_blocking_event_does_not_spin(blocking):
    def event() -> None:
        event = torch_virtual.Event(blocking=blocking)
        event.record()
        event.synchronize()

    assert spins(event) == (0 if blocking else 1)


def test_the_devices_own_events_order_streams_and_tell_the_time(side):
    begin, end = torch_virtual.Event(enable_timing=True), torch_virtual.Event(enable_timing=True)
    x, host = torch.zeros(25_000, device="virtual"), torch.ones(25_000).pin_memory()
    with torch_virtual.link(h2d=1e6):
        begin.record()
        x.copy_(host, non_blocking=True)
        end.record()
    end.wait(side)
    with side:
        assert x.sum().item() == 25_000
    assert end.query()
    torch_virtual.current_stream().wait_stream(side)
    assert begin.elapsed_time(end) >= 99


def test_copies_that_the_host_waits_for_are_counted(pinned):
    x, host = torch.zeros(1000, device="virtual"), pinned(1000)
    before = torch_virtual.counters().blocking_copies
    x.copy_(host, non_blocking=True)
    assert torch_virtual.counters().blocking_copies == before
    x.copy_(torch.ones(1000), non_blocking=True)  # not pinned
    x.sum().item()
    assert torch_virtual.counters().blocking_copies == before + 2


def mapped(nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    memory = mmap.mmap(-1, nbytes)
    return memory, torch.frombuffer(memory, dtype=torch.uint8)


def test_memory_can_be_pinned_page_by_page():
    _, memory = mapped(3 * 4096)
    first, second = memory[:5000], memory[5000:6000]  # the second shares a page with the first
    torch_virtual.register_host(first)
    torch_virtual.register_host(second)
    torch_virtual.unregister_host(second)
    try:
        with torch_virtual.whole_pages(), pytest.raises(ValueError, match="pages that are pinned already"):
            torch_virtual.register_host(second)
        with torch_virtual.whole_pages(), pytest.raises(ValueError, match="pages that are pinned already"):
            torch_virtual.register_host(first)
        third = memory[8192:]
        torch_virtual.register_host(third)
        torch_virtual.unregister_host(third)
    finally:
        torch_virtual.unregister_host(first)


def test_a_driver_may_cap_what_is_pinned():
    _, memory = mapped(1 << 20)
    with torch_virtual.pinned_limit(0), pytest.raises(torch.OutOfMemoryError, match="refuses to pin"):
        torch_virtual.register_host(memory)
    torch_virtual.register_host(memory)
    torch_virtual.unregister_host(memory)


def test_what_fork_would_copy():
    before = torch_virtual.bytes_copied_by_fork()
    memory, tensor = mapped(1 << 20)
    torch_virtual.register_host(tensor)
    try:
        assert torch_virtual.bytes_copied_by_fork() - before == 1 << 20
        memory.madvise(mmap.MADV_DONTFORK)
        assert torch_virtual.bytes_copied_by_fork() == before
    finally:
        torch_virtual.unregister_host(tensor)


def test_contexts_are_those_of_devices_in_use(run_python):
    done = run_python(
        "print(torch_virtual.contexts()); torch.accelerator.set_device_index(2); m = torch.zeros(1024);"
        "torch_virtual.register_host(m); print(torch_virtual.contexts()); torch_virtual.unregister_host(m)\n"
        "x = torch.ones(3, device='virtual:3'); print(torch_virtual.contexts())"
    )
    assert done.stdout.splitlines() == ["[]", "[2]", "[2, 3]"], done.stderr


def test_backward_opens_no_context_on_other_devices(run_python):
    done = run_python(
        "x = torch.ones(3, device='virtual:2', requires_grad=True); x.sum().backward(); print(torch_virtual.contexts())"
    )
    assert done.stdout.splitlines() == ["[2]"], done.stderr


def test_streams_in_use_are_counted(run_python):
    done = run_python(
        "x = torch.ones(3, device='virtual'); print(torch_virtual.streams_in_use())\n"
        "streams = [torch.Stream('virtual') for _ in range(3)]\n"
        "with streams[0]: x.exp_()\n"
        "print(torch_virtual.streams_in_use())"
    )
    assert done.stdout.splitlines()[0] == "1", done.stderr
    assert int(done.stdout.splitlines()[1]) >= 2


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.double(),
        lambda x: torch.zeros(3, dtype=torch.float64, device="virtual"),
        lambda x: x.sum(dtype=torch.float64),
        lambda x: torch.ones(3, dtype=torch.float64).to("virtual"),
        lambda x: x.to(torch.complex128),
    ],
    ids=["convert", "make", "sum", "move", "complex"],
)
def test_a_device_can_have_no_float64(work):
    x = torch.ones(3, device="virtual")
    work(x)
    with torch_virtual.no_float64(), pytest.raises(TypeError, match="no float64"):
        work(x)
    work(x)


def test_the_environment_makes_every_device_unkind(run_python, monkeypatch):
    monkeypatch.setenv("TORCH_VIRTUAL_UNKIND", "512")
    code = """
        print(torch_virtual.contexts())
        for index in (0, 3):
            print(torch_virtual.set_caching(torch_virtual.EXACT, index), torch_virtual.set_workspace(0, index))
    """
    done = run_python(code)
    each = f"{torch_virtual.Caching(64, 4 * KB, 40 * KB)} {16 * KB}"
    assert done.stdout.splitlines() == ["[]", each, each], done.stderr


@pytest.mark.parametrize("value", ["0", "3", "no", "32768"])
def test_a_scale_that_is_no_power_of_two_is_refused(run_python, monkeypatch, value):
    monkeypatch.setenv("TORCH_VIRTUAL_UNKIND", value)
    done = run_python("")
    assert f"must be a power of two from 1 to 16384, not '{value}'" in done.stderr
