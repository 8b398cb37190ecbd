"""Trains neural networks that do not fit on the device."""

from ferryman.runtime import amx

# First, before anything can call oneDNN.
amx.guard()

from ferryman._version import __version__  # noqa: E402 - after the guard
from ferryman.engine import Engine  # noqa: E402
from ferryman.server.gradient_checks import NonFiniteError  # noqa: E402
from ferryman.server.rules import Lion  # noqa: E402

__all__ = ["Engine", "Lion", "NonFiniteError", "__version__"]
