"""The devices that the tests run on, as `--device` gives them, and what only the virtual one of them can do.

`from support.devices import torch_virtual` instead of `import torch_virtual`: importing that package makes the virtual
device PyTorch's current accelerator, which must not happen where another accelerator is tested.
"""

import contextlib
import importlib
import os

import pytest
import torch

DEFAULT = ("cpu", "virtual")
COPY_DELAY = 0.02  # seconds, longer than a visit, so that a missing wait shows; the option --copy-delay
SCALE = 512  # the virtual device is as unkind as CUDA; its segments and workspaces are smaller by this, as models are
WORKSPACE = 1024  # bytes for each pair of thread and stream that multiplies; the smallest budgets are of 64 KiB
_VARIABLE = "FERRYMAN_TEST_DEVICES"  # in the environment, so that processes which the tests start know them too


def choose(names):
    """Sets the devices of the tests: "cpu", and at most one accelerator, since PyTorch has one per process."""
    if sum(name != "cpu" for name in names) > 1:
        raise pytest.UsageError(f"--device: one accelerator in a run, besides cpu; given: {', '.join(names)}")
    os.environ[_VARIABLE] = ",".join(names)
    if "virtual" in names:
        os.environ.setdefault("TORCH_VIRTUAL_UNKIND", str(SCALE))
        importlib.import_module("torch_virtual")


def chosen():
    """The names of the devices, such as ("cpu", "virtual")."""
    return tuple(os.environ[_VARIABLE].split(",")) if _VARIABLE in os.environ else DEFAULT


def chosen_accelerator():
    """The name of the accelerator that was chosen, or None."""
    return next((name for name in chosen() if name != "cpu"), None)


def whole(name):
    """The device of that name, with its index."""
    device = torch.device(name)
    return device if name == "cpu" else torch.device(device.type, device.index or 0)


def delay_copies(device, seconds=None):
    """Context in which each copy over the link starts later, if the device supports that; by default by COPY_DELAY."""
    if device.type == "virtual":
        importlib.import_module("torch_virtual").set_link(device, delay=COPY_DELAY if seconds is None else seconds)


def exact(device):
    """Context in which the virtual device allocates exactly the bytes of tensors, for tests of memory formulas."""
    virtual = importlib.import_module("torch_virtual")
    stack = contextlib.ExitStack()
    stack.enter_context(virtual.caching(virtual.EXACT, device))
    stack.enter_context(virtual.workspace(0, device))
    return stack


class _NotChosen:
    """Replaces torch_virtual where it is not installed: a test that uses it is skipped."""

    def __getattr__(self, name):
        pytest.skip(f"needs torch_virtual.{name}: run it with --device virtual")


def __getattr__(name):
    if name != "torch_virtual":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("torch_virtual") if "virtual" in chosen() else _NotChosen()
