"""Gradients between steps, shown as the parameters' `.grad`, with the same meaning as in plain PyTorch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from ferryman.model.units import GRADIENT, Item, Unit, gradient_views
from ferryman.relay.driver import Relay
from ferryman.server.store import RamStore


class Gradients:
    """Shows gradients to the user, and picks up the user's changes.

    `wide`: gradients are always float32 views of the memory that an update will read. Otherwise they have the
    parameters' dtype, which torch's optimizers need if the user steps one.
    """

    def __init__(self, relay: Relay, store: RamStore, wait_for_updates: Callable[[], None], *, wide: bool) -> None:
        self._relay = relay
        self._wait_for_updates = wait_for_updates
        self._store = store
        self._wide = wide
        self._shown: dict[Item, tuple[weakref.ref[torch.Tensor], int]] = {}  # gradients, and their versions

    def show(self, units: Iterable[Unit]) -> None:
        self._shown.clear()
        there = self._relay.gradients.on_host
        for unit in units:
            views = gradient_views(unit, self._store.gradients(unit)) if unit in there else {}
            for item in unit.trained:
                item.tensor.grad = None
                if self._relay.gradients.has(item):
                    self._show(item, views[item])

    def take(self, units: Iterable[Unit]) -> None:
        """Picks up gradients that the user has cleared, edited or assigned."""
        cleared: list[Item] = []
        for unit in units:
            for item in unit.trained:
                gradient = item.tensor.grad
                shown, version = self._shown.get(item, (_nothing, 0))
                saved = shown()
                if saved is not None and saved is not gradient:
                    saved.data = saved.data.clone()  # the user has kept a reference; later steps must not change it
                if gradient is None:
                    cleared.append(item)
                    continue
                edited = gradient._version != version and gradient.dtype != GRADIENT
                if gradient is not saved or edited or not self._relay.gradients.has(item):
                    self._wait_for_updates()  # a pending update may still read this memory
                    gradient_views(unit, self._store.gradients(unit))[item].copy_(gradient)
                    self._relay.gradients.add_from_user(unit, item, self._relay.lanes.here())
        if cleared:
            self._relay.gradients.clear_of(cleared)

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
