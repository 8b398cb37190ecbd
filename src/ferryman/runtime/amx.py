"""Keeps PyTorch off AMX where the CPU advertises it and then refuses it.

Note [AMX that is not there]
Some virtual machines advertise AMX in CPUID, and PyTorch's bf16 matmul, which uses oneDNN, dies there with SIGILL. Two
kinds have been seen: tile instructions fault although the kernel permits them; or they run, but CPUID hides how large
tiles are, and oneDNN generates code for tiles of no size. So AMX counts as usable only if CPUID describes its tiles and
tile instructions have run (`native/amx.cpp`). Where that fails, or where there is no compiled library to try it with,
oneDNN is told to stop at the instruction set below. It reads the variable at its first call, not when torch is
imported, so this works whichever of torch and ferryman is imported first.
"""

import logging
import os
from collections.abc import Mapping

import torch

from ferryman.runtime import native

_LIMIT = "AVX512_CORE_FP16"
_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the second is oneDNN's older name for the first

_logger = logging.getLogger("ferryman")


def is_advertised() -> bool:
    """Whether CPUID reports AMX, whatever the system thinks of it. (/proc/cpuinfo hides what Linux does not know.)"""
    return bool(torch.cpu.get_capabilities().get("amx_tile", False))


def try_tiles() -> bool | None:
    """Whether tile instructions can be used here; None if there is no compiled library to try them with."""
    library = native.library()
    if library is None:
        return None
    # In this order: without permission the instructions fault even where they exist.
    return bool(
        library.ferryman_amx_permitted() and library.ferryman_amx_described() and library.ferryman_amx_executes()
    )


def needs_limit(advertised: bool, works: bool | None, environment: Mapping[str, str]) -> bool:
    """Whether to keep oneDNN off AMX: it is advertised and not known to work. A limit that the user has set stands."""
    return advertised and not works and not any(variable in environment for variable in _VARIABLES)


def guard() -> None:
    """Makes bf16 safe in this process and in those that it starts."""
    advertised = is_advertised()
    works = try_tiles() if advertised else None
    if needs_limit(advertised, works, os.environ):
        os.environ[_VARIABLES[0]] = _LIMIT
        reason = "does not allow it" if works is False else "could not be tried without ferryman's compiled library"
        _logger.info("AMX is advertised but %s: set %s=%s", reason, _VARIABLES[0], _LIMIT)
