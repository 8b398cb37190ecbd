"""The loss of a micro-batch: the default, which the model computes itself, and the check of every loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Loss = Callable[[nn.Module, Any], torch.Tensor]


def model_loss(model: nn.Module, micro_batch: Any) -> torch.Tensor:
    """The default: calls the model with the micro-batch and returns the `loss` of its output."""
    if isinstance(micro_batch, torch.Tensor):
        output = model(micro_batch)
    else:
        output = model(*micro_batch) if isinstance(micro_batch, tuple) else model(**micro_batch)
    loss = getattr(output, "loss", None)
    if loss is None:
        raise ValueError(
            f"the model returned a {type(output).__name__} without a loss. If it computes one from labels, put them "
            "into the batch; otherwise pass loss=, a function of the model and a micro-batch that returns the loss"
        )
    return loss  # type: ignore[no-any-return]


def check_loss(loss: Any) -> None:
    """Raises a ValueError if the loss is not a scalar tensor that requires gradients."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        raise ValueError(f"the loss of a micro-batch must be a scalar tensor; this is {what}")
    if not loss.requires_grad:
        raise ValueError("the loss does not require a gradient: it does not depend on any trained parameter")
