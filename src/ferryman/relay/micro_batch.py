"""Micro-batches: each has a thread of its own, and only one of them runs at a time.

A micro-batch runs the user's code until it needs a unit. There it parks with a request, and the driver continues. When
the unit is on the device, the driver computes what was requested, on its own thread, and lets the micro-batch continue
with the result. This is cooperation, not parallelism: exactly one of the driver and the micro-batches runs at any
moment.

Note [Units compute on the driver's thread]
The driver's thread is the one that called `engine.step`. On an accelerator, each thread that runs a matrix product has
a library handle and a workspace of its own, so device memory would grow with the number of micro-batches if each
computed in its own thread. Another reason: a profiler that the caller has started sees the units' operators. The user's
code must not notice on which thread it runs: context variables and thread-local variables are sent with the request
(`ThreadState`), and so are torch's modes (`modes.py`) and re-entrant locks (`user_locks.py`).
"""

from __future__ import annotations

import contextlib
import contextvars
import sqlite3
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from ferryman.exactness.reach import context_variables, set_context
from ferryman.exactness.user_locks import Held, UserLocks
from ferryman.model.units import Unit
from ferryman.relay.modes import Modes
from ferryman.runtime.lanes import Lane
from ferryman.runtime.rng import Randomness, State

if TYPE_CHECKING:
    from ferryman.relay.stash import Stashed

T = TypeVar("T")


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class ThreadState(NamedTuple):
    """The user's per-thread state: context variables, and the contents of `threading.local` objects."""

    context: contextvars.Context
    thread_locals: Sequence[dict[str, Any]]

    @staticmethod
    def here(thread_locals: Sequence[threading.local]) -> ThreadState:
        """The state of the calling thread."""
        return ThreadState(contextvars.copy_context(), [dict(local.__dict__) for local in thread_locals])

    def apply(self, thread_locals: Sequence[threading.local]) -> None:
        """Sets this state in the calling thread."""
        set_context(self.context.items())
        if thread_locals:
            self.put_locals(thread_locals)

    @contextlib.contextmanager
    def borrowed(self, thread_locals: Sequence[threading.local]) -> Iterator[None]:
        """Context in which the calling thread has these thread-local variables. Its changes are stored here."""
        own = ThreadState.here(thread_locals)
        self.put_locals(thread_locals)
        try:
            yield
        finally:
            for local, values in zip(thread_locals, self.thread_locals, strict=True):
                values.clear()
                values.update(local.__dict__)
            own.put_locals(thread_locals)

    def put_locals(self, thread_locals: Sequence[threading.local]) -> None:
        for local, values in zip(thread_locals, self.thread_locals, strict=True):
            local.__dict__.clear()
            local.__dict__.update(values)


class Request(NamedTuple):
    """The computation that a parked micro-batch waits for. It needs the unit's weights on the device."""

    unit: Unit
    direction: Direction
    needs: Sequence[torch.Tensor]  # tensors that the computation uses
    recalls: Sequence[Stashed]  # inputs that it saved earlier and uses again
    compute: Callable[[], Any] | None  # None: the micro-batch computes it itself when it continues
    state: ThreadState
    held: Held  # locks that the user's code holds


class _Answer(NamedTuple):
    """The outcome of a request: a result, or an exception to raise in the micro-batch's thread."""

    result: Any = None
    error: BaseException | None = None
    held: Held = ()  # locks that the user's code holds


_NO_ANSWER = _Answer()


class Abandoned(BaseException):
    """Ends a parked micro-batch when its step has failed. Not an Exception: user code should not catch it."""


class MicroBatch:
    """One micro-batch of a step. `run` runs its forward and backward.

    It begins with the thread state at the end of the micro-batch `before` it or, if that has not ended yet, with the
    caller's thread state.
    """

    def __init__(
        self,
        number: int,
        run: Callable[[MicroBatch], None],
        surroundings: Surroundings,
        before: MicroBatch | None,
    ) -> None:
        self.number = number
        self.request: Request | None = None
        self.inherited: dict[int, torch.Tensor] = {}  # tensors that calls can reach beyond variables, at the start
        self.context = context_variables(contextvars.Context())  # the context variables that it has set
        self.turned = False  # its loss is computed, and its backward begins
        self.done = False
        self._error: BaseException | None = None
        self._answer = _NO_ANSWER  # to its last request
        self._served_by: int | None = None  # the driver's thread, while it computes for the micro-batch
        self._runs_in: int | None = None  # its own thread
        self._abandoned = False
        # `_running` is locked while the micro-batch runs, and `_permission` until it may run. (Semaphores would take
        # four times as long.)
        self._running, self._permission = threading.Lock(), threading.Lock()
        self._permission.acquire()
        self._surroundings = surroundings
        self.random = surroundings.random_state(number)  # the state to continue from, while it is parked or served
        self._run = run
        self._before = before
        self._thread: threading.Thread | None = None
        self.thread_state: ThreadState | None = None  # at its end

    def _start(self) -> None:
        before = self._before if self._before is not None and self._before.done else None
        state = (before and before.thread_state) or ThreadState.here(self._surroundings.thread_locals)
        context, self._before = state.context.copy(), None
        thread = threading.Thread(
            target=lambda: context.run(self._main, state), name=f"ferryman-micro-batch-{self.number}", daemon=True
        )
        try:
            thread.start()
        except BaseException:  # a signal handler may raise, too: then the thread runs, and must end by itself
            self._abandoned = True
            self._permission.release()
            raise
        self._thread = thread

    def _main(self, state: ThreadState) -> None:
        self._runs_in = threading.get_ident()
        self._permission.acquire()
        if self._abandoned:
            return
        try:
            with self._surroundings.enter():
                state.put_locals(self._surroundings.thread_locals)
                self._surroundings.locks.acquire(self._surroundings.locks.of_caller)
                self._run(self)
            self.thread_state = ThreadState.here(self._surroundings.thread_locals)
        except Abandoned:
            pass
        except sqlite3.ProgrammingError as error:
            self._error = _explained(error, self._surroundings.thread_locals)
        except BaseException as error:  # the driver raises it in the caller's thread
            self._error = error
        finally:
            self._surroundings.locks.release()
            self.request = None
            self.done = True
            self._running.release()

    def runs_here(self) -> bool:
        """Whether the calling thread runs code of this micro-batch."""
        here = threading.get_ident()
        return here == self._served_by or here == self._runs_in

    @property
    def is_served(self) -> bool:
        """Whether the driver is computing for this micro-batch."""
        return self._served_by is not None

    def requests(self, unit: Unit) -> bool:
        """Whether the micro-batch is parked and waits for this unit."""
        return self.request is not None and self.request.unit is unit

    @property
    def needs(self) -> Sequence[torch.Tensor]:
        """Tensors that the requested computation uses."""
        return () if self.request is None else self.request.needs

    @property
    def recalls(self) -> Sequence[Stashed]:
        """Saved inputs that the requested computation uses."""
        return () if self.request is None else self.request.recalls

    def park(
        self,
        unit: Unit,
        direction: Direction,
        needs: Sequence[torch.Tensor],
        compute: Callable[[], T],
        *,
        recalls: Sequence[Stashed] = (),
        in_own_thread: bool = False,
    ) -> T:
        """Called by the micro-batch: waits until the driver has computed the result, and returns it.

        `needs`, `recalls`: tensors and saved inputs that `compute` uses. `in_own_thread`: the driver only brings the
        unit and the needed tensors to the device, and the micro-batch computes.
        """
        state, locks = ThreadState.here(self._surroundings.thread_locals), self._surroundings.locks
        if self._surroundings.interleaved:
            locks.refuse_held(unit.name)
        held = locks.release()
        self.request = Request(unit, direction, needs, recalls, None if in_own_thread else compute, state, held)
        self._running.release()
        self._permission.acquire()
        answer, self._answer = self._answer, _NO_ANSWER
        locks.acquire(held if in_own_thread or self._abandoned else answer.held)
        if self._abandoned:
            raise Abandoned
        if in_own_thread:
            return compute()
        state.apply(self._surroundings.thread_locals)
        if answer.error is not None:
            try:
                raise answer.error
            finally:
                del answer  # otherwise this frame and the error keep each other and the device's tensors alive
        result: T = answer.result
        return result

    def resume(self) -> None:
        """Called by the driver: computes the micro-batch's request, and lets it continue until it parks again or ends.
        Raises the exception that its code raised, if any."""
        randomness = self._surroundings.randomness
        randomness.restore(self.random)
        if self._surroundings.straight:
            return self._run_here()
        request, self.request = self.request, None
        if self._thread is None:
            self._start()
        elif request is not None and request.compute is not None:
            self._answer = self._serve(request.compute, request.state, request.held)
        del request
        interrupt = self._run_until_parked()
        self.random = randomness.state()
        error, self._error = self._error or interrupt, None
        if error is None:
            return None
        try:
            raise error
        finally:
            del error, interrupt  # otherwise this frame and the error keep each other and the device's tensors alive

    def _run_here(self) -> None:
        """Runs all of the micro-batch on the driver's thread. Its calls do not park. See `straight.py`."""
        before, self._before = self._before, None
        known = None if before is None else before.thread_state
        context = contextvars.copy_context() if known is None else known.context.copy()
        locks, self._served_by = self._surroundings.locks, threading.get_ident()
        try:
            context.run(self._run_code)
        finally:
            locks.release()
            self._served_by, self.done = None, True

    def _run_code(self) -> None:
        with self._surroundings.enter():
            self._surroundings.locks.acquire(self._surroundings.locks.of_caller)
            self._run(self)
        self.thread_state = ThreadState.here(self._surroundings.thread_locals)

    def _serve(self, compute: Callable[[], Any], state: ThreadState, held: Held) -> _Answer:
        """Computes on the driver's thread. See Note [Units compute on the driver's thread]."""
        self._served_by, locks = threading.get_ident(), self._surroundings.locks
        locks.acquire(held)
        try:
            if not (thread_locals := self._surroundings.thread_locals):
                return _Answer(state.context.run(compute), held=locks.release())
            with state.borrowed(thread_locals):
                return _Answer(state.context.run(compute), held=locks.release())
        except BaseException as error:  # raised in the micro-batch, where the user's code called the unit
            return _Answer(error=error, held=locks.release())
        finally:
            self._served_by = None

    def _run_until_parked(self) -> BaseException | None:
        """Lets the micro-batch run until it has parked or ended. Returns an exception that arrived meanwhile.

        A signal handler may raise anywhere here (KeyboardInterrupt, a timeout). The exception must wait: the step must
        not be torn down while a micro-batch still runs. So the wait can be repeated: it takes the lock and releases it.
        """
        interrupt: BaseException | None = None
        self._running.acquire()
        try:
            self._permission.release()
        except BaseException as error:
            interrupt = error
        while True:
            try:
                with self._running:
                    return interrupt
            except BaseException as error:
                interrupt = error

    def abandon(self) -> None:
        """Called by the driver: ends the micro-batch if it is parked, and joins its thread."""
        if self._thread is None:
            return
        if not self.done:
            self._abandoned = True
            self._running.acquire(blocking=False)  # held already if an exception came before the micro-batch could run
            self._permission.release()
        self._thread.join()


def _explained(error: sqlite3.ProgrammingError, thread_locals: Sequence[threading.local]) -> Exception:
    """Explains why SQLite refuses: its objects can be used only in the thread that made them, the caller's thread."""
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
    """The caller's thread state that each micro-batch's thread needs too: stream, autocast, random numbers."""

    def __init__(
        self,
        device: torch.device,
        randomness: Randomness,
        lane: Lane,
        seed: int,
        thread_locals: Sequence[threading.local],
        locks: UserLocks,
        *,
        interleaved: bool,
        straight: bool = False,
    ) -> None:
        self.randomness = randomness
        self.thread_locals = thread_locals
        self.locks = locks
        self.interleaved = interleaved  # other micro-batches run while one is parked
        self.straight = straight  # micro-batches run on the driver's thread
        self._lane = lane
        self._seed = seed
        self._modes = Modes.here()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in {"cpu", device.type} if torch.is_autocast_enabled(kind)
        ]

    def random_state(self, number: int) -> State:
        return self.randomness.seeded(self._seed + number)

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Context in which a micro-batch's thread has this state."""
        # `torch.set_num_threads` reaches MKL and OpenMP in the thread that calls it. In others they learn of it here or
        # in the first parallel loop, but not in a matrix product, which would start threads of its own that wait in a
        # loop (forward and backward of a small one: 1.7 ms of processor time in place of 0.4).
        torch.get_num_threads()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._lane.current())
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
                # On the caller's thread this autocast is inside another one, and would not clear the cache at its end.
                stack.callback(torch.clear_autocast_cache)
            stack.enter_context(self._modes.on())
            # Backward stays on this thread: a parked node would otherwise block autograd's thread for the device.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    @staticmethod
    def driving() -> contextlib.AbstractContextManager[Any]:
        """Context in which a driver resumes micro-batches. Gradient hooks of units must run on its own thread."""
        return torch.autograd.set_multithreading_enabled(False)
