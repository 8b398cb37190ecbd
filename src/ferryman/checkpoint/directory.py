"""A directory that is replaced in one moment: whoever looks, at any time, finds the old one or the new one, whole.

The new one is written beside the old, under a hidden name, and takes its place when all of it is on the disk. Where the
system can exchange two names (Linux), there is no moment without either; elsewhere the old one moves aside first, and
`current` finds it there if the process died in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from ferryman.cost.sizes import show_bytes

MANIFEST = Path("ferryman") / "checkpoint.json"

_EXCHANGE = 2  # RENAME_EXCHANGE, of renameat2
_HERE = -100  # AT_FDCWD


def is_checkpoint(directory: Path) -> bool:
    return (directory / MANIFEST).is_file()


def current(directory: Path) -> Path:
    """Where the directory's content is."""
    aside = _hidden(directory, "before")
    return aside if not directory.exists() and is_checkpoint(aside) else directory


def check_replaceable(directory: Path) -> None:
    """Refuses to write over anything but a checkpoint."""
    if directory.is_dir():
        held = sorted(path.name for path in directory.iterdir())
        if held and not is_checkpoint(directory):
            raise ValueError(
                f"{directory} holds something else than a checkpoint ({', '.join(held[:3])}"
                f"{', ...' if len(held) > 3 else ''}), and would be replaced; give an empty or a new directory"
            )
    elif directory.exists():
        raise ValueError(f"{directory} is a file; a checkpoint is a directory")


@contextlib.contextmanager
def replacing(directory: Path, *, needs: int) -> Iterator[Path]:
    """An empty directory to write into. It takes the place of `directory` when the block has ended well.

    `needs`: bytes that will be written.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = _hidden(directory, "partial")
    with _locked(partial):
        try:
            _empty(partial)
            free = shutil.disk_usage(partial).free
            if needs > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield partial
            for inside, _, _ in os.walk(partial):
                _sync(Path(inside))
            _put_in_place(partial, directory)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(directory.parent).free
                raise OSError(
                    error.errno,
                    f"the disk is full: the checkpoint needs {show_bytes(needs)} beside what is there, "
                    f"and {show_bytes(free)} are free. What was saved before is as it was",
                    str(directory),
                ) from error
            raise
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def carry_over(old: Path, new: Path, written: Collection[str]) -> None:
    """Files that somebody else has put into the old directory stay; `written`: those that were ours."""
    for inside, _, files in os.walk(old):
        for name in files:
            source = Path(inside) / name
            relative = source.relative_to(old)
            target = new / relative
            if str(relative) in written or relative == MANIFEST or target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except OSError:
                shutil.copy2(source, target)


def remove(directory: Path) -> None:
    """Not a checkpoint any more from the first moment on."""
    gone = _hidden(directory, "partial")
    shutil.rmtree(gone, ignore_errors=True)
    directory.rename(gone)
    shutil.rmtree(gone)


def series(directory: Path) -> list[Path]:
    """The checkpoints in a directory of them, the newest last."""
    return sorted(path for path in directory.glob("step-*") if is_checkpoint(path)) if directory.is_dir() else []


def in_series(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08}"


def prune(directory: Path, keep: int) -> None:
    """The newest `keep` of a series stay; and what a process left behind that died is removed."""
    for old in series(directory)[:-keep]:
        remove(old)
    for leftover in directory.glob(".step-*.partial"):
        with contextlib.suppress(ValueError), _locked(leftover):
            shutil.rmtree(leftover)


def _hidden(directory: Path, what: str) -> Path:
    return directory.with_name(f".{directory.name}.{what}")


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """The lock ends with the process, however that ends."""
    while True:
        partial.mkdir(exist_ok=True)
        handle = os.open(partial, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process is saving there at this moment ({partial}); give each its own directory"
                ) from None
            if partial.exists() and os.path.samestat(os.fstat(handle), partial.stat()):
                yield
                return
        finally:
            os.close(handle)


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _put_in_place(partial: Path, directory: Path) -> None:
    aside = _hidden(directory, "before")
    if not directory.exists():
        partial.rename(directory)
    elif _exchange(partial, directory):
        _sync(directory.parent)
        shutil.rmtree(partial)  # what was there before
    else:
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
        partial.rename(directory)
    _sync(directory.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Whether the system can do it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
