"""Trains neural networks that do not fit on the device."""

from ferryman import amx

# First, before anything can call oneDNN.
amx.guard()

from ferryman.engine import Engine  # noqa: E402 - after the guard
from ferryman.server.looks import NonFiniteError  # noqa: E402
from ferryman.server.rules import Lion  # noqa: E402

__all__ = ["Engine", "Lion", "NonFiniteError"]

__version__ = "0.1.0.dev0"
