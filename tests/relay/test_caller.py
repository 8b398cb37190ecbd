"""The thread that calls `engine.step`: units compute on it, and its state is the same before and after."""

import contextlib
import contextvars
import threading
import types

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ferryman.engine import Engine
from support.small_models import WIDTH, Block, Model, assert_equal_to_plain, batches, loss, made

LOCAL = threading.local()
HIDDEN = types.ModuleType("hidden")  # a survey does not look into modules
HIDDEN.local = threading.local()
SEEN = contextvars.ContextVar("seen", default=0)


def state_of_caller(device):
    """All that belongs to a thread, or to the process, and that a step might leave changed."""
    found = {
        "dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", device.type)],
        "multithreading": torch._C._is_multithreading_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "modes": torch.overrides._get_current_function_mode_stack(),
    }
    if device.type != "cpu":
        found["device"] = torch.accelerator.current_device_index()
        count = torch.accelerator.device_count()
        found["streams"] = [torch.accelerator.current_stream(i).stream_id for i in range(count)]
    return found


def uses(engine, model, batch, directory):
    """Everything that runs something on the device, in order."""
    yield "step", lambda: engine.step(batch, micro_batches=3)
    yield "forward_backward", lambda: engine.forward_backward(batch, micro_batches=2)
    yield "update", engine.update
    yield "evaluation", lambda: _evaluate(model, batch)
    yield "save", lambda: engine.save(directory / "checkpoint")
    yield "load", lambda: engine.load(directory / "checkpoint")
    yield "a step that fails", lambda: _fail(engine, batch)
    yield "close", engine.close


def _evaluate(model, batch):
    with torch.no_grad():
        model(batch[0])


def _fail(engine, batch):
    with pytest.raises(RuntimeError):
        engine.step((batch[0][:, :-1].contiguous(), batch[1]), micro_batches=2)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_the_callers_state_is_the_same_before_and_after(device, stash, tmp_path):
    if device.type == "cpu" and stash == "host":
        pytest.skip("on the CPU there is no stash apart from it")
    model = made(Model, None)
    index = min(1, torch.accelerator.device_count() - 1) if device.type != "cpu" else 0
    target = torch.device(device.type, index) if device.type != "cpu" else device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, optimizer, device=target, loss=loss, stash=stash)
    ((_, *batch),) = [(0, *b) for b in batches(1)]
    with contextlib.ExitStack() as stack:
        if device.type != "cpu":
            stack.enter_context(torch.Stream(target))
        for name, use in uses(engine, model, tuple(batch), tmp_path):
            before = state_of_caller(device)
            use()
            assert state_of_caller(device) == before, f"{name} left the caller's state changed"


class Telling(Block):
    """Says on which thread it runs."""

    def forward(self, x):
        THREADS.add(threading.current_thread())
        return super().forward(x)


THREADS = set()


class TellingModel(Model):
    block = Telling


def test_units_compute_on_the_callers_thread(device):
    model = made(TellingModel, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Engine(model, optimizer, device=device, loss=loss) as engine:
        for batch in batches(2):
            engine.step(batch, micro_batches=3)
            THREADS.clear()  # the first step has a trial, one pass of which runs in the micro-batches' threads
        engine.step(batch, micro_batches=3)
    assert {threading.current_thread()} == THREADS


class Counting(Block):
    """Counts in a context variable that the loss sets, so that each micro-batch begins with 0."""

    def forward(self, x):
        SEEN.set(SEEN.get() + 1)
        return super().forward(x) * (1 + 0.1 * SEEN.get())


class CountingModel(Model):
    block = Counting


def counting_loss(model, batch):
    SEEN.set(0)
    value = loss(model, batch)
    return value * SEEN.get()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_context_variables_pass_from_unit_to_unit_and_to_the_loss(device, micro_batches):
    assert_equal_to_plain(CountingModel, counting_loss, None, micro_batches, device)


class Local(Block):
    """Reads a thread-local variable that the loss sets."""

    def forward(self, x):
        return super().forward(x) * LOCAL.scale


class LocalModel(Model):
    block = Local


def local_loss(model, batch):
    LOCAL.scale = 1 + batch[0].mean().abs().item()
    return loss(model, batch)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_units_see_thread_local_variables_of_their_micro_batch(device, micro_batches):
    assert_equal_to_plain(LocalModel, local_loss, None, micro_batches, device)


class Hidden(Block):
    def forward(self, x):
        return super().forward(x) * getattr(HIDDEN.local, "scale", 1.0)


class HiddenModel(Model):
    block = Hidden


def hidden_loss(model, batch):
    HIDDEN.local.scale = 3.0
    return loss(model, batch)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_units_see_thread_local_variables_that_no_survey_finds(device, micro_batches):
    """Where the caller's thread gives another loss, units compute in the micro-batches' threads. A straight step runs
    on this thread, and sets them here, as plain PyTorch does."""
    HIDDEN.local.__dict__.clear()
    model = made(HiddenModel, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = next(iter(batches(1)))
    with Engine(model, optimizer, device=device, loss=hidden_loss) as engine:
        found = engine.step(batch, micro_batches=micro_batches).item()
    assert hasattr(HIDDEN.local, "scale") == (device.type == "cpu" and micro_batches == 1)
    plain = made(HiddenModel, None).to(device)
    assert found == pytest.approx(hidden_loss(plain, [tensor.to(device) for tensor in batch]).item(), rel=1e-5)


def test_a_profiler_of_the_caller_sees_the_units(device):
    model = made(Model, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Engine(model, optimizer, device=device, loss=loss) as engine:
        for batch in batches(1):
            engine.step(batch, micro_batches=2)
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                engine.step(batch, micro_batches=2)
    products = [event for event in seen.events() if event.name in ("aten::linear", "aten::addmm", "aten::mm")]
    blocks = len(model.blocks)
    assert len(products) >= 2 * blocks


class Calling(Block):
    """Calls the block before it, which is a unit of its own."""

    other = None

    def forward(self, x):
        return super().forward(x) + (0 if self.other is None else self.other[0](x))


class CallingModel(Model):
    block = Calling

    def __init__(self):
        super().__init__()
        self.blocks[1].other = [self.blocks[0]]  # in a list, so that it is not a child


def test_a_unit_that_calls_another_unit_is_refused_by_name(device):
    model, before = made(CallingModel, None), made(CallingModel, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        Engine(model, optimizer, device=device, loss=loss) as engine,
        pytest.raises(ValueError, match=r"'blocks.0' is called while the unit 'blocks.1' runs.*units="),
    ):
        engine.step(next(iter(batches(1))), micro_batches=2)
    for one, two in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(one, two)


def test_workspaces_do_not_grow_with_the_number_of_micro_batches(virtual):
    from support.devices import torch_virtual

    nbytes = 2**20
    peaks = {}
    for micro_batches in (2, 64):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(64, WIDTH)
        with (
            torch_virtual.workspace(nbytes, virtual),
            Engine(
                model, optimizer, device=virtual, loss=lambda model, x: model(x).square().mean(), stash="host"
            ) as engine,
        ):
            for _ in range(2):
                engine.step(batch, micro_batches=micro_batches)
            torch.accelerator.reset_peak_memory_stats(virtual)
            engine.step(batch, micro_batches=micro_batches)
            peaks[micro_batches] = torch.accelerator.max_memory_allocated(virtual)
    assert peaks[64] < peaks[2] + nbytes


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def precision_of_products(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Looking(Block):
    """Records what the user has set, and makes a tensor by these settings."""

    def forward(self, x):
        made = torch.ones(())
        SETTINGS.add(
            (
                made.device,
                made.dtype,
                torch.are_deterministic_algorithms_enabled(),
                torch.get_float32_matmul_precision(),
            )
        )
        return super().forward(x) * made.to(x)


SETTINGS = set()


class LookingModel(Model):
    block = Looking


@pytest.mark.parametrize("early", [True, False], ids=["before the engine", "in steps"])
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        (torch.device, "cpu"),
        (torch.device, "accelerator"),
        (default_device, "accelerator"),
        (default_dtype, torch.float64),
        (deterministic, None),
        (precision_of_products, "medium"),
    ],
)
def test_what_the_caller_has_set_holds_in_units_and_disturbs_nothing(setting, value, early, device):
    if value == "accelerator":
        if device.type == "cpu":
            pytest.skip("the CPU is the default device")
        value = torch.device(device.type, torch.accelerator.device_count() - 1)  # not the engine's
    batch, model = next(iter(batches(1))), made(LookingModel, None)
    with setting(*[value] * (value is not None)):
        SETTINGS.clear()
        model.blocks[0](torch.zeros(1, WIDTH, device="cpu", dtype=torch.float32))
        (outside,) = SETTINGS
    found = []
    for is_set in (False, True):
        model = made(LookingModel, None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with contextlib.ExitStack() as stack:
            inside = (lambda: setting(*[value] * (value is not None))) if is_set else contextlib.nullcontext
            if early:
                stack.enter_context(inside())
            with Engine(model, optimizer, device=device, loss=loss) as engine:
                if not early:
                    stack.enter_context(inside())
                for _ in range(2):
                    SETTINGS.clear()
                    engine.step(batch, micro_batches=3)
                engine.forward_backward(batch, micro_batches=2)
                engine.update()
                engine.evaluate(batch)
                if is_set:
                    assert {outside} == SETTINGS
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
