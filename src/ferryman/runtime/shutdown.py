"""The end of a process whose script has not closed its engines.

A thread that returns from C++ while the interpreter shuts down aborts the process, so lanes finish their work before.
Some of it needs other ranks. They do the same, or report that they have failed; waits have the same timeout as
everywhere else. A script that ends with an exception reports that first, so that its own lanes do not wait either.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferryman.distributed.ranks import Ranks
    from ferryman.runtime.lanes import Lanes

open_lanes: weakref.WeakSet[Lanes] = weakref.WeakSet()  # kept alive by their threads
open_ranks: set[Ranks] = set()  # also those of an engine that was dropped, since other ranks may wait for it


def _end() -> None:
    error = getattr(sys, "last_value", None)  # an exception that nobody caught
    if error is not None:
        for ranks in open_ranks:
            ranks.fail(error)
    for lanes in list(open_lanes):
        with contextlib.suppress(Exception):  # there is nobody left to handle it
            lanes.close()
    for ranks in open_ranks:
        ranks.leave()


def _forget() -> None:
    """After a fork, in the child: threads and connections belong to the parent."""
    open_lanes.clear()
    open_ranks.clear()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
