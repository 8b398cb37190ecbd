"""Trains neural networks that do not fit on the device."""

from ferryman import amx

# First, before anything can call oneDNN.
amx.guard()

from ferryman.engine import Engine  # noqa: E402 - after the guard

__all__ = ["Engine"]

__version__ = "0.1.0.dev0"
