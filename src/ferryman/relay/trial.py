"""Trials: runs of micro-batches whose effects on host and device are undone. Only what they have found remains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ferryman.exactness.escapes import Escapes
from ferryman.exactness.survey import Survey
from ferryman.model.units import Item
from ferryman.model.watched_gradients import hooks_unchanged
from ferryman.plan.keep import NOTHING, Keep
from ferryman.relay.explicit_gradients import ExplicitGradients
from ferryman.relay.micro_batch import MicroBatch
from ferryman.relay.observer import Observer
from ferryman.relay.stash import Stash
from ferryman.relay.step_state import Expectation, LossRun, StepState
from ferryman.relay.user_threads import refusing_user_threads

if TYPE_CHECKING:
    from ferryman.relay.call import Call
    from ferryman.relay.driver import Relay


def run_trial(
    relay: Relay,
    loss_runs: Sequence[LossRun],
    seed: int,
    observer: Observer,
    *,
    stash_on_host: bool,
    staying: int = 0,
    keep: Keep = NOTHING,
    interleaved: bool = True,
    forward_only: bool = False,
    check: bool,
) -> None:
    """Runs forward and backward of all micro-batches, reports to the observer, and undoes everything.

    `staying`: see `Relay.stash_for`. `keep`: the calls that keep their graphs. `interleaved`: micro-batches take turns;
    otherwise they run one after the other, as in plain gradient accumulation. `forward_only`: end each micro-batch with
    its loss. `check`: compare the second run of each call with the first, refuse in-place edits that the stash has not
    seen, and record which buffers are edited.
    """
    stash = relay.stash_for(on_host=stash_on_host, staying=staying)
    step = TrialStep(
        loss_runs, seed, stash, relay.expectation(), keep, observer, relay.escapes, interleaved, forward_only
    )
    with (
        _undone(relay, check=check),
        stash.checking() if check else contextlib.nullcontext(),
        refusing_user_threads(step, relay.device),
    ):
        relay.run(step)


class TrialStep(StepState):
    """A step that an observer watches, and whose effects the observer undoes."""

    takes_effect = False

    def __init__(
        self,
        loss_runs: Sequence[LossRun],
        seed: int,
        stash: Stash,
        expected: Expectation,
        keep: Keep,
        observer: Observer,
        escapes: Escapes,
        interleaved: bool,
        forward_only: bool,
    ) -> None:
        super().__init__(loss_runs, seed, stash, expected, keep=keep, interleaved=interleaved)
        self.runs_backward = not forward_only
        self._observer, self._escapes = observer, escapes

    @property
    def survey(self) -> Survey | None:
        return self._observer.survey

    def begin(self) -> None:
        self._observer.begin()

    def micro_batch_resumes(self, batch: MicroBatch) -> None:
        self._observer.resumes(batch)

    def micro_batch_parked(self, batch: MicroBatch) -> None:
        self._observer.parked(batch)

    def has_gradient(self, batch: MicroBatch, item: Item, gradient: torch.Tensor) -> None:
        self._observer.gradient(batch, item, gradient)

    def run_again(
        self, call: Call, inputs: list[torch.Tensor], run: Callable[[], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        return self._observer.run_again(call, inputs, run)

    def watch_user_code(self) -> ExplicitGradients:
        return ExplicitGradients(self._escapes)

    def succeeded(self) -> None:
        self._observer.end(self.losses, self.micro_batches[-1].thread_state)

    def ended(self) -> None:
        self._observer.undo()


@contextlib.contextmanager
def _undone(relay: Relay, *, check: bool) -> Iterator[None]:
    """Context in which a run leaves no gradients, changes of buffers, or trace. See `run_trial` for `check`."""
    lanes, weights, checksums = relay.lanes, relay.weights, relay.checksums
    trace, lanes.trace, fetches = lanes.trace, None, weights.fetches
    checksums.begin(on=True)  # even if they are not read: a trial that measures memory must count theirs
    buffers = relay.buffers.learning() if check else relay.buffers.ignoring()
    try:
        with relay.gradients.discarding(), buffers, hooks_unchanged(relay.trained_parameters()):
            yield
            lanes.wait()
    finally:
        weights.forget(everything=relay.has_unit_buffers)  # the device's copies of buffers may have been edited
        lanes.trace = trace
        if check:
            weights.fetches = fetches
        else:
            checksums.begin(on=False)
