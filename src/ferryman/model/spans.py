"""A span: neighboring weights of a unit that one copy can move."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Span(NamedTuple):
    """Weights of neighboring tensors, or of parts of them, that are contiguous in the unit's memory."""

    host: torch.Tensor  # their bytes on the host
    offset: int  # where they begin in the unit's flat memory, in bytes
    at: int  # where they begin in a buffer with only the subgroup's weights, where all elements have the same width
