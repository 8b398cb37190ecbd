"""The formats that kernels read and write: bfloat16 with its lower half, float16 with its master, both exactly."""

import math

import pytest
import torch

from ferryman.server import kernels, rules
from ferryman.server.kernels import Piece
from support.kernel_pieces import Case, Tensors, bits, generator, numbers, same

every_path = pytest.mark.parametrize("path", kernels.paths())


def pass_through(values: torch.Tensor, form: torch.dtype, path: str) -> Tensors:
    """Has a kernel read and write weights that it does not change: a step of no length along no gradient."""
    still = Case(torch.optim.SGD, rules.DESCENT, {"lr": 0.0})
    tensors = Tensors.make(still, values, form, torch.zeros_like(values))
    if form == torch.float16:
        tensors.weights.zero_()  # it is the master that is read
    kernels.update(still.rule, [tensors.piece(numbers(still, 1))], path=path)
    return tensors


def every_kind_of_float() -> torch.Tensor:
    """All signs and exponents, with every upper half and the edges of the lower; and random bits."""
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    edges = [upper + low for low in (0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    chance = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=generator(), dtype=torch.int64)
    return torch.cat([*edges, chance.to(torch.int32)]).view(torch.float32)


@every_path
def test_split_and_join_give_the_same_float_and_the_nearest_bfloat16(path):
    values = every_kind_of_float()
    high, low = torch.empty(values.shape, dtype=torch.bfloat16), torch.empty(values.shape, dtype=torch.int16)
    kernels.narrow(values, high, low)
    assert same(kernels.widen(high, low), values)
    through = pass_through(values, torch.bfloat16, path)
    assert same(through.values, values)
    assert same(through.weights, high)

    number = ~values.isnan()
    raw = bits(values).to(torch.int64)
    as_documented = ((raw + 0x8000) >> 16).to(torch.int16)
    assert torch.equal(bits(high)[number], as_documented[number])
    assert torch.equal(low[number], (raw - (as_documented.to(torch.int64) << 16)).to(torch.int16)[number])

    # The nearest, and of two the one away from zero, by arithmetic on the numbers themselves. Where the next one would
    # have been 2^128, it is infinity.
    finite = values.isfinite()
    below = (bits(values) & -0x10000).view(torch.float32)[finite].double().abs()
    above = (bits(values) & -0x10000).add(0x10000).view(torch.float32)[finite].double().abs().clamp(max=2.0**128)
    exact = values[finite].double().abs()
    nearest = torch.where(above - exact <= exact - below, above, below)
    nearest[nearest == 2.0**128] = math.inf
    assert torch.equal(high[finite].double().abs(), nearest)
    assert torch.equal(high[finite].signbit(), values[finite].signbit())
    assert same(high[values.isinf()].float(), values[values.isinf()])
    assert high[~number].isnan().all()


def test_split_and_join_keep_the_other_forms():
    values = every_kind_of_float()
    wide = torch.empty_like(values)
    kernels.narrow(values, wide, None)
    assert same(kernels.widen(wide, None), values)
    half, master = torch.empty(values.shape, dtype=torch.float16), torch.empty_like(values)
    kernels.narrow(values, half, master)
    assert same(kernels.widen(half, master), values)
    assert same(half, values.half())


@every_path
def test_the_float16_copy_is_the_masters_nearest(path):
    """Every float16 number, all midpoints and what is beside them, overflow, subnormals, and anything."""
    every_half = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = every_half[every_half.isfinite()].float().sort().values
    middles = torch.cat([(halves[1:] + halves[:-1]) / 2, torch.tensor([65520.0, -65520.0])])
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    exact = torch.cat([halves, middles])
    values = torch.cat([exact, exact.nextafter(up), exact.nextafter(down), every_kind_of_float()])
    through = pass_through(values, torch.float16, path)
    assert same(through.values, values)
    assert same(through.weights, values.half())
    assert same(through.weights[: halves.numel()].float(), halves)
    for value, expected in [(65519.996, 65504.0), (65520.0, math.inf), (2.0**-25, 0.0), (2.0**-25 * 1.0000001, 2**-24)]:
        assert pass_through(torch.tensor([value]), torch.float16, path).weights.item() == expected


@every_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient_is_read_right(dtype, path):
    gradient = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    weights = torch.zeros(gradient.shape)
    backwards = Case(torch.optim.SGD, rules.DESCENT, {"lr": 1.0})
    kernels.update(rules.DESCENT, [Piece(gradient, weights, None, [], numbers(backwards, 1))], path=path)
    assert torch.equal(weights[~gradient.isnan()], -gradient[~gradient.isnan()].float())
    assert weights[gradient.isnan()].isnan().all()
