"""The eager parameter server: takes gradients from the relay and updates weights, beside the sweeps.

- `send_gradients` takes a unit's gradients, subgroup by subgroup. A strategy (`eager.py`, `deferred.py`) decides when
  each is used. With several ranks they are added up first (`exchange.py`).
- Each subgroup is updated on the host (`host_updates.py`) or on the device (`device_updates.py`), as the balancer
  decides (`balancer.py`). `update_log.py` knows what others must wait for.
- `finish` ends a step: all gradients are checked (`gradient_checks.py`), and those that have waited are used.

`engine.forward_backward` leaves gradients for the user: in float32, to be read, edited or added to. Then
`engine.update` has the server use them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence

import torch

from ferryman.distributed.ranks import Ranks
from ferryman.model.precision import LossScale
from ferryman.model.units import GRADIENT, Item, Subgroup, Unit, cut_into_subgroups
from ferryman.options import PlainOptions
from ferryman.plan.staging import Staging
from ferryman.runtime.arena import Arena
from ferryman.runtime.marks import Mark
from ferryman.runtime.streams import Streams
from ferryman.server import calibration
from ferryman.server.deferred import DeferredUpdates
from ferryman.server.device_updates import DeviceUpdates
from ferryman.server.device_weights import DeviceWeights
from ferryman.server.eager import EagerUpdates
from ferryman.server.exchange import Exchange, LeftForUser, RankExchange, SingleRank
from ferryman.server.gradient_checks import GradientChecks, GradientParts, HostGradient, nonfinite_error
from ferryman.server.host_updates import HostUpdates, grouped
from ferryman.server.optimizer_view import OptimizerView
from ferryman.server.state import bounds, is_whole
from ferryman.server.stats import Stats
from ferryman.server.store import RamStore
from ferryman.server.strategy import Strategy, UpdateParts
from ferryman.server.update_log import UpdateLog
from ferryman.server.update_step import RequestedUpdates, WaitingGradients


class Server:
    """The host's side of a step."""

    def __init__(
        self,
        store: RamStore,
        optimizer_view: OptimizerView | None,
        streams: Streams,
        device: torch.device,
        options: PlainOptions,
        scale: LossScale,
        staging: Staging,
        ranks: Ranks,
    ) -> None:
        self.store, self.scale = store, scale
        self._optimizer_view, self._options, self._staging, self._ranks = optimizer_view, options, staging, ranks
        self._subgroups: dict[Unit, list[Subgroup]] = {}
        self._streams, self._device = streams, device
        self._arena = Arena(device)
        self._checks = GradientChecks(streams.host, streams.checks, self._arena, options.host_threads)
        self._sent_losses: list[tuple[torch.Tensor, Mark]] = []  # on the device, and the ends of their copies
        self._log = UpdateLog(streams.lanes, staging)
        self._host_updates = HostUpdates(
            store, streams.host, self._log, options.host_threads, returns_weights=ranks.alone
        )
        self._device_updates: DeviceUpdates | None = None
        self._exchange: Exchange = SingleRank()
        if not ranks.alone and optimizer_view is not None:
            self._exchange = RankExchange(
                ranks, streams, self._arena, store, self._log, optimizer_view, scale, self.subgroups
            )
        self._units: Sequence[Unit] = ()  # in forward order
        self._last_requested = RequestedUpdates.none()  # of the last step, with gradients that had waited
        self._norm: float | None = None  # the global norm of the last step
        self._strategy = self._make_strategy()

    # The model's units, and changes by the user.

    def serve(self, units: Sequence[Unit], weights: DeviceWeights, staging: Staging, *, held: bool) -> None:
        """Sets the units, in forward order. No lane may have work."""
        self._staging, self._units = staging, units
        self._subgroups.clear()
        self._log.fix_prediction()
        self._log.serve(weights, staging)
        if self.has_optimizer and staging.on_device:
            if self._device_updates is None:
                self._device_updates = DeviceUpdates(
                    self.store, staging, self._streams, self._device, self._arena, self._log
                )
            self._device_updates.make_room_for(units, staging, held=held)
            if self._log.balancer.rates is None:
                view, threads = self._optimizer_view, self._options.host_threads
                measured = calibration.measure(self._device_updates, staging, units, view, threads)
                self._log.balancer.start_from(measured)
        elif self._device_updates is not None:
            self._device_updates.copy_state_to_host()
            self._device_updates.release()
        self._log.balancer.serve(units, staging, held=held)
        self._log.begin_record()
        self._checks.serve()
        self._strategy.close()
        self._strategy = self._make_strategy()

    def _make_strategy(self) -> Strategy:
        device_updates = self._device_updates if self._staging.on_device else None
        parts = UpdateParts(
            self.store, self._log, self._checks, self._streams.host, self._host_updates, device_updates, self._arena,
            self.scale, self.describe_changes,
        )  # fmt: skip
        raises = self._options.on_nonfinite == "raise" and not self.scale.is_dynamic
        # With deferred updates several ranks find out together, from the gradients, whether a step is finite.
        kind = DeferredUpdates if self._staging.deferred else EagerUpdates
        strategy = kind(parts, checks_losses=raises and (self._exchange.is_local or kind is EagerUpdates))
        self._exchange.serve(strategy)
        return strategy

    def take_user_changes(self, optimizer_view: OptimizerView) -> None:
        """Takes over what the user has changed since the last update: groups, weights in place, optimizer state."""
        optimizer_view.check_groups()
        if optimizer_view.shows_states or self.store.edited:
            self.copy_state_to_host()
        if self._log.weights is not None:
            self._log.weights.forget()
        self.store.follow_edits()

    def copy_state_to_host(self) -> None:
        """Blocks until the host has all of the optimizer's state."""
        self.wait_for_updates()
        if self._device_updates is not None:
            self._device_updates.copy_state_to_host()

    def forget_unit(self, unit: Unit) -> None:
        """Called when the unit has been removed from the model."""
        self._log.forget_unit(unit)
        self._log.step.waiting.pop(unit, None)
        self._last_requested.args.pop(unit, None)

    def restart(self, steps: int) -> None:
        """Called when a checkpoint from after `steps` steps has been loaded. No lane may have work."""
        self._norm = None
        self._log.restart(steps)

    # What the relay needs: see `relay/parameter_server.py`.

    @property
    def loss_scale(self) -> float:
        """The factor by which losses are multiplied; 1.0 outside float16."""
        return self.scale.value

    @property
    def has_optimizer(self) -> bool:
        """Whether the server updates weights. If not, gradients are always left for the user."""
        return self._optimizer_view is not None

    def weights(self, unit: Unit) -> torch.Tensor:
        """The unit's working copy on the host: flat bytes."""
        return self.store.weights(unit)

    def weights_ready(self, unit: Unit) -> list[Mark]:
        """The marks after which the working copy includes the last update."""
        return self._log.weights_ready(unit)

    def record_fetch(self, unit: Unit, mark: Mark, nbytes: int) -> None:
        """Records that the working copy is being read until the mark."""
        self._log.add_fetch(unit, mark, nbytes)

    def gradient_buffer(self, unit: Unit) -> torch.Tensor:
        """Host memory for float32 gradients that are left for the user: flat bytes."""
        return self.store.gradients(unit)

    def send_gradients(
        self, unit: Unit, gradients: torch.Tensor, items: Collection[Item], after: Sequence[Mark]
    ) -> list[Mark]:
        """Takes a unit's gradients for an update: flat, on the device, complete after the marks.

        `items` are the tensors that have a gradient. Each subgroup is used on the device or copied to the host. Returns
        the marks after which `gradients` may be overwritten.
        """
        used = copied = None  # lanes are in order: the last mark of each is enough
        for subgroup in self.subgroups(unit):
            gradient = gradients[subgroup.start : subgroup.stop]
            if self._device_updates is not None and self._exchange.is_local and self._strategy.stays(subgroup):
                taken = self._strategy.receive_on_device(subgroup, gradient, items, after)
                used = taken if isinstance(taken, Mark) else self._device_updates.update(taken)
                continue
            landing = self._exchange.landing(subgroup)
            copied = self._streams.d2h.copy(
                [(landing.gradient, gradient)], after=[*after, *landing.after], label=f"flush {unit.name}"
            )
            self._log.add_landing(copied, gradient.nbytes)
            for arrival in self._exchange.send(subgroup, landing, items, copied):
                self._strategy.receive(arrival)
        return [*after, *(mark for mark in (copied, used) if mark is not None)]

    def send_loss(self, loss: torch.Tensor, after: Sequence[Mark]) -> None:
        """Takes one micro-batch's loss, complete after the marks. No weight changes if it is not finite."""
        target, source = self._checks.receive_loss(), loss.float().view(1)
        copied = self._streams.d2h.copy([(target, source)], after=after, label="loss")
        self._checks.expect_loss(target, copied)
        self._sent_losses.append((source, copied))

    def wait_for_updates(self) -> None:
        """Blocks until all updates are done."""
        self._streams.host.wait()
        if self._device_updates is not None:
            self._device_updates.wait()
        self._log.trace_last()
        self._exchange.wait()

    # The life of a step.

    def begin_step(self, *, left_for_user: bool = False) -> None:
        """Called before gradients are sent for an update, by this rank or by another.

        `left_for_user`: they do not come from a backward, but were left in float32 by `forward_backward`.
        """
        self._log.step.waiting.clear()
        self._exchange.begin(self._units, left_for_user=left_for_user)

    def send_rest(self, left: LeftForUser) -> None:
        """Called when this rank runs no more backwards: sends the gradients left for the user to other ranks."""
        for arrival in self._exchange.send_rest(left):
            self._strategy.receive(arrival)

    def leave_for_user(self, unit: Unit, items: Collection[Item]) -> WaitingGradients:
        """Records that the unit's gradients are in `gradient_buffer`, in float32, until `finish` uses them."""
        flat = self.store.gradients(unit).view(GRADIENT)
        waiting = self._log.step.waiting[unit] = WaitingGradients(flat, tuple(items), 1.0, is_left_for_user=True)
        return waiting

    def finish(self, units: Iterable[Unit], left: LeftForUser) -> None:
        """Called when all gradients have been sent: checks them, and updates the units that have not been updated yet.

        Units are updated in the order given. `left`: gradients that were left for the user and are used now.
        """
        checks, step = self._checks, self._log.step
        self._strategy.check_losses()
        on_host = list[HostGradient]()
        for unit, items in self._exchange.unsent(left).items():
            waiting = self.leave_for_user(unit, items)
            on_host += (HostGradient(subgroup, waiting.of(subgroup), items) for subgroup in self.subgroups(unit))
        for gradients in grouped(on_host, lambda gradient: gradient.subgroup.size):
            checks.check_on_host(gradients, [])
        checks.wait()
        self._release_losses()
        scaled = (waiting for waiting in step.waiting.values() if waiting.scale != 1)
        scales = {item: waiting.scale for waiting in scaled for item in waiting.items}
        nonfinite = checks.nonfinite_item()
        reports = self._ranks.all_gather([float(nonfinite is None), checks.norm(scales)])  # of all ranks
        is_finite = all(finite for finite, _ in reports)
        self._norm = math.sqrt(math.fsum(norm * norm for _, norm in reports))
        if not is_finite and not self.scale.is_dynamic and self._options.on_nonfinite == "raise":
            raise nonfinite_error(nonfinite, self.describe_changes(), agreed=True)
        if is_finite:
            self._refuse_missing_gradients()
        self.scale.update(finite=is_finite)
        if is_finite:
            self._log.observe()
            clip = _clip_factor(self._norm, self._options.max_grad_norm)
            for neighbors in grouped(units, lambda unit: unit.trained_elements):
                owned = {unit: self._exchange.owned(self.subgroups(unit)) for unit in neighbors}
                self._strategy.update_waiting(owned, clip)
                for unit in () if self._strategy.is_eager else neighbors:
                    self._exchange.share(unit)
            requested = {unit: step.requested.args[unit] for unit in step.waiting}
            self._last_requested = RequestedUpdates(requested, step.requested.begun)
            assert self._optimizer_view is not None, "gradients are used by an optimizer"
            self._optimizer_view.end_step()
        self._log.end_step()
        checks.forget()

    def _refuse_missing_gradients(self) -> None:
        """Raises on all ranks if an optimizer would change a tensor that has no gradient on any of them."""
        view, waiting = self._optimizer_view, self._log.step.waiting
        if view is None or not view.needs_all_gradients:
            return
        owned = [item for unit in self._units if self._exchange.owned(self.subgroups(unit)) for item in unit.trained]
        given = {item for gradients in waiting.values() for item in gradients.items}
        lacking = [item.name for item in owned if view.needs_gradient(item) and item not in given]
        if found := [name for names in self._ranks.all_gather_object("checking gradients", lacking) for name in names]:
            raise ValueError(
                f"{found[0]!r} has no gradient in this step, and {view.name} would change it all the same. No weight "
                "was changed. Let the optimizer's step skip such tensors (`if p.grad is None: continue`), or freeze "
                "them and leave them out of the optimizer"
            )

    def _release_losses(self) -> None:
        """Frees the device memory of losses. It is memory of `compute`, which comes after the last copy from it."""
        if self._sent_losses:
            self._streams.compute.outlast(self._sent_losses[-1][1])
            self._sent_losses.clear()

    def forget_gradients(self) -> None:
        """Called when all gradients have been used, or are discarded."""
        self._log.begin_step()
        self._checks.forget()

    def recover(self) -> None:
        """Called after a failure, when no lane has work: updates that were not made do not count as steps."""
        for requested in (self._log.step.requested, self._last_requested):
            for unit, args in requested.args.items():
                if unit not in requested.begun:
                    self.store.state(unit).undo(args)
        self._last_requested = RequestedUpdates.none()
        self._release_losses()
        self._checks.forget()
        self._log.recover()
        if self._device_updates is not None:
            self._device_updates.recover()
        self._strategy.recover()
        self._exchange.recover()

    def close(self) -> None:
        """Frees memory. No lane may have work."""
        self._strategy.close()
        self._exchange.close()
        self._log.trace_last()
        if self._device_updates is not None:
            self._device_updates.release()
        self._arena.close()

    # What others read.

    @property
    def steps(self) -> int:
        """The number of finished steps."""
        return self._log.steps

    @property
    def has_stepped(self) -> bool:
        """Whether any update was ever submitted."""
        return self._log.has_begun

    @property
    def stats(self) -> Stats | None:
        """Statistics of the last step's updates; waits for them."""
        self.wait_for_updates()
        return self._log.stats

    @property
    def update_rates(self) -> tuple[float | None, float | None]:
        """Parameters per second: as predicted, and as achieved in the last step, if its updates are over."""
        return self._log.rates

    @property
    def grad_norm(self) -> float | None:
        """The global norm before clipping: of gradients that are left for the user, as they are now, if there are any;
        otherwise of the last step."""
        waiting = self._log.step.waiting
        if not waiting:
            return self._norm
        self.wait_for_updates()
        sums = list[float]()
        for unit, gradients in waiting.items():
            parts = GradientParts.of(unit, gradients.items, 0, gradients.flat.numel())
            sums += parts.squares(gradients.flat, self._options.host_threads).values()
        return math.sqrt(sum(sums)) if math.isfinite(sum(sums)) else math.nan

    def describe_changes(self) -> str:
        """Which weights the current step has changed, for an error that ends it."""
        last = self._last_requested.args
        if lost := [unit for unit in last if any(mark.failed() for mark in self._log.weights_ready(unit))]:
            return f"The update of the previous step failed: {len(lost)} of {len(last)} units were not updated"
        begun = self._log.step.requested.begun
        if not begun:
            return "No weight was changed"
        return f"{len(begun)} units had been updated already, eagerly; deferred=True waits for all gradients"

    def subgroups(self, unit: Unit) -> list[Subgroup]:
        """The subgroups of a unit that all ranks own."""
        if unit not in self._subgroups:  # needed several times in a step; they change only with the plan
            self._subgroups[unit] = self._cut(unit)
        return self._subgroups[unit]

    def _cut(self, unit: Unit) -> list[Subgroup]:
        if self._optimizer_view is None:
            return cut_into_subgroups(unit, self._staging.subgroup)
        size = max(unit.trained_elements, 1) if is_whole(unit, self._optimizer_view) else self._staging.subgroup
        cuts = itertools.pairwise(bounds(unit, self._optimizer_view, self._ranks.share))
        return [subgroup for low, high in cuts for subgroup in cut_into_subgroups(unit, size, low, high)]


def _clip_factor(norm: float, max_norm: float | None) -> float:
    """The factor of gradients, as torch.nn.utils.clip_grad_norm_ computes it."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
