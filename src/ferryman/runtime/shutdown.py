"""The end of a process whose script has not closed its engines.

A thread that comes back from C++ while the interpreter goes down aborts the process, so lanes finish what they have
before. That takes other ranks, which do the same or leave word, and no longer than these are waited for anywhere. Who
ends with an exception has nothing to finish: it leaves word first, and its own lanes find that, too.
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

open_lanes: weakref.WeakSet[Lanes] = weakref.WeakSet()  # their threads keep them
open_ranks: set[Ranks] = set()  # also of an engine that was dropped: others may wait for it


def _end() -> None:
    error = getattr(sys, "last_value", None)  # that nobody has caught
    if error is not None:
        for ranks in open_ranks:
            ranks.fail(error)
    for lanes in list(open_lanes):
        with contextlib.suppress(Exception):  # nobody is left to hear of it
            lanes.close()
    for ranks in open_ranks:
        ranks.leave()


def _forget() -> None:
    """In a child that was forked: threads and connections are its parent's."""
    open_lanes.clear()
    open_ranks.clear()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
