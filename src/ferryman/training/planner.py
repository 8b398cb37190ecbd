"""Makes plans for an engine, from its settings and within its budget."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ferryman.distributed.ranks import Ranks, Share
from ferryman.model.blocks import Position
from ferryman.model.placeholder import UsedOutsideError
from ferryman.model.precision import LossScale, loss_scale_for
from ferryman.model.unit_discovery import find_units, units_of_block
from ferryman.model.units import BLOCK, GRAIN, DtypeOf, Unit, landing_dtype, master_dtype
from ferryman.options import PlainOptions
from ferryman.plan.plan import Need, Plan, make_plan
from ferryman.plan.policy import Policy, parse_policy
from ferryman.plan.staging import (
    MIN_DEVICE_SUBGROUP,
    SUBGROUP,
    Staging,
    largest_subgroup,
    subgroup_for,
    subgroup_on,
)
from ferryman.runtime.link_rate import link_rate
from ferryman.runtime.segments import Segments
from ferryman.runtime.sizes import show_bytes
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.state import bounds, is_whole, small_state, state_itemsize
from ferryman.training import checks

_HOST = Policy("host")
_MAX_KEPT = 8  # parameters; a loss that uses more of them outside their units should say which stay on the device
_LINK_BYTES = 1 << 25  # for measuring the link


@dataclass(frozen=True)
class Planner:
    """Makes the plans of one engine."""

    model: nn.Module
    device: torch.device
    options: PlainOptions
    dtype_of: DtypeOf
    optimizer_view: OptimizerView | None
    share: Share = Share()  # noqa: RUF009 - frozen
    segments: Segments = Segments()  # noqa: RUF009 - frozen
    link: float | None = None  # bytes per second to the device, where there is a link and it matters
    kept: tuple[str, ...] = ()  # parameters that stay on the device because they are used outside their units

    @property
    def budget(self) -> int | None:
        return self.options.budget

    @property
    def resident(self) -> Sequence[str]:
        return (*self.options.resident, *self.kept)

    def make(self, needed: Need | None = None, *, smallest: bool = False) -> Plan:
        """Makes a plan; raises a ValueError if there is none. See `make_plan`."""
        ways = self._ways(parse_policy(self.options.updates))
        try:
            return self._make(ways, needed, smallest=smallest)
        except ValueError as error:
            subgroup = self.options.subgroup
            if subgroup is None or needed is not None or not ways[0].on_device:
                raise
            raise ValueError(f"subgroup={subgroup}: {error}. {self._that_would_fit(ways[0])}") from error

    def make_smaller(self, needed: Need) -> Plan:
        """The plan that leaves this room, or the smallest plan: smaller units may need less while they run."""
        try:
            return self.make(needed)
        except ValueError:
            return self.make(smallest=True)

    def keep_resident(self, error: UsedOutsideError) -> tuple[Planner, Plan]:
        """A planner that keeps on the device the parameter that is used outside its unit, and its plan.

        Raises the error if there is no such plan.
        """
        planner = replace(self, kept=(*self.kept, error.parameter))
        try:
            if len(planner.kept) > _MAX_KEPT or error.parameter in self.kept:
                raise error
            plan = planner.make()
        except ValueError:
            raise error from None
        warnings.warn(
            f"{error.parameter!r} is used outside its unit {error.unit!r}, so it stays on the device, as with "
            f"resident=[{error.parameter!r}]",
            stacklevel=7,  # the caller of engine.step or engine.forward_backward
        )
        return planner, plan

    def scale(self) -> LossScale:
        if self.optimizer_view is None:
            return LossScale()
        trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        return loss_scale_for({self.dtype_of(name, p) for name, p in trained})

    def follow_updates(self, plan: Plan, needed: int) -> Plan:
        """Changes a plan to the `updates` of the options. Raises a ValueError if that does not fit.

        `needed`: bytes that micro-batches need while they run; 0 if that is not known.
        """
        policy = parse_policy(self.options.updates)
        ways = self._ways(policy)
        if (changed := self._changed(plan, ways, needed)) is not None:
            return changed
        assert self.budget is not None, "without a budget, everything fits"
        takes = plan.with_staging(ways[-1])
        shares = [Policy("static", share=number / 100) for number in range(int(policy.share * 100), 0, -1)]
        lesser = ((less, [replace(way, policy=less) for way in ways]) for less in shares)
        fitting = [str(less) for less, fewer in lesser if self._changed(plan, fewer, needed) is not None]
        raise ValueError(
            f"updates={self.options.updates!r} does not fit: {show_bytes(takes.fixed)} would always be on the device, "
            f"in addition to {show_bytes(needed)} for micro-batches, where memory={show_bytes(self.budget)}: "
            f"{takes.explain()}. {(fitting or ['host'])[0]!r} would fit"
        )

    def _changed(self, plan: Plan, ways: Sequence[Staging], needed: int) -> Plan | None:
        changed = map(plan.with_staging, ways)
        return next((one for one in changed if self.budget is None or one.fixed + needed <= self.budget), None)

    def insert(self, plan: Plan, block: nn.Module) -> tuple[Sequence[Unit], Plan]:
        """The units of a block that was inserted into the model, and the plan with them.

        Raises a ValueError if the plan does not fit into the budget.
        """
        added = units_of_block(self.model, block, plan.limit, self.dtype_of)
        order = {module: i for i, module in enumerate(self.model.modules())}
        units = sorted((*plan.units, *added), key=lambda unit: min(order[module] for module in unit.modules))
        changed = replace(plan, units=tuple(units))
        if self.optimizer_view is not None:
            self.optimizer_view.check_groups()
        if self.budget is not None and changed.fixed > self.budget:
            raise ValueError(
                f"with this block {show_bytes(changed.fixed)} would always be on the device, where "
                f"memory={show_bytes(self.budget)}: {changed.explain()}"
            )
        return added, changed

    def remove(self, plan: Plan, block: nn.Module, position: Position) -> tuple[Sequence[Unit], Plan]:
        """The units of a block that will be removed from the model, and the plan without them."""
        checks.removable(block, position, plan.units, plan.residents)
        inside = set(block.modules())
        gone = [unit for unit in plan.units if inside.issuperset(unit.modules)]
        if len(gone) == len(plan.units):
            raise ValueError(f"the block {position!r} contains all units of the model; nothing would be left to train")
        return gone, replace(plan, units=tuple(unit for unit in plan.units if unit not in gone))

    def _make(self, ways: Sequence[Staging], needed: Need | None, *, smallest: bool) -> Plan:
        return make_plan(
            self.model,
            budget=self.budget,
            slots=self.options.slots,
            units=self.options.units,
            resident=self.resident,
            staging=ways,
            held=self.options.held if self.budget is not None else bool(self.options.held),
            keeps=self.options.recompute != "always",
            updates=self.optimizer_view is not None,
            dtype_of=self.dtype_of,
            needed=needed,
            smallest=smallest,
            segments=self.segments,
        )

    def _ways(self, policy: Policy) -> list[Staging]:
        """Ways to update the weights, the best first."""
        options, subgroup = self.options, self.options.subgroup
        units, residents = find_units(self.model, units=options.units, resident=self.resident, dtype_of=self.dtype_of)
        every = (residents, *units)
        itemsize = _cached(self._state_itemsize)
        if self.device.type == "cpu":
            if policy.kind not in ("host", "auto"):
                raise ValueError(
                    f"updates={str(policy)!r} lets a device update some of the weights, but device='cpu' is the host "
                    "itself; use updates='host', or leave it out"
                )
            policy = _HOST
        if policy.kind != "host" and not any(itemsize(unit) is not None for unit in every):
            if policy.kind != "auto" and self.optimizer_view is not None:
                raise ValueError(
                    f"updates={str(policy)!r}: no unit can be updated on a device. Either the optimizer "
                    f"({self.optimizer_view.name}), with these options, updates tensors by its own step, on "
                    "the host, or units train bfloat16 and float16 side by side. Use updates='host'"
                )
            policy = _HOST
        most = min(largest_subgroup(every), subgroup_on(self.link, self._crossing(every, policy), self.share.size))
        if policy.kind == "auto" and (subgroup or most) < MIN_DEVICE_SUBGROUP:
            policy = _HOST
        deferred = self.optimizer_view is not None and (
            options.needs_whole_gradient or self.scale().is_dynamic or self.optimizer_view.needs_all_gradients
        )
        for_ranks = self.share.size > 1 and policy.kind != "host" and self.optimizer_view is not None and not deferred
        deferred = deferred or for_ranks  # a device can update a subgroup only when all ranks' gradients have arrived
        grain = self._grain
        most = -(-most // grain) * grain
        given = None if subgroup is None else -(-subgroup // grain) * grain
        at_host = Staging(
            _HOST, given or most, itemsize, deferred, cuts=self._cuts, rank=self.share.rank, for_ranks=for_ranks
        )
        if policy.kind == "host":
            return [at_host]
        sizes = [given or (most if self.budget is None else subgroup_for(self.budget, most))]
        while given is None and self.budget is not None and sizes[-1] > MIN_DEVICE_SUBGROUP:
            sizes.append(max(MIN_DEVICE_SUBGROUP, sizes[-1] // 2 // grain * grain))
        waits_on_device = [True, False] if policy.kind == "auto" and self.budget is not None else [True]
        if self.share.size > 1:
            waits_on_device = [False]  # gradients wait on the host, where those of all ranks are summed
        ways = [
            Staging(
                policy,
                size,
                itemsize,
                deferred,
                may_wait,
                self._cuts,
                self.share.rank,
                for_ranks,
                self._small_state if self._grain == BLOCK else None,
            )
            for may_wait in waits_on_device
            for size in sizes
        ]
        return [*ways, at_host] if policy.kind == "auto" and given is None else ways

    def _crossing(self, units: Sequence[Unit], policy: Policy) -> float:
        """Bytes per element that cross the link in one direction when a subgroup is updated."""
        if policy.kind == "host":
            return max(landing_dtype(unit).itemsize for unit in units)
        able = ((unit, self._state_itemsize(unit)) for unit in units)
        return max(unit.weight_itemsize + unit.master_itemsize + size for unit, size in able if size is not None)

    def _cuts(self, unit: Unit) -> list[int]:
        """The boundaries between the ranks' parts of the unit's trained elements."""
        return (
            [0, unit.trained_elements] if self.optimizer_view is None else bounds(unit, self.optimizer_view, self.share)
        )

    @property
    def _grain(self) -> int:
        """Subgroups have a multiple of so many elements."""
        return BLOCK if self.optimizer_view is not None and self.optimizer_view.is_compact else GRAIN

    def _state_itemsize(self, unit: Unit) -> float | None:
        if self.optimizer_view is None or not unit.trained_elements or is_whole(unit, self.optimizer_view):
            return None
        if len({master_dtype(dtype) for dtype in unit.trained_dtypes} - {None}) > 1:
            return None  # masters of two widths do not lie side by side
        return state_itemsize(unit, self.optimizer_view)

    def _small_state(self, unit: Unit) -> int:
        assert self.optimizer_view is not None, "there is state"
        return small_state(unit, self.optimizer_view)

    def _that_would_fit(self, way: Staging) -> str:
        size, grain = way.subgroup, self._grain
        while size > grain:
            size = size // 2 // grain * grain or grain
            try:
                self._make([replace(way, subgroup=size)], None, smallest=False)
            except ValueError:
                continue
            return f"subgroup={size} would fit, or updates='host', which needs no memory there"
        return "No subgroup would fit"


def find_link(model: nn.Module, device: torch.device, options: PlainOptions, ranks: Ranks) -> float | None:
    """Bytes per second to the device, for `Planner`: the slowest rank's. None if no plan depends on it."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if device.type == "cpu" or options.subgroup is not None or trained <= SUBGROUP:
        return None
    most = _LINK_BYTES if options.budget is None else min(_LINK_BYTES, options.budget // 4)
    return min(rate for (rate,) in ranks.all_gather([link_rate(device, most)]))


def _cached(function: Callable[[Unit], float | None]) -> Callable[[Unit], float | None]:
    """Caches a function that hundreds of plans call. Entries of units that are removed from the model disappear."""
    known: weakref.WeakKeyDictionary[Unit, float | None] = weakref.WeakKeyDictionary()

    def of(unit: Unit) -> float | None:
        try:
            return known[unit]
        except KeyError:
            return known.setdefault(unit, function(unit))

    return of
