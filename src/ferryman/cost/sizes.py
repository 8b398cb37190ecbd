"""Amounts of memory, as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1}
_UNITS.update({f"{prefix}ib": 2 ** (10 * (i + 1)) for i, prefix in enumerate("kmgt")})
_UNITS.update({f"{prefix}b": 10 ** (3 * (i + 1)) for i, prefix in enumerate("kmgt")})


def parse_bytes(amount: int | str, parameter: str) -> int:
    """Bytes from "256MiB", "8GB" or a number; `parameter` is what an error names."""
    if isinstance(amount, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", amount.lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"{parameter}={amount!r} is not an amount of memory; write it like '256MiB' or '8GiB'")
        nbytes = int(float(match[1]) * _UNITS[match[2]])
    elif type(amount) is int:
        nbytes = amount
    else:
        kind = type(amount).__name__
        raise ValueError(f"{parameter}={amount!r} is a {kind}; write an amount of memory like '256MiB', or bytes")
    if nbytes <= 0:
        raise ValueError(f"{parameter}={amount!r}: an amount of memory must be more than nothing")
    return nbytes


def show_bytes(nbytes: int) -> str:
    """With four digits, rounded up, so that what is shown is enough when it is given back."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            hundredths = -(-nbytes * 100 // size)
            return f"{hundredths / 100:.2f}{unit}"
    return f"{nbytes}B"
