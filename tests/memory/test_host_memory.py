"""Host memory as a driver wants it: whole pages, registered once, on the right device, and none of it in a fork."""

import copy
import os
import random
import textwrap
import traceback

import pytest
import torch

from ferryman.engine import Engine
from ferryman.runtime import pinned
from support.devices import torch_virtual
from support.fresh import run_fresh
from support.models import CASES, build, text

SETTINGS = {"stash": "host", "slots": 2, "held": False}


def trained(device, steps=2, **settings):
    model = build(CASES["toy"])
    with Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), device=device, **settings) as engine:
        for seed in range(steps):
            torch.manual_seed(seed)
            engine.step(text(4, seed), 2)
    return model.state_dict()


@pytest.fixture
def one_warning(monkeypatch):
    monkeypatch.setattr(pinned, "_warned", set())


@pytest.mark.parametrize("settings", [SETTINGS, {"max_grad_norm": 1.0}, {"updates": "stride:2"}, {"precision": "bf16"}])
def test_no_page_is_registered_twice(virtual, settings):
    expected = trained(virtual, **settings)
    with torch_virtual.whole_pages():
        found = trained(virtual, **settings)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("limit", [0, 1 << 16, 3 << 20], ids=["nothing", "some", "most"])
def test_a_driver_that_refuses_to_pin_costs_speed_and_one_warning(virtual, one_warning, caplog, limit):
    expected = trained(virtual, **SETTINGS)
    with torch_virtual.pinned_limit(limit):
        found = trained(virtual, **SETTINGS)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len([record for record in caplog.records if "refuses to pin" in record.message]) <= 1
    if limit == 0:
        assert "stays pageable" in caplog.text


def test_no_context_is_opened_on_another_device():
    torch_virtual.contexts  # noqa: B018 - skips where there is none
    script = """
        import torch, torch_virtual, ferryman
        from torch import nn
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters())
        settings = dict(units=["0", "1", "2", "3"], stash="host", slots=2, max_grad_norm=1.0, updates="stride:2")
        loss = lambda model, x: model(x).square().mean()
        engine = ferryman.Engine(model, optimizer, device="virtual:3", loss=loss, **settings)
        for samples in (4, 8):
            engine.step(torch.ones(samples, 8), micro_batches=2)
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 8))
        engine.close()
        print(torch_virtual.contexts())
    """
    done = run_fresh(textwrap.dedent(script))
    assert done.stdout.strip() == "[3]", done.stdout + done.stderr


def in_child(work):
    """What the work returns or raises in a forked child, as text; how the child died, if it did."""
    listen, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(work())
        except BaseException as error:
            said = "".join(traceback.format_exception_only(error))
        os.write(say, said.encode()[:4000])
        os._exit(0)
    os.close(say)
    with os.fdopen(listen) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return said if status == 0 else f"the child died of {status}"


def test_fork_copies_nothing_that_is_pinned(virtual):
    before = torch_virtual.bytes_copied_by_fork()
    model = build(CASES["toy"])
    optimizer = torch.optim.AdamW(model.parameters())
    with Engine(model, optimizer, device=virtual, max_grad_norm=1.0, **SETTINGS) as engine:
        for seed in range(2):
            engine.step(text(4, seed), 2)
        engine.forward_backward(text(4, 3), 2)
        assert torch_virtual.counters(virtual).h2d_bytes > 0
        assert torch_virtual.bytes_copied_by_fork() == before


WAYS = {
    "state_dict": lambda model, weight: model.state_dict(),
    "the parameter": lambda model, weight: weight.sum().item(),
    "its data": lambda model, weight: weight.data.add_(1),
    "a copy of the model": lambda model, weight: copy.deepcopy(model),
    "its text": lambda model, weight: repr(weight),
}


@pytest.mark.parametrize("settled", [True, False], ids=["settled", "unsettled"])
@pytest.mark.parametrize("way", WAYS)
def test_a_forked_child_that_reads_weights_is_told_so(device, way, settled):
    model = build(CASES["toy"])
    weight = next(model.parameters())
    with Engine(model, torch.optim.AdamW(model.parameters()), device=device) as engine:
        engine.step(text(4), 2)
        if settled:
            engine.wait()
        said = [in_child(lambda: WAYS[way](model, weight)) for _ in range(2)]
        assert all("which was forked from it" in one for one in said), said
        assert in_child(lambda: (weight.shape, weight.device, len(list(model.parameters())))).startswith("(torch.Size")
        engine.step(text(4), 2)  # the parent goes on
    assert in_child(lambda: sum(p.sum().item() for p in model.parameters())) == str(
        sum(p.sum().item() for p in model.parameters())
    )


def test_workers_of_a_data_loader_may_have_the_model(device):
    model = build(CASES["toy"])

    class Dataset(torch.utils.data.Dataset):
        def __init__(self):
            self.model = model  # as datasets do that ask a model for its configuration

        def __len__(self):
            return 2

        def __getitem__(self, index):
            assert next(self.model.parameters()).dtype == torch.float32
            return text(4, index)

    with Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), device=device) as engine:
        loader = torch.utils.data.DataLoader(Dataset(), batch_size=None, num_workers=1, multiprocessing_context="fork")
        for seed, batch in enumerate(loader):
            torch.manual_seed(seed)
            engine.step(batch, 2)
    expected = trained(device)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_memory_of_the_stash_follows_its_peak_and_not_the_number_of_sizes(virtual):
    rng, model = random.Random(0), torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer, units = torch.optim.SGD(model.parameters(), lr=0.1), ["0", "1", "2", "3"]
    with Engine(
        model, optimizer, device=virtual, loss=lambda m, x: m(x).square().mean(), units=units, **SETTINGS
    ) as engine:
        arena, regions = engine._parts.relay.host_stash.arena, set()
        for _ in range(60):
            engine.step(torch.ones(4 * rng.randrange(50, 1500), 64), 4)
            regions.update(arena._regions)
            assert arena.reserved <= arena.peak + max(region.nbytes for region in arena._regions)
        engine.step(torch.ones(4, 64), 4)
        assert arena.peak > 4 * 2**20
        assert len(arena._regions) == 1
        assert arena.reserved <= 1.25 * arena.peak
        assert len(regions) < 20
