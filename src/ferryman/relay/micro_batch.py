"""Micro-batches in threads of their own, of which one runs at a time.

A micro-batch runs the user's code until it needs a unit; there it parks and the driver runs on, until the driver grants
the request. This is cooperation, not parallelism: exactly one of the driver and the micro-batches runs at any moment.
"""

from __future__ import annotations

import contextlib
import contextvars
import sqlite3
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack

from ferryman.exactness.reach import context_variables, set_context
from ferryman.model.units import Unit
from ferryman.runtime.lanes import Lane
from ferryman.runtime.rng import Randomness, State


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Request(NamedTuple):
    """What a parked micro-batch waits for: a unit's weights on the device."""

    unit: Unit
    direction: Direction


class Abandoned(BaseException):
    """Ends a parked micro-batch whose step was given up. Not an Exception: user code should not catch it."""


class ThreadState(NamedTuple):
    """What the user's code keeps per thread: context variables, and what is in objects of `threading.local`."""

    context: contextvars.Context
    held: Sequence[dict[str, Any]]

    @staticmethod
    def here(thread_locals: Sequence[threading.local]) -> ThreadState:
        """That of the thread which calls."""
        return ThreadState(contextvars.copy_context(), [dict(local.__dict__) for local in thread_locals])

    def leave_behind(self, thread_locals: Sequence[threading.local]) -> None:
        """Makes it the calling thread's."""
        set_context(self.context.items())
        self.put_locals(thread_locals)

    def put_locals(self, thread_locals: Sequence[threading.local]) -> None:
        for local, held in zip(thread_locals, self.held, strict=True):
            local.__dict__.clear()
            local.__dict__.update(held)


class MicroBatch:
    """One micro-batch of a step: `work` is its forward and backward. It begins with the thread state that the one
    `before` it has left, or, if that has not ended yet, with the caller's."""

    def __init__(
        self,
        number: int,
        work: Callable[[MicroBatch], None],
        surroundings: Surroundings,
        before: MicroBatch | None,
    ) -> None:
        self.number = number
        self.request: Request | None = None
        self.needs: Sequence[torch.Tensor] = ()  # tensors that the call that it is parked in will use
        self.inherited: dict[int, torch.Tensor] = {}  # what calls can reach beyond variables, when it begins
        self.context = context_variables(contextvars.Context())  # those that it has set
        self.turned = False  # its loss is there, and it goes backward from now on
        self.done = False
        self._error: BaseException | None = None
        self._abandoned = False
        self._mine, self._drivers = threading.Semaphore(0), threading.Semaphore(0)
        self._surroundings = surroundings
        self._random = surroundings.random_state(number)
        self._work = work
        self._before = before
        self._thread: threading.Thread | None = None
        self.thread_state: ThreadState | None = None  # in which it has ended

    def _start(self) -> None:
        before = self._before if self._before is not None and self._before.done else None
        state = (before and before.thread_state) or ThreadState.here(self._surroundings.thread_locals)
        context, self._before = state.context.copy(), None
        self._thread = threading.Thread(
            target=lambda: context.run(self._main, state), name=f"ferryman-micro-batch-{self.number}", daemon=True
        )
        self._thread.start()

    def _main(self, state: ThreadState) -> None:
        self._mine.acquire()
        try:
            with self._surroundings.enter():
                state.put_locals(self._surroundings.thread_locals)
                self._work(self)
            self.thread_state = ThreadState.here(self._surroundings.thread_locals)
        except Abandoned:
            pass
        except sqlite3.ProgrammingError as error:
            self._error = _explained(error, self._surroundings.thread_locals)
        except BaseException as error:  # the driver raises it, where the user called
            self._error = error
        finally:
            self.request = None
            self.done = True
            self._drivers.release()

    def requests(self, unit: Unit) -> bool:
        """Whether the micro-batch is parked and waits for this unit."""
        return self.request is not None and self.request.unit is unit

    def park(self, unit: Unit, direction: Direction, needs: Sequence[torch.Tensor]) -> None:
        """Called by the micro-batch: waits until the driver has the unit's weights, and what is needed, in place."""
        self.request = Request(unit, direction)
        self.needs = needs
        self._drivers.release()
        self._mine.acquire()
        self.needs = ()
        if self._abandoned:
            raise Abandoned

    def resume(self) -> None:
        """Called by the driver: runs the micro-batch until it parks again or ends; raises what its code raised."""
        randomness = self._surroundings.randomness
        outside = randomness.state()
        randomness.restore(self._random)
        self.request = None
        if self._thread is None:
            self._start()
        self._mine.release()
        interrupt = self._await_parking()
        self._random = randomness.state()
        randomness.restore(outside)
        error, self._error = self._error or interrupt, None
        if error is None:
            return
        try:
            raise error
        finally:
            del error, interrupt  # else this frame and the error keep each other, and the device's tensors, alive

    def _await_parking(self) -> BaseException | None:
        """A KeyboardInterrupt waits, too: nothing may be taken down beside a micro-batch that runs on."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._drivers.acquire()
            except BaseException as error:
                interrupt = error
            else:
                return interrupt

    def abandon(self) -> None:
        """Called by the driver: ends the micro-batch wherever it is parked."""
        if self._thread is None:
            return
        if not self.done:
            self._abandoned = True
            self._mine.release()
        self._thread.join()


def _explained(error: sqlite3.ProgrammingError, thread_locals: Sequence[threading.local]) -> Exception:
    """SQLite objects refuse to be used outside of the thread that made them, which is the caller's."""
    if "thread" not in str(error):
        return error
    names = [name for local in thread_locals for name, value in vars(local).items() if _is_of_sqlite(value)]
    known = f" Thread-local variables that hold such objects: {', '.join(names)}." if names else ""
    place = traceback.extract_tb(error.__traceback__)[-1]
    explained = ValueError(
        f"{place.filename}:{place.lineno} ({place.line}) uses an SQLite connection that was made in another thread: "
        f"the engine runs each micro-batch in a thread of its own, one at a time.{known} Open it with "
        "sqlite3.connect(..., check_same_thread=False), or read from it before engine.step() and pass the values in "
        "with the batch"
    )
    explained.__cause__ = error
    return explained


def _is_of_sqlite(value: Any) -> bool:
    return isinstance(value, sqlite3.Connection | sqlite3.Cursor | sqlite3.Blob)


class Surroundings:
    """State of the calling thread that a micro-batch's thread must have too: stream, autocast, random numbers."""

    def __init__(
        self,
        device: torch.device,
        randomness: Randomness,
        lane: Lane,
        seed: int,
        thread_locals: Sequence[threading.local],
    ) -> None:
        self.randomness = randomness
        self.thread_locals = thread_locals
        self._lane = lane
        self._seed = seed
        self._function_modes = _get_current_function_mode_stack()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in {"cpu", device.type} if torch.is_autocast_enabled(kind)
        ]

    def random_state(self, number: int) -> State:
        return self.randomness.seeded(self._seed + number)

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._lane.current())
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            for mode in self._function_modes:  # as of torch.set_default_device; not entered anew, which they may refuse
                torch._C._push_on_torch_function_stack(mode)
                stack.callback(torch._C._pop_torch_function_stack)
            # Backward stays on this thread: the parked node would else block autograd's thread for the device.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield
