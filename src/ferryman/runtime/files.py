"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Within, write to the file that it yields; in the end that takes its place. If anything raises, all is as it was.

    It is in the same directory, so that taking the place is one act of the file system.
    """
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
