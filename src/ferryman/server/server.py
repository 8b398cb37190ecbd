"""The server: takes gradients in and updates weights, on the host lane, beside the sweeps.

*Eager*: a subgroup of gradients is used as soon as it has landed, beside the backward of the units before; a few small
buffers are enough. *Deferred*: gradients wait until all have landed and their norm is known; then units are
updated in forward order, beside the next forward, each before it is fetched again. Where nothing needs the whole
gradient first, updates are eager.

Either way each subgroup is updated on the host or on the device; `updates.py` carries that out.

Gradients may also be *kept*: `forward_backward` by itself leaves them in float32 for the user to read, edit or add to,
and `update` takes them from there.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ferryman.distributed.ranks import Ranks
from ferryman.model.precision import Scale
from ferryman.model.units import (
    GRADIENT,
    Item,
    Subgroup,
    Unit,
    cut_into_subgroups,
    landing_dtype,
    trained_elements,
)
from ferryman.plan.staging import Staging
from ferryman.runtime.lanes import DeviceLane
from ferryman.runtime.marks import Mark
from ferryman.runtime.streams import Streams
from ferryman.server.device_updates import Berth
from ferryman.server.exchange import Exchange
from ferryman.server.gradient_checks import GradientChecks, non_finite, squares
from ferryman.server.landing_buffers import Buffer, LandingBuffers
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.settings import Settings
from ferryman.server.state import Order, bounds, is_whole
from ferryman.server.stats import Stats
from ferryman.server.store import RamStore
from ferryman.server.updates import DeviceWeights, Updates


@dataclass(frozen=True)
class _Source:
    """The gradients of one unit, on the host; of some subgroups, instead, on the device."""

    flat: torch.Tensor
    items: Collection[Item]  # those that have a gradient
    scale: float  # by which they are too large
    low: int = 0  # the element that it begins with
    is_kept: bool = False  # from `forward_backward`, for the user to see


class Server:
    """The host's side of a step."""

    def __init__(
        self,
        store: RamStore,
        optimizer_view: OptimizerView | None,
        streams: Streams,
        device: torch.device,
        settings: Settings,
        scale: Scale,
        staging: Staging,
        ranks: Ranks,
    ) -> None:
        self.store = store
        self._ranks = ranks
        self.scale = scale
        self._optimizer_view = optimizer_view
        self._streams, self._host = streams, streams.host
        self.gradient_checks = GradientChecks(self._host, streams.checks, device, settings.threads)
        self._settings = settings
        self._staging = staging
        self._updates = Updates(store, streams, device, staging, settings.threads, alone=ranks.alone)
        self._landing = LandingBuffers(device)
        self._exchange: Exchange | None = None
        if not ranks.alone and optimizer_view is not None:
            self._exchange = Exchange(ranks, streams, device, store, optimizer_view, self._arrived, self._exchanged)
        self._units: Sequence[Unit] = ()  # in forward order
        # Of the step that runs.
        self._orders: dict[Unit, list[Order]] = {}
        self._sources: dict[Unit, _Source] = {}  # gradients that have landed, or are on their way
        self._on_hold: dict[Subgroup, tuple[Berth, torch.Tensor]] = {}  # gradients that wait on the device
        # Of the last one.
        self._last_orders: dict[Unit, list[Order]] = {}  # those that waited for all gradients
        self._last_begun: set[Unit] = set()
        self._norm: float | None = None

    def serve(self, units: Sequence[Unit], weights: DeviceWeights, staging: Staging, *, held: bool) -> None:
        """These are the units from now on, in forward order; when no lane has work."""
        self._staging, self._units = staging, units
        self._updates.serve(units, weights, staging, self._optimizer_view, held=held)

    @property
    def has_optimizer(self) -> bool:
        return self._optimizer_view is not None

    @property
    def loss_scale(self) -> float:
        return self.scale.value

    @property
    def is_eager(self) -> bool:
        return self.has_optimizer and not self._staging.deferred

    @property
    def steps(self) -> int:
        """That were finished."""
        return self._updates.steps

    @property
    def has_stepped(self) -> bool:
        """Whether any weight has been updated, or is about to be."""
        return self._updates.has_begun

    def restart(self, steps: int) -> None:
        """Everything has been loaded, as it was after this many steps; no lane has work."""
        self._norm = None
        self._updates.restart(steps)

    def weights(self, unit: Unit) -> torch.Tensor:
        return self.store.weights(unit)

    def weights_ready(self, unit: Unit) -> list[Mark]:
        """After which the unit's weights, on the host, are those of the last update."""
        return self._updates.ready(unit)

    def gradient_buffer(self, unit: Unit) -> torch.Tensor:
        return self.store.gradients(unit)

    def settle(self) -> None:
        """Blocks until all updates are done."""
        self._updates.settle()
        if self._exchange is not None:
            self._exchange.wait()

    def bring_home(self) -> None:
        """Blocks until the host has all of the optimizer's state."""
        self.settle()
        self._updates.bring_home()

    def follow_user(self, optimizer_view: OptimizerView) -> None:
        """What has been changed since the last update: groups, weights in place, the optimizer's state."""
        optimizer_view.look()
        if optimizer_view.shows_states or self.store.edited:
            self.bring_home()
        self._updates.forget_weights()
        self.store.follow_edits()

    @property
    def stats(self) -> Stats | None:
        """Of the last step; waits for its updates, and for weights that return to the device."""
        self.settle()
        return self._updates.stats

    @property
    def update_rates(self) -> tuple[float | None, float | None]:
        """Parameters a second: as predicted, and as they were in the last step, if that is over."""
        return self._updates.rates

    # Gradients come in.

    def send_gradients(
        self, unit: Unit, gradients: torch.Tensor, items: Collection[Item], after: Sequence[Mark]
    ) -> list[Mark]:
        """Takes a unit's gradients from the device, subgroup by subgroup; see `ParameterServer.send_gradients`."""
        used: list[Mark] = []  # lanes are in order, so the last mark of each lane is enough
        copied: list[Mark] = []
        for subgroup in self.subgroups(unit):
            part = gradients[subgroup.start : subgroup.stop]
            if self.stays(subgroup):
                used = [self.use(subgroup, part, items, after)]
                continue
            target, before = self.receive(subgroup)
            mark = self._streams.d2h.copy([(target, part)], after=[*after, *before], label=f"flush {unit.name}")
            self.landed(subgroup, target, mark, items)
            copied = [mark]
        return [*after, *copied, *used]

    def send_loss(self, loss: torch.Tensor, after: Sequence[Mark]) -> None:
        """Takes the loss of one micro-batch; gradients of a loss that is not finite are not used."""
        target, source, d2h = self.gradient_checks.receive_loss(), loss.float().view(1), self._streams.d2h
        if isinstance(d2h, DeviceLane):
            source.record_stream(d2h.stream)
        self.gradient_checks.expect_loss(target, d2h.copy([(target, source)], after=after, label="loss"))

    def subgroups(self, unit: Unit) -> list[Subgroup]:
        """Of all ranks."""
        if self._optimizer_view is None:
            return cut_into_subgroups(unit, self._staging.subgroup)
        size = max(trained_elements(unit), 1) if is_whole(unit, self._optimizer_view) else self._staging.subgroup
        cuts = itertools.pairwise(bounds(unit, self._optimizer_view, self._ranks.share))
        return [subgroup for low, high in cuts for subgroup in cut_into_subgroups(unit, size, low, high)]

    def begin_step(self, *, kept: bool = False) -> None:
        """Gradients will come, of this rank or of another; `kept`: those that were left in float32, and only they."""
        if self._exchange is not None:
            self._sources.clear()  # this rank's own, that were kept: what counts comes from all ranks
            order = [*reversed(self._units[1:]), self._units[0]]
            self._exchange.begin(order, self.subgroups, (lambda _: GRADIENT) if kept else landing_dtype)

    def stays(self, subgroup: Subgroup) -> bool:
        """Whether the subgroup's gradient is used on the device, or waits there, and does not cross."""
        balancer, on_device = self._updates.balancer, self._updates.on_device
        if on_device is None or self._exchange is not None:
            return False
        self._updates.observe()
        if self.is_eager:
            return balancer.at_once(subgroup)
        return subgroup in on_device.holds and balancer.among_all(subgroup, balancer.waiting_bytes)

    def use(self, subgroup: Subgroup, gradient: torch.Tensor, items: Collection[Item], after: Collection[Mark]) -> Mark:
        """A gradient on the device that stays there; the mark after which its memory may be used again."""
        on_device = self._updates.on_device
        assert on_device is not None, "it stays only if the device can use it"
        if self.is_eager:
            self._check_losses()
            look = on_device.look(subgroup, gradient, items, after, None)
            checked = self.gradient_checks.on_device(subgroup, look, self.what_has_changed)
            orders, before = (
                self._orders_of(subgroup.unit, items),
                [*after, *self.gradient_checks.losses_checked, checked],
            )
            return self._updates.make_on_device(subgroup, orders, gradient, 1.0, before).used
        hold = on_device.holds[subgroup]
        before = [] if hold.free is None else [hold.free]
        look = on_device.look(subgroup, gradient, items, [*after, *before], hold)
        self.gradient_checks.on_device(subgroup, look)
        self._on_hold[subgroup] = hold, hold.memory[: gradient.nbytes].view(gradient.dtype)
        self._add_source(subgroup.unit, gradient.dtype, items)
        return look.landed

    def receive(self, subgroup: Subgroup) -> tuple[torch.Tensor, list[Mark]]:
        """Where a subgroup lands, and what must be over before."""
        unit, dtype = subgroup.unit, landing_dtype(subgroup.unit)
        if self._exchange is not None:
            return self._exchange.receive(subgroup)
        if self.is_eager:
            nbytes = subgroup.size * dtype.itemsize
            buffer = self._landing.next(nbytes)
            target = buffer.memory.bytes[:nbytes].view(dtype)
            return target, [buffer.free] if buffer.free is not None else []
        flat = self.store.gradients(unit, dtype).view(dtype)
        return flat[subgroup.start : subgroup.stop], self.weights_ready(unit)  # the update that used what was there

    def landed(self, subgroup: Subgroup, target: torch.Tensor, mark: Mark, items: Collection[Item]) -> None:
        """A subgroup is on its way; its copy ends with the mark."""
        self._updates.landed(mark, target.nbytes)
        if self._exchange is not None:
            self._exchange.send(subgroup, items, [mark])
            return
        if not self.is_eager:
            self._add_source(subgroup.unit, target.dtype, items)
            self.gradient_checks.on_host(subgroup, target, items, [mark])
            return
        self._check_losses()
        orders = self._orders_of(subgroup.unit, items)
        seen = self.gradient_checks.on_host(subgroup, target, items, [mark], self.what_has_changed)
        self._updates.balancer.host.add(seen, 0)  # its time counts
        self._landing.latest.free = self._updates.make_on_host(subgroup, orders, target, 1.0)

    def _arrived(
        self, subgroup: Subgroup, buffer: Buffer, gradient: torch.Tensor, mark: Mark, items: list[Item]
    ) -> None:
        """The sum of all ranks' gradients, which is this one's to use; of the tensors that are listed by then."""
        unit = subgroup.unit
        if self.is_eager:
            self._check_losses()
            if unit not in self._orders:
                for last in self.weights_ready(unit):
                    last.wait()  # which tensors the last step's were for is known when they have been made
            orders = self._orders_of(unit, unit.trained)
            self.gradient_checks.on_host(subgroup, gradient, items, [mark], self.what_has_changed)
            buffer.free = self._updates.make_on_host(subgroup, orders, gradient, 1.0, only=items)
            return
        source = self._add_source(unit, gradient.dtype, items)
        waits = source.flat[subgroup.start - source.low : subgroup.stop - source.low]
        seen = self.gradient_checks.on_host(subgroup, gradient, items, [mark, *self.weights_ready(unit)])
        buffer.free = self._host.submit(
            lambda: waits.copy_(gradient), after=[seen], label=f"land {unit.name}", reads=[gradient], writes=[waits]
        )

    def _exchanged(self, unit: Unit) -> None:
        if self.is_eager:
            self._share(unit)

    def _share(self, unit: Unit) -> None:
        """Its updates have been asked for; other ranks update other parts of it."""
        assert self._exchange is not None
        self._updates.shared(unit, self._exchange.share(unit, self.subgroups(unit), self.weights_ready(unit)))

    def send_rest(self, kept: Mapping[Unit, Collection[Item]]) -> None:
        """No backward of this rank follows: to others goes what none has sent, gradients that were kept, or nothing."""
        if self._exchange is None:
            return
        for unit in self._exchange.missing():
            flat = self.store.gradients(unit).view(GRADIENT) if unit in kept else None
            for subgroup in self.subgroups(unit):
                target, before = self._exchange.receive(subgroup)
                if flat is not None:
                    factor = 1.0 if target.dtype == GRADIENT else self.scale.value
                    source = flat[subgroup.start : subgroup.stop]
                    before = [
                        self._host.submit(
                            functools.partial(_narrow, source, factor, target),
                            after=before,
                            label=f"send {unit.name}",
                            reads=[source],
                            writes=[target],
                        )
                    ]
                self._exchange.send(subgroup, kept.get(unit, ()), before)

    def keep(self, unit: Unit, items: Collection[Item]) -> None:
        """The unit's gradients were added up in float32 and left for the user."""
        self._sources[unit] = _Source(self.store.gradients(unit).view(GRADIENT), tuple(items), 1.0, is_kept=True)

    def record_fetch(self, unit: Unit, mark: Mark, nbytes: int) -> None:
        """The unit's weights are read until the mark."""
        self._updates.fetched(unit, mark, nbytes)

    # Updates.

    def finish(self, units: Iterable[Unit], kept: Mapping[Unit, Collection[Item]]) -> None:
        """Gradients are complete: updates what has not been, in the order given.

        `kept`: units whose gradients were left in float32 and are used now.
        """
        self._check_losses()
        if self._exchange is None:
            for unit, items in kept.items():
                self.keep(unit, items)
                flat = self._sources[unit].flat
                for subgroup in self.subgroups(unit):
                    self.gradient_checks.on_host(subgroup, flat[subgroup.start : subgroup.stop], items, [])
        self.gradient_checks.wait()
        scales = {item: source.scale for source in self._sources.values() for item in source.items}
        broken = self.gradient_checks.broken()
        finite, self._norm = self._of_all(broken, self.gradient_checks.norm(scales))
        if not finite and not self.scale.moves and self._settings.on_nonfinite == "raise":
            raise non_finite(broken, self.what_has_changed(), agreed=True)
        self.scale.went(finite=finite)
        if finite:
            self._updates.observe()
            clip = self._clip_factor(self._norm)
            self._last_orders, self._last_begun = {}, self._updates.begun
            for unit in units:
                if (source := self._sources.get(unit)) is not None:
                    orders = self._last_orders[unit] = self.store.state(unit).order(source.items)
                    for subgroup in self._own_subgroups(unit):
                        self._update(subgroup, orders, source, clip / source.scale)
                if self._exchange is not None and not self.is_eager and unit.trained:
                    self._share(unit)
        self._updates.end_step()
        self.forget_gradients()

    def _own_subgroups(self, unit: Unit) -> list[Subgroup]:
        every = self.subgroups(unit)
        return every if self._exchange is None else [s for s in every if self._exchange.owner(s) == self._ranks.rank]

    def _of_all(self, broken: Item | None, norm: float) -> tuple[bool, float]:
        """Whether gradients are finite on all ranks, and the norm of all."""
        said = self._ranks.count([float(broken is None), norm])
        return all(finite for finite, _ in said), math.sqrt(math.fsum(theirs * theirs for _, theirs in said))

    @property
    def grad_norm(self) -> float | None:
        """Of all gradients, before clipping: of those that are kept as they are now, else of the last update."""
        if self._sources:
            self.settle()
            sums = dict[Item, float]()
            for unit, source in self._sources.items():
                sums.update(squares(unit, source.flat, 0, source.items, self._settings.threads))
            return math.sqrt(sum(sums.values())) if math.isfinite(sum(sums.values())) else math.nan
        return self._norm

    def what_has_changed(self) -> str:
        """In the step that runs, for an error that ends it."""
        if lost := [unit for unit in self._last_orders if any(mark.failed() for mark in self.weights_ready(unit))]:
            return f"It was the step before whose update failed: {len(lost)} of {len(self._last_orders)} units lack it"
        if not self._updates.begun:
            return "No weight was changed"
        return (
            f"{len(self._updates.begun)} units had been updated already, eagerly; deferred=True waits for all gradients"
        )

    def forget_unit(self, unit: Unit) -> None:
        """It has left the model."""
        self._updates.forget_unit(unit)
        for by_unit in (self._sources, self._last_orders):
            by_unit.pop(unit, None)

    def recover(self) -> None:
        """After a failure, when no lane has work any more: what was not done is not waited for, and does not count."""
        for asked, begun in ((self._orders, self._updates.begun), (self._last_orders, self._last_begun)):
            for unit, orders in asked.items():
                if unit not in begun:
                    self.store.state(unit).undo(orders)
        self._last_orders, self._last_begun = {}, set()
        self.forget_gradients()
        self._updates.recover()
        self._landing.recover()
        if self._exchange is not None:
            self._exchange.recover()

    def close(self) -> None:
        """When no lane has work."""
        self._landing.close()
        if self._exchange is not None:
            self._exchange.close()
        self.gradient_checks.close()
        self._updates.close()

    def forget_gradients(self) -> None:
        self._orders.clear()
        self._updates.begin_again()
        self._sources.clear()
        self._on_hold.clear()
        self.gradient_checks.forget()

    def _orders_of(self, unit: Unit, items: Collection[Item]) -> list[Order]:
        if unit not in self._orders:
            self._orders[unit] = self.store.state(unit).order(items)
        return self._orders[unit]

    def _add_source(self, unit: Unit, dtype: torch.dtype, items: Collection[Item]) -> _Source:
        if unit not in self._sources:
            scale, low = self.scale.value if dtype != GRADIENT else 1.0, 0
            if self._exchange is None:
                flat = self.store.gradients(unit, dtype).view(dtype)
            else:
                flat, low = self.store.sums(unit, dtype).view(dtype), self.store.state(unit).low
            self._sources[unit] = _Source(flat, items, scale, low=low)
        return self._sources[unit]

    def _clip_factor(self, norm: float) -> float:
        """As torch.nn.utils.clip_grad_norm_ does it."""
        largest = self._settings.max_grad_norm
        return 1.0 if largest is None else min(1.0, largest / (norm + 1e-6))

    def _update(self, subgroup: Subgroup, orders: Sequence[Order], source: _Source, factor: float) -> None:
        """With gradients that have waited."""
        if subgroup in self._on_hold:
            hold, gradient = self._on_hold[subgroup]
            hold.free = self._updates.make_on_device(subgroup, orders, gradient, factor, []).used
            return
        gradient = source.flat[subgroup.start - source.low : subgroup.stop - source.low]
        balancer = self._updates.balancer
        waited = GRADIENT.itemsize if source.is_kept else balancer.waiting_bytes
        if self._updates.on_device is not None and balancer.among_all(subgroup, waited):
            self._updates.make_on_device(subgroup, orders, gradient, factor, [])
        else:
            self._updates.make_on_host(subgroup, orders, gradient, factor)

    def _check_losses(self) -> None:
        if self._exchange is not None and not self.is_eager:
            return  # all ranks find out together, from the gradients
        if self._settings.on_nonfinite == "raise" and not self.scale.moves:
            self.gradient_checks.check_losses()


def _narrow(source: torch.Tensor, factor: float, into: torch.Tensor) -> None:
    torch.mul(source, factor, out=into) if factor != 1 else into.copy_(source)
