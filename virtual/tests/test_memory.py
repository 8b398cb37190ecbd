"""Device memory: out of the host's reach, counted to the byte, and finite."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
import torch_virtual

MB = 1 << 20


@pytest.fixture
def base() -> int:
    """Bytes in use before the test."""
    return torch_virtual.memory_allocated()


# --- The host cannot touch it.


@pytest.mark.parametrize(
    "touch",
    [
        "ctypes.c_float.from_address(x.data_ptr()).value",
        "ctypes.c_float.from_address(x.data_ptr()).__setattr__('value', 1.0)",
        "ctypes.string_at(x[500:].data_ptr(), 4)",
    ],
    ids=["read", "write", "read within"],
)
def test_touching_a_device_pointer_from_the_host_is_a_fault(run_python, touch):
    done = run_python(f"x = torch.ones(1000, device='virtual')\nprint('alive', flush=True)\n{touch}\nprint('touched')")
    assert done.stdout.split() == ["alive"]
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(
    "work",
    [
        "torch_virtual.set_link(h2d=1e6); x.copy_(torch.ones(n).pin_memory(), non_blocking=True)",
        "threading.Thread(target=lambda: [x.exp_() for _ in range(10**6)], daemon=True).start(); time.sleep(0.1)",
    ],
    ids=["copy", "kernel"],
)
def test_also_while_a_copy_or_a_kernel_uses_it(run_python, work):
    done = run_python(
        f"n = 1 << 20\nx = torch.zeros(n, device='virtual')\n{work}\nprint('alive', flush=True)\n"
        "ctypes.c_float.from_address(x.data_ptr()).value\nprint('touched')"
    )
    assert done.stdout.split() == ["alive"]
    assert done.returncode == -signal.SIGSEGV


def test_freed_memory_faults_too(run_python):
    done = run_python(
        "x = torch.ones(1000, device='virtual'); p = x.data_ptr(); del x; ctypes.c_float.from_address(p).value"
    )
    assert done.returncode == -signal.SIGSEGV


# --- It is counted to the byte.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex128])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5, 11), (1000, 3), (0, 4), ()])
def test_an_allocation_counts_its_bytes_and_no_more(base, dtype, shape):
    x = torch.empty(shape, dtype=dtype, device="virtual")
    assert torch_virtual.memory_allocated() - base == x.nbytes
    del x
    assert torch_virtual.memory_allocated() == base


def test_peak_is_the_most_in_use_at_once(base):
    torch_virtual.reset_peak_memory_stats()
    assert torch_virtual.max_memory_allocated() == base
    x = torch.empty(1001, dtype=torch.uint8, device="virtual")
    y = torch.empty(2003, dtype=torch.uint8, device="virtual")
    del x
    z = torch.empty(5, dtype=torch.uint8, device="virtual")
    assert torch_virtual.memory_allocated() - base == 2003 + 5
    assert torch_virtual.max_memory_allocated() - base == 1001 + 2003
    torch_virtual.reset_peak_memory_stats()
    assert torch_virtual.max_memory_allocated() - base == 2003 + 5
    del y, z


def test_a_kernel_counts_its_result_and_its_workspace(base):
    x = torch.empty(1000, 1000, device="virtual")
    torch_virtual.reset_peak_memory_stats()
    y = x + x
    assert torch_virtual.memory_allocated() - base == 8_000_000
    assert torch_virtual.max_memory_allocated() - base == 8_000_000
    del y
    # A sum over a bf16 copy needs the copy for as long as it takes.
    total = x.to(torch.bfloat16).sum()
    assert torch_virtual.memory_allocated() - base == 4_000_000 + 2
    assert torch_virtual.max_memory_allocated() - base == 8_000_000
    del total


def test_pytorch_reports_the_same(base):
    x = torch.empty(12345, device="virtual")
    torch_virtual.set_capacity(base + MB)
    assert torch.accelerator.memory_allocated() == torch_virtual.memory_allocated() == base + x.nbytes
    assert torch.accelerator.max_memory_allocated() == torch_virtual.max_memory_allocated()
    assert torch.accelerator.memory_reserved() == base + x.nbytes  # nothing is kept back
    stats = torch_virtual.memory_stats()
    assert stats["allocated_bytes.all.current"] == base + x.nbytes
    assert torch_virtual.mem_get_info() == torch.accelerator.get_memory_info() == (MB - x.nbytes, base + MB)


def test_views_cost_nothing_and_keep_their_memory(base):
    x = torch.empty(1000, device="virtual")
    views = [x.view(10, 100), x[5:], x.view(10, 100).t(), x.detach(), x.expand(7, 1000)]
    assert torch_virtual.memory_allocated() - base == 4000
    del x
    assert torch_virtual.memory_allocated() - base == 4000
    views.clear()
    assert torch_virtual.memory_allocated() == base


def test_a_storage_resizes_and_keeps_what_fits(base):
    x = torch.arange(1000, dtype=torch.float32, device="virtual")
    storage = x.untyped_storage()
    storage.resize_(8000)
    assert torch_virtual.memory_allocated() - base == 8000
    assert torch.equal(x.cpu(), torch.arange(1000, dtype=torch.float32))
    storage.resize_(0)
    assert torch_virtual.memory_allocated() == base
    storage.resize_(4000)
    x.fill_(3)
    assert torch_virtual.memory_allocated() - base == 4000
    assert x.sum().item() == 3000


def test_devices_have_memory_of_their_own(base):
    before = torch_virtual.memory_allocated(1)
    torch_virtual.set_capacity(before + 1000, 1)
    x = torch.empty(500, dtype=torch.uint8, device="virtual:1")
    assert torch_virtual.memory_allocated(1) - before == 500
    assert torch_virtual.memory_allocated(0) == base
    with pytest.raises(torch.OutOfMemoryError, match="virtual:1"):
        torch.empty(501, dtype=torch.uint8, device="virtual:1")
    torch.empty(MB, dtype=torch.uint8, device="virtual:0")
    with torch_virtual.device(1):
        assert torch.empty(500, dtype=torch.uint8, device="virtual").device == x.device


def test_more_devices_can_be_added(run_python):
    done = run_python(
        "print(torch_virtual.device_count()); torch_virtual.set_device_count(6); x = torch.ones(3, device='virtual:5');"
        "print(x.sum().item(), torch.accelerator.device_count())\n"
        "try: torch_virtual.set_device_count(2)\nexcept ValueError as e: print(e)"
    )
    assert done.stdout.splitlines()[:2] == ["4", "3.0 6"]
    assert "can grow from 6" in done.stdout


# --- It runs out.


def test_beyond_the_capacity_is_out_of_memory_with_the_sizes(base):
    torch_virtual.set_capacity(base + 10_000)
    x = torch.ones(1000, device="virtual")
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(6001, dtype=torch.uint8, device="virtual")
    for size in ("6001 bytes", "5.86 KiB free", f"{base + 10_000} bytes", f"{base + 4000} bytes", "virtual:0"):
        assert size in str(error.value)
    # The device is usable, up to the last byte.
    y = torch.empty(6000, dtype=torch.uint8, device="virtual").fill_(1)
    assert torch_virtual.mem_get_info()[0] == 0
    del y
    assert x.sum().item() == 1000
    assert torch_virtual.memory_stats()["num_ooms"] >= 1


def test_out_of_memory_in_a_kernel_leaves_nothing_behind(base):
    a, b = torch.ones(1000, 10, device="virtual"), torch.ones(10, 1000, device="virtual")
    used = torch_virtual.memory_allocated()
    torch_virtual.set_capacity(used + MB)
    for work in (lambda: a @ b, lambda: torch.mm(a, b, out=torch.empty(0, device="virtual")), lambda: (a @ b).exp()):
        with pytest.raises(torch.OutOfMemoryError, match="4000000 bytes"):
            work()
        assert torch_virtual.memory_allocated() == used
    assert (a[:100] @ b[:, :100]).sum().item() == 100_000


def test_out_of_memory_in_a_backward_pass(base):
    x = torch.ones(1000, 100, device="virtual", requires_grad=True)
    y = (x.exp().exp()).sum()
    torch_virtual.set_capacity(torch_virtual.memory_allocated() + 300_000)
    with pytest.raises(torch.OutOfMemoryError):
        y.backward()
    torch_virtual.set_capacity(torch_virtual.memory_allocated() + MB)
    y = x.sum()
    y.backward()
    assert x.grad.sum().item() == 100_000


def test_the_capacity_changes_at_run_time(base):
    x = torch.empty(MB, dtype=torch.uint8, device="virtual")
    torch_virtual.set_capacity(base + 1000)  # below what is in use: that stays, nothing is added
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="virtual")
    assert torch_virtual.mem_get_info() == (0, base + 1000)
    torch_virtual.set_capacity(base + 2 * MB)
    y = torch.empty(MB, dtype=torch.uint8, device="virtual")
    del x, y
    with pytest.raises(ValueError, match="negative"):
        torch_virtual.set_capacity(-1)


def test_free_memory_is_free_however_it_is_cut(base):
    """No fragmentation: what was freed in small pieces is there for a large one."""
    torch_virtual.set_capacity(base + MB)
    pieces = [torch.empty(1024, dtype=torch.uint8, device="virtual") for _ in range(1024)]
    del pieces[::2]
    x = torch.empty(MB // 2, dtype=torch.uint8, device="virtual")
    pieces.clear()
    del x
    torch.empty(MB, dtype=torch.uint8, device="virtual")
    torch_virtual.empty_cache()
    torch.empty(MB, dtype=torch.uint8, device="virtual").fill_(7)


# --- Memory that other streams use.


def test_record_stream_keeps_memory_until_the_stream_has_passed(base, pinned):
    side = torch.Stream("virtual")
    x = torch.ones(25_000, device="virtual")
    host = pinned(25_000)
    side.wait_stream(torch_virtual.current_stream())
    with torch_virtual.link(d2h=1e6), side:  # 0.1 s
        host.copy_(x, non_blocking=True)
    x.record_stream(side)
    address = x.data_ptr()
    del x
    assert torch_virtual.memory_allocated() - base == 100_000
    assert torch.empty(25_000, device="virtual").data_ptr() != address
    # An allocation that needs it waits for it, rather than fail.
    torch_virtual.set_capacity(base + 100_000)
    y = torch.empty(25_000, device="virtual")
    assert side.query()
    assert torch.equal(host, torch.ones(25_000))
    del y
    assert torch_virtual.memory_allocated() == base


def test_a_failed_resize_does_not_make_later_allocations_wait(take_races, base):
    """Memory that was never given to a tensor is not waited for when there is not enough."""
    side = torch.Stream("virtual")
    x = torch.zeros(1000, device="virtual")
    side.wait_stream(torch_virtual.current_stream())
    with side:
        x.fill_(1)
    with pytest.raises(RuntimeError, match="race"), torch_virtual.strict():
        x.untyped_storage().resize_(8000)
    assert len(take_races()) == 1
    torch_virtual.synchronize()
    torch_virtual.set_capacity(base + 10_000)
    failed = threading.Event()

    def fail() -> None:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(20_000, device="virtual")
        failed.set()

    threading.Thread(target=fail, daemon=True).start()
    assert failed.wait(20)
