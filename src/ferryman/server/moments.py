"""The formats of moments, in torch: float32, bfloat16 with stochastic rounding, and eight bits with a scale per block.

The compiled kernels have the same formats (`native/update.inl`; Note [Eight bits] in `native/codes.inl` explains the
codes). Nothing is allocated here: temporary values go into memory that the caller passes.
"""

from __future__ import annotations

import functools

import torch

from ferryman.model.units import BLOCK

# By the setting `state`; in the order of native/update.cpp.
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}

SCALE = torch.float32  # of a block in eight bits


def itemsize(dtype: torch.dtype) -> float:
    """Bytes of a moment in this format, its part of a scale included. All sizes are derived from this."""
    return dtype.itemsize + (SCALE.itemsize / BLOCK if dtype == torch.uint8 else 0)


_LOWEST = 2.0**-16  # what the lowest exponent of a code stands for
_LOWEST_BITS = 111 << 23  # of that number, in float32
_TOP_SIGNED, _TOP_ROOT = 0.9375, 0.96875  # the highest codes
_NONE_SIGNED, _NONE_ROOT = 2.0**-90, 2.0**-110  # a block with nothing above this is zero
_SIGN = -(2**31)  # the sign bit of a 32-bit word
_WORD = 2**32 - 1  # all bits of a 32-bit word


@functools.lru_cache(maxsize=64)  # of the steps that updates are pending for
def noise_keys(step: int) -> tuple[int, int]:
    """Two words that select the noise of a step."""
    return _mixed(2 * step), _mixed(2 * step + 1) | 1  # a sum, and a factor that loses nothing


def _mixed(word: int) -> int:
    word = (word + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    word = (word ^ word >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return word >> 32


def draw(index: int, keys: tuple[int, int], into: torch.Tensor, spare: torch.Tensor) -> None:
    """Fills `into`, of 32-bit integers, with noise: a function of the keys and of each element's index, which counts
    from `index`, modulo 2^32."""

    def mix(shift: int) -> None:
        into.bitwise_xor_(torch.bitwise_right_shift(into, shift, out=spare).bitwise_and_(_WORD >> shift))

    torch.arange(into.numel(), out=into, device=into.device)
    into.add_(_signed(index)).mul_(_signed(0x9E3779B1)).add_(_signed(keys[0]))
    mix(16)
    into.mul_(_signed(keys[1]))
    mix(15)


def read(codes: torch.Tensor, scales: torch.Tensor | None, root: bool, into: torch.Tensor, spare: torch.Tensor) -> None:
    """Decodes a moment into float32. In eight bits `into` has whole blocks; the rest of the last becomes zero.

    `root`: the codes are of the moment's root. `spare`: temporary memory, as long as `into`.
    """
    count = codes.numel()
    if scales is None:
        into[:count].copy_(codes)
        return
    bits, sign = into.view(torch.int32), spare.view(torch.int32)
    bits[count:].zero_()
    bits[:count].copy_(codes)
    if root:
        bits.bitwise_left_shift_(19).add_(_LOWEST_BITS)
    else:
        torch.bitwise_left_shift(bits, 24, out=sign).bitwise_and_(_SIGN)
        bits.bitwise_and_(0x7F).bitwise_left_shift_(20).add_(_LOWEST_BITS)
        torch.threshold_(into, _LOWEST, 0.0)  # the lowest code is zero
    into.view(-1, BLOCK).mul_(scales.view(-1, 1))
    if root:
        into.square_()
    else:
        bits.bitwise_or_(sign)
    into[count:].zero_()


def write(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None, root: bool, spare: torch.Tensor
) -> None:
    """Encodes a moment in eight bits: the opposite of `read`. `values` are changed."""
    count = codes.numel()
    assert scales is not None, "eight bits have a scale per block"
    size = values.sqrt_() if root else torch.abs(values, out=spare)
    torch.amax(size.view(-1, BLOCK), 1, out=scales)
    torch.threshold_(scales, _NONE_ROOT if root else _NONE_SIGNED, 0.0)
    scales.div_(_TOP_ROOT if root else _TOP_SIGNED)
    size.view(-1, BLOCK).div_(scales.view(-1, 1))
    size.nan_to_num_(nan=0.0, posinf=0.0)  # where a block is zero
    size.clamp_(min=_LOWEST)
    bits, dropped = size.view(torch.int32), 19 if root else 20
    bits.add_((1 << dropped - 1) - _LOWEST_BITS).bitwise_right_shift_(dropped)
    if not root:
        bits.bitwise_or_(values.view(torch.int32).bitwise_right_shift_(24).bitwise_and_(0x80))
    codes.copy_(bits[:count])


def round_with(
    noise: torch.Tensor, high: bool, values: torch.Tensor, codes: torch.Tensor, spare: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Stores a moment as bfloat16, rounded by the lower or the higher half of each word of noise. `values` change."""
    part, other = (memory.view(torch.int32) for memory in spare)
    if high:
        torch.bitwise_right_shift(noise, 16, out=part).bitwise_and_(0xFFFF)
    else:
        torch.bitwise_and(noise, 0xFFFF, out=part)
    is_nan = torch.ne(values, values, out=other.view(torch.bool)[: values.numel()])
    part.masked_fill_(is_nan, 0)  # which a carry could turn into zero
    codes.view(torch.int16).copy_(values.view(torch.int32).add_(part).bitwise_right_shift_(16))


def _signed(word: int) -> int:
    word &= _WORD
    return word - (1 << 32) if word >= 1 << 31 else word
