"""The device and the process: fork, spawn, threads, exit."""

from __future__ import annotations

import threading

import pytest
import torch
import torch_virtual


def test_a_forked_process_is_refused_with_the_way_out(run_python):
    done = run_python(
        """
        x = torch.ones(1000, device="virtual")
        pin = torch.ones(10).pin_memory()
        torch_virtual.synchronize()
        child = os.fork()
        if child == 0:
            works = [
                lambda: torch.ones(3, device="virtual"), lambda: x + 1, lambda: x.cpu(),
                lambda: x.copy_(torch.ones(1000)), lambda: pin.to("virtual", non_blocking=True),
                lambda: torch.Event("virtual").record(),
            ]
            for work in works:
                try:
                    work()
                    print("worked", flush=True)
                except RuntimeError as error:
                    print(error, flush=True)
            torch.manual_seed(3)  # as a DataLoader's worker does
            assert torch.ones(3).sum() == 3
            del x, pin
            os._exit(0)
        print("child", os.waitpid(child, 0)[1], flush=True)
        print((x + 1).sum().item())
        """
    )
    *refusals, child, total = done.stdout.splitlines()
    assert len(refusals) == 6
    assert all("forked process" in line and "'spawn'" in line for line in refusals), done.stdout
    assert (child, total) == ("child 0", "2000.0"), done.stderr


def test_a_process_forked_before_the_first_use_may_use_it(run_python):
    done = run_python(
        """
        if os.fork() == 0:
            print(torch.ones(3, device="virtual").sum().item(), flush=True)
            os._exit(0)
        os.wait()
        """
    )
    assert done.stdout.split() == ["3.0"], done.stderr


def test_a_spawned_process_has_devices_of_its_own(tmp_path, run_python):
    script = tmp_path / "spawned.py"
    script.write_text(
        "import torch, torch_virtual\n"
        "def child(index, queue):\n"
        "    queue.put((torch_virtual.memory_allocated(), torch.ones(3, device='virtual').sum().item()))\n"
    )
    done = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import spawned
        x = torch.ones(1000, device="virtual")
        queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
        torch.multiprocessing.spawn(spawned.child, args=(queue,), nprocs=1)
        print(*queue.get())
        """
    )
    assert done.stdout.split() == ["0", "3.0"], done.stderr


def test_the_process_ends_at_once_and_cleanly_while_copies_are_pending(run_python):
    done = run_python(
        """
        torch_virtual.set_link(h2d=1e4, d2h=1e4)
        host, back = torch.ones(1 << 20).pin_memory(), torch.empty(1 << 20, pin_memory=True)
        x = torch.zeros(1 << 20, device="virtual")
        other = torch.Stream("virtual")
        other.wait_stream(torch_virtual.current_stream())
        x.copy_(host, non_blocking=True)  # 420 s, longer than the process may take
        with other:
            back.copy_(torch.ones(1 << 20, device="virtual"), non_blocking=True)
        x.record_stream(other)
        event = torch.Event("virtual")
        event.record()
        threading.Thread(target=event.synchronize, daemon=True).start()
        print("end")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_another_device_of_pytorchs_kind_is_refused(run_python):
    done = run_python(
        """
        import sys
        for name in [n for n in sys.modules if n.startswith("torch_virtual")]:
            del sys.modules[name]
        import torch_virtual
        """
    )
    assert "ImportError: torch_virtual needs PyTorch's PrivateUse1 device" in done.stderr


def test_tensors_made_on_one_thread_and_freed_on_others():
    base = torch_virtual.memory_allocated()

    def work(tensors: list[torch.Tensor]) -> None:
        while tensors:
            x = tensors.pop()
            assert (x + 1).sum().item() == 2000
            del x

    for _ in range(5):
        tensors = [torch.ones(1000, device="virtual") for _ in range(50)]
        threads = [threading.Thread(target=work, args=(tensors[i::4],)) for i in range(4)]
        tensors.clear()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    del threads
    assert torch_virtual.memory_allocated() == base


def test_an_exception_in_a_kernel_gives_the_stream_back():
    x = torch.ones(3, 3, device="virtual")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="not positive-definite"):
            torch.linalg.cholesky(-x)
    assert x.sum().item() == 9
