"""One execution of a unit's module for one micro-batch, as a node of autograd's graph.

The node computes neither its forward nor its backward itself. It parks, and the driver computes when the unit is on the
device. Everything between units is ordinary autograd in the micro-batch's own thread.

Forward saves its inputs (the stash). If there is room for what a graph saves, it runs the module with one, which is
*kept* until the backward, and nothing runs twice (`kept_graph.py`). That is so where the plan says so, and where the
backward is expected to follow the forward at once (the turn). Otherwise forward drops what its graph would save, and
backward runs the module again, with the same inputs and random numbers, and backpropagates through the second graph.

Note [What a unit reads and writes]
The inputs of a call are the tensors in its arguments and in the user's variables that its code can reach
(`user_state.py`, `reach.py`). Its outputs are the tensors that it returns, and those that it leaves in arguments or
variables. That is why a loss that a block stores on itself gets its gradient. The second run sees arguments, variables
and buffers as the first run did, and its changes to them are undone before the backward begins. So hooks and custom
autograd functions see the same values in the backward as in plain PyTorch, and their changes stay. A tensor that leaves
a unit in any other way would lose its gradient; the trial of the first step refuses it (`escapes.py`).
"""

from __future__ import annotations

import contextlib
import contextvars
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import _disable_current_modes

from ferryman.exactness.buffers import Copies
from ferryman.exactness.reach import behind, beyond
from ferryman.exactness.snapshot import Snapshot
from ferryman.exactness.variables import Array, Elements, Variable
from ferryman.model.units import Forward, Unit
from ferryman.relay.call_driver import CallDriver
from ferryman.relay.call_node import CallNode, Handle, SavedInputs
from ferryman.relay.hooked_inputs import HookedInputError, are_hooked, drop_hooks, move_hooks
from ferryman.relay.hooked_outputs import HookedOutputs
from ferryman.relay.kept_graph import DROPPING, DroppedError, KeptGraph, refuses_hooks
from ferryman.relay.micro_batch import Direction, MicroBatch
from ferryman.relay.modes import Modes, saving_hooks
from ferryman.relay.stash import Stashed
from ferryman.relay.tensor_identity import edited_since, version_of
from ferryman.relay.unit_arguments import refuse_cached_parametrizations, refuse_result, refuse_transforms
from ferryman.runtime.rng import State

T = TypeVar("T")

# Errors of torch in code that needs a graph: Tensor.register_hook, Tensor.retain_grad, and torch.autograd.grad.
_NEEDS_GRAPH = (
    "cannot register a hook on a tensor that doesn't require gradient",
    "can't retain_grad on Tensor that has requires_grad=False",
    "element 0 of tensors does not require grad and does not have a grad_fn",
)

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()  # may be entered many times

# Errors of torch where an input, which is a leaf in the unit's graph, is edited in place.
_EDITS_LEAF = ("a leaf Variable that requires grad", "a view of a leaf Variable that requires grad")


class _Run(NamedTuple):
    """The results of one run of the module."""

    result: Snapshot
    variables: list[Variable]
    after: Snapshot | None  # arguments and variables after the run, if it may have changed any
    inputs: list[torch.Tensor]
    constants: list[tuple[torch.Tensor, torch.Tensor]]  # tensors in shared variables: detached, and original
    outputs: list[torch.Tensor]  # tensors in the result, and new ones in arguments and variables; no duplicates


class Call:
    """One call of a unit's module by one micro-batch."""

    def __init__(
        self,
        relay: CallDriver,
        batch: MicroBatch,
        unit: Unit,
        module: nn.Module,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.unit = unit
        self._relay, self._step = relay, relay.step
        self.batch = batch
        self.module = module
        self._forward = forward
        self._names = tuple(kwargs)
        # See Note [What a unit reads and writes].
        private, self._shared = relay.state.of(unit)
        self._private = [*private, *beyond(relay.inside[unit], relay.state.owners)]
        if batch.context.get():
            self._private.append(batch.context)
        self._context = contextvars.copy_context()
        self._given = args, tuple(kwargs.values())  # empty once the call has become a node
        self._before = self._snapshot()
        while (found := self._before.functions) and (new := behind(found, [*self._private, *self._shared])):
            self._private += new
            self._before = self._snapshot()
        self._shared_before: Snapshot | None = None  # at the forward's start
        self._first: _Run | None = None  # between the node's forward and its return
        self._had_graph = False  # the first run had a graph, which may not have been kept
        self._random: State | None = None  # at the forward's start, if the forward draws random numbers
        self._buffers: Copies | None = None  # the unit's buffers at the forward's start, if its code edits them
        self.graph: KeptGraph | None = None  # of the forward, from then to the backward
        self.wants: Sequence[bool] = ()
        self.outputs: HookedOutputs  # once the call has become a node
        self._autocast = tuple(
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in relay.autocast_devices
        )
        self._modes = Modes.here()
        self._saves_through_hooks = saving_hooks() is not None
        self._stash: weakref.ref[SavedInputs] | None = None

    def _snapshot(self) -> Snapshot:
        return self._relay.state.snapshot([*self._given, *(v.get() for v in self._private)])

    def run(self) -> Any:
        """Runs the module's forward, and returns its result for the user's code."""
        tensors = self._before.tensors
        trains = self._relay.trains(self.unit)
        refuse_transforms(self.unit, tensors)
        refuse_cached_parametrizations(self.unit)
        # In the traced trial every unit has a graph, which shows whether it uses leaves outside the model.
        if torch.is_grad_enabled() and (trains or self._relay.escapes.traced or any(t.requires_grad for t in tensors)):
            return self._run_as_node(tensors, trains=trains)
        # The code of a frozen unit may differentiate something by itself.
        mode: contextlib.AbstractContextManager[Any] = (
            torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad()
        )
        if torch.is_inference_mode_enabled():
            mode = torch.inference_mode()
        return self._park(Direction.FORWARD, tensors, lambda: self._run_without_node(tensors, mode))

    def _run_without_node(self, tensors: list[torch.Tensor], mode: contextlib.AbstractContextManager[Any]) -> Any:
        args, values = self._given
        versions = [version_of(t) for t in tensors]
        with mode, self._modes.on(), self._relay.bound(self.unit, adopt=True):
            result = self._call(args, values)
        self._step.stash.edited(edited_since(tensors, versions))
        self._step.stash.track(self.batch, Snapshot([result]).tensors)
        return result

    def _run_as_node(self, tensors: list[torch.Tensor], *, trains: bool) -> Any:
        self._before.give_up_tensors()
        self._given = (), ()
        # Tensors from before the micro-batch have a graph that was freed.
        given = [t.detach() if self._is_inherited(t) else t for t in tensors] if self._private else tensors
        handle = Handle(self)
        self._step.handles.append(weakref.ref(handle))
        try:
            # With the anchor, the call is a node of the graph even if no input requires a gradient.
            made = CallNode.apply(handle, self._relay.anchor if trains else None, *given)  # type: ignore[no-untyped-call]
        finally:
            handle.end_saving()
        run, self._first = self._first, None  # from here on, only the user's code refers to its tensors
        assert run is not None
        self._step.stash.track(self.batch, made)
        move_hooks(run.inputs, tensors)
        self.outputs = HookedOutputs(self.unit.name, made, run.outputs if self._relay.escapes.traced else ())
        outer = {id(inner): t for inner, t in zip(run.outputs, made, strict=True)}
        if run.after is not None:
            back = {id(inner): t for inner, t in (*zip(run.inputs, tensors, strict=True), *run.constants)}
            _, _, *values = run.after.restore([back.get(id(t), outer.get(id(t), t)) for t in run.after.tensors])
            put_all(run.variables, values)
        (result,) = run.result.restore([outer[id(t)] for t in run.result.tensors])
        return result

    def _is_inherited(self, tensor: torch.Tensor) -> bool:
        return tensor.grad_fn is not None and (
            id(tensor) in self.batch.inherited or self._relay.state.is_inherited(tensor)
        )

    def _was_there(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or self._relay.state.is_history(tensor)

    def stash(self) -> SavedInputs | None:
        """The saved inputs, or None if autograd can no longer run the call's backward."""
        return None if self._stash is None else self._stash()

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], SavedInputs]:
        self.wants = tuple(t.requires_grad for t in tensors)
        return self._park(Direction.FORWARD, tensors, lambda: self._compute_forward(tensors))

    def _compute_forward(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], SavedInputs]:
        relay, randomness = self._relay, self._relay.randomness
        before, versions = self.batch.random, [version_of(t) for t in tensors]
        self._buffers = relay.buffers.copy()
        if self._shared:
            self._shared_before = relay.state.snapshot([v.get() for v in self._shared])
        step = self._step
        # A graph may need the values that buffers have now.
        can_keep = not (self._saves_through_hooks or relay.escapes.traced) and self._buffers is None
        lasts = can_keep and not self._sees_edits() and relay.keeps(self)
        save = step.stash.hold if lasts else step.stash.save
        stash = SavedInputs([save(self.batch, t) for t in tensors], self.unit, step.open_calls)
        self._stash = weakref.ref(stash)
        keeps_graph = lasts or (can_keep and relay.turns_at(self.module))
        needs_graph = relay.escapes.traced or self.unit in relay.graph_needed
        drops_graph = not (keeps_graph or needs_graph or self.unit in relay.without_graph)
        self._had_graph = has_graph = keeps_graph or needs_graph or drops_graph
        saving = relay.saving(self.unit) if lasts else None
        first_node, start = relay.escapes.next_number(), time.perf_counter()
        inputs = leaves = self._detached(tensors) if has_graph else [t.detach() for t in tensors]
        if needs_graph:
            with torch.enable_grad():
                inputs = [t.clone() for t in leaves]  # autograd forbids in-place edits of leaves
        if relay.escapes.traced:
            relay.escapes.inputs = list(zip(inputs, tensors, strict=True))
        try:
            hooks = DROPPING if drops_graph else saving or _NOTHING
            with torch.set_grad_enabled(has_graph), self._modes.on(), hooks:
                run = self._first = self._execute(inputs, relay.bound(self.unit, adopt=True))
            if has_graph and not needs_graph and are_hooked(leaves):
                raise HookedInputError
        except RuntimeError as error:
            # Only a graph of this call can be had by running the unit again. Another's may have been dropped, too.
            dropped = drops_graph and isinstance(error, DroppedError)
            if dropped or isinstance(error, HookedInputError) or (not has_graph and _needs_graph(error)):
                relay.graph_needed.add(self.unit)
            elif not (str(error).startswith(_EDITS_LEAF) or refuses_hooks(error)):
                raise
            elif lasts:
                relay.cannot_keep(self.unit)
            elif drops_graph:
                relay.without_graph.add(self.unit)
            else:
                raise
            randomness.restore(before)
            relay.buffers.put(self._buffers)
            if self._shared_before is not None:
                put_all(self._shared, self._shared_before.restore())
            return self._compute_forward(tensors)
        self._buffers = relay.buffers.ran(self.unit, self._buffers)
        if not lasts:
            relay.checksums.first(self, run.outputs)
        outputs = [t.detach() for t in run.outputs]  # without a graph, too: autograd forbids edits of a node's views
        if relay.escapes.traced:
            relay.escapes.ran(self.batch.number, self.unit, first_node, run.outputs)
            relay.note_leaves(self.unit, run.outputs, leaves)
            if are_hooked(inputs):
                relay.graph_needed.add(self.unit)
        elif keeps_graph:
            if saving is not None and saving.leaves_aliases():
                relay.cannot_keep(self.unit)
                lasts = False
            hold = None if saving is None or not lasts else step.stash.hold_saved(saving.storages)
            self.graph = KeptGraph(leaves, run.outputs, lasts, time.perf_counter() - start, hold)
        if not randomness.state().same_as(before):
            self._random = before
        if [version_of(t) for t in tensors] != versions:
            raise ValueError(
                f"the unit {self.unit.name!r} edits one of its inputs in place; running it again in the backward would "
                "edit it twice. Copy the input first (x = x.clone()), or cut the unit differently with units=[...]"
            )
        step.went_forward(self)
        return outputs, stash

    def constants(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the forward's outputs that require no gradient in plain PyTorch."""
        assert self._first is not None
        return [
            t
            for t, original in zip(outputs, self._first.outputs, strict=True)
            if not (t.is_floating_point() or t.is_complex()) or (self._had_graph and not original.requires_grad)
        ]

    def _sees_edits(self) -> bool:
        """Whether the unit's code can reach tensors or arrays in variables that are edited in place."""
        return any(isinstance(variable, Array | Elements) for variable in (*self._private, *self._shared))

    def backward(self, gradients: Sequence[torch.Tensor | None], *, accumulate: bool) -> list[torch.Tensor | None]:
        stash = self.stash()
        if stash is None:
            raise RuntimeError(
                f"the backward of the unit {self.unit.name!r} runs a second time, but its inputs were freed after the "
                "first. Specify retain_graph=True in the first backward"
            )
        running = self._relay.running
        if running is not self.batch:
            raise Handle(self).used("outside of its step" if running is None else f"by micro-batch {running.number}")
        self._step.refuse_other_threads(self.unit)  # a forward is refused where the unit is called
        needs = [g for g in gradients if g is not None]
        recalls = stash.inputs if self.graph is None else ()
        return self._park(
            Direction.BACKWARD, needs, lambda: self._compute_backward(stash, gradients, accumulate), recalls
        )

    def _compute_backward(
        self, stash: SavedInputs, gradients: Sequence[torch.Tensor | None], accumulate: bool
    ) -> list[torch.Tensor | None]:
        self._relay.goes_backward(self, accumulate=accumulate)
        results = self._input_gradients(stash, gradients, accumulate=accumulate)
        self._step.stash.track(self.batch, [g for g in results if g is not None])
        return results

    def _input_gradients(
        self, stash: SavedInputs, gradients: Sequence[torch.Tensor | None], *, accumulate: bool
    ) -> list[torch.Tensor | None]:
        """Backpropagates through the module, and runs it again first unless the forward's graph was kept."""
        buffers = self._relay.buffers
        now = buffers.values(self._buffers)
        kept, self.graph = self.graph, None
        if kept is not None and kept.lasts and self._is_edited(stash, kept):
            kept = None  # the stash may have the values from before the edit
        inputs = self._detached(self._recall(stash)) if kept is None else kept.inputs
        self._step.count(kept)
        modes = self._modes.on() if kept is None else _NOTHING
        # Weights stay bound: the backward runs user code too (hooks, custom autograd functions, and checkpointing,
        # which runs parts of the unit once more).
        with torch.enable_grad(), modes, self._relay.bound(self.unit, adopt=False):
            if kept is None:
                outputs = self._step.run_again(self, inputs, lambda: self._replay(inputs))
                drop_hooks(self.unit.name, inputs, moved=self.unit in self._relay.graph_needed)
            else:
                outputs = kept.outputs
            if len(outputs) != len(gradients):
                raise ValueError(
                    f"the unit {self.unit.name!r} returns or stores {len(outputs)} tensors when it runs again in the "
                    f"backward, and {len(gradients)} in its first run. Let it store the same tensors in each run"
                )
            self.outputs.check(outputs)
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
            with buffers.in_backward(self.unit, now):
                found = self._backpropagate(pairs, inputs, accumulate=accumulate)
            self.outputs.keep_gradients(outputs)
            return found

    def _backpropagate(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        *,
        accumulate: bool,
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of the inputs. `accumulate`: also add to the gradients of parameters."""
        if not pairs:
            return [None] * len(inputs)
        outputs, gradients = [o for o, _ in pairs], [g for _, g in pairs]
        if accumulate:
            self._relay.note_leaves(self.unit, outputs, inputs)
            # What torch.autograd.backward does, without checks of gradients that autograd has just made.
            _engine_run_backward(
                tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
            return [t.grad if t.requires_grad else None for t in inputs]
        wanted = [t for t in inputs if t.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True) if wanted else ())
        return [next(found) if t.requires_grad else None for t in inputs]

    def drop_graph(self, *, lasting: bool = False) -> None:
        """Drops the graph if the backward did not follow at once; the backward will run the module again. `lasting`:
        also one that lasts."""
        if self.graph is not None and (lasting or not self.graph.lasts):
            self.graph = None

    def _park(
        self,
        direction: Direction,
        needs: Sequence[torch.Tensor],
        compute: Callable[[], T],
        recalls: Sequence[Stashed] = (),
    ) -> T:
        """Hands the computation to the driver, and returns its result once the unit is on the device."""
        if (straight := self._step.straight) is not None:
            return straight.compute(self, compute)
        # Escapes are found by the sequence numbers of autograd's nodes, which are counted per thread.
        own = self._relay.escapes.traced or self._relay.computes_in_own_threads
        if own:
            compute = _without_modes(compute)
        return self.batch.park(self.unit, direction, needs, compute, recalls=recalls, in_own_thread=own)

    @staticmethod
    def _is_edited(stash: SavedInputs, kept: KeptGraph) -> bool:
        """Whether tensors that the graph may need were edited in place since the forward."""
        saved = any(stashed.is_edited() for stashed in stash.inputs)
        return saved or (kept.hold is not None and kept.hold.is_edited())

    def _recall(self, stash: SavedInputs) -> list[torch.Tensor]:
        tensors = []
        for stashed in stash.inputs:
            if (tensor := stashed.recall()) is None:
                raise ValueError(
                    f"an input of the unit {self.unit.name!r} was edited in place after the unit had used it, but the "
                    "unit's backward needs the original value. Use an operation that returns a new tensor (x = x + y, "
                    "not x += y)"
                )
            tensors.append(tensor)
        return tensors

    def _detached(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [t.detach().requires_grad_(wanted) for t, wanted in zip(tensors, self.wants, strict=True)]

    def _call(self, args: Sequence[Any], values: Sequence[Any]) -> Any:
        """Runs the module's own forward. The unit's weights are bound."""
        result = self._call_forward(args, dict(zip(self._names, values, strict=True)))
        refuse_result(self.unit, result)
        return result

    def _call_forward(self, args: Sequence[Any], named: dict[str, Any]) -> Any:
        # Entering autocast would cost more than everything else here.
        needed = [autocast for autocast in self._autocast if autocast[2] or torch.is_autocast_enabled(autocast[0])]
        if not needed:
            return self._forward(*args, **named)
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in needed:
                # Autocast is as it was at the call, but without its cache, which would keep cast copies of every unit.
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            return self._forward(*args, **named)

    def _execute(self, inputs: list[torch.Tensor], bound: contextlib.AbstractContextManager[None]) -> _Run:
        """Runs the module on these inputs, with arguments and variables as they were before the first run.

        `bound`: context in which the unit's weights are bound.
        """
        args, values, *variables = self._before.restore(inputs)
        put_all(self._private, variables)
        constants: list[tuple[torch.Tensor, torch.Tensor]] = []
        shared = [] if self._shared_before is None else self._shared_before.tensors
        versions = [version_of(tensor) for tensor in shared]
        if self._shared_before is not None:
            for tensor in shared:
                self._step.stash.use(self.batch, tensor)
            constants = [(t.detach(), t) for t in shared]
            put_all(self._shared, self._shared_before.restore([detached for detached, _ in constants]))
        with bound:
            result = Snapshot([self._call(args, values)])
        if shared:
            self._step.stash.edited(edited_since(shared, versions))
        after, outputs = None, {id(t): t for t in result.tensors}
        changing = [*self._private, *self._shared]
        if self.batch.context not in changing and self.batch.context.get():
            changing.append(self.batch.context)  # the unit has set the first context variable
        if self._before.mutables or changing:
            given = {id(t) for t in inputs} | {id(detached) for detached, _ in constants}
            after = self._relay.state.snapshot([args, values, *(variable.get() for variable in changing)])
            outputs |= {id(t): t for t in after.tensors if id(t) not in given and not self._was_there(t)}
        return _Run(result, changing, after, inputs, constants, list(outputs.values()))

    def _replay(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the module again with a graph, and returns the outputs. Changes of variables are undone. Changes of
        buffers stay, because the graph may need the new values. Weights are bound, and the first run's modes are on."""
        relay = self._relay
        relay.buffers.put(self._buffers)
        now: State | None = None
        if self._random is not None:
            now = relay.randomness.state()
            relay.randomness.restore(self._random)
        try:
            with self._unchanged():
                # Use a copy of the first run's context, so that context variables set here are dropped.
                outputs = self._context.copy().run(self._execute, inputs, _NOTHING).outputs
        finally:
            if now is not None:
                relay.randomness.restore(now)
        relay.checksums.second(self, outputs)
        return outputs

    def _unchanged(self) -> contextlib.AbstractContextManager[None]:
        """Context in which arguments and variables may change. On exit, the changes are undone."""
        mutables, variables = self._before.mutables, (*self._private, *self._shared)
        return self._undone(mutables, variables) if mutables or variables else _NOTHING

    @contextlib.contextmanager
    def _undone(self, mutables: Sequence[Any], variables: Sequence[Variable]) -> Iterator[None]:
        now = self._relay.state.snapshot([*mutables, *(v.get() for v in variables)])
        try:
            yield
        finally:
            put_all(variables, now.restore()[len(mutables) :])


def _without_modes(compute: Callable[[], T]) -> Callable[[], T]:
    """Wraps `compute` for the micro-batch's own thread, where dispatch modes watch the code between units."""

    def run() -> T:
        with _disable_current_modes():
            return compute()

    return run


def _needs_graph(error: RuntimeError) -> bool:
    return str(error).startswith(_NEEDS_GRAPH)


def put_all(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.put(value)
