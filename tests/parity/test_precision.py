"""Narrow compute with float32 masters: bfloat16 and float16 train as a plain reference, written out here, does."""

import copy
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import nn

from ferryman.engine import Engine
from ferryman.server import kernels
from support.models import CASES, build, cut, plain_step, text
from support.slow import covering, slow


def nearest(values):
    """bfloat16 as the server rounds to it: to the nearest, ties away from zero."""
    return ((values.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


class Reference:
    """Computes in a narrow dtype, adds gradients up in float32, updates float32 masters."""

    def __init__(self, model, dtype, make, scale=1.0):
        self.dtype, self.scale = dtype, scale
        self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
        self.plain = copy.deepcopy(model)
        for p in self.plain.parameters():
            p.data = p.data.to(dtype)
        self.optimizer = make(self.masters.values())
        self.copy()

    def copy(self):
        for name, p in self.plain.named_parameters():
            master = self.masters[name].data
            p.data.copy_(nearest(master) if self.dtype == torch.bfloat16 else master)

    def step(self, batch, count, max_grad_norm=None):
        seed = int(torch.randint(0, 2**62, ()))
        sums, losses = {}, []
        with torch.random.fork_rng(devices=[]):
            for number, part in enumerate(cut(batch, count)):
                torch.manual_seed(seed + number)
                loss = self.plain(**part).loss.float() * (self.scale / count)
                losses.append(loss.detach().float())
                loss.backward()
                for name, p in self.plain.named_parameters():
                    gradient, p.grad = p.grad.float() / self.scale, None
                    sums[name] = sums[name] + gradient if name in sums else gradient
        for name, master in self.masters.items():
            master.grad = (sums[name] * self.scale).to(self.dtype).float() / self.scale  # as they cross
        finite = all(torch.isfinite(master.grad).all() for master in self.masters.values())
        norm = torch.stack([m.grad.double().norm() for m in self.masters.values()]).norm().item()
        if finite:
            if max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.masters.values(), max_grad_norm)
            self.optimizer.step()
            self.copy()
        return sum(losses).item() / self.scale, norm, finite


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


@covering
@pytest.mark.parametrize("way", [{}, {"max_grad_norm": 0.5}, *slow({"deferred": True})], ids=str)
@pytest.mark.parametrize("name", ["toy", *slow("llama")])
def test_bfloat16(name, way, device):
    model = build(CASES[name])
    reference = Reference(model, torch.bfloat16, adamw)
    with Engine(model, adamw(model.parameters()), device=device, precision="bf16", **way) as engine:
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        for seed in range(20):
            torch.manual_seed(seed)
            loss = engine.step(text(8, seed), 4)
            torch.manual_seed(seed)
            expected, norm, _ = reference.step(text(8, seed), 4, way.get("max_grad_norm"))
            assert loss.item() == pytest.approx(expected, abs=1e-5)
            assert engine.grad_norm == pytest.approx(norm, rel=1e-5)
            # A master whose last bit differs (Adam's root) may round to another bfloat16, and from then on the two
            # train on weights that differ.
            if any(not torch.equal(p, nearest(reference.masters[key].data)) for key, p in model.named_parameters()):
                break
        working = copy.deepcopy(model.state_dict())
    for key, p in model.named_parameters():  # the masters come back
        assert p.dtype == torch.float32
        assert torch.equal(working[key], nearest(p.data)), key
        assert float((p.detach() - reference.masters[key].detach()).abs().max()) <= 2e-6, key


@covering
@pytest.mark.parametrize("limit", [None, 0.5])
def test_float16(limit, device):
    model = build(CASES["toy"])
    reference = Reference(model, torch.float16, adamw, scale=2.0**16)
    options = {} if limit is None else {"max_grad_norm": limit}
    with Engine(model, adamw(model.parameters()), device=device, precision="fp16", **options) as engine:
        for seed in range(10):
            torch.manual_seed(seed)
            loss = engine.step(text(8, seed), 4)
            torch.manual_seed(seed)
            expected, norm, finite = reference.step(text(8, seed), 4, limit)
            assert finite
            assert loss.item() == pytest.approx(expected, rel=1e-3)
            assert engine.grad_norm == pytest.approx(norm, rel=1e-4)
    for key, p in model.named_parameters():
        assert float((p.detach() - reference.masters[key].detach()).abs().max()) <= 2e-6, key


def test_overflow_skips_the_whole_step_and_the_scale_moves_as_torchs(device):
    model = build(CASES["toy"])
    factors = [1, 1, 3e4, 1, float("inf"), 1]

    def loss(model, part):
        return model(part["input_ids"], part["labels"]).loss * part["factor"][0]

    scaler = torch.amp.GradScaler("cpu")
    there = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([there], lr=0.1)
    with Engine(model, adamw(model.parameters()), device=device, precision="fp16", loss=loss) as engine:
        for seed, factor in enumerate(factors):
            before = {name: value.clone() for name, value in model.state_dict().items()}
            engine.step({**text(4, seed), "factor": torch.full((4,), factor)}, 2)
            after = model.state_dict()
            changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
            assert (len(changed) == 0) if factor != 1 else (len(changed) > len(before) / 2)
            scaler.scale(there.sum() * (1 if factor == 1 else float("inf"))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert engine.loss_scale == scaler.get_scale()


def test_modules_that_want_float32_keep_it(device):
    model = build(CASES["t5"])
    model._keep_in_fp32_modules = ["wo"]
    for precision, dtype in (("fp16", torch.float32), ("bf16", torch.bfloat16)):  # as transformers has it
        with Engine(model, adamw(model.parameters()), device=device, precision=precision, units=["*.block.*"]):
            assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == dtype
            assert model.encoder.block[0].layer[1].DenseReluDense.wi.weight.dtype != torch.float32
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_unit_of_two_dtypes(device):
    model = build(CASES["toy"])
    model._keep_in_fp32_modules_strict = ["up"]

    def loss(model, part):
        with torch.autocast(device.type, torch.bfloat16):
            return model(part["input_ids"], part["labels"]).loss

    with Engine(model, adamw(model.parameters()), device=device, precision="bf16", loss=loss) as engine:
        assert {p.dtype for p in model.blocks[0].parameters()} == {torch.float32, torch.bfloat16}
        losses = [engine.step(text(4, 1), 2).item() for _ in range(20)]
    assert losses[-1] < losses[0] - 0.1


def test_a_model_in_bfloat16_gets_masters(device):
    model = build(CASES["toy"]).to(torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    with Engine(model, torch.optim.SGD(model.parameters(), lr=1e-5), device=device) as engine:
        for seed in range(50):  # each step is too small for bfloat16, all together are not
            engine.step(text(4, seed % 2), 2)
        assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_weights_loaded_into_a_narrow_model_count(device):
    model, other = build(CASES["toy"]), build(CASES["toy"], seed=3)
    with Engine(model, adamw(model.parameters()), device=device, precision="fp16") as engine:
        engine.step(text(4), 2)
        engine.wait()
        model.load_state_dict(other.state_dict())
        engine.step(text(4), 2)
    both = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    off = max(float((a - b).abs().max()) for a, b in both)
    assert off < 5e-3, "one step from the weights that were loaded"


def test_splitting_loses_nothing():
    values = torch.randn(1000) * 10.0 ** torch.randint(-30, 30, (1000,))
    high, low = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000, dtype=torch.int16)
    kernels.narrow(values, high, low)
    assert torch.equal(kernels.widen(high, low), values)
    assert torch.equal(high, nearest(values))


MEMORY = """
import resource, sys, torch, ferryman
from torch import nn
from ferryman.runtime import host_memory

def resident():
    host_memory.trim()  # freed memory that malloc keeps differs from run to run, and is used again
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
    def forward(self, x):
        return x + 0.01 * self.linear(x)

class Model(nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def train(layers, width, **options):
    model = Model(layers, width)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = lambda model, part: model(part["x"]).square().mean()
    engine = ferryman.Engine(model, optimizer, device="cpu", precision="bf16", loss=loss, **options)
    for _ in range(2):
        engine.step({"x": torch.randn(2, width, dtype=torch.bfloat16)}, 2)
    engine.wait()
    return engine, sum(p.numel() for p in model.parameters())

torch.set_num_threads(1)
options = {"deferred": True} if sys.argv[1] == "deferred" else {}
width, layers = int(sys.argv[2]), int(sys.argv[3])
train(4, width, **options)[0].close()
before = resident()
engine, parameters = train(layers, width, **options)
print(resident() - before, sum(engine.host_account.values()), parameters)
"""


def _memory(way, width, layers):
    """Bytes of host memory that an engine takes, what it accounts for, and the number of parameters."""
    script = [sys.executable, "-c", MEMORY, way, str(width), str(layers)]
    run = subprocess.run(script, capture_output=True, text=True, timeout=250, check=True)
    return map(int, run.stdout.split())


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("way", "nbytes"), [("eager", 12), ("deferred", 14)])
def test_bytes_of_host_memory_for_each_parameter(way, nbytes):
    measured, accounted, parameters = _memory(way, width=1024, layers=320)  # a million parameters per unit
    assert accounted / parameters == pytest.approx(nbytes, rel=1e-3)
    assert measured / parameters <= nbytes * 1.01


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_bytes_of_host_memory_for_each_unit():
    """Python's objects, the model's own among them, which have the same size however large a unit is."""
    measured, accounted, _ = _memory("eager", width=16, layers=1280)
    assert (measured - accounted) / 1280 <= 100_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_language_model_learns_in_every_precision(accelerator):
    """A byte-level model on the standard library's sources, 300 steps: to within noise of plain PyTorch."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4}

    def make():
        torch.manual_seed(0)
        return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    def batches():
        random = torch.Generator().manual_seed(0)
        for _ in range(300):
            starts = torch.randint(0, len(data) - 64, (8,), generator=random).tolist()
            ids = torch.stack([data[start : start + 64].long() for start in starts])
            yield {"input_ids": ids, "labels": ids}

    def end_of(losses):
        return sum(losses[-30:]) / 30

    plain = make()
    theirs, losses = torch.optim.AdamW(plain.parameters(), lr=2e-3), []
    for batch in batches():
        result = plain_step(plain, cut(batch, 2))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
        losses.append(result.loss.item())
    expected = end_of(losses)
    assert expected < losses[0] - 2.0
    for precision in ("fp32", "bf16", "fp16"):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        with Engine(model, optimizer, device=accelerator, precision=precision, max_grad_norm=1.0) as engine:
            losses = [engine.step(batch, 2).item() for batch in batches()]
        assert end_of(losses) == pytest.approx(expected, abs=0.1), precision
