"""CRC-32 checksums as computed by zlib: of memory, and of a stream on a background thread."""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ferryman.runtime import native

_POLYNOMIAL = 0xEDB88320
_MIN_NATIVE_BYTES = 4096  # for fewer bytes, calling the native library costs more than it gains


def crc32(data: memoryview, crc: int = 0) -> int:
    if len(data) < _MIN_NATIVE_BYTES or not _width():
        return zlib.crc32(data, crc)
    library = native.library()
    assert library is not None
    found: int = library.ferryman_crc32(np.frombuffer(data, np.uint8).ctypes.data, len(data), crc, _width())
    return found


@functools.cache
def _width() -> int:
    """The vector width in which the native library computes; 0 without the library."""
    library = native.library()
    return 0 if library is None else int(library.ferryman_crc32_width())


def combine(first: int, second: int, length: int) -> int:
    """The checksum of two concatenated pieces, from their checksums; the second piece has `length` bytes."""
    return _times(_power(8 * length), first) ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo that of the checksum. The highest bit is the coefficient of x^0."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(64)
def _power(exponent: int) -> int:
    """x^exponent, modulo the polynomial of the checksum."""
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square, exponent = _times(square, square), exponent >> 1
    return result


class BackgroundChecksum:
    """Computes the checksum of a stream on a background thread, at most a few chunks behind."""

    _MAX_PENDING = 8

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "checksum")
        self._under_way: deque[Future[None]] = deque()
        self._crc = 0

    def add(self, pieces: Sequence[memoryview]) -> None:
        """Adds the next pieces of the stream. Their memory must not change until `value` has returned."""
        self.do(lambda: self._follow(pieces))

    def do(self, act: Callable[[], None]) -> None:
        """Runs other work on the background thread."""
        self._under_way.append(self._pool.submit(act))
        while len(self._under_way) > self._MAX_PENDING:
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
