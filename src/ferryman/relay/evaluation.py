"""Evaluation: runs the model outside of steps, without gradients. Units are fetched as the model calls them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ferryman.model.binding import adopt_assigned, bind
from ferryman.model.units import Unit
from ferryman.relay.bound_model import BoundModel
from ferryman.relay.step_state import upcoming
from ferryman.relay.weight_slots import WeightSlots
from ferryman.runtime.streams import Streams


class Evaluation:
    """Runs the model on the caller's own stream, because that is where its results and caches are used."""

    def __init__(self, model: BoundModel, weights: WeightSlots, streams: Streams) -> None:
        self._model, self._weights, self._streams = model, weights, streams
        self._visited: list[Unit] | None = None  # while an evaluation runs
        self._expected: list[Unit] = []  # the visits of the last evaluation

    @property
    def runs(self) -> bool:
        return self._visited is not None

    def expect(self, units: Sequence[Unit]) -> None:
        """Sets a first guess at the order of visits."""
        self._expected = list(units)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the model can be called."""
        self._visited = []
        compute = self._streams.compute
        self._weights.forget()
        try:
            with self._model.on_device():
                compute.here().precede_caller()
                try:
                    yield
                    residents = self._model.resident_tensors.items()
                    self._model.were_edited([tensor for item, tensor in residents if item.is_in_training])
                    self._model.adopt_assigned_residents()
                finally:
                    compute.follow(self._streams.lanes.here())
        finally:
            self._expected, self._visited = self._visited, None

    def call(self, unit: Unit, forward: Callable[[], Any]) -> Any:
        """Runs the forward of one of the unit's modules with the unit's weights on the device."""
        assert self._visited is not None
        lanes = self._streams.lanes
        self._visited.append(unit)
        slot, of_unit, ready = self._weights.enter(unit, upcoming(self._expected, self._visited))
        tensors = of_unit.pairs
        for mark in ready:
            mark.precede_caller()
        buffers = [(item, tensor) for item, tensor in tensors if item.is_buffer]
        versions = [tensor._version for _, tensor in buffers]
        bind(tensors)
        try:
            result = forward()
            for item, tensor in buffers:
                adopt_assigned(item, tensor)
            changed = (tensor._version != version for (_, tensor), version in zip(buffers, versions, strict=True))
            # Functional batch norm edits running statistics without a new version.
            edited = [pair for pair, is_new in zip(buffers, changed, strict=True) if is_new or pair[0].is_in_training]
            self._model.write_back(edited, lanes.here())
            return result
        finally:
            self._model.bind_placeholders(unit)
            self._weights.leave(slot, lanes.here())


def refuse_other_devices(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses inputs on the device where a part of the model is called by itself, on the host."""
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"{unit.name!r} is called outside of a step and of a call of the whole model, with an input on "
                f"{value.device}. A part of the model runs on the host, where its weights are: pass the input on the "
                "CPU (model.generate() of an encoder-decoder calls the encoder by itself), or call the whole model"
            )
