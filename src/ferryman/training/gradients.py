"""Gradients that a step has left, as the parameters' `.grad`, with the meaning they have in plain PyTorch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from ferryman.model.units import GRADIENT, Item, Unit, gradient_views
from ferryman.relay.driver import Relay
from ferryman.server.store import RamStore


class Gradients:
    """Shows gradients to the user, and takes notice of what the user has done with them.

    `wide`: always in float32, the very memory that an update will read. Torch's own optimizers, where the user steps
    one, want them in the parameters' dtype.
    """

    def __init__(self, relay: Relay, store: RamStore, settle: Callable[[], None], *, wide: bool) -> None:
        self._relay = relay
        self._settle = settle
        self._store = store
        self._wide = wide
        self._shown: dict[Item, tuple[weakref.ref[torch.Tensor], int]] = {}  # and in which version

    def show(self, units: Iterable[Unit]) -> None:
        self._shown.clear()
        for unit in units:
            views = gradient_views(unit, self._store.gradients(unit)) if unit in self._relay.gradients.on_host else {}
            for item in unit.trained:
                item.tensor.grad = None
                if self._relay.gradients.has(item):
                    self._show(item, views[item])

    def take(self, units: Iterable[Unit]) -> None:
        """What the user has cleared starts anew; what they have edited or put there counts."""
        for unit in units:
            for item in unit.trained:
                gradient = item.tensor.grad
                shown, version = self._shown.get(item, (_nothing, 0))
                saved = shown()
                if saved is not None and saved is not gradient:
                    saved.data = saved.data.clone()  # somebody has kept it: it must not change with what comes
                if gradient is None:
                    self._relay.gradients.clear_of([item])
                    continue
                edited = gradient._version != version and gradient.dtype != GRADIENT
                if gradient is not saved or edited or not self._relay.gradients.has(item):
                    self._settle()  # an update may still read what is there
                    gradient_views(unit, self._store.gradients(unit))[item].copy_(gradient)
                    self._relay.gradients.adopt(unit, item, self._relay.lanes.here())

    def _show(self, item: Item, gradient: torch.Tensor) -> None:
        if item.tensor.dtype != GRADIENT:
            if self._wide:
                item.tensor.grad_dtype = GRADIENT
            else:
                gradient = gradient.to(item.tensor.dtype)
        item.tensor.grad = gradient
        assert item.tensor.grad is not None
        self._shown[item] = (weakref.ref(item.tensor.grad), gradient._version)


def _nothing() -> None:
    return None
