"""Makes plans for an engine: from what the user asked for, within what the budget allows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ferryman.distributed.ranks import Share
from ferryman.model.precision import Scale, scale_for
from ferryman.model.units import GRAIN, DtypeOf, Unit, find_units, master_dtype, trained_elements
from ferryman.plan.plan import Need, Plan, make_plan
from ferryman.plan.policy import Policy, parse_policy
from ferryman.plan.staging import JOINT, LEAST, SUBGROUP, Staging, largest_subgroup, subgroup_for
from ferryman.runtime.sizes import show_bytes
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.settings import Settings, is_eager
from ferryman.server.state import arrays, bounds, is_whole

_HOST = Policy("host")


@dataclass(frozen=True)
class Planner:
    """What does not change while an engine lives."""

    model: nn.Module
    device: torch.device
    budget: int | None
    slots: int | None
    units: Sequence[str] | None
    resident: Sequence[str]
    held: bool | None
    subgroup: int | None
    dtype_of: DtypeOf
    optimizer_view: OptimizerView | None
    settings: Settings
    share: Share = Share()  # noqa: RUF009 - of several ranks, which this is

    def make(self, updates: str, needed: Need | None = None, *, smallest: bool = False) -> Plan:
        """A ValueError if there is none; see `make_plan`."""
        ways = self._ways(parse_policy(updates))
        try:
            return self._make(ways, needed, smallest=smallest)
        except ValueError as error:
            if self.subgroup is None or needed is not None or not ways[0].on_device:
                raise
            raise ValueError(f"subgroup={self.subgroup}: {error}. {self._that_would_fit(ways[0])}") from error

    def scale(self) -> Scale:
        if self.optimizer_view is None:
            return Scale()
        trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        return scale_for({self.dtype_of(name, p) for name, p in trained})

    def change(self, plan: Plan, updates: str, needed: int) -> Plan:
        """The same with another policy; `needed`: bytes that micro-batches need while they run, as far as is known."""
        policy = parse_policy(updates)
        ways = self._ways(policy)
        if (changed := self._changed(plan, ways, needed)) is not None:
            return changed
        assert self.budget is not None, "without one anything fits"
        takes = plan.with_staging(ways[-1])
        shares = [Policy("static", share=number / 100) for number in range(int(policy.share * 100), 0, -1)]
        lesser = ((less, [replace(way, policy=less) for way in ways]) for less in shares)
        fitting = [str(less) for less, fewer in lesser if self._changed(plan, fewer, needed) is not None]
        raise ValueError(
            f"updates={updates!r} does not fit: {show_bytes(takes.fixed)} would always be on the device beside "
            f"{show_bytes(needed)} for micro-batches, where memory={show_bytes(self.budget)}: {takes.explain()}. "
            f"{(fitting or ['host'])[0]!r} would fit"
        )

    def _changed(self, plan: Plan, ways: Sequence[Staging], needed: int) -> Plan | None:
        changed = map(plan.with_staging, ways)
        return next((one for one in changed if self.budget is None or one.fixed + needed <= self.budget), None)

    def check_fits(self, plan: Plan, what: str) -> None:
        if self.budget is not None and plan.fixed > self.budget:
            raise ValueError(
                f"{what} {show_bytes(plan.fixed)} would always be on the device, where "
                f"memory={show_bytes(self.budget)}: {plan.explain()}"
            )

    def _make(self, ways: Sequence[Staging], needed: Need | None, *, smallest: bool) -> Plan:
        return make_plan(
            self.model,
            budget=self.budget,
            slots=self.slots,
            units=self.units,
            resident=self.resident,
            staging=ways,
            held=self.held if self.budget is not None else bool(self.held),
            updates=self.optimizer_view is not None,
            dtype_of=self.dtype_of,
            needed=needed,
            smallest=smallest,
        )

    def _ways(self, policy: Policy) -> list[Staging]:
        """To update, the best first."""
        units, residents = find_units(self.model, units=self.units, resident=self.resident, dtype_of=self.dtype_of)
        every = (residents, *units)
        arrays = _remembering(self._arrays)
        most = min(largest_subgroup(every), SUBGROUP if self.share.size == 1 else JOINT)
        if self.device.type == "cpu":
            if policy.kind not in ("host", "auto"):
                raise ValueError(
                    f"updates={str(policy)!r} has a device update a part of the weights, and device='cpu' is the host "
                    "itself; use updates='host', or leave it out"
                )
            policy = _HOST
        if policy.kind != "host" and not any(arrays(unit) is not None for unit in every):
            if policy.kind != "auto" and self.optimizer_view is not None:
                raise ValueError(
                    f"updates={str(policy)!r}: no unit can be updated on a device. Either the optimizer "
                    f"({type(self.optimizer_view.optimizer).__name__}), with these options, is left to torch on the "
                    "host, or units train bfloat16 and float16 side by side. Use updates='host'"
                )
            policy = _HOST
        if policy.kind == "auto" and (self.subgroup or most) < LEAST:
            policy = _HOST
        deferred = self.optimizer_view is not None and not is_eager(self.settings, self.scale())
        for_ranks = self.share.size > 1 and policy.kind != "host" and self.optimizer_view is not None and not deferred
        deferred = deferred or for_ranks  # what a device shall update is known when all ranks' gradients are
        given = None if self.subgroup is None else -(-self.subgroup // GRAIN) * GRAIN
        at_host = Staging(
            _HOST, given or most, arrays, deferred, cuts=self._cuts, rank=self.share.rank, for_ranks=for_ranks
        )
        if policy.kind == "host":
            return [at_host]
        sizes = [given or (most if self.budget is None else subgroup_for(self.budget, most))]
        while given is None and self.budget is not None and sizes[-1] > LEAST:
            sizes.append(max(LEAST, sizes[-1] // 2 // GRAIN * GRAIN))
        holding = [True, False] if policy.kind == "auto" and self.budget is not None else [True]
        if self.share.size > 1:
            holding = [False]  # they wait on the host, where those of all ranks are added up
        ways = [
            Staging(policy, size, arrays, deferred, holds, self._cuts, self.share.rank, for_ranks)
            for holds in holding
            for size in sizes
        ]
        return [*ways, at_host] if policy.kind == "auto" and given is None else ways

    def _cuts(self, unit: Unit) -> list[int]:
        """Where each rank's part of the unit's trained elements begins and ends."""
        return (
            [0, trained_elements(unit)]
            if self.optimizer_view is None
            else bounds(unit, self.optimizer_view, self.share)
        )

    def _arrays(self, unit: Unit) -> int | None:
        if self.optimizer_view is None or not trained_elements(unit) or is_whole(unit, self.optimizer_view):
            return None
        if len({master_dtype(dtype) for dtype in unit.trained_dtypes} - {None}) > 1:
            return None  # masters of two widths do not lie side by side
        return arrays(unit, self.optimizer_view)

    def _that_would_fit(self, way: Staging) -> str:
        size = way.subgroup
        while size > GRAIN:
            size = size // 2 // GRAIN * GRAIN or GRAIN
            try:
                self._make([replace(way, subgroup=size)], None, smallest=False)
            except ValueError:
                continue
            return f"subgroup={size} would fit, or updates='host', which needs no memory there"
        return "No subgroup would fit"


def _remembering(arrays: Callable[[Unit], int | None]) -> Callable[[Unit], int | None]:
    """Hundreds of plans ask the same. Of units that are removed from the model nothing is kept."""
    known: weakref.WeakKeyDictionary[Unit, int | None] = weakref.WeakKeyDictionary()

    def of(unit: Unit) -> int | None:
        try:
            return known[unit]
        except KeyError:
            return known.setdefault(unit, arrays(unit))

    return of
