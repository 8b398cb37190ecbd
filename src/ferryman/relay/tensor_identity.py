"""Versions of tensors, which count in-place edits, and the storages that tensors share."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def version_of(tensor: torch.Tensor) -> int | None:
    """A counter that increases with in-place edits; None if they are not counted (inference tensors)."""
    return None if tensor.is_inference() else tensor._version


def edited_since(tensors: Sequence[torch.Tensor], versions: Sequence[int | None]) -> list[torch.Tensor]:
    """The tensors that were, or may have been, edited since they had these versions."""
    now = [version_of(tensor) for tensor in tensors]
    return [t for t, new, old in zip(tensors, now, versions, strict=True) if new is None or new != old]


def bytes_of_storages(tensors: Sequence[torch.Tensor], device: torch.device) -> int:
    """Bytes of the storages on the device that these tensors share, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.device == device}
    return sum(storages.values())


def storages_of(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Keys of the storages that these tensors share."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}
