"""Who updates which subgroup: the policies that `updates=` takes.

host        the host updates everything (ZeRO-Offload)
static:R    the state of a share R of the subgroups stays on the device, which updates them (TwinFlow)
stride:K    one subgroup in K crosses to the device, is updated there and goes back (Deep Optimizer States)
auto        for each subgroup, whichever of host and device would finish first (`schedule.py`)
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

Kind = Literal["host", "static", "stride", "auto"]

_FORMS = {"host": "host", "static": "static:R", "stride": "stride:K", "auto": "auto"}


@dataclass(frozen=True)
class Policy:
    """A policy, with the parameters that the user gave."""

    kind: Kind
    share: float = 0.0  # R of `static:R`
    stride: int = 0  # K of `stride:K`

    def __str__(self) -> str:
        if self.kind == "static":
            return f"static:{str(self.share).removesuffix('.0')}"
        return f"stride:{self.stride}" if self.kind == "stride" else self.kind

    def device_owns(self, index: int) -> bool:
        """Whether the device always updates the subgroup with this index, counted in forward order over the model."""
        return self.owned(index, index + 1) > 0

    def owned(self, start: int, stop: int) -> int:
        """The number of subgroups in `range(start, stop)` that the device always updates, without listing them."""
        assert self.kind != "auto", "auto decides by queues and rates"
        if self.kind == "stride":
            return stop // self.stride - start // self.stride
        # Spread evenly, so that host and device always have work. In exact fractions: the float 0.1 is not a tenth.
        part, whole = Fraction(str(self.share)).as_integer_ratio()
        return stop * part // whole - start * part // whole


def parse_policy(text: object) -> Policy:
    """A policy from what the user gave as `updates=`."""
    name, colon, value = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name == "static" and colon:
        return Policy("static", share=_share(value))
    if name == "stride" and colon:
        return Policy("stride", stride=_stride(value))
    if name == "host" and not colon:
        return Policy("host")
    if name == "auto" and not colon:
        return Policy("auto")
    near = difflib.get_close_matches(name, get_args(Kind), n=1)
    meant = f" (did you mean {_FORMS[near[0]]!r}?)" if near else ""
    raise ValueError(
        f"updates={text!r} is not a policy{meant}; choose 'host', 'static:R' with a share R from 0 to 1, 'stride:K' "
        "with an integer K of at least 2, or 'auto'"
    )


def _share(value: str) -> float:
    try:
        share = float(value) if value == value.strip() else math.nan
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ValueError(
            f"updates='static:{value}': the share of the state that stays on the device must be a number from 0 to 1, "
            "such as 'static:0.25'"
        )
    return share


def _stride(value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value) >= 2):
        raise ValueError(
            f"updates='stride:{value}': one subgroup in K is updated on the device, and K must be an integer of at "
            "least 2; 'stride:2', every other subgroup, gives the device the most"
        )
    return int(value)
