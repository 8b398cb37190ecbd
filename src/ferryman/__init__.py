"""Trains neural networks that do not fit on the device."""

from ferryman import amx

# First, before anything can call oneDNN.
amx.guard()

__version__ = "0.1.0.dev0"
