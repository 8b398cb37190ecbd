"""The host's arithmetic on flat tensors: compiled where possible, torch otherwise, behind the same functions.

Every function takes `threads` (default: the CPUs that this process may use, whatever OMP_NUM_THREADS says) and `path`
(default: the first of `paths()`). The torch path uses torch's own threads.
"""

import functools
import logging
import os

import torch

from ferryman import native

_logger = logging.getLogger("ferryman")

# In the order of native/every_isa.h.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# The torch path's grain: bounds the memory that widening to float64 takes.
_CHUNK = 1 << 20


@functools.cache
def paths() -> tuple[str, ...]:
    """The ways to compute that there are on this machine, best first: instruction sets, then "torch"."""
    library = native.library()
    if library is None:
        _logger.warning(
            "ferryman: the compiled host kernels are absent, slower torch code serves in their place; to mend: install "
            "g++, then `pip install --force-reinstall --no-deps --no-cache-dir ferryman`"
        )
        return ("torch",)
    usable = native.INSTRUCTION_SETS[: library.ferryman_best_isa() + 1]
    return (*reversed(usable), "torch")


def default_threads() -> int:
    """The number of CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def sum_of_squares(tensor: torch.Tensor, *, threads: int | None = None, path: str | None = None) -> float:
    """The squared norm, added up in double. It is finite exactly when every element is: no second pass for inf and NaN.

    The compiled result does not depend on the number of threads or the instruction set, to the last bit.
    """
    path = _check(tensor, threads, path)
    if path == "torch":
        chunks = tensor.detach().view(-1).split(_CHUNK)
        return sum(torch.dot(wide, wide).item() for wide in map(torch.Tensor.double, chunks))
    library = native.library()
    assert library is not None, "a path other than torch comes from the library"
    result: float = library.ferryman_sum_of_squares(
        tensor.data_ptr(),
        tensor.numel(),
        _DTYPES[tensor.dtype],
        native.INSTRUCTION_SETS.index(path),
        threads or default_threads(),
    )
    return result


def _check(tensor: torch.Tensor, threads: int | None, path: str | None) -> str:
    """Refuses what a raw pointer would turn into a wrong result or a crash. Returns the path to take."""
    if tensor.device.type != "cpu" or tensor.dtype not in _DTYPES or not tensor.is_contiguous():
        raise ValueError(
            "A host kernel needs a contiguous CPU tensor of float32, bfloat16 or float16; this one is "
            f"{'' if tensor.is_contiguous() else 'not contiguous, '}{tensor.dtype}, on {tensor.device}."
        )
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}.")
    if path is None:
        return paths()[0]
    if path not in paths():
        raise ValueError(f"There is no path {path!r} on this machine; there are: {', '.join(paths())}.")
    return path
