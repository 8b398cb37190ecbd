"""The dry run: one micro-batch of a model on the meta device, which needs neither memory nor arithmetic.

The micro-batch and its calls are the relay's own (`relay/micro_batch.py`, `relay/call.py`): calls park, run without a
graph in the forward, run again with one in the backward, and keep their graph at the turn. Only the driver is
different: a single micro-batch does not take turns, and a unit's weights are always available. A meter adds up the
bytes of live storages and the arithmetic of every operator. The result is what a memory trial
(`training/memory_trial.py`) would measure, except for memory that operators allocate internally.

Note [Repeated blocks]
A call is not computed again if its module, parameters and arguments have the same types and shapes as those of an
earlier call. The cost of the earlier call is added, and tensors of the same shapes are returned. So a model of a
hundred blocks takes no longer than one of two.

Note [Values on meta]
A tensor on meta has no values, but some models read them: to find out whether a mask is all ones, or whether positions
are consecutive. The answer is always True (or 1), which is right for a batch without padding.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ferryman.exactness.buffers import Buffers
from ferryman.exactness.escapes import Escapes
from ferryman.exactness.reach import context_variables
from ferryman.exactness.user_locks import UserLocks
from ferryman.exactness.user_state import UserState
from ferryman.model.binding import bind
from ferryman.model.chunked_loss import ChunkedHead
from ferryman.model.loss import Loss
from ferryman.model.patching import ModelPatch
from ferryman.model.units import Forward, Item, Unit
from ferryman.plan.fit import IN_FLIGHT, Stretch, Trial
from ferryman.plan.keep import CallCost
from ferryman.relay.call import Call
from ferryman.relay.call_node import SavedInputs
from ferryman.relay.checksums import Checksums
from ferryman.relay.kept_graph import SavedTensors
from ferryman.relay.micro_batch import Direction, MicroBatch, Surroundings
from ferryman.relay.stash import Stash
from ferryman.relay.step_state import Expectation, StepState
from ferryman.runtime.lanes import Lanes
from ferryman.runtime.rng import Randomness
from ferryman.training.user_code import caches_off, weighted_loss

T = TypeVar("T")

_META, _CPU = torch.device("meta"), torch.device("cpu")
_ITEM = torch.ops.aten._local_scalar_dense.default
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# Operators that are missing from torch's own FLOP counter.
_FORMULAS: dict[Any, Callable[..., int]] = {
    _ATTENTION: lambda query, key, value, *_, **__: sdpa_flop_count(query.shape, key.shape, value.shape),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda gradient, query, key, value, *_, **__: (
        sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)
    ),
}


class DryRunError(Exception):
    """The model needs the values of tensors, which do not exist on meta."""


@dataclass(frozen=True)
class DryRun:
    """The memory and the arithmetic of one micro-batch."""

    trial: Trial  # its costs of calls are operations, not seconds
    visits: list[Unit]  # in the order of a step with any number of such micro-batches
    forward_visits: int  # the number of visits in the forward; the last of them, at the turn, includes a backward
    forward: float  # floating-point operations
    backward: float  # including the recomputation of units


def dry_run(
    model: nn.Module, units: Sequence[Unit], residents: Unit, loss: Loss, batch: Any, *, chunked_loss: bool = False
) -> DryRun:
    """Runs one micro-batch; `model` and `batch` are on meta. Raises a DryRunError if the model needs real data."""
    turns = set[nn.Module]()
    head = ChunkedHead(model, units, lambda: True) if chunked_loss else None
    for _ in range(2):  # the second run knows where the turn is, and keeps the graph there
        driver = _Driver(units, turns)
        try:
            with caches_off(model), _patched(driver, units, head), _bound((*units, residents)):
                driver.run(lambda: weighted_loss(loss, model, batch, 1.0, _META, lambda part: part, lambda *_: None))
        except Exception as error:
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DryRunError(f"{type(error).__name__}: {first_line}") from error
        turns = driver.step.turning_modules
    return driver.result()


class _Meter(TorchDispatchMode):
    """Counts floating-point operations, and the bytes of storages that are created in this mode and still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.operations = 0.0
        # Tensors that operators outside units have created since the last park. A stash on the host keeps them alive
        # until the next park. None: a unit is running.
        self.between: list[torch.Tensor] | None = []
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ITEM and args[0].is_meta:  # Note [Values on meta]
            return True if args[0].dtype == torch.bool else 1
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in _FORMULAS:
            self.operations += _FORMULAS[packet](*args, **kwargs)
        elif packet in flop_registry:
            self.operations += flop_registry[packet](*args, **kwargs, out_val=result)
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in given:
                self._add(tensor.untyped_storage())
                if self.between is not None:
                    self.between.append(tensor)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, key, nbytes).atexit = False

    def _remove(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


class _Kernels(TorchFunctionMode):
    """Replaces kernels that accelerators have and meta does not: attention that never stores its whole matrix, and the
    product of each token with its own expert, which costs as much as the product of all tokens with one expert."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is torch._grouped_mm:
            return args[0] @ args[1][0]
        return func(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (x.repeat_interleave(heads // x.shape[-3], dim=-3) for x in (key, value))
    wide = max(query.shape[-1], value.shape[-1])  # torch pads heads of different widths to the wider one
    padded = [x if x.shape[-1] == wide else functional.pad(x, (0, wide - x.shape[-1])) for x in (query, key, value)]
    result: torch.Tensor = _ATTENTION(*padded, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return result[..., : value.shape[-1]]


class _Shape(NamedTuple):
    """A tensor without its storage."""

    size: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)

    def make(self) -> torch.Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=_META)


class _Cost(NamedTuple):
    """The cost of a call's forward or backward, and its result."""

    result: Any  # with a `_Shape` in place of each tensor
    operations: float
    growth: int  # peak bytes minus bytes at the start


class _DryCall(Call):
    """A call whose arithmetic is computed once for all calls like it. See Note [Repeated blocks]."""

    def __init__(self, driver: _Driver, *call: Any) -> None:
        super().__init__(driver, *call)
        self._driver = driver
        self._likeness: Any = None

    def _call(self, args: Sequence[Any], values: Sequence[Any]) -> Any:
        def compute() -> Any:
            return super(_DryCall, self)._call(args, values)

        if torch.is_grad_enabled():  # at the turn, and in a backward that is the first of its kind
            return compute()
        members = [_Shape.of(x) for x in (*self.module.parameters(), *self.module.buffers())]
        given, spec = pytree.tree_flatten((list(args), list(values)))
        self._likeness = type(self.module), repr(members), repr([_plain(x) for x in given]), repr(spec), *self.wants
        return self._driver.once(self._likeness, compute)

    def _park(self, direction: Direction, needs: Sequence[torch.Tensor], *computation: Any) -> Any:
        self._driver.parks(self.unit, direction, needs, has_graph=self.graph is not None)
        return super()._park(direction, needs, *computation)

    def _input_gradients(
        self, stash: SavedInputs, gradients: Sequence[torch.Tensor | None], *, accumulate: bool
    ) -> list[torch.Tensor | None]:
        def compute() -> list[torch.Tensor | None]:
            return super(_DryCall, self)._input_gradients(stash, gradients, accumulate=accumulate)

        if self.graph is not None:
            return compute()
        inputs = self._recall(stash)
        self._driver.brings_back(inputs)
        shapes = [None if gradient is None else _Shape.of(gradient) for gradient in gradients]
        likeness = (self._likeness, repr(shapes), accumulate)
        results = self._driver.once(likeness, compute)
        self._driver.ran_again(self.module, likeness, inputs)
        return results


def _plain(value: Any) -> Any:
    """The properties of an argument that decide what a module computes with it."""
    if isinstance(value, torch.Tensor):
        return _Shape.of(value)
    return value if isinstance(value, bool | int | float | str | None) else type(value)


class _DryStep(StepState):
    """The step of the micro-batch. Measures the graphs of calls that run again."""

    def __init__(self, meter: _Meter) -> None:
        super().__init__((), 0, Stash(), Expectation(()))
        self._meter = meter
        self.graph = 0, 0.0  # bytes and operations of the last one

    def run_again(
        self, call: Call, inputs: list[torch.Tensor], run: Callable[[], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        before, operations = self._meter.live, self._meter.operations
        outputs = run()
        taken = self._meter.live - before - sum(_storages(outputs).values())
        self.graph = max(0, taken), self._meter.operations - operations
        return outputs


class _Driver:
    """Runs the micro-batch, as `relay/driver.py` does, and measures each *stretch* from one park to the next.

    `turns`: modules whose backward directly follows their forward, as an earlier run has found.
    """

    def __init__(self, units: Sequence[Unit], turns: set[nn.Module]) -> None:
        self.state, self.buffers, self.escapes = UserState(), Buffers(), Escapes()
        self.checksums = Checksums(_META)
        self.randomness = Randomness(_CPU)
        self.autocast_devices = ["cpu"]
        self.anchor = torch.zeros((), device=_META, requires_grad=True, dtype=torch.float32)
        self.graph_needed: set[Unit] = set()
        self.without_graph = set(units)  # the result of a repeated call has no graph: see Note [Repeated blocks]
        self.computes_in_own_threads = False
        self.inside = {unit: [module for top in unit.modules for module in top.modules()] for unit in units}
        self._meter = _Meter()
        self.step = _DryStep(self._meter)
        self._turns = turns
        self._training = {u for u in units if any(p.requires_grad for m in u.modules for p in m.parameters())}
        self._costs: dict[Any, _Cost] = {}
        self._graphs: dict[Any, tuple[int, float]] = {}  # by likeness: bytes and operations of a forward with a graph
        self._calls: dict[nn.Module, CallCost] = {}
        self._forward_visits: int | None = None
        self._forward_operations = 0.0
        self._stretches: list[Stretch] = []
        self._stash_bytes = self._boundary = 0
        # The current stretch: where it began, bytes that were alive then, and the storages that it was given.
        self._where, self._base, self._given = "the start", 0, dict[int, int]()

    @property
    def running(self) -> MicroBatch | None:
        return self.step.running

    def run(self, work: Callable[[], torch.Tensor]) -> None:
        """Runs forward and backward of the micro-batch whose loss `work` returns."""

        def main(batch: MicroBatch) -> None:
            batch.context = context_variables(contextvars.copy_context())
            with self._meter:
                work().backward()

        with self.randomness.unchanged(), Surroundings.driving(), Lanes(_CPU) as lanes:
            surroundings = Surroundings(
                _CPU, self.randomness, lanes.device("compute"), 0, (), UserLocks(), interleaved=False
            )
            self.step.running = batch = MicroBatch(0, main, surroundings, None)
            try:
                while not batch.done:
                    batch.resume()
            finally:
                batch.abandon()
                self.step.close()
        self._end_stretch()

    def result(self) -> DryRun:
        visits = self.step.visited
        return DryRun(
            Trial(self._stretches, self._stash_bytes, self._boundary, costs=self._calls),
            visits,
            len(visits) if self._forward_visits is None else self._forward_visits,
            self._forward_operations,
            self._meter.operations - self._forward_operations,
        )

    def once(self, likeness: Any, compute: Callable[[], T]) -> T:
        """Computes a result once for all calls of the same `likeness`. See Note [Repeated blocks]."""
        meter, cost = self._meter, self._costs.get(likeness)
        if cost is not None:
            with self._metered():
                meter.operations += cost.operations
                meter.peak = max(meter.peak, meter.live + cost.growth)
                repeated: T = pytree.tree_map(_make, cost.result, is_leaf=_is_shape)
                return repeated
        live, operations, peak = meter.live, meter.operations, meter.peak
        meter.peak = live
        result = compute()
        shapes = pytree.tree_map(lambda x: _Shape.of(x) if isinstance(x, torch.Tensor) else x, result)
        self._costs[likeness] = _Cost(shapes, meter.operations - operations, meter.peak - live)
        meter.peak = max(meter.peak, peak)
        return result

    def parks(self, unit: Unit, direction: Direction, needs: Sequence[torch.Tensor], *, has_graph: bool) -> None:
        """Records that the micro-batch parks. All of its tensors leave the device, except for those that the call
        `needs`. If the call still has the graph of its forward (`has_graph`), it continues at once, and none leave."""
        visits = self.step.visited
        if direction is Direction.BACKWARD and self._forward_visits is None:
            self._forward_visits = len(visits)
            self._forward_operations = self._meter.operations
        if not visits or visits[-1] is not unit:
            visits.append(unit)
        if has_graph:
            return
        self._end_stretch()
        self._meter.between = []
        self._where, self._base, self._given = unit.name, self._meter.live, _storages(needs)
        self._meter.peak = self._meter.live
        self._boundary = max(self._boundary, sum(self._given.values()))
        if direction is Direction.FORWARD:
            self._stash_bytes = self._meter.live  # at the end of the forward, all that it has left

    def ran_again(self, module: nn.Module, likeness: Any, inputs: Sequence[torch.Tensor]) -> None:
        """Records that a call's forward has run again, and what its graph would take if it were kept."""
        nbytes, operations = self._graphs.setdefault(likeness, self.step.graph)
        cost = CallCost(nbytes, sum(_storages(inputs).values()), operations)
        self._calls[module] = cost + self._calls.get(module, CallCost(0, 0, 0.0))

    def brings_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Records that the inputs of a call's forward come back for its backward."""
        self._given |= _storages(tensors)

    # The interface for calls: see `CallDriver`.

    def trains(self, unit: Unit) -> bool:
        return unit in self._training

    def turns_at(self, module: nn.Module) -> bool:
        return module in self._turns

    def keeps(self, call: Call) -> bool:
        return False

    def cannot_keep(self, unit: Unit) -> None:
        pass

    def saving(self, unit: Unit) -> SavedTensors | None:
        return None

    @contextlib.contextmanager
    def bound(self, unit: Unit, *, adopt: bool) -> Iterator[None]:
        with self._metered(), _Kernels():
            yield

    def goes_backward(self, call: Call, *, accumulate: bool) -> None:
        self.step.goes_backward(call)

    def note_leaves(self, unit: Unit, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        pass  # nothing is undone: `ferryman plan` does not train afterwards

    @contextlib.contextmanager
    def _metered(self) -> Iterator[None]:
        """Switches the meter on within a unit, since calls disable the modes under which the micro-batch runs."""
        before, self._meter.between = self._meter.between, None
        try:
            with self._meter:
                yield
        finally:
            self._meter.between = before

    def _end_stretch(self) -> None:
        """Ends the current stretch. Its inputs count twice, since those of the next micro-batch are being copied to the
        device; and up to `IN_FLIGHT` tensors of other micro-batches are being copied to the host."""
        growth, sizes = self._meter.peak - self._base, self._given.values()
        moving = 2 * sum(sizes) + IN_FLIGHT * max(sizes, default=0)
        self._stretches.append(Stretch(self._where, growth + moving))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def _storages(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Bytes of the tensors' storages, each once."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def _is_shape(value: Any) -> bool:
    return isinstance(value, _Shape)


def _make(value: Any) -> Any:
    return value.make() if isinstance(value, _Shape) else value


@contextlib.contextmanager
def _patched(driver: _Driver, units: Sequence[Unit], head: ChunkedHead | None) -> Iterator[None]:
    """Context in which the units' modules are called through `driver`."""
    patch = ModelPatch()
    try:
        if head is not None:
            head.add_loss(patch)
        for unit in units:
            for module in unit.modules:
                patch.replace(module, _relayed(driver, unit, module, module.forward))
        if head is not None:
            head.defer(patch)
        yield
    finally:
        patch.end()


def _relayed(driver: _Driver, unit: Unit, module: nn.Module, forward: Forward) -> Forward:
    return lambda *args, **kwargs: _DryCall(driver, driver.running, unit, module, forward, args, kwargs).run()


@contextlib.contextmanager
def _bound(units: Sequence[Unit]) -> Iterator[None]:
    """Context in which modules have tensors of the dtypes in which these cross to the device."""
    try:
        for unit in units:
            bind([(item, _on_device(item)) for item in unit.items])
        yield
    finally:
        for unit in units:
            bind([(item, item.tensor) for item in unit.items])


def _on_device(item: Item) -> torch.Tensor:
    made = torch.empty(item.tensor.shape, dtype=item.dtype, device=_META)
    if not isinstance(item.tensor, nn.Parameter):
        return made
    parameter = nn.Parameter(made, requires_grad=item.trains)
    if item.trains:
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return parameter
