"""Checkpoints of compact optimizer state: resuming is bit-exact, and every format loads into every other."""

import itertools

import pytest
import torch
from torch import nn

import ferryman
from ferryman import Engine
from ferryman.checkpoint import tensor_file
from support.checkpoints import assert_equal, everything
from support.crafted import change_file

FORMATS = ["fp32", "bf16", "8bit"]
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "Lion": lambda parameters: ferryman.Lion(parameters, lr=1e-4),
}


def engine_of(kept: str, optimizer: str = "AdamW", **options: object) -> Engine:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 64))
    made = OPTIMIZERS[optimizer](network.parameters())
    return Engine(network, made, device="cpu", precision="bf16", loss=loss, state=kept, **options)


def loss(network: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return network(batch.bfloat16()).float().square().mean()


def step(engine: Engine, first: int, last: int) -> None:
    for number in range(first, last):
        engine.step(torch.randn(4, 64, generator=torch.Generator().manual_seed(number)), micro_batches=2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kept", FORMATS)
def test_resuming_is_exact(kept, optimizer, tmp_path):
    with engine_of(kept, optimizer) as engine:
        step(engine, 0, 3)
        engine.save(tmp_path / "saved")
        step(engine, 3, 6)
        expected = everything(engine)
    with engine_of(kept, optimizer) as engine:
        engine.load(tmp_path / "saved")
        step(engine, 3, 6)
        assert_equal(everything(engine), expected)


@pytest.mark.parametrize(("saved", "kept"), list(itertools.permutations(FORMATS, 2)))
def test_every_format_loads_into_every_other(saved, kept, tmp_path):
    with engine_of(saved) as engine:
        step(engine, 0, 3)
        engine.save(tmp_path / "saved")
        before = {name: p.detach().clone() for name, p in engine._model.named_parameters()}
        state = engine._optimizer_view.optimizers[0].state
        moments = [{key: value.clone() for key, value in one.items()} for one in state.values()]
    with engine_of(kept) as engine:
        engine.load(tmp_path / "saved")
        for name, parameter in engine._model.named_parameters():
            assert torch.equal(parameter, before[name])
        for one, wanted in zip(engine._optimizer_view.optimizers[0].state.values(), moments, strict=True):
            assert one["step"] == wanted["step"]
            for key, close in (("exp_avg", 1 / 16), ("exp_avg_sq", 1 / 8)):
                lowest = wanted[key].abs().max().item() * 2.0**-14
                torch.testing.assert_close(
                    one[key], wanted[key], rtol=close if kept == "8bit" else 1 / 256, atol=lowest
                )
        step(engine, 3, 4)
        engine.save(tmp_path / "again")
    with engine_of(saved) as engine:
        engine.load(tmp_path / "again")


def test_files_contain_the_compact_state(tmp_path):
    sizes = {}
    for kept in FORMATS:
        with engine_of(kept) as engine:
            step(engine, 0, 1)
            engine.save(tmp_path / kept)
        header = tensor_file.read_header(tmp_path / kept / "ferryman/state.safetensors")
        assert header["0.bias/exp_avg"].dtype == torch.float32
        sizes[kept] = sum(entry.stop - entry.start for name, entry in header.items() if name.startswith("0.weight/exp"))
    count = 64 * 200
    assert sizes == {"fp32": 8 * count, "bf16": 4 * count, "8bit": 2 * count + 2 * 4 * count // 256}


@pytest.mark.parametrize("change", ["missing", "short", "dtype", "without codes"])
def test_scales_that_do_not_fit_are_refused(change, tmp_path):
    for kept in ("8bit", "bf16"):
        with engine_of(kept) as engine:
            step(engine, 0, 1)
            engine.save(tmp_path / kept)
    path = tmp_path / ("bf16" if change == "without codes" else "8bit")
    file, name = path / "ferryman/state.safetensors", "0.weight/exp_avg.scales"
    header = tensor_file.read_header(file)
    tensors = {key: tensor_file.read_tensor(file, entry) for key, entry in header.items()}
    if change == "without codes":
        tensors[name] = torch.ones(50)
    elif change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:-1] if change == "short" else tensors[name].double()
    change_file(path, "ferryman/state.safetensors", tensors)
    with engine_of("8bit") as engine, pytest.raises(ValueError, match=r"0\.weight/exp_avg"):
        engine.load(path)
