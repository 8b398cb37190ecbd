"""A rehearsal: one micro-batch of a model on the meta device, as the relay would run it, without memory or arithmetic.

Units run without a graph in the forward and again, with one, in the backward, as in `call.py`; what lives on the
device meanwhile is counted storage by storage, and the arithmetic of every operator is added up. So what `driver.py`
finds out in a trial is known here before anything is allocated, but for memory that operators use within themselves.

Note [Blocks like others]
A call whose module, parameters and arguments look like those of an earlier one is not run again: it takes what that one
took and returns tensors of the same shapes. So a model of a hundred blocks is rehearsed as fast as one of two.

Note [Questions to data]
A tensor on meta has no values, and some models look at theirs: whether a mask is all ones, whether positions follow one
another. Such a question is answered with yes, which is the answer for a batch without padding.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ferryman.model.binding import bind
from ferryman.model.loss import Loss
from ferryman.model.patching import ModelPatch
from ferryman.model.units import Item, Unit
from ferryman.plan.fit import IN_FLIGHT, Stretch, Trial
from ferryman.training.user_code import caches_off

_TENSOR = object()  # stands in a flattened list where a tensor goes
_QUESTION = torch.ops.aten._local_scalar_dense.default
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# What torch's own list of formulas lacks.
_FORMULAS: dict[Any, Callable[..., int]] = {
    _ATTENTION: lambda query, key, value, *_, **__: sdpa_flop_count(query.shape, key.shape, value.shape),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda gradient, query, key, value, *_, **__: (
        sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)
    ),
}


class NotRehearsedError(Exception):
    """The model does something that cannot be done without data."""


@dataclass
class Rehearsal:
    """What one micro-batch takes."""

    trial: Trial
    visits: list[Unit]  # in order, of a step with any number of such micro-batches
    forward_visits: int  # how many of them are the forward's; at the turn, the last of them has a backward, too
    forward: float  # floating-point operations
    backward: float  # with those of running units again


def rehearse(model: nn.Module, units: Sequence[Unit], residents: Unit, loss: Loss, batch: Any) -> Rehearsal:
    """`model` and `batch` are on meta; a NotRehearsedError says what stands in the way."""
    last = None
    for _ in range(2):  # the second knows where the turn is, and keeps its graph
        run = _Run(last)
        try:
            with caches_off(model), _taken_over(run, units), _bound((*units, residents)):
                run.go(lambda: loss(model, batch))
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise NotRehearsedError(f"{type(error).__name__}: {first}") from error
        last = run.latest
    return run.result()


class _Ledger(TorchDispatchMode):
    """Bytes of storages that came to be within and live; and the arithmetic that was asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.operations = 0.0
        self.between: list[torch.Tensor] | None = []  # what was made since the last park, outside units
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _QUESTION and args[0].is_meta:  # Note [Questions to data]
            return True if args[0].dtype == torch.bool else 1
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in _FORMULAS:
            self.operations += _FORMULAS[packet](*args, **kwargs)
        elif packet in flop_registry:
            self.operations += flop_registry[packet](*args, **kwargs, out_val=result)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                self.see(leaf)
                if self.between is not None:
                    self.between.append(leaf)
        return result

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, nbytes).atexit = False

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


class _Kernels(TorchFunctionMode):
    """What accelerators have a kernel for and meta has not: attention that does not write its matrix down, and the
    product of each token with its expert, which takes as much as that of all with the same one."""

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
    wide = max(query.shape[-1], value.shape[-1])  # heads of two widths are padded, as torch does it
    padded = [x if x.shape[-1] == wide else functional.pad(x, (0, wide - x.shape[-1])) for x in (query, key, value)]
    result: torch.Tensor = _ATTENTION(*padded, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return result[..., : value.shape[-1]]


class _Look(NamedTuple):
    """Of a tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def at(cls, tensor: torch.Tensor) -> _Look:
        return cls(tensor.shape, tensor.dtype)

    def make(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class _Took(NamedTuple):
    """What a call has taken, and given back."""

    results: list[_Look | None]
    form: Any
    operations: float
    grown: int  # bytes at its peak, beyond those at its start


@dataclass(eq=False)
class _Call:
    """A unit's module, called by the micro-batch."""

    run: _Run
    unit: Unit
    module: nn.Module
    forward: Callable[..., Any]
    arguments: Any
    inputs: list[torch.Tensor] = field(default_factory=list)
    wants: list[bool] = field(default_factory=list)
    kept: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def compute(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        leaves, spec = pytree.tree_flatten(self.arguments)
        them = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(them) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
        # The kernels here and not around it all: torch switches them off in a backward.
        with _Kernels(), self.run.within_unit():
            results, shape = pytree.tree_flatten(self.forward(*args, **kwargs))
        form = [_TENSOR if isinstance(x, torch.Tensor) else x for x in results], shape
        return [x for x in results if isinstance(x, torch.Tensor)], form

    def detached(self) -> list[torch.Tensor]:
        return [t.detach().requires_grad_(wanted) for t, wanted in zip(self.inputs, self.wants, strict=True)]

    def backpropagate(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        with torch.enable_grad():
            if self.kept is not None:
                (inputs, outputs), self.kept = self.kept, None
            else:
                inputs = self.detached()
                outputs, _ = self.compute(inputs)
            self.inputs = []
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
            if pairs:
                with self.run.within_unit():
                    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return [t.grad if t.requires_grad else None for t in inputs]

    def likeness(self, *others: torch.Tensor | None) -> Any:
        """Note [Blocks like others]"""
        leaves, spec = pytree.tree_flatten(self.arguments)
        plain = [x if isinstance(x, bool | int | float | str | None) else type(x) for x in leaves]
        members = [(_Look.at(x), x.requires_grad) for x in (*self.module.parameters(), *self.module.buffers())]
        looks = [None if x is None else (_Look.at(x), x.requires_grad) for x in (*self.inputs, *others)]
        return type(self.module), repr(members), repr(plain), str(spec), repr(looks), tuple(self.wants)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        call.inputs, call.wants = [t.detach() for t in tensors], [t.requires_grad for t in tensors]
        call.run.visit(call, backward=False, given=tensors)
        if call.module is call.run.turns_at:
            inputs = call.detached()
            with torch.enable_grad():
                kept, call.run.form = call.compute(inputs)
            call.kept = (inputs, kept)
            outputs: list[torch.Tensor | None] = [t.detach() for t in kept]
        else:
            outputs, call.run.form = call.run.once(call.likeness(), lambda: call.compute(call.inputs))
        made = [t for t in outputs if t is not None]
        ctx.mark_non_differentiable(*(t for t in made if not t.is_floating_point()))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        given = [g for g in gradients if g is not None]
        call.run.visit(call, backward=True, given=[*given, *call.inputs])
        if call.kept is not None:
            return None, None, *call.backpropagate(gradients)
        likeness = ("backward", call.likeness(*gradients))
        results, _ = call.run.once(likeness, lambda: (call.backpropagate(gradients), None))
        call.inputs = []
        return None, None, *results


class _Run:
    """One pass of the micro-batch, in stretches from visit to visit."""

    def __init__(self, turns_at: nn.Module | None) -> None:
        self.turns_at = turns_at  # the module whose backward follows its forward at once, once that is known
        self.latest: nn.Module | None = None  # the last to go forward
        self.form: Any = None  # of what the last call returned: what is no tensor, and how all is put together
        self._ledger = _Ledger()
        self._anchor = torch.zeros((), device="meta", requires_grad=True)
        self._stretches: list[Stretch] = []
        self._where, self._base, self._given = "the start", 0, [0]  # of the stretch that runs
        self._stash = 0
        self._visits: list[Unit] = []
        self._turn: int | None = None
        self._operations = 0.0  # of the forward
        self._known: dict[Any, _Took] = {}  # by likeness

    def go(self, work: Callable[[], torch.Tensor]) -> None:
        with torch.autograd.set_multithreading_enabled(False), self._ledger:
            loss = work()
            (loss.float() * 1.0).backward()
        self._end_stretch()

    def call(self, unit: Unit, module: nn.Module, forward: Callable[..., Any], arguments: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
        call = _Call(self, unit, module, forward, arguments)
        outputs = iter(_Node.apply(call, self._anchor, *tensors))  # type: ignore[no-untyped-call]
        (constants, shape), self.form = self.form, None
        return pytree.tree_unflatten([next(outputs) if x is _TENSOR else x for x in constants], shape)

    def once(
        self, likeness: Any, work: Callable[[], tuple[Sequence[torch.Tensor | None], Any]]
    ) -> tuple[list[torch.Tensor | None], Any]:
        """Note [Blocks like others]"""
        ledger = self._ledger
        took = self._known.get(likeness)
        if took is not None:
            ledger.operations += took.operations
            ledger.peak = max(ledger.peak, ledger.live + took.grown)
            return [None if look is None else look.make() for look in took.results], took.form
        before, operations, peak = ledger.live, ledger.operations, ledger.peak
        ledger.peak = before
        results, form = work()
        looks = [None if x is None else _Look.at(x) for x in results]
        self._known[likeness] = _Took(looks, form, ledger.operations - operations, ledger.peak - before)
        ledger.peak = max(ledger.peak, peak)
        return list(results), form

    def visit(self, call: _Call, *, backward: bool, given: Sequence[torch.Tensor]) -> None:
        """The micro-batch parks: what it holds leaves the device, but for what the call is given."""
        turning = backward and call.kept is not None  # it goes on at once, with the graph of its forward
        if backward and self._turn is None:
            self._turn = len(self._visits)
            self._operations = self._ledger.operations
        if not self._visits or self._visits[-1] is not call.unit:
            self._visits.append(call.unit)
        if not backward:
            self.latest = call.module
        if turning:
            return
        self._end_stretch()
        self._ledger.between = []
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in given}
        self._where, self._base, self._given = call.unit.name, self._ledger.live, [0, *sizes.values()]
        self._ledger.peak = self._ledger.live
        if not backward:
            self._stash = self._ledger.live  # of the last: what the whole forward has left

    @contextlib.contextmanager
    def within_unit(self) -> Iterator[None]:
        """What operators between units make, the stash on the host holds until the next park; within them it is off."""
        before, self._ledger.between = self._ledger.between, None
        try:
            yield
        finally:
            self._ledger.between = before

    def _end_stretch(self) -> None:
        """What it is given is there twice, as that of the next micro-batch is on its way. Others leave the device: of
        theirs, as many tensors as the stash's window holds."""
        grown = self._ledger.peak - self._base
        moving = 2 * sum(self._given) + IN_FLIGHT * max(self._given)
        self._stretches.append(Stretch(self._where, grown + moving))

    def result(self) -> Rehearsal:
        turn = len(self._visits) if self._turn is None else self._turn
        return Rehearsal(
            Trial(self._stretches, self._stash),
            self._visits,
            turn,
            self._operations,
            self._ledger.operations - self._operations,
        )


@contextlib.contextmanager
def _taken_over(run: _Run, units: Sequence[Unit]) -> Iterator[None]:
    takeover = ModelPatch()
    try:
        for unit in units:
            for module in unit.modules:
                takeover.replace(module, _relayed(run, unit, module, module.forward))
        yield
    finally:
        takeover.end()


def _relayed(run: _Run, unit: Unit, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: run.call(unit, module, forward, (args, kwargs))


@contextlib.contextmanager
def _bound(units: Sequence[Unit]) -> Iterator[None]:
    """Modules have their tensors in the dtype in which they travel."""
    try:
        for unit in units:
            bind([(item, _as_it_travels(item)) for item in unit.items])
        yield
    finally:
        for unit in units:
            bind([(item, item.tensor) for item in unit.items])


def _as_it_travels(item: Item) -> torch.Tensor:
    made = torch.empty(item.tensor.shape, dtype=item.dtype, device="meta")
    if not isinstance(item.tensor, nn.Parameter):
        return made
    parameter = nn.Parameter(made, requires_grad=item.trains)
    if item.trains:
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return parameter
