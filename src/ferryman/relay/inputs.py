"""Brings the tensors of micro-batches to the device without blocking the host.

A copy from ordinary (pageable) memory blocks the host until the device has done all work that was queued before it. So
tensors are copied to pinned staging memory first, and from there asynchronously.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ferryman.runtime.arena import Allocation, Arena
from ferryman.runtime.lanes import Lane


class Inputs:
    """Copies of a micro-batch's tensors on the device. They are made on the lane `compute`, where they are used."""

    def __init__(self, device: torch.device, compute: Lane) -> None:
        self._device = device
        self._compute = compute
        self._staging = Arena(device)

    def bring(self, part: Any) -> Any:
        """The micro-batch with its tensors on the device. The caller launches its work on `compute`."""
        pieces: list[Allocation] = []

        def brought(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if x.device == self._device and type(x) is torch.Tensor and not x.requires_grad:
                # Parts of one tensor have one version. Each micro-batch that edits its own would look to autograd as if
                # it had edited the others, too, whose backwards are still to come.
                return x.data
            if self._device.type == "cpu" or not _is_plain(x):
                return x.to(self._device, non_blocking=True)
            pieces.append(self._staging.take(x.nbytes))
            return self._staged(x, pieces[-1])

        try:
            return pytree.tree_map(brought, part)
        finally:
            if pieces:
                end = self._compute.here()
                for piece in pieces:
                    self._staging.give(piece, [end])

    def close(self) -> None:
        self._staging.close()

    def _staged(self, x: torch.Tensor, piece: Allocation) -> torch.Tensor:
        for mark in piece.after:
            mark.wait()  # an earlier step may still be reading there
        with torch.no_grad():
            made = torch.empty_like(x, device=self._device)  # has no gaps, even if `x` has
            staging = piece.bytes.view(x.dtype)
            staging.as_strided(made.shape, made.stride()).copy_(x)
            made.as_strided(staging.shape, (1,)).copy_(staging, non_blocking=True)
        return made


def _is_plain(x: torch.Tensor) -> bool:
    """Whether the tensor is on the host and can be copied byte by byte. A gradient must find its way back otherwise."""
    return (
        type(x) is torch.Tensor
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and not (x.requires_grad or x.is_conj() or x.is_neg() or x.is_quantized)
        and x.nbytes > 0
    )
