"""A directory that is replaced in one moment: whoever looks, at any time, finds the old one or the new one, whole.

The new one is written beside the old, under a hidden name, and takes its place when all of it is on the disk. Where the
system can exchange two names (Linux), there is no moment without either; elsewhere the old one moves aside first, and
`current` finds it there if the process died in between. What such a process leaves behind (`.name.partial`,
`.name.before`, `.name.lock`) goes with the next save.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ferryman.runtime.sizes import show_bytes

MANIFEST = Path("ferryman") / "checkpoint.json"

_EXCHANGE = 2  # RENAME_EXCHANGE, of renameat2
_HERE = -100  # AT_FDCWD

_HIDDEN = ("partial", "before", "lock")  # what is beside a directory while it is replaced


def is_checkpoint(directory: Path) -> bool:
    return (directory / MANIFEST).is_file()


def current(directory: Path) -> Path:
    """Where the directory's content is."""
    aside = _hidden(directory, "before")
    return aside if not directory.exists() and is_checkpoint(aside) else directory


def check_replaceable(directory: Path) -> None:
    """Refuses to write over anything but a checkpoint, and what cannot be replaced."""
    if directory.is_dir():
        if directory.is_mount():
            raise ValueError(
                f"{directory} is where a disk is mounted, so it cannot be replaced; give a directory inside of it"
            )
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
    with _locked(directory):
        try:
            if partial.exists():  # of a process that died
                shutil.rmtree(partial)
            partial.mkdir()
            if needs > shutil.disk_usage(partial).free:
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


def carry_over(old: Path, new: Path, is_ours: Callable[[str], bool]) -> None:
    """What somebody else has put into the old directory stays."""
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
    """The checkpoints in a directory of them, as they were saved, the newest last.

    Not by their steps: whoever goes back to an earlier one, and on from there, means the later ones no more.
    """
    names = {path.name for path in directory.glob("step-*")} | {_shown(path) for path in _leftovers(directory)}
    found = [current(directory / name) for name in sorted(names)]
    return sorted((path for path in found if is_checkpoint(path)), key=_saved)


def in_series(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08}"


def step_of(checkpoint: Path) -> int:
    """Of one in a series."""
    return int(_shown(checkpoint).removeprefix("step-"))


def prune(directory: Path, keep: int, newest: Path) -> None:
    """The newest `keep` of a series stay; and what a process left behind that died is removed.

    `newest` is the one that was just saved: it is that, whatever the clock says of the others.
    """
    others = [path for path in series(directory) if path != newest]
    for old in others[: max(0, len(others) - (keep - 1))]:
        shown = directory / _shown(old)
        with _locked(shown):
            gone = _hidden(shown, "partial")  # and so not a checkpoint any more, from the first moment on
            shutil.rmtree(gone, ignore_errors=True)
            old.rename(gone)
            shutil.rmtree(gone)
    for leftover in _leftovers(directory):
        shown = directory / _shown(leftover)
        with contextlib.suppress(ValueError), _locked(shown):  # its process may be alive
            if leftover.is_dir() and leftover != current(shown):
                shutil.rmtree(leftover)


def _leftovers(directory: Path) -> list[Path]:
    return [path for what in _HIDDEN for path in directory.glob(f".step-*.{what}")]


def _shown(path: Path) -> str:
    """The name of the directory that a hidden one belongs to."""
    return path.name[1:].rpartition(".")[0] if path.name.startswith(".") else path.name


def _saved(checkpoint: Path) -> float:
    """When; of one that does not tell, or is damaged, when its last file was written."""
    try:
        return float(json.loads((checkpoint / MANIFEST).read_text())["content"]["saved"])
    except (ValueError, KeyError, TypeError):
        return (checkpoint / MANIFEST).stat().st_mtime


def last_saved(directory: Path) -> float:
    """Of a series; the next one comes after that, even if the clock was set back."""
    return max(map(_saved, series(directory)), default=0.0)


def _hidden(directory: Path, what: str) -> Path:
    assert what in _HIDDEN
    return directory.with_name(f".{directory.name}.{what}")


def _locked(directory: Path) -> contextlib.AbstractContextManager[None]:
    return locked(
        _hidden(directory, "lock"),
        f"another process is saving to {directory} at this moment; give each its own directory",
    )


@contextlib.contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """The lock ends with the process, however that ends. A file: a directory cannot be locked over NFS."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(refusal) from None
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # there are no locks there
                    raise
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                try:
                    yield
                    return
                finally:
                    path.unlink(missing_ok=True)
        finally:
            os.close(handle)


def _put_in_place(partial: Path, directory: Path) -> None:
    aside = _hidden(directory, "before")
    if not directory.exists():
        partial.rename(directory)
    elif _exchange(partial, directory):
        _sync(directory.parent)
        shutil.rmtree(partial, ignore_errors=True)  # what was there before
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
