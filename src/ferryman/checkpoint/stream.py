"""Moves bytes between memory and files: complete transfers, and reading with several threads."""

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
    """A file of a checkpoint is damaged, truncated or missing."""


def move_all(file: FileIO, move: Move, pieces: Sequence[memoryview], at: int) -> int:
    """Repeats a system call, which may transfer fewer bytes than requested, until all is done; returns the end."""
    left = [piece for piece in pieces if len(piece)]
    while left:
        try:
            count = move(file.fileno(), left, at)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file.name)) from error
        if not count:
            raise DamagedError(f"{file.name} is truncated")
        at += count
        while count:
            taken = min(count, len(left[0]))
            left[0], count = left[0][taken:], count - taken
            if not len(left[0]):
                left.pop(0)
    return at


def begin_writing(file: FileIO, at: int, length: int) -> None:
    """Asks the system to start writing these bytes to the disk now, so that `fsync` has less to wait for. Does nothing
    where the system has no such call."""
    if (ask := _sync_file_range()) is not None:
        ask(file.fileno(), at, length, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


class Reader:
    """Reads a file from the beginning and computes its checksum. Each thread reads and checks a piece."""

    _THREADS = 2  # more gained nothing when measured on two cores (docs/log.md)

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(self._THREADS, "reader")
        self._under_way: deque[tuple[Future[int], int]] = deque()
        self._crc = 0
        self.place = 0  # offset up to which reads have been submitted

    def read(self, pieces: Sequence[memoryview]) -> None:
        """Starts reading the next bytes into this memory, which must not be used until `value` has returned."""
        length = sum(map(len, pieces))
        self._under_way.append((self._pool.submit(self._read, list(pieces), self.place), length))
        self.place += length

    def value(self) -> int:
        """Waits for all reads and returns the checksum."""
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
