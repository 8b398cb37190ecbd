"""Binds tensors to the modules of the user's model: the host's, the device's, or placeholders.

Outside of steps and evaluations, modules have the host's tensors. During a step or an evaluation, residents have the
device's tensors. Units have placeholders, except while their own code runs.

Note [Other tensors]
The user's code may put other tensors in the places of a unit's parameters: `torch.func.functional_call` does so for the
time of a call, to run the model with other weights. A call of such a unit runs at once, on these tensors, as code
between units does. What was not replaced is a placeholder, which refuses to be used and may become resident. If only
some units have other tensors, micro-batches cannot take turns meanwhile (`crosscheck.py`). Buffers of a unit that are
assigned by other code are refused: the engine knows when a unit's own code edits them, and when that is to be undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from ferryman.exactness.buffers import Bound
from ferryman.model.binding import Binding, adopt_assigned, bind
from ferryman.model.placeholder import Placeholder
from ferryman.model.units import Item, Unit
from ferryman.model.watched_gradients import watching_gradients
from ferryman.relay.parameter_server import ParameterServer
from ferryman.relay.unit_tensors import Collect
from ferryman.relay.weight_slots import WeightSlots
from ferryman.runtime.marks import Mark
from ferryman.runtime.streams import Streams


class BoundModel:
    """Puts the device's tensors into the model's modules, and puts the host's tensors back."""

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
        self.resident_tensors: dict[Item, torch.Tensor] = {}  # on the device; empty while the model is on the host
        self._device = device
        self._streams = streams
        self._may_have_gradients = may_have_gradients  # whether parameters could have gradients now, in plain PyTorch
        self._units: Sequence[Unit] = ()
        self._placeholders: dict[Unit, list[tuple[Item, Placeholder]]] = {}
        self._on_host: dict[Unit, Binding] = {}  # what modules have outside of steps and evaluations
        self._in_steps: dict[Unit, Binding] = {}  # what they have in them, while the unit's code does not run
        self._resident_buffers: dict[Unit, list[Item]] = {}  # resident buffers in modules of the unit
        self._users: dict[Item, str] = {}  # residents that a unit's modules use, and the unit's name
        self._weights = WeightSlots(device, 1, server, streams.h2d, collect)
        self._weights.make_room_for([residents])

    def serve(self, units: Sequence[Unit]) -> None:
        """Sets the model's units."""
        self._units = units
        # Placeholders are made anew: a unit may have been renamed, and their messages contain its name.
        self._placeholders = {
            unit: [
                (item, Placeholder(item.tensor, item.name, unit, self._device, self._may_have_gradients))
                for item in unit.items
            ]
            for unit in units
        }
        self._on_host = {
            unit: Binding([(item, item.tensor) for item in unit.items]) for unit in (*units, self.residents)
        }
        inside = {unit: {module for top in unit.modules for module in top.modules()} for unit in units}
        self._users = {
            item: unit.name
            for unit in units
            for item in self.residents.items
            if any(place.module in inside[unit] for place in item.places)
        }
        buffers = [item for item in self.residents.items if item.is_buffer]
        self._resident_buffers = {
            unit: [item for item in buffers if any(place.module in inside[unit] for place in item.places)]
            for unit in units
        }

    @contextlib.contextmanager
    def on_device(self, *, watches_gradients: bool = False) -> Iterator[None]:
        """Context of a step or an evaluation: residents are bound to the device, and units to placeholders.

        `watches_gradients`: refuse code that reads or clears the gradient of a resident while it may have one.

        On exit, the model has the host's tensors again, and changes of resident buffers are copied to the host.
        """
        compute = self._streams.compute
        self._weights.forget()
        compute.follow(self._streams.lanes.here())
        slot, of_unit, ready = self._weights.enter(self.residents, ())
        compute.follow(*ready)
        tensors = of_unit.pairs
        self.resident_tensors = dict(tensors)
        versions = [tensor._version for _, tensor in tensors]
        try:
            bind(tensors)
            for unit in self._units:
                self.bind_placeholders(unit)
            self._in_steps = {unit: Binding(self.outside(unit)) for unit in self._units}
            trained = {
                t: (item.name, self._users.get(item)) for item, t in tensors if watches_gradients and item.trains
            }
            with watching_gradients(trained, self._may_have_gradients):
                yield
            self._refuse_others(tensors)
        finally:
            self._in_steps = {}
            for unit in (*self._units, self.residents):
                bind([(item, item.tensor) for item in unit.items])
            end = compute.here()
            end.precede_caller()
            edited = [pair for pair, version in zip(tensors, versions, strict=True) if pair[1]._version != version]
            self.write_back([pair for pair in edited if pair[0].is_buffer], end)
            self.resident_tensors = {}  # their hooks refer to the relay
            self._weights.leave(slot, end)

    def fetch_ahead(self) -> None:
        """Between steps: see `WeightSlots.fetch_ahead`."""
        self._weights.fetch_ahead([self.residents], latest_first=False)

    def fetched_ahead(self) -> list[Unit]:
        return self._weights.fetched_ahead()

    def drop_ahead(self) -> None:
        self._weights.drop_ahead()

    def all_tensors(self) -> Iterator[torch.Tensor]:
        """All tensors that residents have on the device."""
        yield from self._weights.all_tensors()

    def has_others(self, unit: Unit) -> bool:
        """Whether a call of the unit would use other tensors than the engine's. See Note [Other tensors]."""
        if not self._in_steps:
            return bool(self._on_host[unit].others())
        others = self._in_steps[unit].others()
        if others and all(item.is_buffer for item in others) and len(others) < len(unit.items):
            raise _assigned_outside(others[0], unit)
        return bool(others)

    def other(self) -> str | None:
        """In a step: the name of a tensor that the user's code has replaced by another one."""
        return next((item.name for binding in self._in_steps.values() for item in binding.others()), None)

    def has_others_on_host(self) -> bool:
        """Outside of steps and evaluations: whether a call of the model would use other tensors than the engine's."""
        return any(binding.others() for binding in self._on_host.values())

    def _refuse_others(self, residents: Sequence[tuple[Item, torch.Tensor]]) -> None:
        """At the end of a step or an evaluation: refuses parameters that the user's code has replaced for good."""
        for binding in (*self._in_steps.values(), Binding(residents)):
            for item in binding.others():
                if not item.is_buffer:
                    raise ValueError(
                        f"{item.name!r} is replaced by another tensor while the model or the loss runs, and the engine "
                        "would go on to train the old one. Change weights in place after engine.step(); to run the "
                        "model with other weights, use torch.func.functional_call(model, weights, inputs)"
                    )

    def bind_placeholders(self, unit: Unit) -> None:
        """Binds placeholders after the unit's code has run: its slot on the device may be overwritten from now on."""
        bind(self._placeholders[unit])

    def outside(self, unit: Unit) -> list[tuple[Item, torch.Tensor]]:
        """What is bound while the unit's code does not run: placeholders, and resident buffers, to which its code may
        have assigned other tensors."""
        buffers = [(item, self.resident_tensors[item]) for item in self._resident_buffers[unit]]
        return [*self._placeholders[unit], *buffers]

    def buffers_of(self, unit: Unit, tensors: Sequence[tuple[Item, torch.Tensor]]) -> list[Bound]:
        """The buffers in the unit's modules, its own and resident ones, with the device's tensors for them."""
        own = [(item, tensor) for item, tensor in tensors if item.is_buffer]
        return own + [(item, self.resident_tensors[item]) for item in self._resident_buffers[unit]]

    def adopt_assigned_residents(self) -> None:
        """Copies tensors that the user's code has assigned to resident buffers into the device's tensors for them.
        Refuses assignments to buffers of units."""
        for unit, binding in self._in_steps.items():
            for item in binding.others():
                if item.is_buffer:
                    raise _assigned_outside(item, unit)
        for item, tensor in self.resident_tensors.items():
            if item.is_buffer:
                adopt_assigned(item, tensor)

    def were_edited(self, tensors: Sequence[torch.Tensor]) -> None:
        """Gives resident buffers among these a new version, by which `on_device` knows that the host needs them:
        functional batch norm edits its running statistics without one."""
        edited = {id(tensor) for tensor in tensors}
        for item, tensor in self.resident_tensors.items():
            if item.is_buffer and id(tensor) in edited:
                torch.autograd.graph.increment_version(tensor)

    def adopt_assigned_on_host(self) -> None:
        """The same for the host's buffers, after a call of the model on the host."""
        for binding in self._on_host.values():
            for item in binding.others():
                if item.is_buffer:
                    adopt_assigned(item, item.tensor)

    def write_back(self, edited: Sequence[tuple[Item, torch.Tensor]], end: Mark) -> None:
        """Copies buffers that the user's code changed on the device, before `end`, to the host, and waits."""
        for item, tensor in edited:
            if tensor.device.type == "cpu":
                continue  # the tensor is the host's own
            after = [end, self._streams.lanes.here()]  # evaluations run on the caller's own stream
            copies = [(item.tensor.data, tensor.detach())]
            self._streams.d2h.copy(copies, after=after, label=f"write back {item.name}").wait()

    def recover(self) -> None:
        """After a failure: the tensors on the device are out of date."""
        self._weights.forget(everything=True)

    def close(self) -> None:
        """Frees the device's memory."""
        self._weights.close()


def _assigned_outside(item: Item, unit: Unit) -> ValueError:
    return ValueError(
        f"the buffer {item.name!r} is assigned outside the forward of its unit {unit.name!r}. Pass the tensor to the "
        "unit as an argument, keep it in a plain attribute instead of a buffer, or edit the buffer in place (copy_)"
    )
