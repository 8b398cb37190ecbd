"""The update kernels: every path does what torch's optimizers do, and touches nothing but its piece."""

import functools
import itertools
import math
import signal
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from ferryman import Lion
from ferryman.server import kernels, rules
from ferryman.server.kernels import Piece
from ferryman.server.rules import Numbers
from support.fresh import run_fresh
from support.kernel_pieces import CASES, DTYPES, Case, Tensors, bits, generator, gradients, numbers, same, ulp, ulps

COMPILED = [path for path in kernels.paths() if path != "torch"]
STEPS = 100
BLOCK = 1 << 14  # what one thread takes at a time, of pieces as small as these
GUARD = 40  # elements beside a piece that must stay as they are

# The instruction sets with a fused multiply-add, which torch's vector code has where ours has it.
FUSED = {"avx2", "avx512"} if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else set()

every_path = pytest.mark.parametrize("path", kernels.paths())
every_case = pytest.mark.parametrize("name", CASES)
every_gradient = pytest.mark.parametrize("dtype", DTYPES, ids=["gradient32", "gradientb16", "gradient16"])
every_weight = pytest.mark.parametrize("form", DTYPES, ids=["weights32", "weightsb16", "weights16"])


class Step(NamedTuple):
    """One step of torch's optimizer: what it was given, and what it made of it."""

    gradient: torch.Tensor
    numbers: Numbers
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    weights: torch.Tensor


@functools.cache
def with_torch(name: str, dtype: torch.dtype, from_zero: bool, cancels: bool) -> tuple[torch.Tensor, list[Step]]:
    """The weights that every step begins with, and the steps.

    From zero, the new weights are the update itself. Unless sums may cancel, what belongs to an element has one sign:
    rounding a product then costs a few steps of the result, and not all of it.
    """
    count, case, factor = 203, CASES[name], 0.3
    source = generator(1)
    signs = torch.randn(count, generator=source).sign()
    weights = torch.zeros(count) if from_zero else signs * (torch.rand(count, generator=source) * 1.5 + 0.5)
    parameter = torch.nn.Parameter(torch.empty(count))
    optimizer = case.optimizer([parameter], **case.options)
    start = case.rule.start(optimizer.param_groups[0])
    states = [torch.full((count,), start) for _ in case.rule.states]
    steps = []
    for step in range(1, STEPS + 1):
        gradient = gradients(count, dtype, seed=step)
        if not cancels:
            gradient = gradient.abs() * signs.to(dtype)
        parameter.data.copy_(weights)
        parameter.grad = gradient.float() * factor
        optimizer.step()
        before, states = states, [optimizer.state[parameter][key].clone() for key in case.rule.states]
        steps.append(Step(gradient, numbers(case, step, factor), before, states, parameter.detach().clone()))
    return weights, steps


@every_path
@every_case
@every_gradient
def test_a_hundred_steps_equal_torchs(dtype, name, path):
    case, exact = CASES[name], path in FUSED or path == "torch"
    for from_zero in (False, True):
        start, steps = with_torch(name, dtype, from_zero, cancels=exact)
        states = [state.clone() for state in steps[0].before]
        for step in steps:
            if not exact:
                states = [state.clone() for state in step.before]
            weights = start.clone()
            kernels.update(case.rule, [Piece(step.gradient, weights, None, states, step.numbers)], path=path)
            for state, expected in zip(states, step.after, strict=True):
                assert same(state, expected) if exact else ulps(state, expected) <= 3
            if path == "torch" or (exact and not case.has_root):
                assert same(weights, step.weights)
                continue
            size = torch.maximum(start.abs(), step.weights.abs())  # which the update may have brought near zero
            assert ulps(weights, step.weights, size) <= (6 if not exact else 4 if from_zero else 1)
            if from_zero and exact:
                assert same(weights, with_nearest_root(case, step))
                far = (weights.double() - step.weights.double()).abs() > 2 * ulp(step.weights)
                assert far.sum() <= 0.02 * far.numel()


def with_nearest_root(case: Case, step: Step) -> torch.Tensor:
    """Torch's update of weights that are zero, from the states after it; but its roots are rounded to the nearest."""
    *_, squares = step.after
    root = squares.double().sqrt().float()
    gradient = step.gradient.float() * step.numbers[0]
    above, below = (step.after[0], root / step.numbers[7]) if case.rule is rules.ADAM else (gradient, root)
    return torch.zeros_like(root).addcdiv_(above, below + step.numbers[8], value=step.numbers[6])


def test_lion_does_what_its_paper_says():
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = Lion([parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    weights, momentum = parameter.detach().clone(), torch.zeros(3, dtype=torch.float64)
    for step in range(10):
        gradient = torch.randn(3, generator=generator(step), dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        weights = weights - 0.1 * ((0.9 * momentum + 0.1 * gradient).sign() + 0.5 * weights)
        momentum = 0.99 * momentum + 0.01 * gradient
        torch.testing.assert_close(parameter.detach(), weights)
    with pytest.raises(ValueError, match="betas"):
        Lion([parameter], betas=(1.0, 0.99))


@every_path
@every_case
@every_gradient
def test_narrow_weights_are_updated_as_float32_ones(dtype, name, path):
    """And the working copy is what float32 weights would be cast to, but for bfloat16's ties."""
    case, count = CASES[name], 203
    begin = torch.randn(count, generator=generator())
    forms = {form: Tensors.make(case, begin, form, gradients(count, dtype)) for form in DTYPES}
    for step in range(1, STEPS // 4):
        gradient = gradients(count, dtype, seed=step)
        for tensors in forms.values():
            piece = tensors._replace(gradient=gradient).piece(numbers(case, step, 0.3))
            kernels.update(case.rule, [piece], path=path)
        expected = forms[torch.float32]
        for form, tensors in forms.items():
            assert same(tensors.values, expected.weights)
            assert all(map(same, tensors.states, expected.states))
            ties = bits(expected.weights) & 0xFFFF == 0x8000
            assert same(tensors.weights[~ties], expected.weights.to(form)[~ties])
    assert not same(begin, forms[torch.float32].weights)


def lengths() -> list[int]:
    borders = [multiple + i for multiple in (48, 64, 96, 128, 256, 512, 1024) for i in (-1, 0, 1)]
    return [*range(35), *borders, 1007, *range(BLOCK - 1, BLOCK + 2)]


def guarded(tensor: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy that begins `start` elements into memory of its own, with a margin behind; and that memory."""
    memory = torch.empty(start + tensor.numel() + GUARD, dtype=tensor.dtype)
    memory.view(torch.uint8).fill_(0xA5)
    memory[start : start + tensor.numel()] = tensor
    return memory[start : start + tensor.numel()], memory


@every_path
@every_case
@every_gradient
@every_weight
def test_every_length_and_start(form, dtype, name, path):
    """A piece is updated as it is within a larger one, whatever its length and alignment; its surroundings stay."""
    case, step = CASES[name], numbers(CASES[name], 3, 0.3)
    whole = Tensors.make(case, torch.randn(BLOCK + 1, generator=generator()), form, gradients(BLOCK + 1, dtype))
    expected = whole.clone()
    kernels.update(case.rule, [expected.piece(step)], path=path)
    for length in lengths():
        first = (BLOCK + 1 - length) // 3
        within = slice(first, first + length)
        # Each array lies differently to the registers.
        starts = ((length * odd) % 31 for odd in (1, 3, 5, 7, 11))
        inside = whole.cut(within)
        gradient, gradient_memory = guarded(inside.gradient, next(starts))
        copies, memories = zip(*(guarded(tensor, next(starts)) for tensor in inside.written), strict=True)
        states = copies[1 : 1 + len(whole.states)]
        master = copies[-1] if whole.master is not None else None
        margins = [memory.clone() for memory in memories]
        gradient_before = gradient_memory.clone()
        kernels.update(case.rule, [Piece(gradient, copies[0], master, states, step)], path=path)
        assert torch.equal(bits(gradient_memory), bits(gradient_before))
        for copy, memory, margin, wanted in zip(copies, memories, margins, expected.cut(within).written, strict=True):
            if path == "torch" and copy.dtype == torch.float32:  # its square root depends on the place
                assert ulps(copy, wanted) <= 2
            elif path != "torch":
                assert torch.equal(bits(copy), bits(wanted))
            margin[copy.storage_offset() : copy.storage_offset() + length] = copy
            assert torch.equal(bits(memory), bits(margin))


AT_A_PAGE = """
import ctypes, itertools, mmap, sys
import torch
from ferryman.server import kernels, rules
from ferryman.server.kernels import Piece
from ferryman.model.units import master_dtype

beyond = int(sys.argv[1])
page, count = mmap.PAGESIZE, 5
libc = ctypes.CDLL(None, use_errno=True)

def closed_in():
    # One page that may be used, between two that may not.
    memory = mmap.mmap(-1, 3 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in (start, start + 2 * page):
        assert libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0) == 0
    return memory

pages = [closed_in() for _ in range(count)]

def tensor(memory, dtype, length, at_end):
    offset = 2 * page - length * dtype.itemsize if at_end else page
    return torch.frombuffer(memory, dtype=dtype, count=length + beyond * at_end, offset=offset)

dtypes = (torch.float32, torch.bfloat16, torch.float16)
kinds = itertools.product(kernels.paths()[:-1], rules.NATIVE, dtypes, dtypes, (*range(1, 40), 200), (False, True))
for path, rule, dtype, form, length, at_end in kinds:
    lacking = master_dtype(form)
    gradient, weights, first, second = (
        tensor(memory, kind, length, at_end)
        for memory, kind in zip(pages, (dtype, form, torch.float32, torch.float32), strict=False)
    )
    master = None if lacking is None else tensor(pages[4], lacking, length, at_end)
    numbers = (1.0,) + (0.5,) * 9
    kernels.update(rule, [Piece(gradient, weights, master, [first, second][: len(rule.states)], numbers)], path=path)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forbids pages by mprotect")
@pytest.mark.skipif(not COMPILED, reason="there is no compiled path")
def test_nothing_outside_a_piece_is_read():
    """Pieces end and begin at pages that may not be read. One element more is the end of the process."""

    assert run_fresh(AT_A_PAGE, 0).returncode == 0
    assert run_fresh(AT_A_PAGE, 1).returncode in (-signal.SIGSEGV, -signal.SIGBUS)


@every_path
@every_case
@pytest.mark.parametrize(
    ("dtype", "form"), list(zip(DTYPES, DTYPES, strict=True)), ids=["float32", "bfloat16", "float16"]
)
def test_neither_threads_nor_cuts_make_a_difference(dtype, form, name, path):
    count = 3 * BLOCK + 7
    case, step = CASES[name], numbers(CASES[name], 3)
    whole = Tensors.make(case, torch.randn(count, generator=generator()), form, gradients(count, dtype))
    results = []
    for threads, cuts in itertools.product((1, 2, 3), ([], [1], [BLOCK + 5, 2 * BLOCK, count - 1])):
        tensors = whole.clone()
        borders = [0, *cuts, count]
        parts = [tensors.cut(slice(low, high)) for low, high in itertools.pairwise(borders)]
        kernels.update(case.rule, [part.piece(step) for part in parts], threads=threads, path=path)
        results.append(tensors)
    for tensors in results[1:]:
        for written, expected in zip(tensors.written, results[0].written, strict=True):
            if path == "torch" and written.dtype == torch.float32:  # its square root depends on the place
                assert ulps(written, expected) <= 2
            elif path != "torch":
                assert torch.equal(bits(written), bits(expected))


@every_path
def test_pieces_of_all_kinds_go_together(path):
    case, kinds = CASES["adamw"], list(itertools.product(DTYPES, DTYPES))
    together = [
        Tensors.make(case, torch.randn(length, generator=generator()), form, gradients(length, dtype))
        for length, (dtype, form) in enumerate(kinds, start=100)
    ]
    alone = [tensors.clone() for tensors in together]
    steps = [numbers(case, step, 1 / step) for step in range(1, len(kinds) + 1)]
    kernels.update(case.rule, [tensors.piece(step) for tensors, step in zip(together, steps, strict=True)], path=path)
    for tensors, step, expected in zip(together, steps, alone, strict=True):
        kernels.update(case.rule, [expected.piece(step)], path=path)
        assert all(map(torch.equal, tensors.written, expected.written))
    kernels.update(case.rule, [], path=path)


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 3e38, 1e-40, -1e-40, 1e-45]


@every_path
@every_case
@every_gradient
def test_nan_infinity_and_subnormals_pass_as_in_torch(dtype, name, path):
    """All of them in gradient, weights and states, and all combinations."""
    case = CASES[name]
    wide = torch.tensor(list(itertools.product(SPECIAL, repeat=2 + len(case.rule.states))))
    gradient, start, *states = (column.contiguous() for column in wide.t())
    if case.has_root:
        states[-1].abs_()  # a sum of squares
    gradient = gradient.to(dtype)
    parameter = torch.nn.Parameter(start.clone())
    parameter.grad = torch.zeros_like(start)
    optimizer = case.optimizer([parameter], **case.options)
    optimizer.step()  # makes the states
    parameter.data.copy_(start)
    for key, state in zip(case.rule.states, states, strict=True):
        optimizer.state[parameter][key].copy_(state)
    parameter.grad = gradient.float()
    optimizer.step()
    weights = start.clone()
    kernels.update(case.rule, [Piece(gradient, weights, None, states, numbers(case, 2))], path=path)
    exact = path in FUSED or path == "torch"
    pairs = [(state, optimizer.state[parameter][key]) for key, state in zip(case.rule.states, states, strict=True)]
    for actual, expected in (*pairs, (weights, parameter.detach())):
        if exact and not (actual is weights and case.has_root):
            assert same(actual, expected)
            continue
        finite = expected.isfinite()
        assert same(actual[~finite], expected[~finite])
        # Where numbers of one size cancel, what is left of a product's rounding is small against these.
        size = torch.stack([start, gradient.float(), expected]).nan_to_num(0, 0, 0).abs().amax(0)
        assert ulps(actual[finite], expected[finite], size[finite]) <= 2
    assert weights.isnan().any()
    assert weights.isfinite().any()


@every_path
@every_weight
@every_gradient
def test_a_nan_in_the_gradient_is_one_in_both_forms_of_the_weights(dtype, form, path):
    """Whatever its bits: rounding must not carry them on to zero or infinity."""
    payloads = torch.tensor([0x7FC00000, 0x7F800001, 0x7F807FFF, 0x7FBFFFFF, 0x7FFF8000, 0x7FFFFFFF], dtype=torch.int32)
    gradient = torch.cat([payloads, payloads | -0x80000000]).view(torch.float32)
    if dtype == torch.bfloat16:
        gradient = (bits(gradient) >> 16 | 1).to(torch.int16).view(dtype)
    gradient = gradient.to(dtype)
    assert gradient.isnan().all()
    for name in set(CASES) - {"lion"}:  # whose sign of a NaN is zero, in torch too
        tensors = Tensors.make(CASES[name], torch.ones(gradient.shape), form, gradient)
        kernels.update(CASES[name].rule, [tensors.piece(numbers(CASES[name], 2))], path=path)
        assert tensors.weights.isnan().all()
        assert tensors.values.isnan().all()


def test_flushing_subnormals_on_the_calling_thread_changes_nothing():
    case, count = CASES["descent"], 3 * BLOCK
    begin = Tensors.make(case, torch.full((count,), 1e-40), torch.float32, torch.full((count,), 1e-39))
    expected = begin.clone()
    kernels.update(case.rule, [expected.piece(numbers(case, 1))])
    assert (expected.weights != 0).all()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        for path, threads in itertools.product(COMPILED[:1], (1, 2, 3)):
            tensors = begin.clone()
            kernels.update(case.rule, [tensors.piece(numbers(case, 1))], threads=threads, path=path)
            assert torch.equal(bits(tensors.weights), bits(expected.weights))
    finally:
        torch.set_flush_denormal(False)


@every_path
@every_case
@every_gradient
@pytest.mark.parametrize("factor", [1 / 3, 2.0**-16, 0.0, math.nan])
def test_the_factor_multiplies_the_gradient_first(factor, dtype, name, path):
    """Before weight decay is added, and in float32: unscaling makes numbers that float16 does not have."""
    case, count = CASES[name], 99
    gradient = gradients(count, dtype)
    gradient[3], gradient[44] = math.inf, -math.inf
    start = Tensors.make(case, torch.randn(count, generator=generator()), torch.float32, gradient)
    given, multiplied = start.clone(), start.clone()
    kernels.update(case.rule, [given.piece(numbers(case, 2, factor))], path=path)
    multiplied = multiplied._replace(gradient=gradient.float() * factor)
    kernels.update(case.rule, [multiplied.piece(numbers(case, 2))], path=path)
    assert all(map(same, given.written, multiplied.written))


def test_what_a_raw_pointer_cannot_take_is_refused():
    case = CASES["adamw"]
    good = Tensors.make(case, torch.ones(8), torch.bfloat16, torch.ones(8))
    step = numbers(case, 1)

    def update(with_numbers: Numbers = step, **change: Any) -> None:
        options = {key: change.pop(key) for key in ("path", "threads") if key in change}
        kernels.update(case.rule, [good.clone()._replace(**change).piece(with_numbers)], **options)

    update()
    column = torch.ones(8, 2)[:, 0]
    for bad, message in [
        (column, "not contiguous"),
        (torch.ones(8).double(), "float64"),
        (torch.ones(8).to("meta"), "meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            update(gradient=bad)
        with pytest.raises(ValueError, match=message):
            update(weights=bad)
    with pytest.raises(ValueError, match="at least 1"):
        update(threads=0)
    with pytest.raises(ValueError, match="path='sse9': this machine has"):
        update(path="sse9")

    state, low = good.states[0], good.master
    assert low is not None
    mistakes: Sequence[dict[str, Any]] = [
        {"gradient": torch.ones(7)},
        {"gradient": torch.ones(2, 4)},
        {"weights": torch.ones(8)},  # float32, which has no master
        {"weights": torch.ones(8).half()},  # whose master is in float32
        {"master": None},
        {"master": low.int()},
        {"master": low[:7]},
        {"master": low.to("meta")},
        {"master": torch.zeros(8, 2, dtype=torch.int16)[:, 0]},
        {"states": [state]},
        {"states": [state, state, state]},
        {"states": [state, state.double()]},
        {"states": [state, state.bfloat16()]},
        {"states": [state, state[:7]]},
        {"states": [state, column]},
        {"states": [state, state.to("meta")]},
        {"with_numbers": step[:-1]},
    ]
    for mistake in mistakes:
        with pytest.raises(AssertionError):
            update(**mistake)
