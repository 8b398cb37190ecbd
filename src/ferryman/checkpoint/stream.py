"""Bytes between memory and a file: as many as were asked for, and by several threads where they are read."""

from __future__ import annotations

import ctypes
import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO

from ferryman.checkpoint.checksum import combine, crc32

_SYNC_FILE_RANGE_WRITE = 2
Move = Callable[[int, Sequence[memoryview], int], int]  # os.preadv, os.pwritev


class DamagedError(ValueError):
    """A file is not what was written."""


def move_all(file: FileIO, move: Move, pieces: Sequence[memoryview], at: int) -> int:
    """Where it ends. A system call may do less than it was asked for."""
    left = [piece for piece in pieces if len(piece)]
    while left:
        try:
            count = move(file.fileno(), left, at)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file.name)) from error
        if not count:
            raise DamagedError(f"{file.name} is truncated: it ended too soon")
        at += count
        while count:
            taken = min(count, len(left[0]))
            left[0], count = left[0][taken:], count - taken
            if not len(left[0]):
                left.pop(0)
    return at


def begin_writing(file: FileIO, at: int, length: int) -> None:
    """Asks the system to bring these bytes to the disk from now on, not when it likes to, or when `fsync` waits for all
    of them. Where it cannot be asked, nothing is lost but time."""
    if (ask := _sync_file_range()) is not None:
        ask(file.fileno(), at, length, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


class Reader:
    """Reads a file from its beginning on, and its checksum: each thread a piece, and of that the checksum."""

    _THREADS = 2  # more gained nothing where it was measured, on two cores (docs/log.md)

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(self._THREADS, "reader")
        self._under_way: deque[tuple[Future[int], int]] = deque()
        self._crc = 0
        self.place = 0  # up to where reading has been asked for

    def read(self, pieces: Sequence[memoryview]) -> None:
        """What comes next, into this memory. It must stay as it is until `value` has been asked for."""
        length = sum(map(len, pieces))
        self._under_way.append((self._pool.submit(self._read, list(pieces), self.place), length))
        self.place += length

    def value(self) -> int:
        """The checksum, when all is there."""
        while self._under_way:
            future, length = self._under_way.popleft()
            self._crc = combine(self._crc, future.result(), length)
        return self._crc

    def _read(self, pieces: Sequence[memoryview], at: int) -> int:
        move_all(self._file, os.preadv, pieces, at)
        crc = 0
        for piece in pieces:
            crc = crc32(piece, crc)
        return crc

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
