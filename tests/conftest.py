import contextlib
import gc
import importlib
import random
import shutil

import numpy as np
import pytest
import torch
from playwright.sync_api import sync_playwright

from ferryman.observe.report import write_report
from ferryman.training.first_steps import FirstSteps
from support import devices
from support.ranks import Ranks


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        action="append",
        help="a device to run the tests on; may be repeated: cpu, and one accelerator (default: cpu and virtual)",
    )
    parser.addoption(
        "--copy-delay",
        type=float,
        default=devices.COPY_DELAY,
        help="seconds that copies of the virtual device are late in tests that look for missing waits (default: "
        "%(default)s); must be longer than a visit, so give more on a busy machine",
    )
    parser.addoption(
        "--trials",
        choices=["some", "all"],
        default="some",
        help="whether an engine tries out its first steps also in the folders of tests/ that are not about such trials "
        "(default: %(default)s)",
    )


def pytest_configure(config):
    devices.choose(config.getoption("--device") or devices.DEFAULT)
    devices.COPY_DELAY = config.getoption("--copy-delay")


def pytest_generate_tests(metafunc):
    """Tests that take a `device` run on each that was chosen, unless they say themselves on which."""
    if "device" in metafunc.fixturenames and "device" not in _parametrized(metafunc.definition):
        metafunc.parametrize("device", devices.chosen(), indirect=True)


def _parametrized(definition):
    """The names for which a test has values of its own."""
    names = [mark.args[0] for mark in definition.iter_markers("parametrize")]
    return {name.strip() for some in names for name in (some.split(",") if isinstance(some, str) else some)}


@pytest.hookimpl(tryfirst=True)  # before the option -m chooses
def pytest_collection_modifyitems(items):
    """A test that has other parameters, too, runs on the accelerator with all of their values. On the CPU it runs with
    the first; the others are slow there."""
    seen = set()
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if given.get("device") != "cpu" or devices.chosen_accelerator() is None or "device" in _parametrized(item):
            continue
        if item.function in seen:
            item.add_marker(pytest.mark.slow)
        seen.add(item.function)


def pytest_collection_finish(session):
    """What has been imported stays, so that the collections below need not look at it. The first optimizer of a process
    imports torch._dynamo, whose objects would be most of what they look at."""
    if session.items:
        importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


_kept = 0  # bytes of the device that a collection could not free


def pytest_runtest_logfinish(nodeid, location):
    """An exception that a test has caught keeps the test's frame alive, and with it tensors on the device, until the
    garbage collector runs. Tests that measure the device's memory would see those of tests before them."""
    global _kept
    name = devices.chosen_accelerator()
    if name is not None and torch.accelerator.memory_allocated(devices.whole(name)) > _kept:
        gc.collect()
        _kept = torch.accelerator.memory_allocated(devices.whole(name))


@pytest.fixture
def virtual(request):
    """The virtual device, strict about races, with its link and capacity as they were before. For tests that need its
    own controls, or whose budgets in kilobytes are smaller than what a GPU's libraries take for themselves.

    It is as unkind as CUDA (`support.devices.SCALE`), unless the test is marked `exact`."""
    if "virtual" not in devices.chosen():
        pytest.skip("needs the virtual device's own controls: run it with --device virtual")
    from support.devices import torch_virtual

    torch_virtual.clear_races()
    before = torch_virtual.set_link("virtual:0")
    _, capacity = torch_virtual.mem_get_info("virtual:0")
    # Whichever tests have run before, no stream has a workspace, and the allocator's cache is empty.
    workspace = torch_virtual.set_workspace(devices.WORKSPACE, "virtual:0")
    torch_virtual.synchronize()
    torch_virtual.empty_cache()
    is_exact = request.node.get_closest_marker("exact") is not None
    with devices.exact("virtual:0") if is_exact else contextlib.nullcontext(), torch_virtual.strict():
        yield torch.device("virtual:0")
    torch_virtual.synchronize()
    torch_virtual.set_link("virtual:0", h2d=before.h2d, d2h=before.d2h, latency=before.latency, delay=before.delay)
    torch_virtual.set_capacity(capacity, "virtual:0")
    torch_virtual.set_workspace(workspace, "virtual:0")
    assert torch_virtual.races() == []


@pytest.fixture
def device(request):
    """Each device that was chosen, one after the other."""
    return _prepared(request.param, request)


@pytest.fixture
def accelerator(request):
    """The chosen device that is not the CPU."""
    name = devices.chosen_accelerator()
    if name is None:
        pytest.skip("needs an accelerator: run it with --device virtual, or that of this machine")
    return _prepared(name, request)


def _prepared(name, request):
    return request.getfixturevalue("virtual") if name == "virtual" else devices.whole(name)


@pytest.fixture(autouse=True)
def _seeded():
    """Every test draws the same numbers, whichever tests have run before it."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


# Trials leave no trace, and take most of the time of an engine that runs a few small steps. The folders that are not in
# this list test what trials find and what remains of them.
_WITHOUT_TRIALS = {"checkpoint", "interleave", "kernels", "model", "observe", "plan", "runtime", "updates"}


@pytest.fixture(autouse=True)
def _trials(request, monkeypatch):
    """Without the option `--trials all`, most engines do not try out their first steps. A test that needs trials,
    because its model has state or because it counts what they do, is marked `trials`."""
    folder = request.path.relative_to(request.config.rootpath / "tests").parts[0]
    wanted = request.config.getoption("--trials") == "all" or request.node.get_closest_marker("trials") is not None
    if folder in _WITHOUT_TRIALS and not wanted:
        monkeypatch.setattr(FirstSteps, "is_new", lambda self, parts: False)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the ferryman crosses the river {i} times\n" for i in range(100)))
    return path


@pytest.fixture(scope="module")
def browser():
    """A real one."""
    if shutil.which("chromium") is None:
        pytest.skip("there is no chromium here to look at the report with (Debian: apt install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens the report of a trace; in the end nothing may have gone wrong in the page, nor left the machine."""
    wrong, asked, pages = [], [], []

    def open_page(trace, width=1400, scheme="light"):
        target = tmp_path / "report.html"
        write_report(trace, target, overwrite=True)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(target.as_uri())
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert wrong == []
    assert {url for url in asked if not url.startswith("data:")} == {(tmp_path / "report.html").as_uri()}


@pytest.fixture(scope="session")
def two():
    """Two ranks of one machine."""
    yield from _ranks(2, nodes=1)


@pytest.fixture(scope="session")
def nodes():
    """Two ranks that share no memory."""
    yield from _ranks(2, nodes=2)


@pytest.fixture(scope="session")
def four():
    """Two ranks on each of two machines."""
    yield from _ranks(4, nodes=2)


def _ranks(size, nodes):
    ranks = Ranks(size, nodes)
    yield ranks
    ranks.close()
