"""Moments in bfloat16 and in eight bits: every path, any threads and cuts, against independent references."""

import itertools
import math

import pytest
import torch

from ferryman.model.units import BLOCK, master_dtype
from ferryman.server import kernels, moments
from ferryman.server.kernels import Piece, Scratch
from support.kernel_pieces import CASES, DTYPES, Case, generator, gradients, numbers, ulps

COMPILED = [path for path in kernels.paths() if path != "torch"]
COMPACT = ["adamw", "adam", "adam, short memory", "momentum", "nesterov", "lion"]

every_path = pytest.mark.parametrize("path", kernels.paths())
every_case = pytest.mark.parametrize("name", COMPACT)
every_format = pytest.mark.parametrize("kept", ["bf16", "8bit"])


class Kept:
    """The arrays of a tensor whose moments are compact, and updates of them."""

    def __init__(self, case: Case, kept: str, count: int, form: torch.dtype = torch.float32) -> None:
        self.case, self.count = case, count
        lacking = master_dtype(form)
        self.weights = torch.empty(count, dtype=form)
        self.master = None if lacking is None else torch.empty(count, dtype=lacking)
        kernels.narrow(torch.randn(count, generator=generator()), self.weights, self.master)
        self.states = [torch.zeros(count, dtype=moments.FORMATS[kept]) for _ in case.rule.states]
        blocks = -(-count // BLOCK)
        self.scales = [torch.zeros(blocks) for _ in case.rule.states] if kept == "8bit" else []

    @property
    def arrays(self) -> list[torch.Tensor]:
        return [self.weights, *self.states, *self.scales, *([] if self.master is None else [self.master])]

    def piece(self, gradient: torch.Tensor, step: int, at: slice) -> Piece:
        blocks = slice(at.start // BLOCK, -(-at.stop // BLOCK))
        return Piece(
            gradient[at],
            self.weights[at],
            None if self.master is None else self.master[at],
            [state[at] for state in self.states],
            numbers(self.case, step, 0.5),
            [scales[blocks] for scales in self.scales],
            at.start,
            moments.noise_keys(step),
        )

    def update(
        self, gradient: torch.Tensor, step: int, path: str, threads: int = 1, cuts: tuple[int, ...] = ()
    ) -> None:
        borders = itertools.pairwise([0, *cuts, self.count])
        pieces = [self.piece(gradient, step, slice(low, high)) for low, high in borders]
        kernels.update(self.case.rule, pieces, threads=threads, path=path)

    def decoded(self, number: int) -> torch.Tensor:
        whole = -(-self.count // BLOCK) * BLOCK
        values = torch.empty(whole)
        scales = self.scales[number] if self.scales else None
        root = self.case.rule.states[number] == self.case.rule.root
        moments.read(self.states[number], scales, root, values, torch.empty(whole))
        return values[: self.count]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("form", DTYPES, ids=["weights32", "weightsb16", "weights16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["gradient32", "gradientb16", "gradient16"])
@every_case
@every_format
def test_compiled_code_does_what_torch_code_does(kept, name, dtype, form):
    """Each step from the same state: moments differ by at most one step of their format, and hardly ever."""
    count = 5 * BLOCK + 77
    expected = Kept(CASES[name], kept, count, form)
    for step in range(1, 6):
        gradient = gradients(count, dtype, seed=step)
        results = []
        for path in COMPILED:
            mine = Kept(CASES[name], kept, count, form)
            for to, value in zip(mine.arrays, expected.arrays, strict=True):
                to.copy_(value)
            mine.update(gradient, step, path)
            results.append(mine)
        before = kernels.widen(expected.weights, expected.master).clone()
        moments_before = [expected.decoded(number).abs() for number in range(len(expected.states))]
        expected.update(gradient, step, "torch")
        after = kernels.widen(expected.weights, expected.master)
        for mine in results:
            for number, (one, other) in enumerate(zip(mine.states, expected.states, strict=True)):
                assert (one != other).float().mean() < 0.01
                found, wanted = mine.decoded(number), expected.decoded(number)
                step_size = wanted.abs() * (1 / 4 if kept == "8bit" else 1 / 128)
                if kept == "8bit":  # from zero to the lowest code
                    step_size += expected.scales[number].repeat_interleave(BLOCK)[:count] * 2.0**-15
                # Where numbers of one size cancel, what is left of their rounding is small against these.
                size = torch.maximum(moments_before[number], torch.maximum(gradient.float().abs(), before.abs()))
                assert ((found - wanted).abs() <= step_size + 1e-6 * size).all()
            for one, other in zip(mine.scales, expected.scales, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
            size = torch.maximum(before.abs(), after.abs())
            values = kernels.widen(mine.weights, mine.master)
            if name != "lion":  # which may take the sign of nothing but rounding
                assert ulps(values, after, size) <= 16
            assert (values - after).abs().mean() < 1e-6
    assert not torch.equal(before, after)


@every_path
@every_case
@every_format
def test_neither_threads_nor_cuts_make_a_difference(kept, name, path):
    count = (1 << 16) + 300
    results = []
    for threads, cuts in [(1, ()), (2, ()), (3, (BLOCK,)), (4, (1 << 14, 1 << 15, (1 << 16) + BLOCK))]:
        mine = Kept(CASES[name], kept, count, torch.bfloat16)
        for step in (1, 2, 3):
            mine.update(gradients(count, torch.bfloat16, seed=step), step, path, threads, cuts)
        results.append(mine)
    for mine in results[1:]:
        for one, other in zip(mine.arrays, results[0].arrays, strict=True):
            if path == "torch":  # its square root depends on the place
                assert (as_bytes(one) != as_bytes(other)).float().mean() < 1e-3
            else:
                assert torch.equal(as_bytes(one), as_bytes(other))


@pytest.mark.parametrize("form", DTYPES, ids=["weights32", "weightsb16", "weights16"])
@every_case
@every_format
def test_instruction_sets_with_fused_multiply_adds_give_the_same_bits(kept, name, form):
    """Registers of other widths hold other elements side by side."""
    count, results = 3 * BLOCK + 77, []
    for path in COMPILED:
        if path == "baseline":  # rounds a product before it adds
            continue
        mine = Kept(CASES[name], kept, count, form)
        for step in (1, 2, 3):
            mine.update(gradients(count, torch.bfloat16, seed=step), step, path)
        results.append(mine)
    for mine in results[1:]:
        assert all(map(torch.equal, map(as_bytes, mine.arrays), map(as_bytes, results[0].arrays)))


@every_format
def test_scratch_of_any_length_gives_the_same(kept):
    count, results = 9 * BLOCK + 5, []
    for length in (512, 1000, 1 << 14):
        mine = Kept(CASES["adamw"], kept, count)
        for step in (1, 2):
            piece = mine.piece(gradients(count, torch.float32, seed=step), step, slice(0, count))
            kernels.update_in_torch(CASES["adamw"].rule, [piece], Scratch(length))
        results.append(mine)
    for mine in results[1:]:
        for one, other in zip(mine.states, results[0].states, strict=True):
            assert (as_bytes(one) != as_bytes(other)).float().mean() < 1e-3


# Eight bits, by an encoder that looks for the nearest code among all.


def values_of(root: bool) -> list[float]:
    """What each code stands for, of a block with the scale 1."""
    if root:
        return [2.0 ** (code // 16 - 16) * (1 + code % 16 / 16) for code in range(256)]
    size = [0.0] + [2.0 ** (code // 8 - 16) * (1 + code % 8 / 8) for code in range(1, 128)]
    return size + [-value for value in size]


def nearest(value: float, table: list[float]) -> float:
    return min(abs(value - one) for one in table)


@every_path
@pytest.mark.parametrize("name", ["adamw", "lion", "momentum"])
def test_eight_bits_equal_a_reference_in_python(name, path):
    """From the same state, each step's codes are the nearest to what plain arithmetic gives, and the scale is exact."""
    case, count = CASES[name], BLOCK + 40
    mine = Kept(case, "8bit", count)
    for step in range(1, 8):
        gradient = gradients(count, torch.float32, seed=step)
        before = [mine.decoded(number).double() for number in range(len(case.rule.states))]
        weights = mine.weights.double()
        mine.update(gradient, step, path)
        given, n = gradient.double() * 0.5, numbers(case, step)
        if name == "adamw":
            wanted = [before[0] * (1 - n[3]) + n[3] * given, (before[1] * n[4] + n[5] * given**2).sqrt()]
        elif name == "lion":
            wanted = [before[0] * n[4] + n[5] * given]
        else:
            given = given + weights * n[2]
            wanted = [given if step == 1 else before[0] * n[3] + n[4] * given]
        for number, values in enumerate(wanted):
            root = case.rule.states[number] == case.rule.root
            table, got = values_of(root), mine.states[number].tolist()
            for block in range(2):
                some = range(block * BLOCK, min((block + 1) * BLOCK, count))
                scale = max(abs(values[i].item()) for i in some) / max(table)
                assert mine.scales[number][block].item() == pytest.approx(scale, rel=1e-5)
                for i in some:
                    relative = values[i].item() / scale
                    distance = abs(table[got[i]] - relative)
                    # The codes 0 and 1 of a moment with a sign share a step: what rounds to the lowest is zero.
                    assert distance <= nearest(relative, table) + 1e-4 * abs(relative) + (0 if root else 2.0**-16)


@every_path
def test_the_largest_of_a_block_is_exact_and_no_second_moment_is_zero(path):
    case = CASES["adamw"]
    mine = Kept(case, "8bit", 2 * BLOCK)
    gradient = torch.zeros(2 * BLOCK)
    gradient[3], gradient[4], gradient[BLOCK + 5] = 1e4, 1e-5, -1e-12
    mine.update(gradient, 1, path)
    first, second = mine.decoded(0), mine.decoded(1)
    assert first[3].item() == pytest.approx(500, rel=1e-6)
    assert first[BLOCK + 5].item() == pytest.approx(-5e-14, rel=1e-6)
    assert second[3].item() == pytest.approx(0.001 * 25e6, rel=1e-5)
    assert (second > 0).all()
    assert (first[gradient == 0] == 0).all()
    untouched = Kept(case, "8bit", 2 * BLOCK)
    still = kernels.widen(untouched.weights, None) * (1 - 1e-4)
    assert torch.allclose(mine.weights[gradient == 0], still[gradient == 0])


@every_path
@every_format
def test_a_block_of_zeros_stays_zero(kept, path):
    mine = Kept(CASES["adamw"], kept, 2 * BLOCK)
    for step in (1, 2):
        mine.update(torch.zeros(2 * BLOCK), step, path)
    assert all((mine.decoded(number) == 0).all() for number in (0, 1))
    assert mine.weights.isfinite().all()


# bfloat16.


@every_path
def test_rounding_keeps_the_mean_where_the_nearest_would_stand_still(path):
    """A momentum that grows by a thousandth of itself each step: less than half of bfloat16's last place."""
    case = Case(torch.optim.SGD, CASES["momentum"].rule, {"lr": 0.0, "momentum": 0.999})
    count, steps = 1 << 14, 300
    mine = Kept(case, "bf16", count)
    mine.states[0].fill_(1.0)
    for step in range(2, steps + 2):
        mine.update(torch.full((count,), 2 * 0.002), step, path)  # the factor is a half
    expected = 1.0
    for _ in range(steps):
        expected = expected * 0.999 + 0.002
    found = mine.decoded(0)
    assert expected > 1.2
    assert found.mean().item() == pytest.approx(expected, rel=2e-3)
    assert 0 < found.std().item() < 0.1


def test_noise_is_even_and_without_memory():
    count = 1 << 14
    words, spare = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=torch.int32)
    halves = []
    for step in range(1, 65):
        moments.draw(0, moments.noise_keys(step), words, spare)
        halves.append(torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF]).double() / 65535 - 0.5)
    noise = torch.stack(halves)  # step, half, element
    assert noise.mean().abs() < 1e-3
    assert noise.var().item() == pytest.approx(1 / 12, rel=1e-2)
    limit = 5 / math.sqrt(64 * count)  # of a correlation
    for one, other in [
        (noise[:, 0], noise[:, 1]),
        *((noise[..., lag:], noise[..., :-lag]) for lag in (1, 2, 3, 16, 256, 4096)),
        *((noise[lag:], noise[:-lag]) for lag in (1, 2, 3)),
    ]:
        assert (12 * (one * other).mean()).abs() < 3 * limit
    part = torch.empty(100, dtype=torch.int32)
    moments.draw(1234, moments.noise_keys(64), part, spare[:100])
    assert torch.equal(part, words[1234:1334])
    moments.draw((1 << 32) + 1234, moments.noise_keys(64), part, spare[:100])
    assert torch.equal(part, words[1234:1334])


@every_path
@pytest.mark.parametrize("dtype", DTYPES, ids=["gradient32", "gradientb16", "gradient16"])
def test_a_nan_stays_one(dtype, path):
    payloads = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32)  # those that arithmetic makes
    gradient = payloads.view(torch.float32).to(dtype).repeat(100)
    mine = Kept(CASES["momentum"], "bf16", gradient.numel(), torch.bfloat16)
    mine.update(gradient, 2, path)
    assert mine.decoded(0).isnan().all()
    assert mine.weights.isnan().all()
