"""Directories that are replaced atomically: a reader finds the complete old one or the complete new one at any time.

The new directory is written beside the old one under a hidden name, and takes its place once it is on the disk. Where
the system can exchange two names (Linux), one of them exists at every moment. Elsewhere the old directory is moved
aside first, and `current` finds it there if the process died in between. The next save removes what a killed process
has left behind (`.name.partial`, `.name.before`, `.name.lock`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ferryman.checkpoint import schema
from ferryman.runtime.files import FULL, why_full
from ferryman.runtime.sizes import show_bytes

MANIFEST = Path("ferryman") / "checkpoint.json"

_RENAME_EXCHANGE = 2  # flag of renameat2
_AT_FDCWD = -100

_IN_SERIES = re.compile("step-[0-9]+")  # a copy with another name, such as step-best, is not part of a series
_HIDDEN = ("partial", "before", "lock")  # suffixes of hidden names beside a directory while it is replaced


def is_checkpoint(directory: Path) -> bool:
    return (directory / MANIFEST).is_file()


def current(directory: Path) -> Path:
    """The path that holds the directory's content: usually itself, or where an interrupted save moved it."""
    aside = _hidden(directory, "before")
    return aside if not directory.exists() and is_checkpoint(aside) else directory


def check_replaceable(directory: Path) -> None:
    """Raises if the directory holds anything but a checkpoint, or cannot be replaced."""
    if directory.is_dir():
        if directory.is_mount():
            raise ValueError(f"{directory} is a mount point, so it cannot be replaced; give a directory inside it")
        held = sorted(path.name for path in directory.iterdir())
        if held and not is_checkpoint(directory):
            raise ValueError(
                f"{directory} is not a checkpoint (it holds {', '.join(held[:3])}{', ...' if len(held) > 3 else ''}) "
                "and is not replaced; give an empty or a new directory"
            )
    elif directory.exists():
        raise ValueError(f"{directory} is a file; a checkpoint is a directory")


@contextlib.contextmanager
def replacing(directory: Path, *, needs: int) -> Iterator[Path]:
    """Yields an empty directory to write into, which replaces `directory` when the block ends without an exception.

    `needs` is the number of bytes that will be written.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = _hidden(directory, "partial")
    with _locked(directory):
        try:
            _remove(partial)  # left by a killed process
            partial.mkdir()
            if needs > shutil.disk_usage(partial).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield partial
            for inside, _, _ in os.walk(partial):
                _sync(Path(inside))
            _put_in_place(partial, directory)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if error.errno in FULL:
                why = why_full(error, directory.parent)
                if why is None:
                    free = shutil.disk_usage(directory.parent).free
                    why = f"the disk is full: the checkpoint needs {show_bytes(needs)}, and {show_bytes(free)} is free"
                raise OSError(error.errno, f"{why}. The previous checkpoint is unchanged", str(directory)) from error
            raise
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def carry_over(old: Path, new: Path, is_ours: Callable[[str], bool]) -> None:
    """Copies files that do not belong to the checkpoint from the old directory, as hard links where possible."""
    for inside, folders, files in os.walk(old):
        links = [name for name in folders if (Path(inside) / name).is_symlink()]
        for source in (Path(inside) / name for name in (*files, *links)):
            relative = source.relative_to(old)
            target = new / relative
            if is_ours(str(relative)) or os.path.lexists(target):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target, follow_symlinks=False)
            except OSError:
                shutil.copy2(source, target, follow_symlinks=False)


def series(directory: Path) -> list[Path]:
    """The checkpoints in a directory, in the order in which they were saved, the newest last.

    Not in the order of steps: after a run has been resumed from an earlier step, its later checkpoints are outdated.
    """
    names = {path.name for path in directory.glob("step-*")} | {_shown(path) for path in _leftovers(directory)}
    found = [current(directory / name) for name in sorted(filter(_IN_SERIES.fullmatch, names))]
    return sorted((path for path in found if is_checkpoint(path)), key=_saved)


def in_series(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08}"


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint in a series."""
    return int(_shown(checkpoint).removeprefix("step-"))


def prune(directory: Path, keep: int, newest: Path) -> None:
    """Removes all but the newest `keep` checkpoints of a series, and what killed processes have left behind.

    `newest` is the checkpoint that was just saved; it is kept even if others have a later time stamp.
    """
    others = [path for path in series(directory) if path != newest]
    for old in others[: max(0, len(others) - (keep - 1))]:
        shown = directory / _shown(old)
        with _locked(shown):
            gone = _hidden(shown, "partial")  # renamed first, so that a half-removed checkpoint is never found
            shutil.rmtree(gone, ignore_errors=True)
            old.rename(gone)
            shutil.rmtree(gone)
    for leftover in _leftovers(directory):
        shown = directory / _shown(leftover)
        with contextlib.suppress(ValueError), _locked(shown):  # unless its process is still running
            if leftover.is_dir() and leftover != current(shown):
                shutil.rmtree(leftover)


def _leftovers(directory: Path) -> list[Path]:
    return [path for what in _HIDDEN for path in directory.glob(f".step-*.{what}")]


def _shown(path: Path) -> str:
    """The name of the directory that a hidden one belongs to."""
    return path.name[1:].rpartition(".")[0] if path.name.startswith(".") else path.name


def _saved(checkpoint: Path) -> float:
    """The time at which it was saved; for a damaged manifest, the time at which that file was written."""
    try:
        return float(schema.read(checkpoint / MANIFEST, schema.TIME)["content"]["saved"])
    except ValueError:
        return (checkpoint / MANIFEST).stat().st_mtime


def last_saved(directory: Path) -> float:
    """The time of the newest checkpoint of a series. The next one gets a later time even if the clock was set back."""
    return max(map(_saved, series(directory)), default=0.0)


def _hidden(directory: Path, what: str) -> Path:
    assert what in _HIDDEN
    return directory.with_name(f".{directory.name}.{what}")


def _locked(directory: Path) -> contextlib.AbstractContextManager[None]:
    return locked(
        _hidden(directory, "lock"),
        f"another process is saving to {directory} right now; give each process its own directory",
    )


@contextlib.contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Holds a lock file, which the system releases when the process ends. (Directories cannot be locked over NFS.)"""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ValueError(f"{path} must be a file, for a lock, but is a symbolic link; remove it") from error
            raise
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(refusal) from None
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # no support for locks: go on
                    raise
            if _is_open(path, handle):
                try:
                    yield
                    return
                finally:
                    path.unlink(missing_ok=True)
        finally:
            os.close(handle)


def _is_open(path: Path, handle: int) -> bool:
    """Whether the path is still the file that was opened."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    """Removes a directory, or a file or link of that name, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _put_in_place(partial: Path, directory: Path) -> None:
    aside = _hidden(directory, "before")
    if not directory.exists():
        partial.rename(directory)
    elif _exchange(partial, directory):
        _sync(directory.parent)
        shutil.rmtree(partial, ignore_errors=True)  # the old directory, after the exchange
    else:
        _remove(aside)
        directory.rename(aside)
        partial.rename(directory)
    _sync(directory.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names atomically; returns whether the system supports that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
