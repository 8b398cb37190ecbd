"""The engine: wires the parts together. Read from here.

`Engine.forward_backward` cuts a batch into micro-batches (`batch.py`) and gives them to the relay (`relay/relay.py`),
which runs the user's code and moves units (`units.py`) between the server's store (`server/store.py`) and the device's
slots (`relay/slots.py`), on lanes (`lanes.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ferryman.batch import split
from ferryman.lanes import Lanes
from ferryman.relay.relay import Relay
from ferryman.server.store import RamStore, gradient_views
from ferryman.trace import Trace
from ferryman.units import find_units

Loss = Callable[[nn.Module, Any], torch.Tensor]


def model_loss(model: nn.Module, micro_batch: Any) -> torch.Tensor:
    """The default: what the model itself calls its loss."""
    if isinstance(micro_batch, tuple):
        return model(*micro_batch).loss  # type: ignore[no-any-return]
    return model(**micro_batch).loss  # type: ignore[no-any-return]


class Engine:
    """Trains a model that may be larger than the device.

    `units` names the modules that travel, by name or pattern; without it they are found. `resident` names parameters
    that stay on the device. `stash="host"` keeps what waiting micro-batches hold on the host, and device memory
    constant; on the "device" it is faster and grows with depth and micro-batches. `slots` is how many units' weights
    the device holds at once. `trace` records what ran when.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device | str | None = None,
        loss: Loss = model_loss,
        units: Sequence[str] | None = None,
        resident: Sequence[str] = (),
        stash: str = "device",
        slots: int = 2,
        trace: Trace | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots}: at least one is needed for weights, and two to fetch beside the compute")
        if stash not in ("device", "host"):
            raise ValueError(f"stash={stash!r}: it is kept on the 'device' or on the 'host'")
        self.device = _device(device)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.device.type != "cpu":
                raise ValueError(f"the model must be on the host, and {name!r} is on {tensor.device}; use model.cpu()")
        if any(getattr(module.__dict__.get("forward"), "of_an_engine", False) for module in model.modules()):
            raise ValueError("the model has an engine already; close it first (engine.close())")
        self._model = model
        self._loss = loss
        self.units, self._residents = find_units(model, units=units, resident=resident)
        self._store = RamStore((*self.units, self._residents), self.device)
        self._lanes = Lanes(self.device, trace=trace)
        shared = sum(len(unit.modules) > 1 for unit in self.units)
        self._relay = Relay(
            self.units,
            self._residents,
            self.device,
            self._store,
            self._lanes,
            weight_slots=slots,
            gradient_slots=2 + shared,  # a unit with several modules holds its slot through the whole backward
            stash_on_host=stash == "host",
        )
        # What instances had for `forward` of their own, to be put back; usually nothing.
        self._forwards: dict[nn.Module, Callable[..., Any] | None] = {}
        for unit in self.units:
            for module in unit.modules:
                self._replace(module, self._relay.intercept(unit, module, module.forward))
        self._replace(model, self._outside_steps(model.forward))
        self._stepping = False
        self._closed = False

    def forward_backward(self, batch: Any, micro_batches: int | None = None) -> torch.Tensor:
        """The micro-batches' mean loss, weighted by their samples; gradients are added to the parameters' `.grad`.

        A model that averages over tokens (padding, labels of -100) averages within each micro-batch, as in any loop.
        """
        self._check_model()
        parts = split(batch, micro_batches)

        def work(part: Any, weight: float) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                content = _to(part, self.device)
                self._relay.adopt([x for x in pytree.tree_leaves(content) if isinstance(x, torch.Tensor)])
                loss = self._loss(self._model, content)
                _check_loss(loss)
                return loss * weight

            return run

        seed = int(torch.randint(0, 2**62, ()).item())
        # As with plain autograd: what the user has cleared starts anew.
        cleared = [item for unit in (*self.units, self._residents) for item in unit.trained if item.tensor.grad is None]
        self._relay.clear_gradients_of(cleared)
        with self._step():
            total = self._relay.run([work(part.content, part.weight) for part in parts], seed)
        self._relay.finish()
        for unit in (*self.units, self._residents):
            for item, view in gradient_views(unit, self._store.gradients(unit)).items():
                item.tensor.grad = view.to(item.tensor.dtype) if self._relay.has_gradient(item) else None
        return total

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        self._relay.clear_gradients()
        for parameter in self._model.parameters():
            parameter.grad = None

    @property
    def fetches(self) -> int:
        return self._relay.fetches

    def close(self) -> None:
        """Gives the model back as it came, with its weights as they are now."""
        self._closed = True
        try:
            self._lanes.close()
        finally:
            for module, own in self._forwards.items():
                module.__dict__.pop("forward", None)
                if own is not None:
                    module.__dict__["forward"] = own
            self._forwards.clear()
            self._relay.close()
            self._store.close()

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._forwards[module] = module.__dict__.get("forward")
        forward.of_an_engine = True  # type: ignore[attr-defined]  # so that a second engine is refused
        module.__dict__["forward"] = forward

    def _check_model(self) -> None:
        if self._closed:
            raise ValueError("the engine is closed; make a new one to train the model further")
        for unit in (*self.units, self._residents):
            flat = self._store.weights(unit)
            for item in unit.items:
                if any(place.current() is not item.tensor for place in item.places) or (
                    item.tensor.data_ptr() != flat.data_ptr() + item.offset and item.nbytes
                ):
                    raise ValueError(
                        f"the memory of {item.name!r} was replaced while the model was in the engine (by .to(), "
                        ".data = or load_state_dict(assign=True)), so the engine would train the old one. Change "
                        "weights in place (copy_, load_state_dict), or close the engine and make a new one"
                    )
        if not torch.is_grad_enabled():
            raise ValueError("a step needs gradients, and they are switched off here (torch.no_grad or inference_mode)")
        for name, module in self._model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                raise ValueError(
                    f"the module {name!r} is a {type(module).__name__} in training: what it does to a sample depends "
                    "on the others of its micro-batch, and its statistics would be updated twice, as units run again "
                    "in the backward. Freeze it (module.eval()), or use a normalisation within samples (LayerNorm)"
                )

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Caches are off within: running a unit again in the backward would fill them twice."""
        configs: list[Any] = [getattr(module, "config", None) for module in self._model.modules()]
        before = [(config, config.use_cache) for config in configs if hasattr(config, "use_cache")]
        self._stepping = True
        try:
            for config, _ in before:
                config.use_cache = False
            yield
        finally:
            self._stepping = False
            for config, use_cache in reversed(before):
                config.use_cache = use_cache

    def _outside_steps(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model's own forward; outside steps, on a device, its units come over as it calls them."""

        def streamed(*args: Any, **kwargs: Any) -> Any:
            if self._stepping or self.device.type == "cpu":
                return forward(*args, **kwargs)
            if torch.is_grad_enabled():
                raise ValueError(
                    "outside a step the model runs without gradients: call it under torch.no_grad(), or train with "
                    "engine.forward_backward(batch)"
                )
            home = next((x.device for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), None)
            with self._relay.evaluating():
                args, kwargs = _to((args, kwargs), self.device)
                result = forward(*args, **kwargs)
            return result if home is None else _to(result, home)

        return streamed

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A failure of closing must not hide the exception that is on its way.
        with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
            self.close()


def _device(device: torch.device | str | None) -> torch.device:
    """The device with its number, so that it equals the device of tensors on it."""
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = "cpu" if accelerator is None else accelerator
    try:
        found = torch.empty(0, device=device).device
    except Exception as error:
        usual = torch.accelerator.current_accelerator()
        known = "'cpu'" if usual is None else f"'cpu' and {usual.type!r} (of which there are {_count()})"
        raise ValueError(f"device={str(device)!r} cannot be used here ({error}); there is {known}") from error
    return torch.device("cpu") if found.type == "cpu" else found


def _count() -> int:
    return torch.accelerator.device_count()


def _to(part: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, part)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        raise ValueError(f"the loss of a micro-batch must be a scalar tensor, this is {what}")
    if not loss.requires_grad:
        raise ValueError("the loss does not require a gradient: nothing that trains has a part in it")
