"""The host's arithmetic on flat tensors: compiled where possible, torch otherwise, behind the same functions.

Compiled kernels are used because they update 1.9 times as fast as torch's fused AdamW, or DeepSpeedCPUAdam, with the
casts that these need (docs/log.md).

Every function takes `threads` (default: the CPUs that this process may use, whatever OMP_NUM_THREADS says) and `path`
(default: the first of `paths()`). The torch path uses torch's own threads.
"""

import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from typing import NamedTuple, overload

import torch

from ferryman.model.units import BLOCK, SHORTEST_COMPACT, master_dtype
from ferryman.runtime import native
from ferryman.server import moments, rules
from ferryman.server.rules import Numbers, Rule

_logger = logging.getLogger("ferryman")

# In the order of native/every_isa.h.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_FORMATS = list(moments.FORMATS.values())
_NUMBERS = len(native.NumbersStruct().hyper)  # of a rule

# Elements that the torch path processes at a time, which bounds the memory of float64 copies.
_CHUNK = 1 << 20


@functools.cache
def paths() -> tuple[str, ...]:
    """The ways to compute on this machine, fastest first: instruction sets, then "torch"."""
    library = native.library()
    if library is None:
        _logger.warning(
            "ferryman: the compiled host kernels are missing, so slower torch code is used. To fix this, install g++, "
            "then run `pip install --force-reinstall --no-deps --no-cache-dir ferryman`"
        )
        return ("torch",)
    usable = native.INSTRUCTION_SETS[: library.ferryman_best_isa() + 1]
    return (*reversed(usable), "torch")


def default_threads() -> int:
    """The number of threads for updates: the CPUs that this process may run on, but for those that lanes need."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cpus - lane_cpus(cpus)


def lane_cpus(cpus: int) -> int:
    """How many of the CPUs are left to the threads that launch work and copy: an eighth. With fewer than four, none,
    since an update would lose more than the lanes gain."""
    return 0 if cpus < 4 else max(1, cpus // 8)


class Ranges:
    """Ranges of elements of a flat tensor, as the library takes them."""

    def __init__(self, ranges: Sequence[slice]) -> None:
        self.ranges = ranges
        self.bounds = (ctypes.c_int64 * (2 * len(ranges)))(*(bound for at in ranges for bound in (at.start, at.stop)))
        self.end = max((at.stop for at in ranges), default=0)


def sums_of_squares(
    tensor: torch.Tensor, ranges: Ranges, *, threads: int | None = None, path: str | None = None
) -> list[float]:
    """The squared norm of each range, summed in float64. It is finite exactly if every element is, so no second pass is
    needed.

    The compiled result does not depend on the number of threads or the instruction set, to the last bit.
    """
    path = _check(tensor, threads, path)
    assert ranges.end <= tensor.numel()
    if path == "torch":
        flat = tensor.detach().view(-1)
        chunks = (flat[at].split(_CHUNK) for at in ranges.ranges)
        return [sum(torch.dot(w, w).item() for w in map(torch.Tensor.double, parts)) for parts in chunks]
    library, count = native.library(), len(ranges.ranges)
    assert library is not None, "a path other than torch comes from the library"
    sums = (ctypes.c_double * count)()
    library.ferryman_sums_of_squares(
        tensor.data_ptr(),
        ranges.bounds,
        count,
        _DTYPES[tensor.dtype],
        native.INSTRUCTION_SETS.index(path),
        threads or default_threads(),
        sums,
    )
    return list(sums)


def sum_of_squares(tensor: torch.Tensor, *, threads: int | None = None, path: str | None = None) -> float:
    """As `sums_of_squares`, of all elements."""
    return sums_of_squares(tensor, Ranges([slice(0, tensor.numel())]), threads=threads, path=path)[0]


class Piece(NamedTuple):
    """A part of one tensor, and everything that an update of it reads and writes: flat and contiguous."""

    gradient: torch.Tensor
    weights: torch.Tensor  # the working copy
    master: torch.Tensor | None  # the bits that the working copy lacks in float32: see `master_dtype`
    states: Sequence[torch.Tensor]  # in one of `moments.FORMATS`
    numbers: Numbers  # of the rule; the gradient is multiplied by the first
    scales: Sequence[torch.Tensor] = ()  # of states in eight bits; then the part begins and ends with a block
    first: int = 0  # the index of its first element in the tensor
    keys: tuple[int, int] = (0, 0)  # of the noise that rounds to bfloat16: `moments.noise_keys`

    @property
    def state_dtype(self) -> torch.dtype:
        return self.states[0].dtype if self.states else torch.float32


class PieceTarget(NamedTuple):
    """What is the same in every update of a piece."""

    at: slice  # of the gradients
    weights: torch.Tensor
    master: torch.Tensor | None
    states: Sequence[torch.Tensor]
    scales: Sequence[torch.Tensor]
    first: int

    def piece(self, gradients: torch.Tensor, numbers: Numbers, keys: tuple[int, int]) -> Piece:
        gradient = gradients[self.at]
        return Piece(gradient, self.weights, self.master, self.states, numbers, self.scales, self.first, keys)


class Table:
    """Parts that are updated together again and again. They are checked once, when their arguments for the library are
    made."""

    def __init__(self, rule: Rule, parts: Sequence[PieceTarget], gradients: torch.Tensor) -> None:
        """`gradients` are like those of all updates: flat, of this size and dtype."""
        self.parts = parts
        self._size, self._dtype = gradients.numel(), gradients.dtype
        pieces = [part.piece(gradients, (0.0,) * _NUMBERS, (0, 0)) for part in parts]
        for piece in pieces:
            _check_piece(rule, piece)
        self.numbers = native.NumbersStruct()
        self.structs = (native.PieceStruct * len(pieces))(*(_raw(piece, self.numbers) for piece in pieces))
        self.address = gradients.data_ptr()  # from which the structures' gradients are counted

    def pieces(self, gradients: torch.Tensor, numbers: Numbers, keys: tuple[int, int]) -> "TablePieces":
        """The parts with what is new in an update."""
        assert (gradients.numel(), gradients.dtype) == (self._size, self._dtype)
        assert gradients.is_contiguous()
        return TablePieces(self, gradients, numbers, keys)


class TablePieces(Sequence[Piece]):
    """Pieces made from a table. The library needs none of these tuples."""

    def __init__(self, table: Table, gradients: torch.Tensor, numbers: Numbers, keys: tuple[int, int]) -> None:
        self.table, self.gradients, self.numbers, self.keys = table, gradients, numbers, keys

    def __len__(self) -> int:
        return len(self.table.parts)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(index, slice):
            return list(self)[index]
        return self.table.parts[index].piece(self.gradients, self.numbers, self.keys)


class Scratch:
    """Temporary memory for an update in torch, which processes `length` elements at a time. If states are compact, it
    processes fewer, and `length` is at least SHORTEST_COMPACT."""

    def __init__(self, length: int, device: torch.device | str = "cpu") -> None:
        self.length = length
        self._memory = torch.empty(3 * length, dtype=torch.float32, device=device)
        self.compact_length = 3 * length // 5 // BLOCK * BLOCK  # elements at a time, if states are compact

    def thirds(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first, second, third = self._memory.view(3, self.length)[:, :count]
        return first, second, third

    def fifths(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._memory[: 5 * self.compact_length].view(5, self.compact_length))

    def doubles(self, count: int) -> torch.Tensor:
        return self._memory[: 2 * count].view(torch.float64)


def widen(weights: torch.Tensor, master: torch.Tensor | None, into: torch.Tensor | None = None) -> torch.Tensor:
    """The weights in float32, in `into` or in new memory; if they are float32 already, the same memory."""
    if weights.dtype == torch.float32:
        return weights
    assert master is not None, "narrow weights have a master"
    if weights.dtype == torch.float16:
        return master
    values = torch.empty_like(weights, dtype=torch.float32) if into is None else into
    values.view(torch.int32).copy_(weights.view(torch.int16)).bitwise_left_shift_(16).add_(master)
    return values


def narrow(
    values: torch.Tensor, weights: torch.Tensor, master: torch.Tensor | None, spare: torch.Tensor | None = None
) -> None:
    """Stores weights given in float32 as working copy and master. `spare`: temporary memory as large as `values`."""
    if weights.dtype != torch.bfloat16:
        weights.copy_(values)
        if master is not None and master is not values:
            master.copy_(values)
        return
    assert master is not None, "narrow weights have a master"
    between = torch.empty_like(values) if spare is None else spare
    # Rounding would turn some NaNs into infinity or zero, so all become the same NaN.
    is_nan = torch.ne(values, values, out=between.view(torch.bool)[: values.numel()])
    bits = values.view(torch.int32).masked_fill_(is_nan, 0x7FC00000)
    high = torch.add(bits, 0x8000, out=between.view(torch.int32)).bitwise_right_shift_(16)
    weights.view(torch.int16).copy_(high)
    master.copy_(bits)  # truncated to the low half, which is that of the difference


def update(rule: Rule, pieces: Sequence[Piece], *, threads: int | None = None, path: str | None = None) -> None:
    """One step of an optimizer, in one pass. It is elementwise, so the number of threads does not change the result."""
    path = _check_path(threads, path)
    if not isinstance(pieces, TablePieces):
        for piece in pieces:
            _check_piece(rule, piece)
    if path == "torch":
        longest = max((piece.gradient.numel() for piece in pieces), default=0)
        update_in_torch(rule, pieces, Scratch(max(SHORTEST_COMPACT, min(longest, _CHUNK))))
        return
    moved = 0
    if isinstance(pieces, TablePieces):
        table = pieces.table
        table.numbers.hyper, table.numbers.keys = pieces.numbers, pieces.keys
        structs, moved = table.structs, pieces.gradients.data_ptr() - table.address
    else:
        numbers = [native.NumbersStruct(piece.numbers, piece.keys) for piece in pieces]
        structs = (native.PieceStruct * len(pieces))(*map(_raw, pieces, numbers))
    library, isa = native.library(), native.INSTRUCTION_SETS.index(path)
    assert library is not None, "a path other than torch comes from the library"
    library.ferryman_update(rules.NATIVE.index(rule), structs, len(pieces), moved, isa, threads or default_threads())


def _raw(piece: Piece, numbers: native.NumbersStruct) -> native.PieceStruct:
    states = [state.data_ptr() for state in piece.states]
    return native.PieceStruct(
        piece.gradient.numel(),
        piece.gradient.data_ptr(),
        piece.weights.data_ptr(),
        None if piece.master is None else piece.master.data_ptr(),
        *(*states, None, None)[:2],
        *(*(scales.data_ptr() for scales in piece.scales), None, None)[:2],
        piece.first,
        ctypes.pointer(numbers),
        _DTYPES[piece.gradient.dtype],
        _DTYPES[piece.weights.dtype],
        _FORMATS.index(piece.state_dtype),
    )


def update_in_torch(rule: Rule, pieces: Sequence[Piece], scratch: Scratch) -> None:
    """As `update`, on any device, without allocating anything."""
    for piece in pieces:
        is_wide = piece.state_dtype == torch.float32
        update, length = (_update_stretch, scratch.length) if is_wide else (_update_compact, scratch.compact_length)
        for start in range(0, piece.gradient.numel(), length):
            update(rule, piece, slice(start, start + length), scratch)


def _update_stretch(rule: Rule, piece: Piece, at: slice, scratch: Scratch) -> None:
    weights, master = piece.weights[at], None if piece.master is None else piece.master[at]
    _step(rule, piece, at, weights, master, [state[at] for state in piece.states], scratch.thirds(weights.numel()))


def _step(
    rule: Rule,
    piece: Piece,
    at: slice,
    weights: torch.Tensor,
    master: torch.Tensor | None,
    states: Sequence[torch.Tensor],
    spare: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    first, second, third = spare
    values = widen(weights, master, third)
    gradient, factor = piece.gradient[at], piece.numbers[0]
    if gradient.dtype != torch.float32:
        gradient = first.copy_(gradient)
    if factor != 1:
        gradient = torch.mul(gradient, factor, out=first)
    rule.step(values, gradient, states, piece.numbers, (first, second))
    if values is not weights:
        narrow(values, weights, master, second)


def _update_compact(rule: Rule, piece: Piece, at: slice, scratch: Scratch) -> None:
    """As `_update_stretch`: states are decoded into float32 first, and encoded afterwards."""
    weights, master = piece.weights[at], None if piece.master is None else piece.master[at]
    codes, count = [state[at] for state in piece.states], weights.numel()
    blocks = slice(at.start // BLOCK, -(-(at.start + count) // BLOCK))
    scales: list[torch.Tensor | None] = [scale[blocks] for scale in piece.scales]
    if not scales:
        scales = [None] * len(codes)
    whole = -(-count // BLOCK) * BLOCK if piece.scales else count
    first, second, third, *wide = (memory[:whole] for memory in scratch.fifths())
    roots = [name == rule.root for name in rule.states]
    for code, scale, root, values in zip(codes, scales, roots, wide, strict=False):
        moments.read(code, scale, root, values, first)
    states = [values[:count] for values in wide[: len(codes)]]
    _step(rule, piece, at, weights, master, states, (first[:count], second[:count], third[:count]))
    if piece.scales:
        for code, scale, root, values in zip(codes, scales, roots, wide, strict=False):
            moments.write(values, code, scale, root, first)
        return
    noise = first.view(torch.int32)
    moments.draw(piece.first + at.start, piece.keys, noise, second.view(torch.int32))
    for number, (code, values) in enumerate(zip(codes, states, strict=True)):
        moments.round_with(noise, number > 0, values, code, (second, third))


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64: some do not (MPS, some XPUs)."""
    try:
        return bool(torch.zeros(2, dtype=torch.float64, device=device).add_(1).sum().item() == 2)
    except (TypeError, RuntimeError):
        return False


def add_squares_in_torch(gradient: torch.Tensor, total: torch.Tensor, number: torch.Tensor, scratch: Scratch) -> None:
    """Adds the sum of squares to `total`, in float64, on any device that has it. `number`: temporary memory for one."""
    for stretch in gradient.split(scratch.length):
        wide = scratch.doubles(stretch.numel()).copy_(stretch)
        total.add_(torch.sum(wide.square_(), dim=0, out=number))


def _check_piece(rule: Rule, piece: Piece) -> None:
    _check_tensor(piece.gradient)
    _check_tensor(piece.weights)
    shape, wanted = piece.gradient.shape, master_dtype(piece.weights.dtype)
    assert len(shape) == 1, "pieces are flat"
    assert piece.weights.shape == shape
    assert (piece.master is None) == (wanted is None), "there is a master beside narrow weights, and only there"
    if piece.master is not None:
        assert piece.master.dtype == wanted
        assert (piece.master.shape, piece.master.is_contiguous(), piece.master.is_cpu) == (shape, True, True)
    assert len(piece.states) == len(rule.states)
    dtype = piece.state_dtype
    assert dtype in _FORMATS
    assert dtype == torch.float32 or rule.fades, "states that never forget must not be rounded"
    for state in piece.states:
        assert state.dtype == dtype
        assert (state.shape, state.is_contiguous(), state.is_cpu) == (shape, True, True)
    assert len(piece.scales) == (len(piece.states) if dtype == torch.uint8 else 0)
    for scales in piece.scales:
        assert scales.dtype == moments.SCALE
        assert (scales.shape, scales.is_contiguous(), scales.is_cpu) == ((-(-shape[0] // BLOCK),), True, True)
    assert len(piece.numbers) == _NUMBERS


def _check(tensor: torch.Tensor, threads: int | None, path: str | None) -> str:
    _check_tensor(tensor)
    return _check_path(threads, path)


def _check_tensor(tensor: torch.Tensor) -> None:
    """Refuses tensors whose raw pointer would give a wrong result or a crash."""
    if not tensor.is_cpu or tensor.dtype not in _DTYPES or not tensor.is_contiguous():
        raise ValueError(
            "a host kernel needs a contiguous CPU tensor of float32, bfloat16 or float16; this one is "
            f"{'' if tensor.is_contiguous() else 'not contiguous, '}{tensor.dtype}, on {tensor.device}"
        )


def _check_path(threads: int | None, path: str | None) -> str:
    """Returns the path to take."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}: it must be at least 1")
    if path is None:
        return paths()[0]
    if path not in paths():
        raise ValueError(f"path={path!r}: this machine has {', '.join(paths())}")
    return path
