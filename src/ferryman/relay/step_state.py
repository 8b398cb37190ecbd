"""The state of one step: created when the step begins, and dropped when it is over."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import nn

from ferryman.exactness.batch_edits import BatchEdits
from ferryman.exactness.guard import Guard, NotRepeatableError, StepAgainError
from ferryman.exactness.outside_leaves import OutsideLeaves
from ferryman.exactness.survey import Survey
from ferryman.exactness.weight_edits import WeightEdits
from ferryman.model.binding import Binding
from ferryman.model.units import Item, Unit
from ferryman.plan.keep import NOTHING, Keep
from ferryman.relay.autograd_sums import AutogradSums
from ferryman.relay.micro_batch import MicroBatch
from ferryman.relay.stash import Stash
from ferryman.relay.unit_tensors import UnitTensors

if TYPE_CHECKING:
    from ferryman.relay.call import Call
    from ferryman.relay.call_node import Handle
    from ferryman.relay.kept_graph import KeptGraph
    from ferryman.relay.straight import Straight

LossRun = Callable[[], torch.Tensor]  # runs the forward of one micro-batch, and returns its loss


class OpenCalls:
    """Counts, for each unit, the calls whose backward may still run.

    A separate object, because autograd's graph refers to it and may outlive the step.
    """

    def __init__(self) -> None:
        self._counts: Counter[Unit] = Counter()

    def open(self, unit: Unit) -> None:
        """Counts a call of the unit, until `close` when the call's backward can no longer run."""
        self._counts[unit] += 1

    def close(self, unit: Unit) -> None:
        self._counts[unit] -= 1

    def count(self, unit: Unit) -> int:
        return self._counts[unit]


class Bindings(NamedTuple):
    """What a unit's modules have while its code runs (`inside`), and while it does not."""

    inside: Binding
    outside: Binding


class Visit:
    """A visit to a unit: the unit's tensors on the device, and the state of the current call."""

    def __init__(self, unit: Unit, of_unit: UnitTensors, bindings: Bindings) -> None:
        self.unit = unit
        self.of_unit = of_unit
        self.tensors = of_unit.pairs
        self.inside, self.outside = bindings
        self.runs_code = False  # the unit's weights are bound, for its forward or its backward
        self.has_gradient_slot = False
        self.sums: AutogradSums | None = None  # where gradients stay in their slot for the whole visit
        self.host_has_room: bool | None = None  # for graphs that are kept; None: not checked yet
        self.is_last_backward = False  # no other call of the unit will add to its gradients


class Expectation(NamedTuple):
    """The expected course of a step, learned from the last one."""

    visits: Sequence[Unit]  # the order of visits
    skipped: Collection[Unit] = ()  # units that will not be called in this step


class StepState:
    """One step. Trials (`trial.py`) override some of its methods."""

    runs_backward = True
    takes_effect = True  # changes of buffers and thread-local variables by the user's code stay

    def __init__(
        self,
        loss_runs: Sequence[LossRun],
        seed: int,
        stash: Stash,
        expected: Expectation,
        *,
        keep: Keep = NOTHING,
        for_update: bool = False,
        guard: Guard | None = None,
        between_visits: Callable[[], None] = lambda: None,
        interleaved: bool = True,
    ) -> None:
        self.loss_runs, self.seed = loss_runs, seed
        self.interleaved = interleaved  # micro-batches take turns (and could, in a straight step), or each in one go
        self.stash = stash
        self.keep = keep  # the calls that keep their graphs
        self.for_update = for_update  # gradients are sent to the server; otherwise they are left for the user
        self.between_visits = between_visits  # may raise an exception to end the step
        self.skips_units = bool(expected.skipped)
        self.micro_batches: list[MicroBatch] = []
        self.running: MicroBatch | None = None
        self._refusal = ""  # the error of a call in another thread, which the user's code may catch
        self.losses: dict[int, torch.Tensor] = {}  # by micro-batch
        self.visited: list[Unit] = []  # the order of visits so far
        self.visit: Visit | None = None  # the current visit
        self.straight: Straight | None = None  # computes calls at once, if the step is straight
        self._bindings: dict[Unit, Bindings] = {}
        self.open_calls = OpenCalls()
        self.turning_modules: set[nn.Module] = set()  # modules whose backward followed their forward at once
        self.hooked: set[tuple[MicroBatch, Item]] = set()  # parameters whose gradient hooks have run
        self.handles: list[weakref.ref[Handle]] = []  # calls that autograd may still refer to
        self.resident_edits = WeightEdits((), by_bytes=False)
        self.leaves = OutsideLeaves()
        self.batch_edits = BatchEdits()
        self.kept_calls = self.recomputed_calls = 0
        self.kept_seconds = 0.0  # of forwards whose graph lasted, if the device is the host
        self._latest_call: Call | None = None  # the last call that ran its forward; it may keep its graph
        self._guard = guard
        once = [unit for unit in expected.visits if unit not in expected.skipped]
        self._expected = once if interleaved else once * len(loss_runs)

    # Points of a step that trials override.

    @property
    def survey(self) -> Survey | None:
        """The survey of the user's variables that this step makes, if it makes one."""
        return None if self._guard is None else self._guard.survey

    def begin(self) -> None:
        """Called when the model is on the device, before any micro-batch runs."""
        if self._guard is not None:
            self._guard.begin()

    def micro_batch_resumes(self, batch: MicroBatch) -> None:
        """Called before the micro-batch continues."""

    def micro_batch_parked(self, batch: MicroBatch) -> None:
        """Called when the micro-batch has parked again or is done."""

    def has_gradient(self, batch: MicroBatch, item: Item, gradient: torch.Tensor) -> None:
        """Called with each call's gradient of a parameter."""

    def run_again(
        self, call: Call, inputs: list[torch.Tensor], run: Callable[[], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Runs a call's forward with a graph, in its backward, and returns the outputs."""
        return run()

    def watch_user_code(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which a micro-batch runs the user's code."""
        return contextlib.nullcontext()

    def succeeded(self) -> None:
        """Called when all micro-batches are done. The user's variables have their final values."""

    def ended(self) -> None:
        """Called at the end, with or without an exception, while the model is still on the device."""

    # Common to all steps.

    def groups(self) -> list[list[MicroBatch]]:
        """Groups of micro-batches, in the order in which they run. The micro-batches of a group run interleaved."""
        return [self.micro_batches] if self.interleaved else [[batch] for batch in self.micro_batches]

    def bindings(
        self, unit: Unit, of_unit: UnitTensors, outside: Callable[[Unit], Sequence[tuple[Item, torch.Tensor]]]
    ) -> Bindings:
        """The unit's bindings. Their places in the user's modules are looked up once a step."""
        if unit not in self._bindings:
            self._bindings[unit] = Bindings(Binding(of_unit.pairs), Binding(outside(unit)))
        return self._bindings[unit]

    def upcoming(self) -> Sequence[Unit]:
        """The visits that are expected after the current one."""
        return upcoming(self._expected, self.visited)

    def refuse_other_threads(self, unit: Unit | None = None) -> None:
        """Refuses calls of a unit, or of the model, outside the thread of the current micro-batch: stream, autocast,
        random numbers and the stash's dispatch mode belong to that thread. Also refuses calls of a unit inside another
        unit."""
        if self.running is None or not self.running.runs_here():
            self.refuse_thread("the model" if unit is None else f"the unit {unit.name!r}")
        if unit is not None and self.running.is_served and self.visit is not None:
            raise ValueError(
                f"the unit {unit.name!r} is called while the unit {self.visit.unit.name!r} runs. Only one unit is on "
                "the device at a time: name a module around both in units=[...]"
            )

    def refuse_thread(self, what: str) -> NoReturn:
        """Raises a ValueError because the calling thread, which is not the micro-batch's, uses `what`."""
        self._refusal = (
            f"{what} is used in the thread {threading.current_thread().name!r}, and not in the thread that calls the "
            "loss. In a step, forward and backward of a micro-batch must run in that thread: call the model and "
            "backward() there, and use other threads only for work on the host"
        )
        raise ValueError(self._refusal)

    def check_refusal(self, error: BaseException | None = None) -> None:
        """Raises the error of another thread again, if there was one. `error`: a consequence of it in this thread."""
        if self._refusal:
            raise ValueError(self._refusal) from error

    def has_turned(self) -> bool:
        """Whether the forwards of all micro-batches are over."""
        return all(batch.turned or batch.done for batch in self.micro_batches)

    def went_forward(self, call: Call) -> None:
        """Called after a call's forward. The call may have kept its graph; the graph of an earlier call is dropped."""
        self.drop_graph()
        self._latest_call = call

    def goes_backward(self, call: Call) -> None:
        """Called before a call's backward."""
        if self._latest_call is call:
            self.turning_modules.add(call.module)

    def count(self, kept: KeptGraph | None) -> None:
        """Counts a call's backward, which uses the graph of its forward or else runs the forward again."""
        if kept is None:
            self.recomputed_calls += 1
            return
        self.kept_calls += 1
        self.kept_seconds += kept.seconds if kept.lasts else 0.0

    def drop_graph(self) -> None:
        """Drops the graph of the latest call's forward, if there is one that does not last."""
        if self._latest_call is not None:
            self._latest_call.drop_graph()
            self._latest_call = None

    def check_before_update(self) -> None:
        """Called before weights change and before gradients are left for the user: raises if the step is not valid."""
        if self._guard is not None and self.has_turned():
            self._guard.check(self.losses)
            self.resident_edits.check()

    def reason_to_repeat(self, error: BaseException) -> StepAgainError | None:
        """See `Guard.reason_to_repeat`."""
        return None if self._guard is None else self._guard.reason_to_repeat(error)

    def undo(self, error: BaseException | None = None) -> None:
        """Undoes the recorded changes that the step has made outside the model.

        `error`: the exception that has ended the step. After a StepAgainError the step is run again; if that is
        impossible, a NotRepeatableError is raised.
        """
        if isinstance(error, StepAgainError):
            self.stash.bring_back()  # the step runs again and needs these tensors
        self.leaves.put_back()
        lost = self.batch_edits.put_back()
        if isinstance(error, StepAgainError) and self._guard is not None:
            self._guard.put_back(error)  # last, because leaves were saved later: before their first backward
            if lost:
                raise NotRepeatableError(
                    f"these changed in a step for the first time: {error}. The engine would undo the step and run it "
                    "again, but cannot, because the model or the loss has edited the batch in place, which it did not "
                    "do in the engine's trial run. No weight was changed: call the engine with a new batch, or edit a "
                    "copy (x = x.clone())"
                ) from error

    def close(self) -> None:
        """Drops all references, because a traceback may keep this object alive."""
        for batch in self.micro_batches:
            batch.thread_state, batch.inherited = None, {}
        while self.handles:
            if (handle := self.handles.pop()()) is not None:
                handle.end()
        self.loss_runs, self.micro_batches, self.running, self.visit, self.straight = (), [], None, None, None
        self.losses = {}
        self._bindings.clear()
        self.hooked.clear()
        self.leaves.forget()
        self.batch_edits.forget()
        self.resident_edits = WeightEdits((), by_bytes=False)
        self._latest_call = self._guard = None
        self.stash.forget()


def upcoming(order: Sequence[Unit], visited: Sequence[Unit]) -> Sequence[Unit]:
    """The rest of the expected `order` of visits after those that this step has `visited`."""
    at = len(visited)
    if at > len(order) or order[at - 1] is not visited[-1]:
        # The order differs from the last step's: continue from the next visit to this unit, if there is one.
        later = [i for i in range(at - 1, len(order)) if order[i] is visited[-1]]
        at = later[0] + 1 if later else len(order)
    return order[at:]
