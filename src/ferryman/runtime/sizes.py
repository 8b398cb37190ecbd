"""Amounts of memory, rates and counts: parsing of user input, and formatting."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1}
_UNITS.update({f"{prefix}ib": 2 ** (10 * (i + 1)) for i, prefix in enumerate("kmgt")})
_UNITS.update({f"{prefix}b": 10 ** (3 * (i + 1)) for i, prefix in enumerate("kmgt")})


def parse_bytes(amount: int | str, parameter: str) -> int:
    """Bytes from "256MiB", "8GB" or a number. Errors name the `parameter`."""
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
        raise ValueError(f"{parameter}={amount!r}: an amount of memory must be more than 0")
    return nbytes


_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}

_BITS = ("bit/s", "bits/s")

# For each kind of rate: its units in lower case, and examples for errors.
_RATES = {
    "bytes": (("b/s", "bps", *_BITS), "'12GB/s' or '100Gbit/s'"),
    "operations": (("flops", "flop/s"), "'150TFLOPS'"),
    "parameters": (("param/s", "params/s"), "'900Mparam/s'"),
}


def parse_rate(text: str, parameter: str, of: str) -> float:
    """A rate per second of "bytes", "operations" or "parameters" (`of`), from text such as "12GB/s" or "150TFLOPS"."""
    ends, example = _RATES[of]
    if of == "bytes" and re.search(r"[\dKMGTP]i?b/s\s*$|bps\s*$", text):
        raise ValueError(
            f"{parameter}={text!r} may be bits or bytes per second; write bytes like '12GB/s' and bits like '100Gbit/s'"
        )
    match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)({'|'.join(map(re.escape, ends))})\s*", text.lower())
    if match is None or (match[3] and not (of == "bytes" and match[2])):
        raise ValueError(f"{parameter}={text!r} is not a rate of {of} per second; write it like {example}")
    size = 1024.0 ** " kmgtp".index(match[2]) if match[3] else _PREFIXES[match[2]]
    rate = float(match[1]) * size / (8 if match[4] in _BITS else 1)
    if rate <= 0:
        raise ValueError(f"{parameter}={text!r}: a rate must be more than 0")
    return rate


def show_rate(rate: float, of: str) -> str:
    """A rate as text, with three digits."""
    ends = {"bytes": "B/s", "operations": "FLOP/s", "parameters": "param/s"}
    for prefix in ("p", "t", "g", "m", "k"):
        if rate >= _PREFIXES[prefix]:
            return f"{rate / _PREFIXES[prefix]:.3g} {prefix.upper() if prefix != 'k' else prefix}{ends[of]}"
    return f"{rate:.3g} {ends[of]}"


def show_bytes(nbytes: int) -> str:
    """An amount of memory as text, rounded up, so that it is enough if a user passes it back."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            hundredths = -(-nbytes * 100 // size)
            return f"{hundredths / 100:.2f}{unit}"
    return f"{nbytes}B"


def show_count(number: int, noun: str) -> str:
    """A number of things as text: "1 unit", "2 units"."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"
