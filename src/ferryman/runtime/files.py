"""Writes files either completely or not at all. Errors say why a file could not be written."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)  # a full disk, or an exhausted quota


@contextlib.contextmanager
def replacing_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary file to write to, which replaces `path` at the end. If anything raises, `path` is unchanged.

    The temporary file is in the same directory, so that the file system can replace `path` atomically. It is created
    here, so that an existing symbolic link with its name is not followed.
    """
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    with naming(target):
        try:
            partial.unlink(missing_ok=True)
            partial.touch(exist_ok=False)
            yield partial
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context in which a file is written: errors without a file name get this one, and the reason if inodes ran out."""
    try:
        yield
    except OSError as error:
        why = why_full(error, path.parent)
        if error.filename is not None and why is None:
            raise
        raise OSError(error.errno, why or error.strerror, str(path)) from error


def why_full(error: OSError, directory: Path) -> str | None:
    """A message if the disk has no inodes left, else None. The system reports the same error as for a full disk."""
    if error.errno != errno.ENOSPC:
        return None
    found = os.statvfs(next(place for place in (directory, *directory.parents) if place.exists()))
    if found.f_files and not found.f_favail and found.f_bavail:  # some file systems do not count inodes
        return "the disk has no inodes left: there are too many files on it, though it has space. Remove some files"
    return None
