"""The relay's implementation of `CallDriver` (`call.py`), which calls use during a step.

Calls and gradient hooks enter here from the user's code. `driver.py` decides the order of visits.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ferryman.exactness.buffers import Buffers
from ferryman.exactness.escapes import Escapes
from ferryman.exactness.user_state import UserState
from ferryman.model.placeholder import hooked_in_step
from ferryman.model.units import Item, Unit
from ferryman.model.watched_gradients import drop_hooks, is_hooked, take_gradient, watching_gradients
from ferryman.plan.keep import HOST_RESERVE
from ferryman.plan.plan import Plan
from ferryman.relay.bound_model import BoundModel
from ferryman.relay.call import Call
from ferryman.relay.checksums import Checksums
from ferryman.relay.gradient_slots import GradientSlots
from ferryman.relay.held_weights import HeldWeights
from ferryman.relay.kept_graph import SavedTensors
from ferryman.relay.micro_batch import MicroBatch
from ferryman.relay.parameter_server import ParameterServer
from ferryman.relay.step_state import StepState, Visit
from ferryman.relay.weight_slots import WeightSlots
from ferryman.runtime import host_memory
from ferryman.runtime.rng import Randomness
from ferryman.runtime.streams import Streams


class CallHost:
    """Serves the calls of micro-batches: binds weights, collects gradients, and records changes that may be undone."""

    def __init__(self, plan: Plan, device: torch.device, server: ParameterServer, streams: Streams) -> None:
        self.device = device
        self.lanes, self.compute = streams.lanes, streams.compute
        self._server = server
        self.randomness = Randomness(device)
        self.state = UserState()
        self.buffers = Buffers()
        self.checksums = Checksums(device)
        self.escapes = Escapes()
        self.autocast_devices = sorted({"cpu", device.type})
        self.anchor = torch.zeros((), device=device, requires_grad=True, dtype=torch.float32)
        self.graph_needed: set[Unit] = set()
        self.without_graph: set[Unit] = set()
        self.computes_in_own_threads = False  # for code that keeps state per thread where no survey finds it
        self.compiled: set[Unit] = set()  # with compiled code, for which tensors must keep their class
        self.inside: dict[Unit, list[nn.Module]] = {}  # the modules of each unit, in a fixed order
        self._residents = plan.residents
        kind = HeldWeights if plan.held else WeightSlots
        self.weights = kind(device, plan.weight_slots, server, streams.h2d, self._collect)
        self.gradients = GradientSlots(device, plan.gradient_slots, plan.residents, server, streams.h2d, streams.d2h)
        self.bound_model = BoundModel(plan.residents, device, server, streams, self._collect, self._may_have_gradients)
        self._step: StepState | None = None  # the current step
        self._training: set[Unit] = set()  # units with a parameter that requires a gradient
        # Learned from earlier steps:
        self._turning_modules: set[nn.Module] = set()
        self._called_in_backward: set[Unit] = set()  # by reentrant checkpointing
        self._using_leaves: set[Unit] = set()  # units whose backwards reach leaves outside the model
        self.unkeepable: set[Unit] = set()  # units whose graphs cannot last from one visit to another
        self._edits_batch = False  # whether the user's code has edited a batch in place

    @property
    def step(self) -> StepState:
        """The current step."""
        assert self._step is not None, "there is a step while a micro-batch runs"
        return self._step

    @property
    def running(self) -> MicroBatch | None:
        """The micro-batch whose code is running."""
        return None if self._step is None else self._step.running

    def runs_here(self) -> bool:
        """Whether the calling thread runs the code of the current micro-batch."""
        running = self.running
        return running is not None and running.runs_here()

    def refuse_other_threads(self) -> None:
        """Called when the model is called: during a step, only the current micro-batch's thread may call it."""
        step = self._step
        if step is not None and step.micro_batches:
            step.refuse_other_threads()

    def register_batch(self, tensors: Sequence[torch.Tensor], borrowed: Sequence[torch.Tensor]) -> None:
        """Registers the tensors that the current micro-batch begins with. Those in `borrowed` belong to the user."""
        assert self.running is not None
        self.step.stash.track(self.running, tensors)
        self.step.batch_edits.note(borrowed, keep=self._is_checked or self._edits_batch)
        if self.escapes.traced:
            self.escapes.began(self.running.number, tensors)

    def turns_at(self, module: nn.Module) -> bool:
        """Whether the module's backward followed its forward at once in the last step."""
        return module in self._turning_modules

    def keeps(self, call: Call) -> bool:
        """Whether the call's graph is kept until its backward."""
        keep, visit = self.step.keep, self.step.visit
        if call.unit in self.unkeepable or not keep.has(call.module, call.batch.number):
            return False
        if not keep.if_free:
            return True
        assert visit is not None, "a unit's code runs only during a visit to the unit"
        if visit.host_has_room is None:
            visit.host_has_room = _host_has_room()
        return visit.host_has_room

    def cannot_keep(self, unit: Unit) -> None:
        """Called when graphs of the unit turn out to be ones that cannot last."""
        self.unkeepable.add(unit)

    def saving(self, unit: Unit) -> SavedTensors | None:
        """Hooks for what a lasting graph of the visited unit saves. None: weights and activations stay in place."""
        step = self.step
        assert step.visit is not None, "a unit's code runs only during a visit to the unit"
        of_unit = step.visit.of_unit
        return SavedTensors(of_unit) if of_unit.moves or step.stash.moves else None

    def trains(self, unit: Unit) -> bool:
        """Whether anything that the unit uses requires a gradient: a parameter, residents included, or a leaf outside
        the model."""
        return unit in self._training or unit in self._using_leaves

    def bound(self, unit: Unit, *, adopt: bool) -> contextlib.AbstractContextManager[None]:
        """Context in which the modules of the visited unit have the device's tensors. `adopt`: copy tensors that they
        assign to buffers into the device's tensors for these buffers."""
        visit = self.step.visit
        assert visit is not None, "a unit's code runs only during a visit to the unit"
        bound = _Bound(visit, self.buffers if adopt else None)
        return bound if self.step.takes_effect or unit in self.compiled else _watched(bound, visit)

    @property
    def _is_checked(self) -> bool:
        """Whether the step is a trial, or compares second runs with first runs."""
        return not self.step.takes_effect or self.checksums.is_on

    def note_leaves(self, unit: Unit | None, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Called before a backward from `outputs`: saves the gradients of leaves outside the model that it may change.

        `unit`: the unit in which the backward runs, if any. `inputs`: the call's own leaves, which are not saved.
        """
        if unit is not None and not self._is_checked and unit not in self._using_leaves:
            return  # searching its graph is slow, and the checked steps found no such leaves in it
        step = self.step
        bound = () if step.visit is None else step.visit.tensors
        own = {id(tensor) for _, tensor in (*bound, *self.bound_model.resident_tensors.items())}
        if step.leaves.note(outputs, own | {id(tensor) for tensor in (*inputs, self.anchor)}) and unit is not None:
            self._using_leaves.add(unit)

    def goes_backward(self, call: Call, *, accumulate: bool) -> None:
        """Called before a call's backward. To `accumulate` gradients of parameters, the unit needs a gradient slot."""
        step, unit = self.step, call.unit
        step.goes_backward(call)
        if not accumulate:
            return
        visit = step.visit
        assert visit is not None, "a unit's code runs only during a visit to the unit"
        if visit.sums is not None:
            visit.sums.before_backward()
        visit.is_last_backward = (
            step.open_calls.count(unit) == 1 and step.has_turned() and unit not in self._called_in_backward
        )
        if unit.trained and not visit.has_gradient_slot:
            visit.has_gradient_slot = True
            self.compute.follow(*self.gradients.enter(unit))

    def is_finished(self, unit: Unit) -> bool:
        """Whether the unit's backward is over. Before an update, and in a straight step, in which sums stay on the
        device, no micro-batch may call the unit any more."""
        step = self.step
        if step.open_calls.count(unit):
            return False
        if not step.for_update and step.straight is None:
            return True
        return step.has_turned() and unit not in self._called_in_backward

    def _check_call_in_backward(self, unit: Unit, running: MicroBatch) -> None:
        """Handles a unit that is called in the backward, by checkpointing with use_reentrant=True.

        More gradients may follow after all open calls of such a unit, so they are not sent for an update before the
        end of the step.
        """
        if running.turned and unit not in self._called_in_backward:
            if self.step.for_update:
                raise ValueError(
                    f"the unit {unit.name!r} is called in the backward, by torch.utils.checkpoint, but was not in the "
                    "first step. The engine runs units again by itself: switch checkpointing off"
                )
            self._called_in_backward.add(unit)

    def _may_have_gradients(self) -> bool:
        """Whether parameters could have gradients at this point of the current micro-batch in plain PyTorch."""
        running = self.running
        return running is not None and (running.number > 0 or not self.gradients.are_empty)

    def _collect(self, unit: Unit, item: Item, parameter: torch.Tensor) -> None:
        """Runs the user's hooks on the gradient that one call has made, and adds the result to the gradient slot."""
        step = self._step
        assert step is not None, "gradients are computed in a step"
        batch, gradient, hooks = step.running, *take_gradient(parameter, item.tensor)
        if is_hooked(parameter):
            self._drop_hooks()
            raise hooked_in_step(item.name)
        assert gradient is not None, "autograd calls this after it has set the gradient"
        assert batch is not None
        visit = step.visit
        if unit is not self._residents and not (visit is not None and visit.unit is unit and visit.runs_code):
            self.cannot_keep(unit)
            raise ValueError(
                f"the gradient of {item.name!r} is computed outside of the unit {unit.name!r}, which keeps tensors "
                "with their graph where the engine has not seen it in its trial run. Let the unit store them from the "
                "first step on, or return them"
            )
        if self.lanes.trace is not None and unit is not self._residents:
            self.lanes.trace.sample_memory()  # while the call's graph exists
        if hooks:
            if (batch, item) in step.hooked:
                raise ValueError(
                    f"{item.name!r} has a hook on its gradient (register_hook) and is used by several calls in one "
                    "backward. Plain PyTorch would run the hook once, on their sum, which the engine never computes. "
                    "Edit the gradient between engine.forward_backward() and engine.update()"
                )
            step.hooked.add((batch, item))
            for hook in list(hooks.values()):
                if (changed := hook(gradient)) is not None:
                    gradient = changed
        step.has_gradient(batch, item, gradient)
        visit = None if unit is self._residents else step.visit
        total = self.gradients.add(unit, item, gradient, last=visit is not None and visit.is_last_backward)
        if visit is None or visit.sums is None or hooks or self.lanes.trace is not None or not step.takes_effect:
            return  # something must see each gradient
        if total is not None:
            visit.sums.lend(item, parameter, total)

    def own_leaves(self) -> Iterator[torch.Tensor]:
        """The model's parameters on host and device, to which the user's code may have a reference."""
        on_host = (item.tensor for unit in (*self.inside, self._residents) for item in unit.items)
        tensors = itertools.chain(on_host, self.weights.all_tensors(), self.bound_model.all_tensors())
        yield from (tensor for tensor in tensors if isinstance(tensor, nn.Parameter))
        yield self.anchor

    def trained_parameters(self) -> Iterator[torch.Tensor]:
        """The host's parameters that are trained."""
        return (item.tensor for unit in (*self.inside, self._residents) for item in unit.trained)

    def _drop_hooks(self) -> None:
        for parameter in itertools.chain(self.weights.all_tensors(), self.bound_model.all_tensors()):
            drop_hooks(parameter)

    def _sample_memory(self) -> None:
        if self.lanes.trace is not None:
            self.lanes.trace.sample_memory()


class _Bound:
    """See `CallHost.bound`. A class, since a generator takes several times as long."""

    def __init__(self, visit: Visit, adopts: Buffers | None) -> None:
        self._visit = visit
        self._adopts = adopts

    def __enter__(self) -> None:
        self._visit.inside.bind()
        self._visit.runs_code = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._adopts is not None:
                self._adopts.adopt()
        finally:
            self._visit.runs_code = False
            self._visit.outside.bind()


@contextlib.contextmanager
def _watched(bound: _Bound, visit: Visit) -> Iterator[None]:
    """See `CallHost.bound`: in trials, the unit's code may not read or clear gradients either."""
    names = {tensor: (item.name, None) for item, tensor in visit.tensors if item.trains}
    with bound, watching_gradients(names, lambda: True):
        yield


def _host_has_room() -> bool:
    """Whether the host has memory to spare; see Note [Without a budget] in `micro_batching.py`."""
    free, total = host_memory.available(), host_memory.total()
    return free is None or total is None or free > total * HOST_RESERVE
