"""Which tensors the modules of the user's model have: the host's, the device's, or placeholders.

Outside of steps and evaluations modules have the host's tensors. Within, residents have the device's tensors, and units
have placeholders, except while a unit's own code runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from ferryman.exactness.buffers import Bound
from ferryman.model.binding import adopt_assigned, bind, is_buffer
from ferryman.model.placeholder import Placeholder
from ferryman.model.units import Item, Unit
from ferryman.model.watched_gradients import watching_gradients
from ferryman.relay.parameter_server import ParameterServer
from ferryman.relay.weight_slots import Collect, WeightSlots
from ferryman.runtime.marks import Mark
from ferryman.runtime.streams import Streams


class BoundModel:
    """Puts tensors into the model's modules, and the host's back."""

    def __init__(
        self,
        residents: Unit,
        device: torch.device,
        server: ParameterServer,
        streams: Streams,
        collect: Collect,
        may_have_gradients: Callable[[], bool],
    ) -> None:
        self.residents = residents
        self.resident_tensors: dict[Item, torch.Tensor] = {}  # the device's; empty while the model is on the host
        self._device = device
        self._streams = streams
        self._may_have_gradients = may_have_gradients  # parameters, as the user's code that runs would see them
        self._units: Sequence[Unit] = ()
        self._placeholders: dict[Unit, list[tuple[Item, Placeholder]]] = {}
        self._resident_buffers: dict[Unit, list[Item]] = {}  # those that belong to modules of the unit
        self._users: dict[Item, str] = {}  # units in whose modules residents are
        self._weights = WeightSlots(device, 1, server, streams.h2d, collect)
        self._weights.make_room_for([residents])

    def serve(self, units: Sequence[Unit]) -> None:
        """These are the model's units from now on."""
        self._units = units
        # A unit may have been renamed, so placeholders, whose messages have names, are made anew.
        self._placeholders = {
            unit: [
                (item, Placeholder(item.tensor, item.name, unit, self._device, self._may_have_gradients))
                for item in unit.items
            ]
            for unit in units
        }
        inside = {unit: {module for top in unit.modules for module in top.modules()} for unit in units}
        self._users = {
            item: unit.name
            for unit in units
            for item in self.residents.items
            if any(place.module in inside[unit] for place in item.places)
        }
        buffers = [item for item in self.residents.items if is_buffer(item)]
        self._resident_buffers = {
            unit: [item for item in buffers if any(place.module in inside[unit] for place in item.places)]
            for unit in units
        }

    @contextlib.contextmanager
    def on_device(self, *, watches_gradients: bool = False) -> Iterator[None]:
        """For a step or an evaluation: binds the residents' tensors on the device, and placeholders for all units.

        `watches_gradients`: who reads or clears the gradient of a resident is refused, where it may have one.

        Afterwards the model has the host's tensors again, and the host has what was changed in resident buffers.
        """
        compute = self._streams.compute
        self._weights.forget()
        compute.follow(self._streams.lanes.here())
        slot, tensors, ready = self._weights.enter(self.residents, ())
        compute.follow(*ready)
        self.resident_tensors = dict(tensors)
        versions = [tensor._version for _, tensor in tensors]
        try:
            bind(tensors)
            for unit in self._units:
                self.bind_placeholders(unit)
            trained = {
                t: (item.name, self._users.get(item)) for item, t in tensors if watches_gradients and item.trains
            }
            with watching_gradients(trained, self._may_have_gradients):
                yield
        finally:
            for unit in (*self._units, self.residents):
                bind([(item, item.tensor) for item in unit.items])
            end = compute.here()
            end.precede_caller()
            edited = [pair for pair, version in zip(tensors, versions, strict=True) if pair[1]._version != version]
            self.write_back([pair for pair in edited if is_buffer(pair[0])], end)
            self.resident_tensors = {}  # their hooks refer to the relay
            self._weights.leave(slot, end)

    def all_tensors(self) -> Iterator[torch.Tensor]:
        """The device's tensors of residents, so far."""
        yield from self._weights.all_tensors()

    def bind_placeholders(self, unit: Unit) -> None:
        """The unit's code has run: its tensors on the device may be overwritten from now on."""
        bind(self._placeholders[unit])

    def bind_resident_buffers(self, unit: Unit) -> None:
        """The unit's code has run, and may have assigned to resident buffers: they are bound again."""
        bind([(item, self.resident_tensors[item]) for item in self._resident_buffers[unit]])

    def buffers_of(self, unit: Unit, tensors: Sequence[tuple[Item, torch.Tensor]]) -> list[Bound]:
        """The buffers in the unit's modules, its own and resident ones, with the device's tensors for them."""
        own = [(item, tensor) for item, tensor in tensors if is_buffer(item)]
        return own + [(item, self.resident_tensors[item]) for item in self._resident_buffers[unit]]

    def adopt_assigned_residents(self) -> None:
        """Copies tensors that the user's code has assigned to resident buffers into the device's tensors for them."""
        for item, tensor in self.resident_tensors.items():
            if is_buffer(item):
                adopt_assigned(item, tensor)

    def write_back(self, edited: Sequence[tuple[Item, torch.Tensor]], end: Mark) -> None:
        """Copies buffers that the user's code has changed on the device, before `end`, to the host; waits for it."""
        for item, tensor in edited:
            if tensor.device.type == "cpu":
                continue  # it is the host's own
            after = [end, self._streams.lanes.here()]  # evaluations run on the caller's own stream
            copies = [(item.tensor.data, tensor.detach())]
            self._streams.d2h.copy(copies, after=after, label=f"write back {item.name}").wait()

    def recover(self) -> None:
        """After a failure: what is on the device is out of date."""
        self._weights.forget()

    def close(self) -> None:
        """Gives the device's memory back."""
        self._weights.close()
