"""How a piece of the optimizer's state is called in files: what it is of, which number, and from which element on."""

from __future__ import annotations

from typing import NamedTuple


class Stretch(NamedTuple):
    """`layers.0.weight/exp_avg`; where several ranks have saved, each its part, `layers.0.weight/exp_avg@4096`."""

    name: str  # the tensor's
    key: str
    start: int = 0  # element

    def __str__(self) -> str:
        return f"{self.name}/{self.key}" + (f"@{self.start}" if self.start else "")


def parse_stretch(text: str) -> Stretch:
    name, _, rest = text.rpartition("/")
    key, _, start = rest.partition("@")
    return Stretch(name, key, int(start or 0))
