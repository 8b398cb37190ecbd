"""Cross entropy of a linear head's logits, which are computed in chunks of the vocabulary and never exist as a whole.

Note [Why not linear_cross_entropy]
`torch.nn.functional.linear_cross_entropy` cuts tokens into chunks, and computes gradients in the forward. Each chunk
adds to the weight's gradient: in bfloat16 that loses bits, or it takes a copy of the gradient in float32, which may be
larger than the logits. It returns the loss of bfloat16 logits in bfloat16. It knows no soft-capping, and a dry run on
meta does not see what it allocates. (Measurements are in docs/log.md.)

Here the vocabulary is cut, as if a large head were many small ones. A row of the weight belongs to one chunk, so its
gradient is one product, rounded once, as in plain PyTorch. The first pass finds the logarithm of each token's sum of
exponentials. The backward computes each chunk's logits a second time, since only then is that sum known: four matrix
products in place of three, for memory that does not depend on the size of the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional

# Rows of the weight in a chunk. Enough to keep a device busy; the logits of a chunk take as much memory as hidden
# states of this width.
COLUMNS = 4096


class Adjustment(NamedTuple):
    """One elementwise operation that a model applies to its logits, such as a division by a constant."""

    name: str  # a key of `ADJUSTMENTS`
    value: Any = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return ADJUSTMENTS[self.name](logits, self.value)


ADJUSTMENTS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "multiply": lambda logits, factor: logits * factor,
    "divide": lambda logits, divisor: logits / divisor,
    "tanh": lambda logits, _: torch.tanh(logits),
    "convert": lambda logits, dtype: logits.to(dtype),
}


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    adjustments: tuple[Adjustment, ...],
    ignore_index: int,
    reduction: str,
) -> torch.Tensor:
    """`cross_entropy(adjust(linear(hidden, weight, bias)), target, ignore_index=..., reduction=...)`.

    `hidden` is (tokens, width), `target` is (tokens,).
    """
    kind = hidden.device.type
    with contextlib.ExitStack() as stack:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):  # as in `linear`
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
            stack.enter_context(torch.autocast(kind, enabled=False))
        ignored = target == ignore_index
        # Ignored tokens must not contribute, whatever their hidden states are (0 * inf is NaN).
        hidden = hidden.masked_fill(ignored.unsqueeze(1), 0)
        target = target.masked_fill(ignored, 0)
        losses: torch.Tensor = _TokenLosses.apply(hidden, weight, bias, target, adjustments)  # type: ignore[no-untyped-call]
    losses = losses.masked_fill(ignored, 0)
    if reduction == "sum":
        losses = losses.sum()
    elif reduction == "mean":
        losses = losses.sum() / (~ignored).sum()
    return losses.to(_adjusted(hidden.new_empty(0), adjustments).dtype)


class _TokenLosses(torch.autograd.Function):
    """The cross entropy of each token, in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        adjustments: tuple[Adjustment, ...],
    ) -> torch.Tensor:
        # The running maximum of each token's logits, and the sum of exponentials relative to it.
        highest = torch.full(target.shape, -torch.inf, device=hidden.device, dtype=torch.float32)
        total, of_target = torch.zeros_like(highest), torch.zeros_like(highest)
        for rows in _chunks(weight):
            logits = _adjusted(functional.linear(hidden, weight[rows], _rows_of(bias, rows)), adjustments).float()
            index, inside = _positions(target, rows)
            of_target += logits.gather(1, index).squeeze(1).masked_fill_(~inside, 0)
            before, highest = highest, torch.maximum(highest, logits.amax(1))
            total.mul_(torch.exp(before - highest)).add_(_exp_less(logits, highest).sum(1))
            del logits  # before the next chunk's are allocated
        log_total = total.log_().add_(highest)
        ctx.save_for_backward(hidden, weight, bias, target, log_total)
        ctx.adjustments = adjustments
        return log_total - of_target

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, target, log_total = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_hidden = torch.zeros(hidden.shape, device=hidden.device, dtype=torch.float32) if needs_hidden else None
        of_weight = torch.empty_like(weight) if needs_weight else None
        of_bias = torch.empty_like(bias) if needs_bias else None
        factor = gradient.unsqueeze(1)
        saves_result = ctx.adjustments and ctx.adjustments[-1].name == "tanh"  # the backward of tanh needs its result
        for rows in _chunks(weight):
            logits = functional.linear(hidden, weight[rows], _rows_of(bias, rows))
            with torch.enable_grad():
                logits.requires_grad_()
                adjusted = _adjusted(logits, ctx.adjustments).float()
            # The derivative of cross entropy: probabilities, less 1 at the target.
            index, inside = _positions(target, rows)
            slope = _exp_less(adjusted.detach(), log_total, overwrite=not saves_result)
            slope.scatter_add_(1, index, -inside.to(slope.dtype).unsqueeze(1)).mul_(factor)
            if adjusted is not logits:
                (slope,) = torch.autograd.grad(adjusted, logits, slope)
            del logits, adjusted
            if of_hidden is not None:
                if slope.dtype == of_hidden.dtype:
                    of_hidden.addmm_(slope, weight[rows])
                else:
                    of_hidden += slope @ weight[rows]
            if of_weight is not None:
                torch.mm(slope.t(), hidden, out=of_weight[rows])
            if of_bias is not None:
                torch.sum(slope, 0, out=of_bias[rows])
            del slope
        return None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias, None, None


def _chunks(weight: torch.Tensor) -> Iterator[slice]:
    for start in range(0, len(weight), COLUMNS):
        yield slice(start, min(start + COLUMNS, len(weight)))


def _rows_of(bias: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if bias is None else bias[rows]


def _adjusted(logits: torch.Tensor, adjustments: tuple[Adjustment, ...]) -> torch.Tensor:
    for adjust in adjustments:
        logits = adjust(logits)
    return logits


def _positions(target: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each token's target is in the chunk, as a column for `gather`, and whether it is in the chunk at all."""
    index = target - rows.start
    inside = (index >= 0) & (index < rows.stop - rows.start)
    return index.masked_fill_(~inside, 0).unsqueeze(1), inside


def _exp_less(logits: torch.Tensor, subtrahend: torch.Tensor, *, overwrite: bool = True) -> torch.Tensor:
    """exp(logits - subtrahend), of which the second has one value per token."""
    difference = logits.sub_(subtrahend.unsqueeze(1)) if overwrite else logits - subtrahend.unsqueeze(1)
    return difference.exp_()
