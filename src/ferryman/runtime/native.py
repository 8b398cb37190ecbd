"""The compiled host library (`native/`), if this installation has it."""

import ctypes
import functools
from pathlib import Path

PATH = Path(__file__).with_name("libferryman.so")

# In the order of native/isa.h: each set includes those before it.
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")


class NumbersStruct(ctypes.Structure):
    """The C structure `Numbers` of native/update.cpp."""

    _fields_ = [("hyper", ctypes.c_float * 10), ("keys", ctypes.c_uint32 * 2)]


class PieceStruct(ctypes.Structure):
    """The C structure `Piece` of native/update.cpp."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("gradient", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("master", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("first_scales", ctypes.c_void_p),
        ("second_scales", ctypes.c_void_p),
        ("index", ctypes.c_int64),
        ("numbers", ctypes.POINTER(NumbersStruct)),
        ("gradient_dtype", ctypes.c_int32),
        ("weight_dtype", ctypes.c_int32),
        ("format", ctypes.c_int32),
    ]


_SIGNATURES: dict[str, tuple[type, list[type]]] = {
    "ferryman_best_isa": (ctypes.c_int, []),
    "ferryman_amx_permitted": (ctypes.c_int, []),
    "ferryman_amx_described": (ctypes.c_int, []),
    "ferryman_amx_executes": (ctypes.c_int, []),
    "ferryman_crc32_width": (ctypes.c_int, []),
    "ferryman_crc32": (ctypes.c_uint32, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_int]),
    "ferryman_sums_of_squares": (
        ctypes.c_int,
        [
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_int64),
            ctypes.c_int64,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_double),
        ],
    ),
    "ferryman_update": (
        ctypes.c_int,
        [ctypes.c_int, ctypes.POINTER(PieceStruct), ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int],
    ),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, or None if it was not built. Its functions run without the GIL."""
    if not PATH.exists():
        return None
    loaded = ctypes.CDLL(str(PATH))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded
