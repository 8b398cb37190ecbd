"""Runs code in a forked child, and reports how it ended."""

import os
import pickle
import select

_SECONDS = 60  # far more than a child needs that does not hang


def in_a_fork(work):
    """What `work` returns or raises in a forked child, as text; "hangs" if it does neither."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                found = f"returned {work()}"
            except BaseException as error:
                found = f"{type(error).__name__}: {error}"
            os.write(writing, pickle.dumps(found))
        finally:
            os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], _SECONDS)[0]:
            os.kill(child, 9)
            return "hangs"
        with os.fdopen(reading, "rb", closefd=False) as file:
            said = file.read()
    finally:
        os.close(reading)
        _, status = os.waitpid(child, 0)
    return pickle.loads(said) if said else f"ended by signal {os.WTERMSIG(status)}"
