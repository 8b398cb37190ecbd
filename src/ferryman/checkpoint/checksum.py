"""CRC-32, as zlib has it: of pieces of memory, and beside a stream, by a thread of its own."""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ferryman.runtime import native

_POLYNOMIAL = 0xEDB88320
_SHORT = 4096  # bytes, below which a call into the library costs more than it gains


def crc32(data: memoryview, crc: int = 0) -> int:
    if len(data) < _SHORT or not _width():
        return zlib.crc32(data, crc)
    library = native.library()
    assert library is not None
    found: int = library.ferryman_crc32(np.frombuffer(data, np.uint8).ctypes.data, len(data), crc, _width())
    return found


@functools.cache
def _width() -> int:
    """How much the library takes at a time; 0 without it."""
    library = native.library()
    return 0 if library is None else int(library.ferryman_crc32_width())


def combine(first: int, second: int, length: int) -> int:
    """Of two pieces one after the other, from the checksum of each; the second has `length` bytes."""
    return _times(_power(8 * length), first) ^ second


def _times(a: int, b: int) -> int:
    """Of polynomials modulo that of the checksum. As everywhere here, the highest bit is that of x to the 0."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(64)
def _power(exponent: int) -> int:
    """Of x."""
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square, exponent = _times(square, square), exponent >> 1
    return result


class BackgroundChecksum:
    """Follows a stream, at most a few chunks behind."""

    _BEHIND = 8

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "checksum")
        self._under_way: deque[Future[None]] = deque()
        self._crc = 0

    def add(self, pieces: Sequence[memoryview]) -> None:
        """The memory must stay as it is until `value` is asked for."""
        self.do(lambda: self._follow(pieces))

    def do(self, act: Callable[[], None]) -> None:
        """Something else that is to be done beside the stream."""
        self._under_way.append(self._pool.submit(act))
        while len(self._under_way) > self._BEHIND:
            self._under_way.popleft().result()

    def value(self) -> int:
        while self._under_way:
            self._under_way.popleft().result()
        return self._crc

    def _follow(self, pieces: Sequence[memoryview]) -> None:
        for piece in pieces:
            self._crc = crc32(piece, self._crc)

    def __enter__(self) -> BackgroundChecksum:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
