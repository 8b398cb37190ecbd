"""The link between host and device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

from torch_virtual import _C
from torch_virtual._device import Device, index_of

_LONGEST = 3600.0  # seconds; longer is a mistake, and beyond what clocks can count


@dataclass(frozen=True)
class Link:
    """Bandwidths are bytes per second, each direction's own, and infinite unless set; times are seconds."""

    h2d: float = math.inf
    d2h: float = math.inf
    latency: float = 0.0  # added to each copy
    delay: float = 0.0  # before each asynchronous copy begins, to make missing waits show

    def __post_init__(self) -> None:
        for name in ("h2d", "d2h"):
            if isinstance(getattr(self, name), str) or not getattr(self, name) > 0:
                raise ValueError(f"a link's {name} is in bytes per second and above 0, not {getattr(self, name)}")
        for name in ("latency", "delay"):
            if isinstance(getattr(self, name), str) or not 0 <= getattr(self, name) <= _LONGEST:
                raise ValueError(f"a link's {name} is in seconds, 0 or more, not {getattr(self, name)}")


def _get(index: int) -> Link:
    now = _C.link(index)
    return Link(now.h2d or math.inf, now.d2h or math.inf, now.latency, now.delay)


def _set(index: int, link: Link) -> None:
    def finite(rate: float) -> float:
        return 0.0 if math.isinf(rate) else rate

    _C.set_link(index, finite(link.h2d), finite(link.d2h), link.latency, link.delay)


def set_link(device: Device = None, **changes: float) -> Link:
    """Changes what is named (`h2d`, `d2h`, `latency`, `delay`) and returns the link as it was.

    Copies asked for from now on go by it. With no changes it only tells.
    """
    unknown = set(changes) - {field.name for field in fields(Link)}
    if unknown:
        raise ValueError(f"a link has h2d, d2h, latency and delay, not {', '.join(sorted(unknown))}")
    index = index_of(device)
    before = _get(index)
    _set(index, replace(before, **changes))
    return before


@contextmanager
def link(device: Device = None, **changes: float) -> Iterator[None]:
    """`set_link` for a block of code."""
    index = index_of(device)
    before = set_link(index, **changes)
    try:
        yield
    finally:
        _set(index, before)
