"""Runs the user's code: the loss of a micro-batch, on the device, without caches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ferryman.model.loss import Loss, check_loss
from ferryman.runtime.rng import Randomness


def weighted_loss(
    loss: Loss,
    model: nn.Module,
    content: Any,
    weight: float,
    device: torch.device,
    bring: Callable[[Any], Any],
    register: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
) -> torch.Tensor:
    """The weighted loss of a micro-batch, which `bring` copies to the device. `register` is called with its tensors on
    the device, and with those of them that are the user's own."""
    here = bring(content)
    pairs = zip(pytree.tree_leaves(content), pytree.tree_leaves(here), strict=True)
    tensors = [(given, x) for given, x in pairs if isinstance(x, torch.Tensor)]
    register([x for _, x in tensors], [x for given, x in tensors if _share_memory(given, x)])
    try:
        value = loss(model, here)
    except RuntimeError as error:
        if device.type != "cpu" and "Expected all tensors to be on the same device" in str(error):
            error.add_note(
                f"ferryman: the model and the batch are on {device} while the loss runs. The loss's own tensors, such "
                "as its parameters, must be there too: move them with .to(engine.device) before training"
            )
        if "must have the same dtype" in str(error):
            error.add_note(
                "ferryman: precision= sets the dtype of the weights, and not that of the batch: convert what the model "
                "is given (x.to(torch.bfloat16)), as for model.to(torch.bfloat16)"
            )
        raise
    check_loss(value)
    if value.dim():
        value = value.reshape(())  # backward() also accepts a tensor of one element
    return value.to(torch.promote_types(value.dtype, torch.float32)) * weight


def _share_memory(given: torch.Tensor, x: torch.Tensor) -> bool:
    if given is x:
        return True
    same_kind = given.device == x.device and given.layout is x.layout is torch.strided
    return same_kind and x.nbytes > 0 and given.data_ptr() == x.data_ptr()


@contextlib.contextmanager
def caches_off(model: nn.Module) -> Iterator[None]:
    """Context in which the model uses no caches: a unit that runs again in the backward would fill them twice."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    before = [(config, config.use_cache) for config in configs if hasattr(config, "use_cache")]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, use_cache in reversed(before):
            config.use_cache = use_cache


@contextlib.contextmanager
def undisturbed(model: nn.Module, randomness: Randomness) -> Iterator[None]:
    """Context that restores training flags, generators and buffers on exit."""
    flags = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    state = randomness.state()
    try:
        yield
    finally:
        randomness.restore(state)
        for module, training in flags:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def to_device(part: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, part)


def evaluation(
    forward: Callable[..., Any],
    device: torch.device,
    evaluating: Callable[[], contextlib.AbstractContextManager[None]],
) -> Callable[..., Any]:
    """Wraps the model's forward for use outside of steps: units are copied to the device as they are called."""

    def streamed(*args: Any, **kwargs: Any) -> Any:
        if device.type == "cpu":
            return forward(*args, **kwargs)
        if torch.is_grad_enabled():
            raise ValueError(
                "outside a step the model runs without gradients: call it under torch.no_grad(), or train with "
                "engine.forward_backward(batch)"
            )
        home = next((x.device for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), None)
        with evaluating():
            args, kwargs = to_device((args, kwargs), device)
            result = forward(*args, **kwargs)
        return result if home is None else to_device(result, home)

    return streamed
