"""Keeps PyTorch from using AMX on CPUs that advertise it but do not allow it.

Note [AMX that does not work]
Some virtual machines advertise AMX in CPUID, and PyTorch's bf16 matmul, which uses oneDNN, dies there with SIGILL. Two
cases have been seen: tile instructions fault although the kernel permits them, or they run, but CPUID hides the size of
tiles, and oneDNN generates code for tiles of size zero. So AMX counts as usable only if CPUID describes its tiles and
tile instructions have run (`native/amx.cpp`). If that fails, or if there is no compiled library to try it with, an
environment variable limits oneDNN to the instruction set below. OneDNN reads the variable at its first call, not when
torch is imported, so torch and ferryman can be imported in any order.
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
    """Whether CPUID reports AMX, even if the system does not know AMX, so that /proc/cpuinfo does not list it."""
    return bool(torch.cpu.get_capabilities().get("amx_tile", False))


def try_tiles() -> bool | None:
    """Whether tile instructions can be used here; None if there is no compiled library to try them with."""
    library = native.library()
    if library is None:
        return None
    # The order matters: without permission the instructions fault even if they exist.
    return bool(
        library.ferryman_amx_permitted() and library.ferryman_amx_described() and library.ferryman_amx_executes()
    )


def needs_limit(advertised: bool, works: bool | None, environment: Mapping[str, str]) -> bool:
    """Whether to limit oneDNN: AMX is advertised, not known to work, and the user has not set a limit."""
    return advertised and not works and not any(variable in environment for variable in _VARIABLES)


def guard() -> None:
    """Makes bf16 safe in this process and in processes that it starts."""
    advertised = is_advertised()
    works = try_tiles() if advertised else None
    if needs_limit(advertised, works, os.environ):
        os.environ[_VARIABLES[0]] = _LIMIT
        reason = "does not allow it" if works is False else "could not be tried without ferryman's compiled library"
        _logger.info("AMX is advertised but %s: set %s=%s", reason, _VARIABLES[0], _LIMIT)
