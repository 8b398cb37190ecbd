"""All that belongs to one step: made when the step begins, and dropped when it is over."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import nn

from ferryman.exactness.batch_edits import BatchEdits
from ferryman.exactness.guard import Guard, NewStateError, NotRepeatableError
from ferryman.exactness.outside_leaves import OutsideLeaves
from ferryman.exactness.survey import Survey
from ferryman.exactness.weight_edits import WeightEdits
from ferryman.model.units import Item, Unit
from ferryman.relay.micro_batch import MicroBatch
from ferryman.relay.stash import Stash

if TYPE_CHECKING:
    from ferryman.relay.call import Call
    from ferryman.relay.call_node import Handle

Work = Callable[[], torch.Tensor]  # the forward of one micro-batch; returns its loss


class OpenCalls:
    """How many calls of each unit still have their backward to come.

    Autograd's graph has a reference to this, and may outlive the step: so it is apart from the rest of the step.
    """

    def __init__(self) -> None:
        self._counts: Counter[Unit] = Counter()

    def open(self, unit: Unit) -> Callable[[], None]:
        """The backward of a call may come from now on. The function that is returned says that it cannot any more."""
        self._counts[unit] += 1

        def close() -> None:
            self._counts[unit] -= 1

        return close

    def count(self, unit: Unit) -> int:
        return self._counts[unit]


class Visit:
    """A unit that is being served: its tensors on the device, and what is known about the call that runs."""

    def __init__(self, unit: Unit, tensors: Sequence[tuple[Item, torch.Tensor]]) -> None:
        self.unit = unit
        self.tensors = tensors
        self.has_gradient_slot = False
        self.is_last_backward = False  # no other call of the unit will add to its gradients


class Expectation(NamedTuple):
    """What the last step has shown, for the next."""

    visits: Sequence[Unit]  # the order of visits
    skipped: Collection[Unit] = ()  # units that are not called in this step


class StepState:
    """One step. Trials (`trial.py`) override what is done at certain points of it."""

    interleaved = True  # micro-batches take turns; otherwise one begins when the one before it is done
    runs_backward = True
    takes_effect = True  # what the user's code leaves behind in buffers and thread-local variables stays

    def __init__(
        self,
        works: Sequence[Work],
        seed: int,
        stash: Stash,
        expected: Expectation,
        *,
        for_update: bool = False,
        guard: Guard | None = None,
        between_visits: Callable[[], None] = lambda: None,
    ) -> None:
        self.works, self.seed = works, seed
        self.stash = stash
        self.for_update = for_update  # gradients are sent to the server; otherwise they are left for the user
        self.between_visits = between_visits  # may raise, to end the step
        self.skips_units = bool(expected.skipped)
        self.micro_batches: list[MicroBatch] = []
        self.running: MicroBatch | None = None
        self._refusal = ""  # of a call in another thread, whose error the user's code may not hand on
        self.losses: dict[int, torch.Tensor] = {}  # by micro-batch
        self.visited: list[Unit] = []  # the order of visits so far
        self.visit: Visit | None = None  # the one that is under way
        self.open_calls = OpenCalls()
        self.turning_modules: set[nn.Module] = set()  # those whose backward followed their forward at once
        self.hooked: set[tuple[MicroBatch, Item]] = set()  # parameters whose gradient hooks have run
        self.handles: list[weakref.ref[Handle]] = []  # of calls that autograd may still refer to
        self.resident_edits = WeightEdits((), by_bytes=False)
        self.leaves = OutsideLeaves()
        self.batch_edits = BatchEdits()
        self._latest_call: Call | None = None  # the last to go forward; it may keep its graph
        self._guard = guard
        self._expected = [unit for unit in expected.visits if unit not in expected.skipped]

    # Points of a step that trials override.

    @property
    def survey(self) -> Survey | None:
        """The survey of the user's variables that this step makes, if it makes one."""
        return None if self._guard is None else self._guard.survey

    def begin(self) -> None:
        """The model is on the device, and nothing has run."""
        if self._guard is not None:
            self._guard.begin()

    def micro_batch_resumes(self, batch: MicroBatch) -> None:
        """The micro-batch is about to go on."""

    def micro_batch_parked(self, batch: MicroBatch) -> None:
        """The micro-batch has parked again, or is done."""

    def has_gradient(self, batch: MicroBatch, item: Item, gradient: torch.Tensor) -> None:
        """One call has made this gradient of a parameter."""

    def succeeded(self) -> None:
        """All micro-batches are done, and the user's variables are as they have left them."""

    def ended(self) -> None:
        """The step is over, with or without an exception; the model is still on the device."""

    # What all steps have in common.

    def groups(self) -> list[list[MicroBatch]]:
        """Micro-batches that run together, in the order of groups."""
        return [self.micro_batches] if self.interleaved else [[batch] for batch in self.micro_batches]

    def upcoming(self) -> Sequence[Unit]:
        """The visits to expect after the one that has just begun."""
        return upcoming(self._expected, self.visited) if self.interleaved else ()

    def refuse_other_threads(self, unit: Unit | None = None) -> None:
        """A unit, or the model, is called only in the thread of the micro-batch that runs: stream, autocast, random
        numbers and the watch of the stash belong to that thread. While a unit computes, no other unit can be called."""
        if self.running is None or not self.running.runs_here():
            self.refuse_thread("the model" if unit is None else f"the unit {unit.name!r}")
        if unit is not None and self.running.is_served and self.visit is not None:
            raise ValueError(
                f"the unit {unit.name!r} is called while the unit {self.visit.unit.name!r} runs. Only one unit is on "
                "the device at a time: name a module around both in units=[...]"
            )

    def refuse_thread(self, what: str) -> NoReturn:
        """The thread that calls is not the micro-batch's, and uses what it must not use there."""
        self._refusal = (
            f"{what} is used in the thread {threading.current_thread().name!r}, and not in the thread that calls the "
            "loss. In a step, forward and backward of a micro-batch must run in that thread: call the model and "
            "backward() there, and use other threads only for work on the host"
        )
        raise ValueError(self._refusal)

    def check_refusal(self, error: BaseException | None = None) -> None:
        """Raises again what was refused in another thread; `error` is what followed from it."""
        if self._refusal:
            raise ValueError(self._refusal) from error

    def has_turned(self) -> bool:
        """Whether no micro-batch will go forward any more."""
        return all(batch.turned or batch.done for batch in self.micro_batches)

    def went_forward(self, call: Call) -> None:
        """A call has run its forward. It may have kept its graph: those of earlier calls are dropped."""
        self.drop_graph()
        self._latest_call = call

    def goes_backward(self, call: Call) -> None:
        """A call is about to run its backward."""
        if self._latest_call is call:
            self.turning_modules.add(call.module)

    def drop_graph(self) -> None:
        """The latest call gives up the graph of its forward, if it still has it."""
        if self._latest_call is not None:
            self._latest_call.drop_graph()
            self._latest_call = None

    def check_before_update(self) -> None:
        """The first weights are about to change, or gradients to be left for the user: raises if they must not."""
        if self._guard is not None and self.has_turned():
            self._guard.check(self.losses)
            self.resident_edits.check()

    def undo(self, error: BaseException | None = None) -> None:
        """Puts back what the step has changed outside the model, as far as that was noted.

        `error` has ended the step. After a NewStateError the step is made again: a ValueError says if it cannot be.
        """
        if isinstance(error, NewStateError):
            self.stash.bring_back()  # the step is made again, with all that was there before
        self.leaves.put_back()
        lost = self.batch_edits.put_back()
        if isinstance(error, NewStateError) and self._guard is not None:
            self._guard.put_back(error)  # last: leaves were noted when their first backward began
            if lost:
                raise NotRepeatableError(
                    f"these changed in a step for the first time: {error}. The engine would undo the step and make it "
                    "again, but cannot, because the model or the loss has edited the batch in place, which it did not "
                    "do when the engine tried the step. No weight was changed: call the engine with a new batch, or "
                    "edit a copy (x = x.clone())"
                ) from error

    def close(self) -> None:
        """Lets go of everything: a traceback may keep this object alive."""
        for batch in self.micro_batches:
            batch.thread_state, batch.inherited = None, {}
        while self.handles:
            if (handle := self.handles.pop()()) is not None:
                handle.end()
        self.works, self.micro_batches, self.running, self.visit = (), [], None, None
        self.losses = {}
        self.hooked.clear()
        self.leaves.forget()
        self.batch_edits.forget()
        self.resident_edits = WeightEdits((), by_bytes=False)
        self._latest_call = self._guard = None
        self.stash.forget()


def upcoming(order: Sequence[Unit], visited: Sequence[Unit]) -> Sequence[Unit]:
    """The visits that followed, last time, the point that this time has reached."""
    at = len(visited)
    if at > len(order) or order[at - 1] is not visited[-1]:
        # The order is not that of last time: go on from the next visit to this unit, if there is one.
        later = [i for i in range(at - 1, len(order)) if order[i] is visited[-1]]
        at = later[0] + 1 if later else len(order)
    return order[at:]
